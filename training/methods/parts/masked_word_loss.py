"""A second loss beside a contrastive one: guess masked words, so that the encoder forgets less of its language."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.data.masking import mask_tokens, maskable_tokens
from training.errors import EncoderError
from training.methods.parts.gather import gather
from training.model.encoder import SentenceEncoder
from training.model.masked_head import MaskedHead
from training.model.views import View

__all__ = ["MaskedWordLoss"]


class MaskedWordLoss(nn.Module):
    """The mean cross entropy of the masked words of all views: the auxiliary objective of SimCSE, arXiv:2104.08821."""

    def __init__(self, encoder: SentenceEncoder, recipe: Any) -> None:
        super().__init__()
        if encoder.tokenizer.mask_token_id is None:
            raise EncoderError(f"{recipe.encoder!r}: its tokenizer has no mask token; write mlm_weight = 0")
        self._encoder = (encoder,)  # in a tuple, so that it is not a submodule
        self.share = float(recipe.masked_share)
        self.head = MaskedHead(encoder.backbone.config)  # a fresh one, as in the paper's code

    def draw(self, view: View) -> View:
        """The view with `masked_ids` and `answers` added, both (n, L); `answers` is -100 where no word is masked."""
        (encoder,) = self._encoder
        ids, tokenizer = view["input_ids"], encoder.tokenizer
        maskable = maskable_tokens(ids, tokenizer)
        masked, chosen = mask_tokens(ids, maskable, self.share, tokenizer.mask_token_id, encoder.vocabulary)
        return view | {"masked_ids": masked, "answers": ids.where(chosen, -100)}

    def forward(self, view: View) -> Tensor:
        """A drawn view -> the cross entropies of each row's masked words, summed: (n)."""
        (encoder,) = self._encoder
        chosen = view["answers"] >= 0
        hidden = encoder.hidden(view["masked_ids"], view["attention_mask"])[chosen]  # (m, d)
        scores = self.head(hidden, encoder.word_embeddings.weight).float()
        losses = F.cross_entropy(scores, view["answers"][chosen], reduction="none")  # (m)
        return losses.new_zeros(len(chosen)).index_add(0, chosen.nonzero()[:, 0], losses)

    def mean(self, sums: Mapping[str, Tensor], views: Mapping[str, View]) -> Tensor:
        """What `forward` gave for each view -> the mean over the masked words of all views and processes."""
        counts = torch.stack([(views[name]["answers"] >= 0).sum(1) for name in sums])  # (views, n)
        return gather(torch.stack(list(sums.values()))).sum() / gather(counts).sum().clamp(min=1)
