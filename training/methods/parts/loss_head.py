"""The head between an encoder's vectors and a contrastive loss: used in training only, or kept in the encoder."""

from typing import Any

from torch import nn

from training.errors import RecipeError
from training.model.encoder import SentenceEncoder
from training.model.heads import Head
from training.model.masked_head import MaskedHead

__all__ = ["loss_head", "projection", "transform"]


def loss_head(encoder: SentenceEncoder, recipe: Any) -> nn.Module:
    """A tanh head for training only; or, with the recipe's `kept_head`, nothing: that head is in the encoder."""
    if recipe.kept_head is None:
        return projection(encoder)
    if encoder.head is None:
        encoder.head = projection(encoder) if recipe.kept_head == "tanh" else transform(encoder, recipe.encoder)
    elif encoder.head.kind != recipe.kept_head:
        raise RecipeError(
            f"kept_head is {recipe.kept_head!r} and {recipe.encoder!r} has kept a {encoder.head.kind!r}; write that"
        )
    return nn.Identity()


def projection(encoder: SentenceEncoder) -> Head:
    """The contrastive papers' head, Linear(d, d) and tanh, initialised as BERT initialises its own weights."""
    return Head("tanh", encoder.backbone.config)


def transform(encoder: SentenceEncoder, source: str) -> Head:
    """A head that begins as the layers of `source`'s masked-word head before its output matrix. Raises EncoderError."""
    head, masked = Head("transform", encoder.backbone.config), MaskedHead.load(source)
    head.load_state_dict(nn.Sequential(masked.dense, masked.activation, masked.norm).state_dict())
    return head
