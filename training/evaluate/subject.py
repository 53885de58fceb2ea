"""What is scored: something that embeds texts, and what identifies it."""

from dataclasses import dataclass
from typing import Self

from torch import nn

from training.model.pooling import Embed

__all__ = ["Subject"]


@dataclass(frozen=True)
class Subject:
    """`embed` gives the vectors of sentences and documents, `embed_queries` those of search queries.

    `digest` identifies all that decides the vectors; finished tasks are kept under it. `size` is in bytes. `model` is
    the encoder in torch, for suites that look inside it; a graph or a server has none.
    """

    name: str
    embed: Embed
    embed_queries: Embed
    digest: str
    size: int | None = None
    model: nn.Module | None = None

    @classmethod
    def of(cls, name: str, embed: Embed, digest: str = "") -> Self:
        """A subject that embeds queries like documents."""
        return cls(name, embed, embed, digest)
