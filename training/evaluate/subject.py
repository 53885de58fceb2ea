"""What is scored: something that embeds texts, and what identifies it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray
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

    def remembering(self) -> Self:
        """This subject with an `embed` that computes each text once; documents are too many to be kept."""
        return replace(self, embed=_Remembered(self.embed), embed_documents=self.documents)

    @classmethod
    def of(cls, name: str, embed: Embed, digest: str = "") -> Self:
        """A subject that embeds queries and documents like sentences."""
        return cls(name, embed, embed, digest)


class _Remembered:
    """Texts (n) -> vectors (n, d) by `embed`, which gets each text once: suites share many sentences."""

    def __init__(self, embed: Embed) -> None:
        self._embed = embed
        self._vectors: dict[str, NDArray[np.float32]] = {}

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        if not texts:
            return self._embed(texts)
        new = [text for text in dict.fromkeys(texts) if text not in self._vectors]
        if new:
            self._vectors |= zip(new, self._embed(new), strict=True)
        return np.stack([self._vectors[text] for text in texts])
