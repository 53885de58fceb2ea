"""Encode a view in parts of similar length, each cut to its longest row, so that there is less padding.

A row's vector depends on no other row and not on padding, so the vectors and their gradients are those of one batch.
"""

from collections.abc import Callable, Iterator
from typing import Final

import torch
from torch import Tensor

from training.objective import View

__all__ = ["encode_trimmed", "trimmed"]

PARTS: Final = 4  # of a batch, at most: more parts leave little padding out, and small products run slower
CPU_TOKENS: Final = 512  # of a part, padding included, at least
CUDA_TOKENS: Final = 32_768  # the same; an estimate: below it a GPU waits for its next kernel
TOKENWISE: Final = ("input_ids", "attention_mask", "answers", "places")  # (n, L); a view's other tensors are (n, ...)


def encode_trimmed(encode: Callable[[View], Tensor], view: View, size: int | None = None) -> Tensor:
    """What `encode(view)` gives, (n, ...), row by row in the view's order, encoded `size` rows at a time."""
    places, vectors = zip(*((rows, encode(part)) for rows, part in trimmed(view, size)), strict=True)
    return torch.cat(vectors)[torch.cat(places).argsort()]


def trimmed(view: View, size: int | None = None) -> Iterator[tuple[Tensor, View]]:
    """Yield `size` rows at a time, shortest first: their indices, and their part of the view without common padding.

    By default up to PARTS parts, none smaller than CPU_TOKENS or CUDA_TOKENS.
    """
    lengths, size = view["attention_mask"].sum(1), size or _size(view)
    if size >= len(lengths):
        yield torch.arange(len(lengths), device=lengths.device), view
        return
    for rows in lengths.argsort(stable=True).split(size):
        longest = int(lengths[rows[-1]])
        yield rows, {key: tensor[rows, :longest] if key in TOKENWISE else tensor[rows] for key, tensor in view.items()}


def _size(view: View) -> int:
    ids = view["input_ids"]
    parts = max(1, min(PARTS, ids.numel() // (CUDA_TOKENS if ids.is_cuda else CPU_TOKENS)))
    return -(-len(ids) // parts)
