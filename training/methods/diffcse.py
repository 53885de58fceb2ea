"""DiffCSE (arXiv:2204.10298): SimCSE, and a vector that helps to find what was edited in its sentence.

A fixed generator edits the sentence. A discriminator that sees the original's vector in place of [CLS] finds the edits,
and its gradient reaches the encoder through that vector. Both, and the projector, are used in training only.

Keys give the variants of Tables 3 and 5: without contrast, the next sentence instead of the same one, words to guess
instead of edits to find, and a projector without BatchNorm.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from training.data.corpus import Row
from training.errors import EncoderError, RecipeError
from training.methods.contrastive import Contrastive, ContrastiveRecipe
from training.methods.losses import info_nce
from training.methods.parts.discriminator import ConditionalTask, Discriminator, WordGuesser
from training.methods.parts.edits import Edited, EditKind, Editor, Guessing
from training.methods.parts.gather import gather, own
from training.methods.parts.loss_head import projection
from training.model.encoder import SentenceEncoder
from training.model.masked_head import MaskedHead
from training.model.views import View, view

__all__ = ["DiffCSE", "DiffCSERecipe"]

VIEWS: Final = ("first", "second")
EDITED: Final = {"same": ("same", "same"), "next": ("next", "next"), "both": ("same", "next")}  # for the two views


class DiffCSERecipe(ContrastiveRecipe):
    """The keys of `method = "diffcse"`."""

    method: Literal["diffcse"]
    generator: str | None = Field(
        None,
        description="masked language model that edits: a folder or a hub name, with the encoder's vocabulary; "
        "unset: the encoder's own checkpoint, which then needs a masked-word head; deleting and task mlm need none",
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
    contrast: bool = Field(True, description="train with the contrastive loss too; otherwise the task alone")
    task: Literal["detection", "mlm", "correction"] = Field(
        "detection",
        description="what the discriminator does: detection, find the edits; mlm, guess masked words; or correction, "
        "restore the original words of the edited sentence. The last two begin with the encoder's masked-word head",
    )
    edited: Literal["same", "next", "both"] = Field(
        "same",
        description="what is edited or masked for the discriminator: the same sentence, the next one in the corpus, or "
        "both: the same for one view, the next for the other",
    )
    detection_weight: Annotated[float, Field(ge=0)] = Field(
        0.005, description="weight of the task's loss; 0: no discriminator, SimCSE with this projector"
    )
    projector: Literal["batchnorm", "tanh"] = Field(
        "batchnorm", description="between vectors and losses: two layers with BatchNorm, or SimCSE's one with tanh"
    )
    condition: Literal["projected", "cls"] = Field(
        "projected", description="what the discriminator sees: the projector's output, or the encoder's raw vector"
    )

    @property
    def next_sentences(self) -> bool:
        return self.edited != "same"

    @model_validator(mode="after")
    def _variant(self) -> Self:
        if self.mini_batch_size and self.projector == "batchnorm":
            raise ValueError(
                f"mini_batch_size is {self.mini_batch_size}, and method 'diffcse' has BatchNorm, which sees all rows "
                "at once; remove mini_batch_size, or write projector = 'tanh'"
            )
        if self.task != "detection" and self.edits != ("replace",):
            raise ValueError(
                f"task is {self.task!r} and edits names {', '.join(self.edits)}; only replaced words can be guessed: "
                "write edits = ['replace']"
            )
        if not self.detection_weight and (not self.contrast or self.task != "detection" or self.edited != "same"):
            raise ValueError(
                "detection_weight is 0, which leaves only the contrastive loss: raise it, or write contrast = true, "
                "task = 'detection' and edited = 'same'"
            )
        if not self.contrast and self.dimensions:
            raise ValueError("dimensions average the contrastive loss, and contrast is false; remove dimensions")
        return self


class DiffCSE(Contrastive):
    """Contrast plus lambda times detection, section 3. The projector with BatchNorm is from appendix A."""

    Recipe = DiffCSERecipe

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
