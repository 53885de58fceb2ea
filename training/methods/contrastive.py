"""The base of the methods whose loss compares the vectors of a batch: passes over views, then a loss over all rows.

The two halves are separate because they scale differently. A pass works row by row and may run in chunks whose
activations are thrown away (GradCache). `loss` sees the vectors of all rows, and of all processes.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from training.data.corpus import Row
from training.errors import RecipeError
from training.methods.losses import false_negatives, info_nce
from training.methods.objective import Objective
from training.methods.parts.gather import gather
from training.methods.parts.guide import Guide
from training.model.encoder import SentenceEncoder
from training.model.views import Pass, View, encode_trimmed

__all__ = ["VIEWS", "Contrastive", "FromPairs"]

VIEWS = ("first", "second", *(f"negative{number}" for number in range(1, 9)))  # a text, its positive, hard negatives


class Contrastive(Objective):
    """Base class of the methods whose loss compares vectors across the batch. A subclass writes `encode` and `loss`."""

    contrastive = True
    head: nn.Module  # between vectors and loss

    def __init__(self, encoder: SentenceEncoder, recipe: Any) -> None:
        super().__init__(encoder, recipe)
        if recipe.dimensions and max(recipe.dimensions) > encoder.dimension:
            raise RecipeError(
                f"dimensions has {max(recipe.dimensions)}; the encoder's vectors have {encoder.dimension}: lower it"
            )

    def draw(self, views: dict[str, View]) -> dict[str, View]:
        """The views with what a step draws at random before its passes (masked words, dropout rates)."""
        return views

    @abstractmethod
    def encode(self, name: str, view: View) -> Tensor:
        """The vectors of a view: (n, ...), row i from row i of the view alone."""

    def passes(self) -> dict[str, Pass]:
        """The passes over every view, by the argument of `loss` that takes their results."""
        return {"vectors": self.encode}

    @abstractmethod
    def loss(self, vectors: Mapping[str, Tensor], views: Mapping[str, View]) -> dict[str, Tensor]:
        """The results of each pass by view, all n rows of each -> what `forward` returns. Heads are applied here."""

    def forward(self, **views: View) -> dict[str, Tensor]:
        views, size = self.draw(views), self.recipe.mini_batch_size
        results = {
            argument: {name: encode_trimmed(partial(run, name), view, size) for name, view in views.items()}
            for argument, run in self.passes().items()
        }
        return self.loss(views=views, **results)

    def contrast(self, first: Tensor, second: Tensor) -> Tensor:
        """InfoNCE of vectors (n, d) after the head, over the rows of all processes."""
        return info_nce(self.joined(first), self.joined(second), self.recipe.temperature)

    def joined(self, vectors: Tensor) -> Tensor:
        """Vectors (n, ..., d) after the head, of all processes, in fp32 because the gather's gradient is a sum."""
        return gather(self.head(vectors).float())

    def nested(self, loss: Callable[..., Tensor], *vectors: Tensor) -> Tensor:
        """`loss` of the vectors (n, d), averaged over the recipe's Matryoshka dimensions (arXiv:2205.13147).

        A vector is cut by zeros: the cosine is that of the shorter vector, and the head still sees its own width.
        """
        if not self.recipe.dimensions:
            return loss(*vectors)
        places = torch.arange(self.encoder.dimension, device=vectors[0].device)
        cuts = [places < size for size in self.recipe.dimensions]
        return torch.stack([loss(*(vector * cut for vector in vectors)) for cut in cuts]).mean()


class FromPairs(Contrastive):
    """Base class of the methods of pairs and hard negatives. A subclass calls `guided` in `views`."""

    columns = tuple(range(1, len(VIEWS) + 1))

    def __init__(self, encoder: SentenceEncoder, recipe: Any) -> None:
        super().__init__(encoder, recipe)
        self.guide = Guide.load(recipe.guide) if recipe.guide else None

    def begin(self, rows: Iterable[Row]) -> None:
        if self.guide is not None:
            self.guide.read(text for row in rows for text in row)

    def guided(self, views: dict[str, View], columns: list[tuple[str, ...]]) -> dict[str, View]:
        """The views with `guide`, the guide's vectors of the texts of each (n, d), if there is a guide."""
        if self.guide is None:
            return views
        texts = columns * 2 if len(columns) == 1 else columns
        return {name: views[name] | {"guide": self.guide(each)} for name, each in zip(views, texts, strict=True)}

    def pairs_loss(self, vectors: Iterable[Tensor], views: Mapping[str, View]) -> dict[str, Tensor]:
        """`loss`, of vectors (n, d) of each view, and `left_out`: the share of comparisons that the guide removed."""
        if self.guide is None:
            return {"loss": self.nested(self._contrast, *vectors)}
        anchors, positives, *negatives = (gather(view["guide"]) for view in views.values())
        hard = torch.cat(negatives) if negatives else None  # (k·n, d)
        left_out = false_negatives(anchors, positives, self.recipe.guide_margin, hard)
        loss = self.nested(partial(self._contrast, left_out=left_out), *vectors)
        return {"loss": loss, "left_out": left_out.float().mean()}

    def _contrast(self, first: Tensor, second: Tensor, *negatives: Tensor, left_out: Tensor | None = None) -> Tensor:
        """InfoNCE with hard negatives, all (n, d), over the rows of all processes."""
        first, second = self.joined(first), self.joined(second)
        hard = torch.cat([self.joined(each) for each in negatives]) if negatives else None  # (k·n, d)
        return info_nce(first, second, self.recipe.temperature, hard, self.recipe.negative_weight, left_out)
