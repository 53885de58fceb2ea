"""One way to read a backbone: a text in a template, and the place in its last layer where the vector stands."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from encoding.template import PoolingMode
from encoding.text import TextEncoder

__all__ = ["Pooling", "token_batches"]


class Pooling:
    """One template, and how a vector is read from the backbone's last layer behind it."""

    def __init__(self, text_encoder: TextEncoder, mode: PoolingMode, denoising: bool = False) -> None:
        self.text_encoder = text_encoder
        self.mode = mode
        self.denoising = denoising

    def lengths(self, attention_mask: Tensor) -> Tensor:
        """How many tokens of a text each row has, (n)."""
        return attention_mask.sum(1) - self.text_encoder.template_tokens

    def read(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        """Hidden states (n, L, d) -> vectors (n, d) at [MASK], at [CLS], or the mean over attended tokens."""
        if self.mode == "mean":
            weights = attention_mask.to(hidden.dtype).unsqueeze(-1)  # (n, L, 1)
            return (hidden * weights).sum(1) / weights.sum(1)
        if self.mode == "cls":
            return hidden[:, 0]
        index = self.text_encoder.mask_index
        assert index is not None, "a template read at the mask has one: Template.parse holds it. This is a bug."
        if index >= 0:
            return hidden[:, index]
        rows = torch.arange(hidden.shape[0], device=hidden.device)  # not len: tracing would take it for a constant
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
