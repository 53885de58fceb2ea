"""Classification of the vectors: MR, CR, SUBJ, MPQA, SST-2, TREC and MRPC, as in the papers' transfer tables.

`transfer` follows SentEval's protocol (arXiv:1803.05449) with its own classifier. `transfer-fast` trains scikit-learn's
logistic regression once per fold or set, with its default penalty, so its figures are not comparable to the papers'.
Both represent MRPC's pairs by |u - v| and u * v. Figures are accuracies x100.

The sets are read and ordered as SentEval does. Every file's number of rows is checked: a truncated SUBJ once gave
accuracies above 99 %.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]
from sklearn.model_selection import StratifiedKFold, cross_val_predict  # type: ignore[import-untyped]
from sklearn.pipeline import make_pipeline  # type: ignore[import-untyped]
from sklearn.preprocessing import StandardScaler  # type: ignore[import-untyped]

from cloze.training.errors import CorpusError
from cloze.training.evaluation.measures import Embed, in_columns
from cloze.training.evaluation.sts import find_downstream, present
from cloze.training.evaluation.suites.senteval import Rows, fold_protocol, nested_protocol, split_protocol
from cloze.training.evaluation.task import Score, Subject, Task, measured

COUNTS: Final[dict[str, int]] = {
    "MR/rt-polarity.pos": 5331,
    "MR/rt-polarity.neg": 5331,
    "CR/custrev.pos": 2407,
    "CR/custrev.neg": 1368,
    "SUBJ/subj.objective": 5000,
    "SUBJ/subj.subjective": 5000,
    "MPQA/mpqa.pos": 3312,
    "MPQA/mpqa.neg": 7294,
    "SST/binary/sentiment-train": 67349,
    "SST/binary/sentiment-dev": 872,
    "SST/binary/sentiment-test": 1821,
    "TREC/train_5500.label": 5452,
    "TREC/TREC_10.label": 500,
    "MRPC/msr_paraphrase_train.txt": 4076,
    "MRPC/msr_paraphrase_test.txt": 1725,
}
POLAR: Final = {  # set -> its files of class 1 and class 0
    "MR": ("MR/rt-polarity.pos", "MR/rt-polarity.neg"),
    "CR": ("CR/custrev.pos", "CR/custrev.neg"),
    "SUBJ": ("SUBJ/subj.objective", "SUBJ/subj.subjective"),
    "MPQA": ("MPQA/mpqa.pos", "MPQA/mpqa.neg"),
}
CLASSES: Final = ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM")  # of TREC
EMPTY: Final = "."  # SentEval embeds this for an empty text

Row: TypeAlias = tuple[tuple[str, ...], int]
"""The text, or the two texts of a pair, and the class."""

FOLDS: Final = 5
SEED: Final = 1111


@dataclass(frozen=True)
class Labelled:
    """Texts with one class each. `second` has the second sentences of MRPC's pairs."""

    texts: list[str] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    second: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class TransferSet:
    """`test` is None for a set that is scored by folds of `train`; `dev` is None except for SST-2."""

    train: Labelled
    test: Labelled | None = None
    dev: Labelled | None = None


def load_transfer(data: str | Path) -> dict[str, TransferSet]:
    """The seven sets by name. Raises CorpusError, which names the file, if one is missing or its count is wrong."""
    folder = find_downstream(data)
    sets = {}
    for name, files in POLAR.items():
        rows: list[Row] = [
            ((text,), label) for label, file in ((1, files[0]), (0, files[1])) for text in _lines(folder, file)
        ]
        sets[name] = TransferSet(_labelled(rows))
    train, dev, test = (_split(folder, f"SST/binary/sentiment-{part}", _sentiment) for part in ("train", "dev", "test"))
    sets["SST-2"] = TransferSet(train, test, dev)
    train, test = (_split(folder, f"TREC/{part}.label", _question) for part in ("train_5500", "TREC_10"))
    sets["TREC"] = TransferSet(train, test)
    train, test = (_split(folder, f"MRPC/msr_paraphrase_{part}.txt", _paraphrase) for part in ("train", "test"))
    sets["MRPC"] = TransferSet(train, test)
    return sets


def _split(folder: Path, file: str, parse: Callable[[str], Row]) -> Labelled:
    rows = []
    for number, line in enumerate(_lines(folder, file), 1):
        try:
            rows.append(parse(line))
        except (ValueError, IndexError) as error:
            raise CorpusError(
                f"{folder / file}, row {number} is not a row of this set; get SentEval's data again"
            ) from error
    return _labelled(rows)


def _sentiment(line: str) -> Row:
    text, label = line.rstrip().split("\t")
    return (text,), int(label)


def _question(line: str) -> Row:
    label, text = line.split(":", 1)
    return (text.split(" ", 1)[1],), CLASSES.index(label)


def _paraphrase(line: str) -> Row:
    cells = line.strip().split("\t")
    return (cells[3], cells[4]), int(cells[0])


def _labelled(rows: list[Row]) -> Labelled:
    """The rows in SentEval's order, on which its folds depend: by number of words, then by class."""
    rows = [(tuple(" ".join(text.split()) for text in texts), label) for texts, label in rows]
    rows.sort(key=lambda row: (*(len(text.split()) for text in row[0]), row[1]))
    first = [texts[0] or EMPTY for texts, _ in rows]
    second = [texts[1] or EMPTY for texts, _ in rows if len(texts) > 1]
    return Labelled(first, [label for _, label in rows], second)


def _lines(folder: Path, file: str) -> Iterator[str]:
    """The lines of a file, without MRPC's header. Their number is checked first."""
    path = present(folder / file)
    header = file.startswith("MRPC")
    encoding = "utf-8-sig" if header or file.startswith("SST") else "latin-1"
    try:
        lines = path.read_text(encoding=encoding).split("\n")
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path} is not UTF-8 ({error.reason}); get SentEval's data again") from error
    lines = lines[1 if header else 0 : len(lines) - (not lines[-1])]
    if len(lines) != COUNTS[file]:
        raise CorpusError(
            f"{path} has {len(lines)} rows, but SentEval's has {COUNTS[file]}, so accuracies would not be comparable: "
            "get SentEval's data again"
        )
    return iter(lines)


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
    """Vectors (n, d); for pairs |u - v| and u * v, (n, 2d)."""
    if not rows.second:
        return in_columns(embed, rows.texts)[0]
    first, second = in_columns(embed, rows.texts, rows.second)
    return np.concatenate([np.abs(first - second), first * second], axis=1)


def _rows(embed: Embed, rows: Labelled) -> Rows:
    return Rows.of(features(embed, rows), rows.labels)


def _accuracy(task: TransferTask | FastTransferTask, right: NDArray[np.bool_]) -> Score:
    counts = {"train": len(task.rows.train), "scored": len(right)}
    return measured(task.suite, task.name, "accuracy", "mean", right, counts=counts)
