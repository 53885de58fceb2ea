"""Development data, which chooses a run's checkpoint: the user's files and folders, each with one figure.

| contents | columns | figure |
| --- | --- | --- |
| scored pairs | `sentence1`, `sentence2`, `score`; or the STS benchmark's `sts-dev.csv` | `spearman` |
| duplicate pairs | `sentence1`, `sentence2`, `label`: 1 or 0 | `average_precision` |
| triplets | `anchor`, `positive`, `negative`; or `sent0`, `sent1`, `hard_neg` | `accuracy` |
| a folder in BEIR's layout | | `ndcg`: nDCG@10 |

All figures are x100, and the same as `cloze evaluate` gives for the file or folder.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Final, Self

from cloze.training.errors import CorpusError
from cloze.training.evaluation.measures import Embed, average_precision, cosines_of
from cloze.training.evaluation.own_data import (
    TRIPLETS,
    columns_of,
    load_duplicates,
    load_triplets,
    shares_right,
    triplet_margins,
)
from cloze.training.evaluation.search import load_collection, search_score
from cloze.training.evaluation.sts import is_benchmark, load_pairs, spearman

KINDS: Final = (
    "sentence1, sentence2 and score; sentence1, sentence2 and label; anchor, positive and negative; "
    "or the path of a folder to search, in BEIR's layout"
)


@dataclass(frozen=True)
class DevSet:
    """One file or folder: `score` gives the figure `metric`, with embeds for texts, search queries and documents."""

    name: str
    metric: str
    score: Callable[[Embed, Embed, Embed], float]


@dataclass(frozen=True)
class DevData:
    """The files and folders that `dev` of a recipe names, by the names of their figures."""

    sets: dict[str, DevSet]

    @classmethod
    def load(cls, paths: Sequence[str]) -> Self:
        """Read the data. A figure's name is its metric, after its set if several share a metric. Raises CorpusError."""
        loaded = [_load(Path(path)) for path in paths]
        metrics = Counter(dev_set.metric for dev_set in loaded)
        names = [
            dev_set.metric if metrics[dev_set.metric] == 1 else f"{dev_set.name}_{dev_set.metric}" for dev_set in loaded
        ]
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise CorpusError(f"dev has two sets named {twice[0]}; rename one of them")
        return cls(dict(zip(names, loaded, strict=True)))

    def chooser(self, choice: str) -> str:
        """The figure of `score` that chooses a checkpoint: the only one, or else `choice` (mean or least_gain)."""
        return choice if len(self.sets) > 1 else next(iter(self.sets))

    def score(
        self,
        embed: Embed,
        queries: Embed | None = None,
        documents: Embed | None = None,
        start: Mapping[str, float] | None = None,
    ) -> dict[str, float]:
        """The figure of each set, x100. For several sets also `mean` and `least_gain`, the gain over `start`.

        Search embeds with `queries` and `documents`, or else with `embed`. Without `start` the gain is 0.
        """
        figures = {
            name: dev_set.score(embed, queries or embed, documents or embed) for name, dev_set in self.sets.items()
        }
        if len(figures) == 1:
            return figures
        gains = [value - (start or figures)[name] for name, value in figures.items()]
        return figures | {"mean": mean(figures.values()), "least_gain": min(gains)}


def _load(path: Path) -> DevSet:
    """Read a file or folder according to its contents."""
    if path.is_dir():
        collection = load_collection(path, "dev")
        return DevSet(path.name, "ndcg", lambda _, queries, documents: search_score(queries, documents, collection))
    if not path.is_file():
        raise CorpusError(f"{path} is not a file or folder; dev takes a file with the columns {KINDS}")
    columns = set() if is_benchmark(path) else columns_of(path)
    if any(set(names) <= columns for names in TRIPLETS):
        triplets = load_triplets(path)
        return DevSet(
            path.stem, "accuracy", lambda embed, *_: float(100 * shares_right(triplet_margins(embed, triplets)).mean())
        )
    if columns and not ({"sentence1", "sentence2"} <= columns and {"score", "label"} & columns):
        raise CorpusError(f"{path} has the columns {', '.join(sorted(columns))}; dev takes {KINDS}")
    if "label" in columns and "score" not in columns:
        duplicates = load_duplicates(path)
        return DevSet(
            path.stem,
            "average_precision",
            lambda embed, *_: average_precision(cosines_of(embed, duplicates), duplicates.gold),
        )
    pairs = load_pairs(path)
    return DevSet(path.stem, "spearman", lambda embed, *_: spearman(embed, pairs))
