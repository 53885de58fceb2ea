"""Attention for training in bf16 on a CPU.

The backward pass of torch's fused kernel is slow there: attention in plain matrix products is 7 times as fast for texts
of 32 tokens, and 3 times for 128 (torch 2.13, Intel Xeon with AMX).
"""

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from cloze.training.model.pretrained import quiet

LONGEST: Final = 256  # tokens; for longer texts the fused kernel is as fast, and needs less memory
_ATTENTION: Final = "bf16_training"


def train_on_cpu(backbone: PreTrainedModel) -> None:
    """Let `backbone` compute attention in plain matrix products where that is faster; no effect on a GPU."""
    if not torch.cuda.is_available():
        with quiet():  # an architecture with its own attention keeps it, with a warning
            backbone.set_attn_implementation(_ATTENTION)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **keywords: Any,
) -> tuple[Tensor, Tensor | None]:
    """Heads (n, h, L, d) -> (n, L, h, d). The fused kernel is used in fp32, without a gradient and for long texts."""
    if query.dtype != torch.bfloat16 or query.size(2) > LONGEST or not torch.is_grad_enabled():
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **keywords
        )
    with torch.autocast("cpu", enabled=False):  # autocast would compute the softmax in fp32, and move twice the memory
        scores = (query * (query.size(-1) ** -0.5 if scaling is None else scaling)) @ key.transpose(2, 3)
        if attention_mask is not None:  # True where a token may be attended to
            scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
        probabilities = functional.dropout(scores.softmax(dim=-1), dropout, module.training)
        return (probabilities @ value).transpose(1, 2).contiguous(), probabilities


AttentionInterface.register(_ATTENTION, _attend)
AttentionMaskInterface.register(_ATTENTION, sdpa_mask)
