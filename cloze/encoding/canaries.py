"""Canary texts: a bundle holds their vectors, so that the service can check that a graph still gives them.

A digest shows that a file is the one that was exported. The canaries show that the graph computes what it computed
then: they catch an altered file whose digest was altered too, and a machine that computes wrongly. They cannot catch a
change that does not affect these texts, such as a change to a word that they do not contain.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cloze.encoding.errors import BundleError
from cloze.encoding.template import MASK

CANARY_FILE: Final = "canaries.json"
DIGITS: Final = 7  # of each component

CANARY_TEXTS: Final = (
    "",
    "Yes.",
    "A man is playing the guitar on a small stage.",
    "Why does the price of oil rise when supply falls?",
    "Invoice no. 2024-117: 3,499.00 EUR, due on 31 May",
    "https://example.com/search?q=vectors&page=2",
    "def mean(values): return sum(values) / len(values)",
    f"The word {MASK} in a text is text.",
    "Zürich, São Paulo, 東京 and Москва 🎸",
    "The committee met again, and the minutes were longer than before. " * 60,
)
"""An empty, a short and a very long text, a question, numbers, an address, code, [MASK] and several scripts."""

TOLERANCES: Final = {"fp32": 1e-3, "fp16": 1e-2, "int8": 2e-2}
"""The largest allowed difference of any component between two machines, relative to the longest vector."""


class Canaries(BaseModel):
    """`canaries.json`: the texts, and their vectors by precision."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    texts: tuple[str, ...] = Field(min_length=1)
    vectors: dict[str, list[list[float]]]

    @classmethod
    def write(cls, folder: Path, vectors: Mapping[str, NDArray[np.float32]]) -> None:
        """Write the file. `vectors` are those of CANARY_TEXTS, (texts, dimension), by precision."""
        rows = {
            precision: [[float(f"{value:.{DIGITS}g}") for value in row] for row in rows]
            for precision, rows in vectors.items()
        }
        text = json.dumps({"texts": CANARY_TEXTS, "vectors": rows}, ensure_ascii=False)
        (folder / CANARY_FILE).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises BundleError."""
        path = folder / CANARY_FILE
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValidationError) as error:
            raise BundleError(f"{path} cannot be read ({error}); export the bundle again") from error

    def difference(self, precision: str, vectors: NDArray[np.float32]) -> tuple[float, str]:
        """Return the largest difference of `vectors` (texts, dimension), relative to the longest vector, and its text.

        Raises BundleError if the file has no vectors of this shape for the precision.
        """
        expected = np.array(self.vectors.get(precision, []), dtype=np.float32)
        if expected.shape != vectors.shape:
            raise BundleError(
                f"{CANARY_FILE} has vectors of shape {expected.shape} for {precision}, but the graph gives "
                f"{vectors.shape}; export the bundle again"
            )
        distances = np.abs(vectors - expected).max(1) / np.linalg.norm(expected, axis=1).max()
        worst = int(distances.argmax())
        return float(distances[worst]), self.texts[worst]
