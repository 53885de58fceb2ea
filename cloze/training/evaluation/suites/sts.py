"""Semantic textual similarity: the papers' seven test sets, two development sets, and folders in SemEval's format.

Scores are computed as in SimCSE and PromptBERT: a task's parts are joined for one Spearman correlation ('all').
Further figures are Pearson's correlation, and the mean of the parts' correlations, unweighted and weighted by their
numbers of pairs, as in the original SentEval. The similarity is the cosine of vectors in fp32; only the encoder's own
limit truncates a text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from cloze.training.evaluation.measures import Pairs, cosines_of
from cloze.training.evaluation.sts import DEV_TASKS, STS_TASKS, load_parts, load_semeval
from cloze.training.evaluation.task import MEASURES, Score, Subject, Task, measured

CORRELATIONS = ("spearman", "pearson")


def tasks(data: Path | None, own: Sequence[Path]) -> list[Task]:
    """The sets of SentEval's folder and of own folders. Raises CorpusError."""
    known = load_parts(data, (*STS_TASKS, *DEV_TASKS)) if data else {}
    sts_tasks = [StsTask(name, parts) for name, parts in known.items()]
    for folder in own:
        parts, name = load_semeval(folder), folder.resolve().name
        sts_tasks += [StsTask(f"{name} {part}", {part: pairs}) for part, pairs in parts.items()]
        if len(parts) > 1:
            sts_tasks.append(StsTask(name, parts))
    return list(sts_tasks)


@dataclass(frozen=True)
class StsTask(Task):
    """The parts of a set; most sets have one."""

    suite: ClassVar[str] = "sts"
    parts: dict[str, Pairs]

    def run(self, subject: Subject) -> list[Score]:
        joined = sum(self.parts.values(), Pairs([], [], []))
        cosine = cosines_of(subject.embed, joined)
        counts = {"pairs": len(joined)}
        scores = [
            measured(self.suite, self.name, metric, metric, cosine, joined.gold, counts=counts)
            for metric in CORRELATIONS
        ]
        return scores + self._means(cosine) if len(self.parts) > 1 else scores

    def _means(self, cosine: NDArray[np.float64]) -> list[Score]:
        sizes = [len(pairs) for pairs in self.parts.values()]
        sides = np.split(cosine, np.cumsum(sizes)[:-1])
        scores = []
        for metric in CORRELATIONS:
            measure = MEASURES[metric]
            values = [
                measure(side, np.array(pairs.gold)) for side, pairs in zip(sides, self.parts.values(), strict=True)
            ]
            details = {"parts": dict(zip(self.parts, values, strict=True))}
            counts = {"parts": len(values), "pairs": sum(sizes)}
            for name, value in (("mean", np.mean(values)), ("weighted mean", np.average(values, weights=sizes))):
                scores.append(Score(self.suite, self.name, f"{name} {metric}", float(value), counts, None, details))
        return scores
