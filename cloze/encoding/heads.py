"""Heads: classifiers that give the labels of a text, computed from the bundle's vector of the text.

Each `heads/NAME.json` has one head. A text with the unit vector u has the scores W u + b, one for each label. Its
probabilities are their softmax, or the logistic function of each score if a text may have several labels.
"""

from functools import cached_property
from pathlib import Path
from typing import Annotated, Final, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cloze.encoding.errors import BundleError

HEAD_FOLDER: Final = "heads"
HEAD_NAME: Final = r"[a-z0-9][a-z0-9._-]{0,63}"

Finite = Annotated[float, Field(allow_inf_nan=False)]


class ClassifierHead(BaseModel):
    """One head, and what it was learnt from.

    `figures` are of texts that the head was not fitted to. `threshold` is the probability below which it abstains, null
    where no threshold reaches the accuracy that was wanted.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    labels: tuple[str, ...] = Field(min_length=1)
    several: bool  # a text may have several of the labels, or none
    weights: tuple[tuple[Finite, ...], ...]  # (labels, dimension)
    biases: tuple[Finite, ...]
    threshold: Finite | None
    texts: int
    source: str  # name of the file of labelled texts
    figures: dict[str, Finite]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        widths = {len(row) for row in self.weights}
        if not len(self.labels) == len(set(self.labels)) == len(self.weights) == len(self.biases) or len(widths) != 1:
            raise ValueError("a head has a row of weights and a bias for each label, and all rows have one width")
        return self

    @classmethod
    def read(cls, path: Path, dimension: int) -> Self:
        """Raises BundleError if the file is not a head for vectors of that dimension."""
        try:
            head = cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise BundleError(f"{path} is not a head ({reason}); make it again: `cloze head`") from error
        if (width := len(head.weights[0])) != dimension:
            raise BundleError(
                f"{path} takes {width} dimensions, but the bundle has {dimension}; make it again: `cloze head`"
            )
        return head

    def scores(self, units: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return the scores (texts, labels) of unit vectors (texts, dimension)."""
        return np.asarray(units @ self._matrix.T + self.biases)

    def probabilities(self, scores: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return the probabilities of scores, in the same shape."""
        over = np.logaddexp(0, scores) if self.several else np.logaddexp.reduce(scores, axis=1, keepdims=True)
        return np.asarray(np.exp(scores - over))

    @cached_property
    def _matrix(self) -> NDArray[np.float64]:
        return np.array(self.weights)
