"""Own triplets: how often the anchor is closer to the positive than to the negative; equal cosines count half."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from training.data.own_data import load_triplets
from training.data.similarity import units
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
    triplets: list[tuple[str, str, str]]

    def run(self, subject: Subject) -> list[Score]:
        texts = sorted({text for triplet in self.triplets for text in triplet})
        places = {text: place for place, text in enumerate(texts)}
        vectors = units(subject.embed(texts))
        anchor, positive, negative = (
            vectors[[places[text] for text in column]] for column in zip(*self.triplets, strict=True)
        )
        margin = (anchor * positive).sum(1) - (anchor * negative).sum(1)
        right = (1 + np.sign(margin)) / 2
        details = {"mean margin": float(margin.mean())}
        counts = {"triplets": len(self.triplets)}
        return [measured(self.suite, self.name, "accuracy", "mean", right, counts=counts, details=details)]
