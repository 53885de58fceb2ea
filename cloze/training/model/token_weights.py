"""Token weights for mean pooling: the more often a token occurs in a corpus, the lower its weight.

A frequent word says little about the subject of a text, but an unweighted mean gives it as much weight as a rare one.
SIF (Arora, Liang and Ma, ICLR 2017, section 3) weights a word that makes up the share p of a corpus by a / (a + p).
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

WEIGHTS_FILE = "token_weights.safetensors"
WORD_WEIGHTS_FILE = "1_WordWeights/config.json"  # of sentence-transformers
STEP: Final = 2.0**-12  # weights are multiples of it: fp32 sums thousands of them exactly, in any order


class TokenWeights(nn.Module):
    """Token ids (n, L) -> weights (n, L, 1), each at least STEP. They are not trained."""

    table: Tensor  # (vocabulary, 1)

    def __init__(self, weights: NDArray[np.floating]) -> None:
        """`weights` (vocabulary, 1)."""
        super().__init__()
        rounded = np.maximum(np.rint(weights / STEP), 1) * STEP
        self.register_buffer("table", torch.from_numpy(rounded.astype(np.float32)))

    @classmethod
    def of_counts(cls, counts: NDArray[np.int64], smoothing: float, special: Sequence[int]) -> Self:
        """`counts` (vocabulary) of a corpus -> a / (a + p), a being `smoothing`; `special` tokens have the weight 1."""
        counted = counts.astype(np.float64)
        counted[list(special)] = 0
        return cls(smoothing / (smoothing + counted[:, None] / max(counted.sum(), 1)))

    def forward(self, input_ids: Tensor) -> Tensor:
        return F.embedding(input_ids, self.table)

    def save(self, folder: Path) -> None:
        """Write WEIGHTS_FILE."""
        save_file({"table": self.table}, folder / WEIGHTS_FILE)

    @classmethod
    def load(cls, folder: Path, vocabulary: int) -> Self | None:
        """Read the file of `save`, or the one that sentence-transformers saves instead; None if there is neither.

        Raises ValueError, KeyError, OSError or SafetensorError if it does not hold one weight for each of `vocabulary`
        tokens.
        """
        path, saved_again = folder / WEIGHTS_FILE, folder / WORD_WEIGHTS_FILE
        if path.is_file():
            with safe_open(path, "np") as file:
                table: NDArray[np.float32] = file.get_tensor("table")
        elif saved_again.is_file():
            settings = json.loads(saved_again.read_text(encoding="utf-8"))
            table = np.array([[settings["word_weights"][token]] for token in settings["vocab"]], np.float32)
        else:
            return None
        if table.shape != (vocabulary, 1) or not (table > 0).all():
            raise ValueError(f"it has weights of shape {table.shape}; {vocabulary} positive ones are expected")
        return cls(table)
