"""Own triplets: how often the anchor is closer to the positive than to the negative; equal cosines count half.

The margin is the difference of the two cosines.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from training.data.own_data import Triplets, load_triplets, shares_right, triplet_margins
from training.evaluate.measures import Score, measured
from training.evaluate.subject import Subject
from training.evaluate.task import Task

__all__ = ["TripletTask", "tasks"]


def tasks(data: Path | None, own: Sequence[Path]) -> list[Task]:
    """One task per file. Raises CorpusError."""
    return [TripletTask(path.stem, load_triplets(path)) for path in own]


@dataclass(frozen=True)
class TripletTask(Task):
    suite: ClassVar[str] = "triplets"
    triplets: Triplets

    def run(self, subject: Subject) -> list[Score]:
        margins = triplet_margins(subject.embed, self.triplets)
        right = shares_right(margins)
        counts = {"triplets": len(self.triplets)}
        return [
            measured(self.suite, self.name, "accuracy", "mean", right, counts=counts),
            Score(self.suite, self.name, "mean margin", float(margins.mean()), counts),
        ]
