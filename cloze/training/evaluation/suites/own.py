"""A user's own files: pairs, triplets and labelled texts.

Scored pairs are measured by Spearman's and Pearson's correlation, duplicate pairs by average precision and the best F1.
The threshold of the best F1 is chosen on the same pairs, so this F1 is optimistic; average precision needs no
threshold. Triplets are measured by how often the anchor is closer to the positive than to the negative (equal cosines
count half), and by the margin, which is the mean difference of the two cosines.

Labelled texts are classified with scikit-learn. Accuracies are measured in five stratified folds, for logistic
regression on standardised vectors and for the five nearest neighbours by cosine. k-means has as many clusters as there
are labels (as in MTEB, arXiv:2210.07316, section 3.2), and its figure is the V-measure.
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
from sklearn.pipeline import make_pipeline  # type: ignore[import-untyped]
from sklearn.preprocessing import StandardScaler  # type: ignore[import-untyped]

from cloze.training.evaluation.measures import Pairs, cosines_of, units
from cloze.training.evaluation.own_data import (
    Triplets,
    columns_of,
    load_duplicates,
    load_labels,
    load_triplets,
    shares_right,
    triplet_margins,
)
from cloze.training.evaluation.sts import is_benchmark, load_pairs
from cloze.training.evaluation.task import Score, Subject, Task, best_f1, measured

FOLDS: Final = 5
NEIGHBOURS: Final = 5
SEED: Final = 1111  # SentEval's


def pair_tasks(data: Path | None, own: Sequence[Path]) -> list[Task]:
    """One task per file; a file with the column `label` has duplicate pairs. Raises CorpusError."""
    return [_task(path) for path in own]


def _task(path: Path) -> Task:
    columns = columns_of(path) if path.is_file() and not is_benchmark(path) else set()
    if "label" in columns and "score" not in columns:
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


def triplet_tasks(data: Path | None, own: Sequence[Path]) -> list[Task]:
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


def label_tasks(data: Path | None, own: Sequence[Path]) -> list[Task]:
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
            "linear accuracy": make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)),
            "kNN accuracy": KNeighborsClassifier(n_neighbors=NEIGHBOURS),
        }
        scores = [
            measured(self.suite, self.name, name, "mean", _right(classifier, vectors, gold), counts=counts)
            for name, classifier in classifiers.items()
        ]
        clusters = KMeans(len(names), n_init=10, random_state=SEED).fit_predict(vectors)
        return [*scores, measured(self.suite, self.name, "V-measure", "V-measure", clusters, gold, counts=counts)]


def _right(classifier: object, vectors: NDArray[np.float64], gold: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Which texts are classified correctly in cross-validation."""
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=SEED)
    right: NDArray[np.bool_] = cross_val_predict(classifier, vectors, gold, cv=folds) == gold
    return right
