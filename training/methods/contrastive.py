"""The base of the methods whose loss compares the vectors of a batch: passes over views, then a loss over all rows.

The two halves are separate because they scale differently. A pass works row by row and may run in chunks whose
activations are thrown away (GradCache). `loss` sees the vectors of all rows, and of all processes.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Annotated, Any, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from training.data.corpus import Row
from training.errors import RecipeError
from training.methods.losses import false_negatives, info_nce
from training.methods.objective import Objective
from training.methods.parts.gather import gather
from training.methods.parts.guide import Guide
from training.model.encoder import SentenceEncoder
from training.model.heads import HeadKind
from training.model.views import Pass, View, encode_trimmed
from training.recipes.keys import Positive, Recipe

__all__ = ["VIEWS", "BatchRecipe", "Contrastive", "ContrastiveRecipe", "FromPairs", "PairsRecipe"]

VIEWS = ("first", "second", *(f"negative{number}" for number in range(1, 9)))  # a text, its positive, hard negatives


class BatchRecipe(Recipe):
    """The keys of every method whose loss compares the vectors of a batch."""

    dimensions: tuple[Positive, ...] = Field(
        (),
        description="Matryoshka: average the loss of vectors cut to each of these sizes; empty: whole vectors",
    )
    mini_batch_size: Positive | None = Field(
        None, description="GradCache: encode this many rows at a time, twice, which saves memory; unset: all at once"
    )

    @model_validator(mode="after")
    def _distinct_dimensions(self) -> Self:
        if len(set(self.dimensions)) < len(self.dimensions):
            raise ValueError(f"dimensions has one size twice: {', '.join(map(str, self.dimensions))}; write each once")
        return self


class ContrastiveRecipe(BatchRecipe):
    """The keys of every contrastive method."""

    temperature: Annotated[float, Field(gt=0)] = Field(0.05, description="divides the cosines in the loss")
    no_duplicates: bool = Field(
        False, description="put no text into a batch twice, because it would be a negative of itself"
    )

    @model_validator(mode="after")
    def _one_order(self) -> Self:
        orders = {"group_by_length": self.group_by_length, "weights": self.weights}
        other = next((name for name, asked in orders.items() if asked), None)
        if self.no_duplicates and other:
            raise ValueError(f"no_duplicates and {other} order the corpus in two ways; choose one")
        return self


class PairsRecipe(ContrastiveRecipe):
    """The keys of the methods that learn from pairs and hard negatives as well as from single sentences."""

    negative_weight: float = Field(
        0.0, description="added to the logits of a row's own hard negatives: their logarithmic weight"
    )
    kept_head: HeadKind | None = Field(
        None,
        description="a head that is served: tanh, or transform, which begins as that of the encoder's masked-word "
        "head; unset: a tanh in training only",
    )
    guide: str | None = Field(
        None,
        description="run, bundle, encoder's folder or hub name that finds false negatives in a batch, which are left "
        "out of the loss; unset: none",
    )
    guide_margin: Annotated[float, Field(ge=0, le=2)] = Field(
        0.0, description="a negative's cosine, by the guide, is lower than the positive's less this"
    )

    @model_validator(mode="after")
    def _guided(self) -> Self:
        if self.guide_margin and self.guide is None:
            raise ValueError(
                f"guide_margin is {self.guide_margin} and there is no guide; write one, or guide_margin = 0.0"
            )
        return self

    @model_validator(mode="after")
    def _weighed(self) -> Self:
        if self.negative_weight and len(self.columns) < 3:
            raise ValueError(
                f"negative_weight is {self.negative_weight} and columns names {len(self.columns)}; hard negatives are "
                "further columns: name three or more, or write negative_weight = 0.0"
            )
        return self


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
