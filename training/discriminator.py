"""DiffCSE's conditional discriminator: which tokens of an edited sentence are edits, seen with the original's vector.

ELECTRA's task (arXiv:2003.10555) with one thing more to go by, so that the vector is asked for what the edit took away.
"""

from copy import deepcopy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

__all__ = ["Discriminator"]


class Discriminator(nn.Module):
    """A copy of the encoder's backbone, sharing nothing with it, and two scores a token: kept, edited."""

    def __init__(self, backbone: PreTrainedModel) -> None:
        super().__init__()
        self.backbone = deepcopy(backbone)
        self.head = nn.Linear(backbone.config.hidden_size, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, condition: Tensor) -> Tensor:
        """Token ids (n, L) and what stands in place of [CLS] (n, d) -> scores (n, L, 2).

        The condition goes in behind the embeddings' sum, layer norm and dropout: it has no position and no type.
        """

        def put(_module: nn.Module, _inputs: object, embedded: Tensor) -> Tensor:  # (n, L, d)
            return torch.cat([condition.unsqueeze(1).to(embedded.dtype), embedded[:, 1:]], dim=1)

        hook = self.backbone.embeddings.register_forward_hook(put)
        try:
            hidden = self.backbone(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        finally:
            hook.remove()
        return self.head(hidden)
