"""Everything that scores a model: the STS tasks, the two development sets, and the collections to search."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from training.data.scored_pairs import Pairs
from training.data.search_collection import Collection, find_collections, load_collection, search_score
from training.evaluate.sts import DEV_TASKS, STS_TASKS, average, load_tasks, sts_dev
from training.model.pooling import Embed

__all__ = ["SEARCH", "Suite", "search_columns"]

SEARCH = " nDCG@10"  # ends the name of a collection's figure

Follow = Callable[[list[str]], Iterable[str]]
"""Wraps the names of what is scored, to show progress."""


@dataclass(frozen=True)
class Suite:
    """`tasks` by name; a collection's figure is named after its folder."""

    tasks: dict[str, Pairs]
    collections: tuple[Collection, ...]

    @classmethod
    def load(cls, data: str | Path) -> Self:
        """Read the STS sets, and the folders of `data`/retrieval if there are any. Raises CorpusError."""
        tasks = load_tasks(data, (*STS_TASKS, *DEV_TASKS))
        return cls(tasks, tuple(map(load_collection, find_collections(data))))

    def score(self, embed: Embed, follow: Follow = iter) -> dict[str, float]:
        """Name -> Spearman or nDCG@10, x100; `Avg.` is the mean of the seven STS tasks."""
        collections = {each.name + SEARCH: each for each in self.collections}
        figures = {}
        for name in follow([*self.tasks, *collections]):
            known = name in self.tasks
            figures[name] = sts_dev(embed, self.tasks[name]) if known else search_score(embed, collections[name])
        return figures | {"Avg.": average(figures)}


def search_columns(scores: Iterable[dict[str, float]]) -> list[str]:
    """The names of the collections' figures among others."""
    return list(dict.fromkeys(name for row in scores for name in row if name.endswith(SEARCH)))
