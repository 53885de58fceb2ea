"""How a sentence vector is read from a backbone: the template around the text, and the pooling of the last layer."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from encoding.template import PoolingMode
from encoding.text import TextEncoder

__all__ = ["Embed", "Pooling", "token_batches"]

Embed: TypeAlias = Callable[[Sequence[str]], NDArray[np.float32]]
"""Texts (n) -> vectors (n, d), in the texts' order."""


class Pooling:
    """A template with its text encoder, and how the backbone's last layer becomes one vector per text."""

    def __init__(self, text_encoder: TextEncoder, mode: PoolingMode, denoising: bool = False) -> None:
        self.text_encoder = text_encoder
        self.mode = mode
        self.denoising = denoising

    def lengths(self, attention_mask: Tensor) -> Tensor:
        """How many tokens of its text each row has, (n)."""
        return attention_mask.sum(1) - self.text_encoder.template_tokens

    def read(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        """Hidden states (n, L, d) -> vectors (n, d) at [MASK], at [CLS], or the mean over attended tokens."""
        if self.mode == "mean":
            weights = attention_mask.to(hidden.dtype).unsqueeze(-1)  # (n, L, 1)
            return (hidden * weights).sum(1) / weights.sum(1)
        if self.mode == "cls":
            return hidden[:, 0]
        index = self.text_encoder.mask_index
        assert index is not None, "Template.parse requires [MASK] in a template with mask pooling. This is a bug."
        if index >= 0:
            return hidden[:, index]
        rows = torch.arange(hidden.shape[0], device=hidden.device)  # not len: tracing would make it a constant
        return hidden[rows, attention_mask.sum(1) + index]


def token_batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Rows in order of length, cut into batches whose padded size (longest x count) stays within `batch_tokens`."""
    rows: list[int] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if rows and lengths[row] * (len(rows) + 1) > batch_tokens:
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows
