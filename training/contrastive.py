"""What the contrastive methods share: passes over views first, then a loss over the whole batch.

The two halves are kept apart because they scale differently. `encode` works row by row and may run in chunks whose
activations are thrown away (GradCache); `loss` sees the vectors of all rows, and of all processes.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from training.encoder import SentenceEncoder
from training.errors import RecipeError
from training.gather import gather
from training.heads import HeadKind
from training.losses import info_nce
from training.objective import Objective, View
from training.recipe import Positive, Recipe
from training.trimmed import encode_trimmed

__all__ = ["VIEWS", "Contrastive", "ContrastiveRecipe", "PairsRecipe"]

VIEWS = ("first", "second", "negative")  # of a row: a text, its positive, its hard negative


class ContrastiveRecipe(Recipe):
    """The keys of every contrastive method."""

    temperature: Annotated[float, Field(gt=0)] = Field(0.05, description="divides the cosines in the loss")
    dimensions: tuple[Positive, ...] = Field(
        (),
        description="Matryoshka: average the loss of vectors cut to each of these sizes; empty: whole vectors",
    )
    mini_batch_size: Positive | None = Field(
        None, description="GradCache: encode so many rows at a time, twice, which saves memory; unset: all at once"
    )

    @model_validator(mode="after")
    def _distinct_dimensions(self) -> Self:
        if len(set(self.dimensions)) < len(self.dimensions):
            raise ValueError(f"dimensions has one size twice: {', '.join(map(str, self.dimensions))}; write each once")
        return self


class PairsRecipe(ContrastiveRecipe):
    """The keys of the methods that learn from pairs and hard negatives as well as from single sentences."""

    negative_weight: float = Field(
        0.0, description="added to the logit of a row's own hard negative: its logarithmic weight"
    )
    kept_head: HeadKind | None = Field(
        None,
        description="a head that is served: tanh, or transform, which begins as that of the encoder's masked-word "
        "head; unset: a tanh in training only",
    )

    @model_validator(mode="after")
    def _weighed(self) -> Self:
        if self.negative_weight and len(self.columns) != 3:
            raise ValueError(
                f"negative_weight is {self.negative_weight} and columns names {len(self.columns)}; hard negatives are "
                "a third column: name three columns, or write negative_weight = 0.0"
            )
        return self


class Contrastive(Objective):
    """Base of the methods whose loss compares vectors across the batch: a subclass writes `encode` and `loss`."""

    rowwise: ClassVar[bool] = True  # False where rows of a pass depend on each other (BatchNorm): no chunks then
    head: nn.Module  # between vectors and loss

    def __init__(self, encoder: SentenceEncoder, recipe: Any) -> None:
        super().__init__(encoder, recipe)
        if recipe.mini_batch_size and not self.rowwise:
            raise RecipeError(
                f"mini_batch_size is {recipe.mini_batch_size}, and method {recipe.method!r} has BatchNorm, which sees "
                "all rows at once; remove mini_batch_size"
            )
        if recipe.dimensions and max(recipe.dimensions) > encoder.dimension:
            raise RecipeError(
                f"dimensions has {max(recipe.dimensions)}; the encoder's vectors have {encoder.dimension}: lower it"
            )

    def draw(self, views: dict[str, View]) -> dict[str, View]:
        """What a step draws at random before its passes (masked words, dropout rates); by default nothing."""
        return views

    @abstractmethod
    def encode(self, name: str, view: View) -> Tensor:
        """One pass over a view: (n, ...), row i from row i of the view alone."""

    @abstractmethod
    def loss(self, vectors: Mapping[str, Tensor], views: Mapping[str, View]) -> dict[str, Tensor]:
        """What `encode` gave for each view, all n rows -> what `forward` returns. Heads belong here."""

    def forward(self, **views: View) -> dict[str, Tensor]:
        views = self.draw(views)
        vectors = {name: encode_trimmed(partial(self.encode, name), view) for name, view in views.items()}
        return self.loss(vectors, views)

    def contrast(self, first: Tensor, second: Tensor, negative: Tensor | None = None) -> Tensor:
        """InfoNCE of vectors (n, d) behind the head, over the rows of all processes."""
        first, second = self.joined(first), self.joined(second)
        if negative is None:
            return info_nce(first, second, self.recipe.temperature)
        return info_nce(first, second, self.recipe.temperature, self.joined(negative), self.recipe.negative_weight)

    def joined(self, vectors: Tensor) -> Tensor:
        """Vectors (n, ..., d) behind the head, of all processes, in fp32: the gather's gradient is a sum."""
        return gather(self.head(vectors).float())

    def nested(self, loss: Callable[..., Tensor], *vectors: Tensor) -> Tensor:
        """`loss` of the vectors (n, d), averaged over the recipe's Matryoshka dimensions (arXiv:2205.13147).

        A vector is cut by zeros: the cosine is that of the shorter vector, and a head meets the width it knows.
        """
        if not self.recipe.dimensions:
            return loss(*vectors)
        places = torch.arange(self.encoder.dimension, device=vectors[0].device)
        cuts = [places < size for size in self.recipe.dimensions]
        return torch.stack([loss(*(vector * cut for vector in vectors)) for cut in cuts]).mean()
