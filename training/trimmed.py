"""A batch of mixed lengths through an encoder with little padding: in parts of like length, each cut to its longest."""

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["encode_trimmed"]


def encode_trimmed(encode: Callable[[Tensor, Tensor], Tensor], ids: Tensor, mask: Tensor, parts: int = 4) -> Tensor:
    """What `encode(ids, mask)` gives, (n, d), for ids and mask (n, L) padded on the right; rows stay in their order."""
    lengths = mask.sum(1)
    order = lengths.argsort()
    vectors = []
    for rows in order.chunk(parts):
        longest = int(lengths[rows[-1]])
        vectors.append(encode(ids[rows, :longest], mask[rows, :longest]))
    return torch.cat(vectors)[order.argsort()]
