"""SimCSE (arXiv:2104.08821): a sentence and itself under another dropout mask, or a pair of sentences, are positives.

One column is unsupervised; two are pairs; a third is a hard negative of the first. An optional second loss guesses
masked words, so that the encoder forgets less of its language.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from training.contrastive import VIEWS, Contrastive, PairsRecipe
from training.corpus import Row
from training.encoder import SentenceEncoder
from training.errors import EncoderError
from training.gather import gather
from training.masking import mask_tokens, maskable_tokens
from training.mlm import MaskedHead
from training.objective import View, loss_head, view

__all__ = ["SimCSE", "SimCSERecipe"]

MASKED = "masked "  # before the name of a view whose words are to be guessed


class SimCSERecipe(PairsRecipe):
    """The keys of `method = "simcse"`."""

    method: Literal["simcse"]
    mlm_weight: Annotated[float, Field(ge=0)] = Field(0.0, description="weight of a masked-word loss beside; 0: none")
    masked_share: Annotated[float, Field(gt=0, lt=1)] = Field(0.15, description="share of the tokens it has to guess")


class SimCSE(Contrastive):
    """Equation 1, or with hard negatives equation 5; the head is used in training only, or kept."""

    Recipe = SimCSERecipe
    columns = (1, 2, 3)

    def __init__(self, encoder: SentenceEncoder, recipe: SimCSERecipe) -> None:
        super().__init__(encoder, recipe)
        if recipe.mlm_weight and encoder.tokenizer.mask_token_id is None:
            raise EncoderError(f"{recipe.encoder!r}: its tokenizer has no mask token; write mlm_weight = 0")
        self.head = loss_head(encoder, recipe)
        # a fresh masked-word head, as the paper's code has it
        self.masked_head = MaskedHead(encoder.backbone.config) if recipe.mlm_weight else None

    def views(self, rows: Sequence[Row]) -> dict[str, View]:
        columns = [view(self.prompt, texts) for texts in zip(*rows, strict=True)]
        if len(columns) == 1:
            columns *= 2  # dropout alone tells them apart
        return dict(zip(VIEWS, columns, strict=False))

    def draw(self, views: dict[str, View]) -> dict[str, View]:
        if self.masked_head is None:
            return views
        return views | {f"{MASKED}{name}": self._masked(view) for name, view in views.items()}

    def _masked(self, view: View) -> View:
        """A view with words hidden, and what they were: `answers` (n, L), elsewhere -100."""
        ids, tokenizer = view["input_ids"], self.encoder.tokenizer
        maskable = maskable_tokens(ids, tokenizer)
        masked, chosen = mask_tokens(
            ids, maskable, self.recipe.masked_share, tokenizer.mask_token_id, self.encoder.vocabulary
        )
        return {**view, "input_ids": masked, "answers": ids.where(chosen, -100)}

    def encode(self, name: str, view: View) -> Tensor:
        if not name.startswith(MASKED):
            return self.encoder(**view, prompt=self.prompt)  # (n, d)
        chosen = view["answers"] >= 0
        hidden = self.encoder.hidden(view["input_ids"], view["attention_mask"])[chosen]  # (m, d)
        scores = self.masked_head(hidden, self.encoder.backbone.get_input_embeddings().weight).float()
        losses = F.cross_entropy(scores, view["answers"][chosen], reduction="none")  # (m)
        return losses.new_zeros(len(chosen)).index_add(0, chosen.nonzero()[:, 0], losses)  # (n), a sum a row

    def loss(self, vectors: Mapping[str, Tensor], views: Mapping[str, View]) -> dict[str, Tensor]:
        columns = [vectors[name] for name in VIEWS if name in vectors]
        contrast = self.nested(self.contrast, *columns)
        if self.masked_head is None:
            return {"loss": contrast}
        masked = [name for name in vectors if name.startswith(MASKED)]
        losses = torch.stack([vectors[name] for name in masked])  # (views, n)
        counts = torch.stack([(views[name]["answers"] >= 0).sum(1) for name in masked])
        guessing = gather(losses).sum() / gather(counts).sum().clamp(min=1)  # of all processes
        loss = contrast + self.recipe.mlm_weight * guessing
        return {"loss": loss, "contrast": contrast.detach(), "guessing": guessing.detach()}
