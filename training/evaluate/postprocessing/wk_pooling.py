"""WK pooling (SBERT-WK, arXiv:2002.06652): a token's layers, then its tokens, weighted by how they change over depth.

A layer's weight for a token is the sum of its alignment with the layers around it and of its novelty, the share that
they do not explain. A token's weight is the variance of the cosines of its adjacent layers. The published code's habits
are kept: the first two layers have no layers before them in their window, and [CLS] counts while the last token does
not. It uses layers 4 to 12 of 12; here they start at a third of the depth, which is 2 to 6 of 6. The QR decomposition
of the paper gives the same weights as the Gram matrix that is used here.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

__all__ = ["FEWEST_STATES", "wk_pooling"]

WINDOW: Final = 2  # layers on each side
FEWEST_STATES: Final = 3  # with fewer, the last layer has no layers around it
START: Final = 3  # the depth divided by this is the first layer


def wk_pooling(hidden_states: Sequence[Tensor], attention_mask: Tensor) -> Tensor:
    """Hidden states (n, L, d) of layer 0 to the last -> vectors (n, d) in float64."""
    first = (len(hidden_states) - 1) // START
    states = torch.stack(list(hidden_states[first:]), 2).double()  # (n, L, k, d)
    gram = states @ states.mT  # (n, L, k, k)
    words = (_layer_weights(gram).unsqueeze(-1) * states).sum(2)  # (n, L, d)
    counted = torch.zeros_like(attention_mask, dtype=torch.float64)
    counted[:, :-1] = attention_mask[:, 1:].double()  # all but the last token of each row
    weights = _token_weights(gram) * counted
    return (weights.unsqueeze(-1) * words).sum(1) / weights.sum(1, keepdim=True)


def _layer_weights(gram: Tensor) -> Tensor:
    """Products of a token's layers (..., k, k) -> their weights (..., k), which add up to 1."""
    layers = range(gram.shape[-1])
    alignment, novelty = zip(*(_alignment_and_novelty(gram, layer) for layer in layers), strict=True)
    shares = [torch.stack(each, -1) for each in (alignment, novelty)]
    weights = sum((share / share.sum(-1, keepdim=True) for share in shares), torch.zeros(()))
    return weights / weights.sum(-1, keepdim=True)


def _alignment_and_novelty(gram: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Of one layer x with its window W: 1 / (2 (|W| + 1) c) and |x - Px| / |x|, with Px in the span of W.

    c is the mean cosine of Px with the layers of W.
    """
    left = range(layer - WINDOW, layer) if layer >= WINDOW else ()
    window = [*left, *range(layer + 1, min(layer + WINDOW + 1, gram.shape[-1]))]
    inside, toward = gram[..., window, :][..., window], gram[..., window, layer]
    projected = (toward * torch.linalg.solve(inside, toward)).sum(-1).clamp(min=0)  # |Px|^2
    lengths = inside.diagonal(dim1=-2, dim2=-1).sqrt()
    cosine = (toward / lengths).mean(-1) / projected.sqrt()
    square = gram[..., layer, layer]
    novelty = ((square - projected).clamp(min=0) / square).sqrt()
    return 1 / (2 * (len(window) + 1) * cosine), novelty


def _token_weights(gram: Tensor) -> Tensor:
    """The variance of the cosines of adjacent layers, (..., k, k) -> (...)."""
    lengths = gram.diagonal(dim1=-2, dim2=-1).sqrt()
    cosines = gram.diagonal(1, -2, -1) / (lengths[..., 1:] * lengths[..., :-1])
    return cosines.var(-1, unbiased=False)
