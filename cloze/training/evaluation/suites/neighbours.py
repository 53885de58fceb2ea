"""Recall@k among the sentences of STS-B test, with example neighbours: DiffCSE (arXiv:2204.10298) 6.2 and Table 9.

The corpus is the 2,758 sentences of the set, duplicates included; the queries are the 97 pairs with the gold score 5,
in both directions, as the paper's figures imply (each is k/194). A query's own place is excluded. The paper does not
say what counts if a sentence occurs twice. Here a hit on an identical sentence counts; the second figure counts only
the place of the pair's other sentence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from cloze.training.errors import CorpusError
from cloze.training.evaluation.measures import Pairs, in_columns, units
from cloze.training.evaluation.sts import load_tasks
from cloze.training.evaluation.task import Score, Subject, Task, measured

DEPTHS: Final = (1, 5, 10)
POSITIVE: Final = 5.0
POSITIVES: Final = 97  # pairs of STS-B test with that score
SHOWN: Final = 10  # queries with example neighbours
NEIGHBOURS: Final = 3  # of each query


def tasks(data: Path | None, own: Sequence[Path]) -> list[Task]:
    """One task. Raises CorpusError."""
    if data is None:
        return []
    pairs = load_tasks(data, ("STS-B",))["STS-B"]
    if (count := pairs.gold.count(POSITIVE)) != POSITIVES:
        raise CorpusError(
            f"sts-test.csv has {count} pairs with the score 5, but STS-B test has {POSITIVES}; get it again"
        )
    return [NeighbourTask("STS-B", pairs)]


@dataclass(frozen=True)
class NeighbourTask(Task):
    suite: ClassVar[str] = "neighbours"
    pairs: Pairs
    depths: tuple[int, ...] = DEPTHS

    def run(self, subject: Subject) -> list[Score]:
        corpus = self.pairs.left + self.pairs.right
        vectors = units(in_columns(subject.embed, corpus)[0])
        queries, targets = self._queries()
        cosines = vectors[queries] @ vectors.T
        cosines[np.arange(len(queries)), queries] = -np.inf
        ranked = np.argsort(-cosines, axis=1, kind="stable")[:, : max(self.depths)]
        texts = np.array(corpus)
        by_place = ranked == targets[:, None]
        by_text = texts[ranked] == texts[targets][:, None]
        counts = {"sentences": len(corpus), "queries": len(queries)}
        scores = []
        for suffix, hits in (("", by_text), (" by place", by_place)):
            for depth in self.depths:
                values = hits[:, :depth].any(1).reshape(2, -1).mean(axis=0)  # over a pair's two directions
                scores.append(measured(self.suite, self.name, f"recall@{depth}{suffix}", "mean", values, counts=counts))
        details = {"examples": _examples(corpus, queries, targets, ranked, cosines)}
        return [replace(scores[0], details=details), *scores[1:]]

    def _queries(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """The places of the queries and of the sentences that they should find, in both directions."""
        first = np.flatnonzero(np.array(self.pairs.gold) == POSITIVE)
        second = first + len(self.pairs)
        return np.concatenate([first, second]), np.concatenate([second, first])


def _examples(
    corpus: list[str],
    queries: NDArray[np.intp],
    targets: NDArray[np.intp],
    ranked: NDArray[np.intp],
    cosines: NDArray[np.float64],
) -> list[dict[str, Any]]:
    """The first queries with their nearest sentences and cosines."""
    return [
        {
            "query": corpus[queries[row]],
            "positive": corpus[targets[row]],
            "neighbours": [[corpus[place], round(float(cosines[row, place]), 4)] for place in ranked[row, :NEIGHBOURS]],
        }
        for row in range(min(SHOWN, len(queries)))
    ]
