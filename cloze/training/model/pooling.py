"""How a sentence vector is read from a backbone: the template around the text, and the pooling of the last layer."""

from collections.abc import Callable

import torch
from torch import Tensor

from cloze.encoding.template import PoolingMode
from cloze.encoding.text import TextEncoder

__all__ = ["Pooling"]


class Pooling:
    """A template with its text encoder, and how the backbone's last layer becomes one vector per text."""

    def __init__(self, text_encoder: TextEncoder, mode: PoolingMode, denoising: bool = False) -> None:
        self.text_encoder = text_encoder
        self.mode = mode
        self.denoising = denoising

    @property
    def reads_one_token(self) -> bool:
        """Whether the vector is that of a single token, so that the last layer needs no other."""
        return self.mode in ("mask", "cls", "lasttoken")

    def lengths(self, attention_mask: Tensor) -> Tensor:
        """How many tokens of its text each row has, (n)."""
        return attention_mask.sum(1) - self.text_encoder.template_tokens

    def read(
        self,
        hidden: Tensor,
        attention_mask: Tensor,
        token_weights: Tensor | None = None,
        rounded: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Hidden states (n, L, d) -> vectors (n, d): those of one token, or a mean or maximum over attended tokens.

        The names of the modes, [MASK] apart, and the weights 1 to L of `weightedmean` are sentence-transformers'.
        A mean weighs the states by `token_weights` (n, L, 1). `rounded` is applied to what is added up.
        """
        if self.reads_one_token:
            return self._token(hidden, attention_mask)
        weights = attention_mask.to(hidden.dtype).unsqueeze(-1)  # (n, L, 1)
        if token_weights is not None:
            weights = weights * token_weights.to(hidden.dtype)
            hidden = hidden * weights
        if rounded:
            hidden = rounded(hidden)
        if self.mode == "max":
            return hidden.masked_fill(weights == 0, -torch.inf).amax(1)
        if self.mode == "weightedmean":
            weights = weights * weights.cumsum(1)
        total, divisor = (hidden if token_weights is not None else hidden * weights).sum(1), weights.sum(1)
        return total / (divisor.sqrt() if self.mode == "mean_sqrt_len_tokens" else divisor)

    def _token(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        """The states (n, d) of the one token that is read."""
        if self.mode == "cls":
            return hidden[:, 0]
        index = -1 if self.mode == "lasttoken" else self.text_encoder.mask_index
        assert index is not None, "Template.parse requires [MASK] in a template with mask pooling. This is a bug."
        if index >= 0:
            return hidden[:, index]
        rows = torch.arange(hidden.shape[0], device=hidden.device)  # not len: tracing would make it a constant
        return hidden[rows, attention_mask.sum(1) + index]
