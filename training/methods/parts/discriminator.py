"""DiffCSE's conditional discriminator: it finds the edited tokens of a sentence, given the original's vector.

This is ELECTRA's task (arXiv:2003.10555) with one more input, so that the vector learns to hold what the edit changed.
"""

from copy import deepcopy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

__all__ = ["Discriminator"]


class Discriminator(nn.Module):
    """A copy of the encoder's backbone that shares nothing with it, and two scores per token: kept, edited."""

    def __init__(self, backbone: PreTrainedModel) -> None:
        super().__init__()
        self.backbone = deepcopy(backbone)
        self.head = nn.Linear(backbone.config.hidden_size, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, condition: Tensor) -> Tensor:
        """Token ids (n, L) and the vector in place of [CLS] (n, d) -> scores (n, L, 2).

        The condition is inserted after the embeddings' sum, layer norm and dropout: it has no position and no type.
        """

        def replace(_module: nn.Module, _inputs: object, embedded: Tensor) -> Tensor:  # (n, L, d)
            return torch.cat([condition.unsqueeze(1).to(embedded.dtype), embedded[:, 1:]], dim=1)

        hook = self.backbone.get_submodule("embeddings").register_forward_hook(replace)
        try:
            hidden = self.backbone(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        finally:
            hook.remove()
        scores: Tensor = self.head(hidden)
        return scores
