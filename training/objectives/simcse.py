"""Unsupervised SimCSE (arXiv:2104.08821): a sentence and itself under another dropout mask are a positive pair."""

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from training.corpus import Row
from training.encoder import SentenceEncoder
from training.losses import info_nce
from training.objective import Objective, View, projection, view
from training.recipe import Recipe

__all__ = ["SimCSE", "SimCSERecipe"]


class SimCSERecipe(Recipe):
    """The keys of `method = "simcse"`."""

    method: Literal["simcse"]
    temperature: Annotated[float, Field(gt=0)] = Field(0.05, description="divides the cosines in the loss")


class SimCSE(Objective):
    """Equation 1 over two passes of the same texts; the tanh head is used in training only."""

    Recipe = SimCSERecipe

    def __init__(self, encoder: SentenceEncoder, recipe: SimCSERecipe) -> None:
        super().__init__(encoder, recipe)
        self.head = projection(encoder)

    def views(self, rows: Sequence[Row]) -> dict[str, View]:
        return {"texts": view(self.prompt, [text for (text,) in rows])}

    def forward(self, texts: View) -> dict[str, Tensor]:
        # one pass over (2n, L): every row draws its own dropout mask
        both = self.head(self.encoder(**{name: ids.repeat(2, 1) for name, ids in texts.items()}, prompt=self.prompt))
        first, second = torch.chunk(both, 2)
        return {"loss": info_nce(first, second, self.recipe.temperature)}
