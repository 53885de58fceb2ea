"""Own pairs: scored pairs by Spearman's correlation, duplicate pairs by average precision and the best F1.

The cosine that is the threshold of the best F1 is chosen on the same pairs, so that F1 is optimistic; average precision
needs no threshold.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from training.data.own_data import columns_of, load_duplicates
from training.data.scored_pairs import Pairs, cosines_of, is_benchmark, load_pairs
from training.evaluate.measures import Score, best_f1, measured
from training.evaluate.subject import Subject
from training.evaluate.task import Task

__all__ = ["DuplicateTask", "ScoredPairsTask", "tasks"]


def tasks(data: Path | None, own: Sequence[Path]) -> list[Task]:
    """One task per file; a file with the column `label` has duplicate pairs. Raises CorpusError."""
    return [_task(path) for path in own]


def _task(path: Path) -> Task:
    if path.is_file() and not is_benchmark(path) and "score" not in (found := columns_of(path)) and "label" in found:
        return DuplicateTask(path.stem, load_duplicates(path))
    return ScoredPairsTask(path.stem, load_pairs(path))


@dataclass(frozen=True)
class ScoredPairsTask(Task):
    suite: ClassVar[str] = "pairs"
    pairs: Pairs

    def run(self, subject: Subject) -> list[Score]:
        cosine, counts = cosines_of(subject.embed, self.pairs), {"pairs": len(self.pairs)}
        return [
            measured(self.suite, self.name, metric, metric, cosine, self.pairs.gold, counts=counts)
            for metric in ("spearman", "pearson")
        ]


@dataclass(frozen=True)
class DuplicateTask(Task):
    suite: ClassVar[str] = "pairs"
    pairs: Pairs

    def run(self, subject: Subject) -> list[Score]:
        cosine, gold = cosines_of(subject.embed, self.pairs), self.pairs.gold
        counts = {"pairs": len(gold), "duplicates": int(sum(gold))}
        _, threshold = best_f1(cosine, np.array(gold))
        scores = [
            measured(self.suite, self.name, name, name, cosine, gold, counts=counts)
            for name in ("average precision", "best F1")
        ]
        return [*scores, Score(self.suite, self.name, "its threshold", threshold, counts)]
