"""Development data, by which a run's checkpoint is chosen: scored pairs of sentences, and collections to search."""

from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Self

from training.recipe import Recipe
from training.retrieval import Collection, load_collection, search_score
from training.sts import Embed, Pairs, load_pairs, spearman

__all__ = ["DevData"]


@dataclass(frozen=True)
class DevData:
    """What `dev` and `dev_retrieval` of a recipe name."""

    pairs: Pairs | None
    collections: tuple[Collection, ...]

    @classmethod
    def load(cls, recipe: Recipe) -> Self | None:
        """None where the recipe names none. Raises CorpusError."""
        if recipe.dev is None and not recipe.dev_retrieval:
            return None
        pairs = load_pairs(Path(recipe.dev)) if recipe.dev else None
        return cls(pairs, tuple(load_collection(folder) for folder in recipe.dev_retrieval))

    @property
    def chooser(self) -> str:
        """The figure of `score` that chooses a checkpoint: the only one, or the mean of all."""
        names = [] if self.pairs is None else ["spearman"]
        names += [f"{each.name}_ndcg" for each in self.collections]
        return names[0] if len(names) == 1 else "mean"

    def score(self, embed: Embed) -> dict[str, float]:
        """Spearman's correlation and each collection's nDCG@10, x100; of several figures also the mean."""
        figures = {} if self.pairs is None else {"spearman": spearman(embed, self.pairs)}
        figures |= {f"{each.name}_ndcg": search_score(embed, each) for each in self.collections}
        return figures if len(figures) == 1 else figures | {"mean": mean(figures.values())}
