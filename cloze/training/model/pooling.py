"""Pooling: how the backbone's last layer becomes one vector per text."""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from cloze.encoding.template import PoolingMode

ONE_TOKEN: Final = ("mask", "cls", "lasttoken")  # modes that read one token: the last layer can skip the others


def pool(
    hidden: Tensor,
    attention_mask: Tensor,
    mode: PoolingMode,
    mask_index: int | None = None,
    token_weights: Tensor | None = None,
    rounded: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Hidden states (n, L, d) -> vectors (n, d): those of one token, or a mean or maximum over attended tokens.

    The names of the modes, except `mask`, and the weights 1 to L of `weightedmean` are sentence-transformers'.
    `mask_index` is the text encoder's. A mean weights the states by `token_weights` (n, L, 1). `rounded` is applied to
    the states before they are summed.
    """
    if mode in ONE_TOKEN:
        return _token(hidden, attention_mask, {"cls": 0, "lasttoken": -1}.get(mode, mask_index))
    weights = attention_mask.to(hidden.dtype).unsqueeze(-1)  # (n, L, 1)
    if token_weights is not None:
        weights = weights * token_weights.to(hidden.dtype)
        hidden = hidden * weights
    if rounded:
        hidden = rounded(hidden)
    if mode == "max":
        return hidden.masked_fill(weights == 0, -torch.inf).amax(1)
    if mode == "weightedmean":
        weights = weights * weights.cumsum(1)
    weighed, divisor = hidden if token_weights is not None else hidden * weights, weights.sum(1)
    if rounded and mode == "weightedmean":
        weighed = weighed.double()  # rounded states times 1 to L: their sum is exact in 53 bits, but not in 24
    total = weighed.sum(1).to(hidden.dtype)
    return total / (divisor.sqrt() if mode == "mean_sqrt_len_tokens" else divisor)


def _token(hidden: Tensor, attention_mask: Tensor, index: int | None) -> Tensor:
    """The states (n, d) of one token. A negative index counts from the end of the attended tokens."""
    assert index is not None, "Template.parse requires [MASK] in a template with mask pooling. This is a bug."
    if index >= 0:
        return hidden[:, index]
    rows = torch.arange(hidden.shape[0], device=hidden.device)  # not len(): tracing would make it a constant
    return hidden[rows, attention_mask.sum(1) + index]
