"""Own labelled texts: linear and nearest-neighbour accuracy, and the V-measure of k-means, all with scikit-learn.

Accuracies are those of five stratified folds: logistic regression, and the five nearest neighbours by cosine. k-means
has as many clusters as there are labels (as in MTEB, arXiv:2210.07316, section 3.2).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import KMeans  # type: ignore[import-untyped]
from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]
from sklearn.model_selection import StratifiedKFold, cross_val_predict  # type: ignore[import-untyped]
from sklearn.neighbors import KNeighborsClassifier  # type: ignore[import-untyped]

from training.data.own_data import load_labels
from training.data.similarity import units
from training.evaluate.measures import Score, measured
from training.evaluate.subject import Subject
from training.evaluate.task import Task

__all__ = ["LabelTask", "tasks"]

FOLDS: Final = 5
NEIGHBOURS: Final = 5
SEED: Final = 1111  # SentEval's


def tasks(data: Path | None, own: Sequence[Path]) -> list[Task]:
    """One task per file. Raises CorpusError."""
    return [LabelTask(path.stem, *load_labels(path, FOLDS)) for path in own]


@dataclass(frozen=True)
class LabelTask(Task):
    suite: ClassVar[str] = "labels"
    texts: list[str]
    labels: list[str]

    def run(self, subject: Subject) -> list[Score]:
        vectors = units(subject.embed(self.texts))
        names, gold = np.unique(self.labels, return_inverse=True)
        counts = {"texts": len(gold), "labels": len(names)}
        classifiers = {
            "linear accuracy": LogisticRegression(max_iter=1000),
            "kNN accuracy": KNeighborsClassifier(n_neighbors=NEIGHBOURS),
        }
        scores = [
            measured(self.suite, self.name, name, "mean", _right(classifier, vectors, gold), counts=counts)
            for name, classifier in classifiers.items()
        ]
        clusters = KMeans(len(names), n_init=10, random_state=SEED).fit_predict(vectors)
        return [*scores, measured(self.suite, self.name, "V-measure", "V-measure", clusters, gold, counts=counts)]


def _right(classifier: object, vectors: NDArray[np.float64], gold: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Which texts are classified correctly by a classifier that was not fitted on them."""
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=SEED)
    right: NDArray[np.bool_] = cross_val_predict(classifier, vectors, gold, cv=folds) == gold
    return right
