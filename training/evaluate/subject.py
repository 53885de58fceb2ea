"""What is scored: something that embeds texts, and what identifies it."""

from dataclasses import dataclass
from typing import Self

from torch import nn

from training.model.pooling import Embed

__all__ = ["Subject"]


@dataclass(frozen=True)
class Subject:
    """`embed` gives the vectors of sentences, `embed_queries` those of search queries; see also `documents`.

    `digest` identifies all that decides the vectors; finished tasks are kept under it. `size` is in bytes. `model` is
    the encoder in torch, for suites that look inside it; a graph or a server has none.
    """

    name: str
    embed: Embed
    embed_queries: Embed
    digest: str
    size: int | None = None
    model: nn.Module | None = None
    embed_documents: Embed | None = None

    @property
    def documents(self) -> Embed:
        """What embeds documents that are searched: like sentences, unless they have a template of their own."""
        return self.embed_documents or self.embed

    @classmethod
    def of(cls, name: str, embed: Embed, digest: str = "") -> Self:
        """A subject that embeds queries and documents like sentences."""
        return cls(name, embed, embed, digest)
