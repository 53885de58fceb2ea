"""Classification of the vectors: MR, CR, SUBJ, MPQA, SST-2, TREC and MRPC, as in the papers' transfer tables.

`transfer` follows SentEval's protocol (arXiv:1803.05449) with its own classifier. `transfer-fast` trains scikit-learn's
logistic regression once per fold or set, with its default penalty: its figures are not the papers'. Both read MRPC's
pairs as |u - v| and u * v. Figures are accuracies x100.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]
from sklearn.model_selection import StratifiedKFold, cross_val_predict  # type: ignore[import-untyped]
from sklearn.pipeline import make_pipeline  # type: ignore[import-untyped]
from sklearn.preprocessing import StandardScaler  # type: ignore[import-untyped]

from training.data.transfer_sets import Labelled, TransferSet, load_transfer
from training.evaluate.measures import Score, measured
from training.evaluate.senteval_classifier import Rows, fold_protocol, nested_protocol, split_protocol
from training.evaluate.subject import Subject
from training.evaluate.task import Task
from training.model.pooling import Embed

__all__ = ["FastTransferTask", "TransferTask", "fast_tasks", "tasks"]

FOLDS: Final = 5
SEED: Final = 1111


def tasks(data: Path | None, own: Sequence[Path]) -> list[Task]:
    """SentEval's protocol. Raises CorpusError."""
    return [] if data is None else [TransferTask(name, rows) for name, rows in load_transfer(data).items()]


def fast_tasks(data: Path | None, own: Sequence[Path]) -> list[Task]:
    """The fast protocol. Raises CorpusError."""
    return [] if data is None else [FastTransferTask(name, rows) for name, rows in load_transfer(data).items()]


@dataclass(frozen=True)
class TransferTask(Task):
    suite: ClassVar[str] = "transfer"
    rows: TransferSet

    def run(self, subject: Subject) -> list[Score]:
        train = _rows(subject.embed, self.rows.train)
        if self.rows.test is None:
            right = nested_protocol(train)
        elif self.rows.dev is None:
            right = fold_protocol(train, _rows(subject.embed, self.rows.test))
        else:
            dev, test = _rows(subject.embed, self.rows.dev), _rows(subject.embed, self.rows.test)
            right = split_protocol(train, dev, test)
        return [_accuracy(self, right)]


@dataclass(frozen=True)
class FastTransferTask(Task):
    suite: ClassVar[str] = "transfer-fast"
    rows: TransferSet

    def run(self, subject: Subject) -> list[Score]:
        classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=200, tol=1e-3))
        train, labels = features(subject.embed, self.rows.train), self.rows.train.labels
        if self.rows.test is None:
            folds = StratifiedKFold(FOLDS, shuffle=True, random_state=SEED)
            right = cross_val_predict(classifier, train, labels, cv=folds) == np.array(labels)
        else:
            predicted = classifier.fit(train, labels).predict(features(subject.embed, self.rows.test))
            right = predicted == np.array(self.rows.test.labels)
        return [_accuracy(self, right)]


def features(embed: Embed, rows: Labelled) -> NDArray[np.float32]:
    """Vectors (n, d); |u - v| and u * v of pairs, (n, 2d)."""
    texts = sorted({*rows.texts, *rows.second})
    places = {text: place for place, text in enumerate(texts)}
    vectors = embed(texts)
    first = vectors[[places[text] for text in rows.texts]]
    if not rows.second:
        return first
    second = vectors[[places[text] for text in rows.second]]
    return np.concatenate([np.abs(first - second), first * second], axis=1)


def _rows(embed: Embed, rows: Labelled) -> Rows:
    return Rows.of(features(embed, rows), rows.labels)


def _accuracy(task: TransferTask | FastTransferTask, right: NDArray[np.bool_]) -> Score:
    counts = {"train": len(task.rows.train), "scored": len(right)}
    return measured(task.suite, task.name, "accuracy", "mean", right, counts=counts)
