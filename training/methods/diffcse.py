"""DiffCSE (arXiv:2204.10298): SimCSE, and a vector that helps to find what was edited in its sentence.

A fixed generator edits the sentence. A discriminator that sees the original's vector in place of [CLS] finds the edits,
and its gradient reaches the encoder through that vector. Both, and the projector, are used in training only.

Keys give the variants of Tables 3 and 5: without contrast, the next sentence instead of the same one, words to guess
instead of edits to find, and a projector without BatchNorm.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from training.data.corpus import Row
from training.errors import EncoderError, RecipeError
from training.methods.contrastive import Contrastive
from training.methods.losses import info_nce
from training.methods.parts.discriminator import ConditionalTask, Discriminator, WordGuesser
from training.methods.parts.edits import Edited, Editor
from training.methods.parts.gather import gather, own
from training.methods.parts.loss_head import projection
from training.model.encoder import SentenceEncoder
from training.model.masked_head import MaskedHead
from training.model.views import View, view
from training.recipes.methods import DiffCSERecipe

__all__ = ["DiffCSE"]

VIEWS: Final = ("first", "second")
EDITED: Final = {"same": ("same", "same"), "next": ("next", "next"), "both": ("same", "next")}  # for the two views


class DiffCSE(Contrastive):
    """Contrast plus lambda times detection, section 3. The projector with BatchNorm is from appendix A."""

    def __init__(self, encoder: SentenceEncoder, recipe: DiffCSERecipe) -> None:
        super().__init__(encoder, recipe)
        _check_room(encoder, recipe)
        projected = recipe.contrast or recipe.condition == "projected"
        self.projector = _projector(encoder, recipe.projector) if projected else nn.Identity()
        self.discriminator = None
        if recipe.detection_weight:
            edits = recipe.task != "mlm" and set(recipe.edits) != {"delete"}
            generator = (recipe.generator or recipe.encoder) if edits else None
            self.editor = Editor.load(generator, encoder.tokenizer, recipe.masked_share, recipe.guessing)
            self.discriminator = _discriminator(encoder, recipe)

    def views(self, rows: Sequence[Row]) -> dict[str, View]:
        first, *following = (view(self.pooling, texts) for texts in zip(*rows, strict=True))
        for texts in following:  # one, if the recipe reads the next sentences
            first |= {"next_ids": texts["input_ids"], "next_mask": texts["attention_mask"]}
        return dict.fromkeys(VIEWS, first)

    def draw(self, views: dict[str, View]) -> dict[str, View]:
        if self.discriminator is None:
            return views
        drawn = {}
        for (name, texts), sentence in zip(views.items(), EDITED[self.recipe.edited], strict=True):
            ids, attention = ("input_ids", "attention_mask") if sentence == "same" else ("next_ids", "next_mask")
            edited_ids, edited_mask, labels = self._edit(texts[ids], texts[attention])
            drawn[name] = texts | {"edited_ids": edited_ids, "edited_mask": edited_mask, "labels": labels}
        return drawn

    def _edit(self, ids: Tensor, attention: Tensor) -> Edited:
        match self.recipe.task:
            case "mlm":
                return self.editor.mask(ids, attention)
            case "correction":
                return self.editor.correct(ids, attention)
        kind = self.recipe.edits[int(torch.randint(len(self.recipe.edits), ()))]
        return self.editor.edit(kind, ids, attention)

    def encode(self, name: str, view: View) -> Tensor:
        return self.encoder.vectors(view, self.pooling)  # (n, d)

    def loss(self, vectors: Mapping[str, Tensor], views: Mapping[str, View]) -> dict[str, Tensor]:
        first, second = (gather(vectors[name]) for name in VIEWS)  # before BatchNorm, so that it sees all processes
        losses, parts = [], {}
        if self.recipe.contrast:
            contrast = self.nested(self._contrast, first, second)
            losses.append(contrast)
            parts["contrast"] = contrast.detach()
        if self.discriminator is not None:
            conditions = [vectors[name] for name in VIEWS]
            if self.recipe.condition == "projected":
                conditions = [own(rows) for rows in self._project(first, second)]
            parts |= self.discriminator.loss([views[name] for name in VIEWS], conditions)
            losses.append(self.recipe.detection_weight * parts.pop("loss"))
        return {"loss": torch.stack(losses).sum()} | parts

    def _project(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Both views, (n, d) each; BatchNorm takes the statistics of the two together."""
        first, second = self.projector(torch.cat([first, second])).chunk(2)
        return first, second

    def _contrast(self, first: Tensor, second: Tensor) -> Tensor:
        first, second = self._project(first, second)
        return info_nce(first, second, self.recipe.temperature)


def _projector(encoder: SentenceEncoder, kind: str) -> nn.Sequential:
    if kind == "tanh":
        return projection(encoder)
    width = encoder.dimension
    return nn.Sequential(
        nn.Linear(width, 2 * width, bias=False),
        nn.BatchNorm1d(2 * width),
        nn.ReLU(),
        nn.Linear(2 * width, width, bias=False),
        nn.BatchNorm1d(width, affine=False),
    )


def _discriminator(encoder: SentenceEncoder, recipe: DiffCSERecipe) -> ConditionalTask:
    if recipe.task == "detection":
        return Discriminator(encoder.backbone)
    if encoder.tokenizer.mask_token_id is None:
        raise EncoderError(f"{recipe.encoder!r}: its tokenizer has no mask token; write task = 'detection'")
    return WordGuesser(encoder.backbone, MaskedHead.load(recipe.encoder), copies=recipe.task == "correction")


def _check_room(encoder: SentenceEncoder, recipe: DiffCSERecipe) -> None:
    """Check that inserted words have positions too. Raises RecipeError."""
    longest = recipe.max_tokens + math.ceil(recipe.masked_share * recipe.max_tokens) * ("insert" in recipe.edits)
    if longest > encoder.config.max_tokens:
        raise RecipeError(
            f"max_tokens is {recipe.max_tokens}, up to {longest} with words inserted; the encoder has positions for "
            f"{encoder.config.max_tokens}: lower max_tokens or masked_share"
        )
