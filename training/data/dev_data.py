"""Development data, which chooses a run's checkpoint: scored pairs of sentences, and collections to search."""

from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Self

from training.data.scored_pairs import Pairs, load_pairs, spearman
from training.data.search_collection import Collection, load_collection, search_score
from training.model.pooling import Embed
from training.recipes.keys import Recipe

__all__ = ["DevData"]


@dataclass(frozen=True)
class DevData:
    """The data that `dev` and `dev_retrieval` of a recipe name."""

    pairs: Pairs | None
    collections: tuple[Collection, ...]

    @classmethod
    def load(cls, recipe: Recipe) -> Self | None:
        """None if the recipe names none. Raises CorpusError."""
        if recipe.dev is None and not recipe.dev_retrieval:
            return None
        pairs = load_pairs(Path(recipe.dev)) if recipe.dev else None
        return cls(pairs, tuple(load_collection(folder) for folder in recipe.dev_retrieval))

    @property
    def chooser(self) -> str:
        """The figure of `score` that chooses a checkpoint: the only one, or the mean of several."""
        names = [] if self.pairs is None else ["spearman"]
        names += [f"{each.name}_ndcg" for each in self.collections]
        return names[0] if len(names) == 1 else "mean"

    def score(self, embed: Embed) -> dict[str, float]:
        """Spearman's correlation and each collection's nDCG@10, x100; and the mean, if there are several."""
        figures = {} if self.pairs is None else {"spearman": spearman(embed, self.pairs)}
        figures |= {f"{each.name}_ndcg": search_score(embed, each) for each in self.collections}
        return figures if len(figures) == 1 else figures | {"mean": mean(figures.values())}
