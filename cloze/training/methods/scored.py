"""Pairs of sentences with a score: CoSENT, which trains the order of the pairs.

The columns are two texts and their score, on any scale that grows with similarity. Scores are compared within a batch.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from cloze.training.data.stored_rows import Row
from cloze.training.methods.contrastive import VIEWS, BatchObjective
from cloze.training.methods.losses import cosent, cosine_similarity
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.views import View, view
from cloze.training.recipes.methods import ScoredRecipe


class Scored(BatchObjective):
    """The served vectors are compared: there is no head."""

    contrastive = False  # a pair with a low score is not a positive
    recipe: ScoredRecipe

    def __init__(self, encoder: SentenceEncoder, recipe: ScoredRecipe) -> None:
        super().__init__(encoder, recipe)
        self.head = nn.Identity()

    def views(self, rows: Sequence[Row]) -> dict[str, View]:
        first, second, scores = zip(*rows, strict=True)
        views = {name: view(self.text_encoder, texts) for name, texts in zip(VIEWS, (first, second), strict=False)}
        views["first"]["score"] = torch.tensor([float(score) for score in scores])  # (n)
        return views

    def loss(self, vectors: Mapping[str, Tensor], views: Mapping[str, View]) -> dict[str, Tensor]:
        *joined, scores = self.joined(*vectors.values(), views["first"]["score"])

        def ranking(first: Tensor, second: Tensor) -> Tensor:
            return cosent(cosine_similarity(*self.headed(first, second)), scores, self.recipe.scale)

        return {"loss": self.nested(ranking, *joined)}
