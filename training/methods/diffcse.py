"""DiffCSE (arXiv:2204.10298): SimCSE, and a vector that helps to find what was edited in its sentence.

A fixed generator edits the sentence. A discriminator that sees the original's vector in place of [CLS] finds the edits,
and its gradient reaches the encoder through that vector. Both, and the projector, are used in training only.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from training.data.corpus import Row
from training.errors import RecipeError
from training.methods.contrastive import Contrastive, ContrastiveRecipe
from training.methods.losses import edit_detection, info_nce
from training.methods.parts.discriminator import Discriminator
from training.methods.parts.edits import EditKind, Editor, Guessing
from training.methods.parts.gather import gather, own
from training.model.encoder import SentenceEncoder
from training.model.views import View, view

__all__ = ["DiffCSE", "DiffCSERecipe"]

VIEWS = ("first", "second")


class DiffCSERecipe(ContrastiveRecipe):
    """The keys of `method = "diffcse"`."""

    method: Literal["diffcse"]
    generator: str | None = Field(
        None,
        description="masked language model that edits: a folder or a hub name, with the encoder's vocabulary; "
        "unset: the encoder's own checkpoint, which then needs a masked-word head; deleting needs no generator",
    )
    edits: tuple[EditKind, ...] = Field(
        ("replace",),
        min_length=1,
        description="replace, insert, delete: a view's edit is drawn from these at each step",
    )
    masked_share: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.3, description="share of the tokens to mask for the generator, to insert or to delete"
    )
    guessing: Guessing = Field(
        "best", description="the generator's best word at every position, or one sampled where a word is masked"
    )
    detection_weight: Annotated[float, Field(ge=0)] = Field(0.005, description="weight of the edit detection loss")
    condition: Literal["projected", "cls"] = Field(
        "projected", description="what the discriminator sees: the projector's output, or the encoder's raw vector"
    )


class DiffCSE(Contrastive):
    """Contrast plus lambda times detection, section 3. The projector with BatchNorm is from appendix A."""

    Recipe = DiffCSERecipe
    rowwise = False

    def __init__(self, encoder: SentenceEncoder, recipe: DiffCSERecipe) -> None:
        super().__init__(encoder, recipe)
        _check_room(encoder, recipe)
        generator = None if set(recipe.edits) == {"delete"} else recipe.generator or recipe.encoder
        self.editor = Editor.load(generator, encoder.tokenizer, recipe.masked_share, recipe.guessing)
        self.projector = _projector(encoder.dimension)
        self.discriminator = Discriminator(encoder.backbone)

    def views(self, rows: Sequence[Row]) -> dict[str, View]:
        texts = view(self.pooling, [text for (text,) in rows])
        return dict.fromkeys(VIEWS, texts)

    def draw(self, views: dict[str, View]) -> dict[str, View]:
        drawn = {}
        for name, texts in views.items():
            kind = self.recipe.edits[int(torch.randint(len(self.recipe.edits), ()))]
            ids, attention, labels = self.editor.edit(kind, **texts)
            drawn[name] = texts | {"edited_ids": ids, "edited_mask": attention, "labels": labels}
        return drawn

    def encode(self, name: str, view: View) -> Tensor:
        return self.encoder.vectors(view, self.pooling)  # (n, d)

    def loss(self, vectors: Mapping[str, Tensor], views: Mapping[str, View]) -> dict[str, Tensor]:
        first, second = (gather(vectors[name]) for name in VIEWS)  # before BatchNorm, so that it sees all processes
        contrast = self.nested(self._contrast, first, second)
        conditions: Mapping[str, Tensor] = vectors
        if self.recipe.condition == "projected":
            conditions = dict(zip(VIEWS, map(own, self._project(first, second)), strict=True))
        found = self._detect(conditions, views)
        loss = contrast + self.recipe.detection_weight * found.pop("loss")
        return {"loss": loss, "contrast": contrast.detach()} | found

    def _project(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Both views, (n, d) each, normalised by the statistics of the two together."""
        first, second = self.projector(torch.cat([first, second])).chunk(2)
        return first, second

    def _contrast(self, first: Tensor, second: Tensor) -> Tensor:
        first, second = self._project(first, second)
        return info_nce(first, second, self.recipe.temperature)

    def _detect(self, conditions: Mapping[str, Tensor], views: Mapping[str, View]) -> dict[str, Tensor]:
        """Each view's edit with its own vector, for the rows of this process; the processes average their means."""
        passes = [
            self.discriminator(views[name]["edited_ids"], views[name]["edited_mask"], conditions[name])
            for name in VIEWS
        ]
        scores = torch.cat([scores.flatten(0, 1) for scores in passes])  # (m, 2); edited views differ in length
        labels, attended = (
            torch.cat([views[name][key].flatten() for name in VIEWS]) for key in ("labels", "edited_mask")
        )
        loss = edit_detection(scores, labels)
        right = (scores.argmax(1) == labels).float()
        return {
            "loss": loss,
            "detection": loss.detach(),
            "accuracy_edited": _mean(right, labels),
            "accuracy_kept": _mean(right, attended - labels),
        }


def _projector(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, 2 * width, bias=False),
        nn.BatchNorm1d(2 * width),
        nn.ReLU(),
        nn.Linear(2 * width, width, bias=False),
        nn.BatchNorm1d(width, affine=False),
    )


def _check_room(encoder: SentenceEncoder, recipe: DiffCSERecipe) -> None:
    """Check that inserted words have positions too. Raises RecipeError."""
    longest = recipe.max_tokens + math.ceil(recipe.masked_share * recipe.max_tokens) * ("insert" in recipe.edits)
    if longest > encoder.config.max_tokens:
        raise RecipeError(
            f"max_tokens is {recipe.max_tokens}, up to {longest} with words inserted; the encoder has positions for "
            f"{encoder.config.max_tokens}: lower max_tokens or masked_share"
        )


def _mean(values: Tensor, where: Tensor) -> Tensor:
    """The mean of the values at the ones of `where`; 0 if there are none."""
    return (values * where).sum() / where.sum().clamp(min=1)
