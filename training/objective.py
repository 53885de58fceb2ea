"""What a training method is: views of a batch of texts, and a loss over them.

An objective owns what only training needs (heads, second templates, teachers); the encoder inside it is what is
served, so export forgets the rest by construction.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from training.corpus import Row
from training.encoder import SentenceEncoder
from training.errors import RecipeError
from training.heads import Head
from training.mlm import MaskedHead
from training.pooling import Pooling
from training.recipe import Recipe

__all__ = ["Objective", "View", "loss_head", "projection", "transform", "view"]

View = dict[str, Tensor]  # input_ids and attention_mask, (n, L) both, and what a method adds; a row each, all of them


class Objective(nn.Module, ABC):
    """Base of the methods: a subclass sets `Recipe` and writes `views` and `forward`."""

    Recipe: ClassVar[type[Recipe]]
    columns: ClassVar[tuple[int, ...]] = (1,)  # how many columns a row may have

    def __init__(self, encoder: SentenceEncoder, recipe: Any) -> None:
        super().__init__()
        self.encoder = encoder
        self.recipe = recipe
        limit = encoder.config.max_tokens
        if recipe.max_tokens > limit:
            raise RecipeError(f"max_tokens is {recipe.max_tokens}; the encoder has positions for {limit}: lower it")
        self.prompt = encoder.make_prompt(recipe.template, recipe.max_tokens)  # the encoder's own, cut shorter

    @abstractmethod
    def views(self, rows: Sequence[Row]) -> dict[str, View]:
        """Rows of the corpus -> the token ids that `forward` takes by name."""

    @abstractmethod
    def forward(self, **views: View) -> dict[str, Tensor]:
        """Views -> {"loss": scalar with gradient, and named parts to log, detached}."""

    def save(self, folder: Path) -> None:
        """Write what training was for: the encoder alone, unless a method says otherwise."""
        self.encoder.save(folder)


def view(prompt: Pooling, texts: Sequence[str]) -> View:
    """Texts in one template, padded to the longest."""
    input_ids, attention_mask = map(torch.from_numpy, prompt.text_encoder.batch(texts))
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def projection(encoder: SentenceEncoder) -> Head:
    """The contrastive papers' head, Linear(d, d) and tanh, drawn as BERT draws its own weights."""
    return Head("tanh", encoder.backbone.config)


def loss_head(encoder: SentenceEncoder, recipe: Any) -> nn.Module:
    """What stands between an encoder's vectors and the loss: a tanh head, for training only.

    Where the recipe has a `kept_head` it is the encoder's own, which is served, and nothing is left to stand here.
    """
    if recipe.kept_head is None:
        return projection(encoder)
    if encoder.head is None:
        encoder.head = projection(encoder) if recipe.kept_head == "tanh" else transform(encoder, recipe.encoder)
    elif encoder.head.kind != recipe.kept_head:
        raise RecipeError(
            f"kept_head is {recipe.kept_head!r} and {recipe.encoder!r} has kept a {encoder.head.kind!r}; write that"
        )
    return nn.Identity()


def transform(encoder: SentenceEncoder, source: str) -> Head:
    """A head that begins as the layers of `source`'s masked-word head before its output matrix. Raises EncoderError."""
    head, masked = Head("transform", encoder.backbone.config), MaskedHead.load(source)
    head.load_state_dict(nn.Sequential(masked.dense, masked.activation, masked.norm).state_dict())
    return head
