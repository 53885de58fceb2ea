"""The parts of a suite: a subject that embeds, a task that scores it, and the resulting figures.

A figure is always `MEASURES[items.measure](values, gold)`, so that a bootstrap can resample the items and recompute it.
Finished tasks are kept in a cache, under the digests of the subject and of the task's data.
"""

import hashlib
import json
import os
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.stats import pearsonr
from sklearn.metrics import precision_recall_curve, v_measure_score  # type: ignore[import-untyped]
from torch import nn

from cloze.encoding.files import check_folder
from cloze.training.bar import bar
from cloze.training.errors import RunError
from cloze.training.evaluation.measures import Embed, average_precision, rank_correlation

SEARCH: Final = " nDCG@10"  # ends the name of a collection's figure

Numbers: TypeAlias = Sequence[float] | NDArray[Any]
Array: TypeAlias = NDArray[np.float64]

VERSION: Final = 3  # raise it when a suite computes another figure from the same data


@dataclass(frozen=True)
class Items:
    """The numbers from which a figure is computed, one per item. `gold` is empty if the measure is a mean."""

    measure: str
    values: list[float]
    gold: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Score:
    """One figure. `counts` has the number of pairs, queries or texts; `details` is what a report shows with it.

    Correlations, accuracies and search metrics are x100. `items` is None for a figure that is not computed from items,
    such as a speed or the mean of other figures. `data` is the digest of the task that gave it.
    """

    suite: str
    task: str
    metric: str
    value: float
    counts: dict[str, int]
    items: Items | None = None
    details: dict[str, Any] = field(default_factory=dict)
    data: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        """The inverse of `as_json`. Raises KeyError or TypeError for another kind of record."""
        items = record["items"]
        return cls(**record | {"items": None if items is None else Items(**items)})


def measured(
    suite: str,
    task: str,
    metric: str,
    measure: str,
    values: Numbers,
    gold: Numbers = (),
    *,
    counts: Mapping[str, int],
    details: Mapping[str, Any] | None = None,
) -> Score:
    """A score with the measure of these items as its value."""
    items = Items(measure, np.asarray(values, float).tolist(), np.asarray(gold, float).tolist())
    value = MEASURES[measure](np.array(items.values), np.array(items.gold))
    return Score(suite, task, metric, value, dict(counts), items, dict(details or {}))


def best_f1(values: Array, gold: Array) -> tuple[float, float]:
    """The highest F1 of `value >= threshold` against gold 1 and 0, in [0, 1], and that threshold."""
    precision, recall, thresholds = precision_recall_curve(gold, values)
    total = precision + recall
    f1 = 2 * precision * recall / np.where(total > 0, total, 1)
    best = int(np.argmax(f1[:-1]))  # the last point has no threshold
    return float(f1[best]), float(thresholds[best])


def least_threshold(values: Array, gold: Array, wanted: float) -> float | None:
    """The least threshold at and above which the wanted share of values has gold 1; None if there is none."""
    if not gold.any():
        return None
    precision, _, thresholds = precision_recall_curve(gold, values)
    reached = np.flatnonzero(precision[:-1] >= wanted)  # the last point has no threshold
    return float(thresholds[reached[0]]) if reached.size else None


def _mean(values: Array, _gold: Array) -> float:
    return float(100 * values.mean())


def _plain_mean(values: Array, _gold: Array) -> float:
    return float(values.mean())


def _pearson(values: Array, gold: Array) -> float:
    if np.ptp(values) == 0 or np.ptp(gold) == 0:
        return 0.0
    return float(100 * pearsonr(values, gold).statistic)


def _best_f1(values: Array, gold: Array) -> float:
    return 100 * best_f1(values, gold)[0] if gold.any() else 0.0


def _v_measure(values: Array, gold: Array) -> float:
    return float(100 * v_measure_score(gold.astype(int), values.astype(int)))


MEASURES: Final[dict[str, Callable[[Array, Array], float]]] = {
    "mean": _mean,
    "plain mean": _plain_mean,
    "spearman": rank_correlation,
    "pearson": _pearson,
    "average precision": average_precision,
    "best F1": _best_f1,
    "V-measure": _v_measure,
}
"""Values (n) and gold (n) -> a figure, x100 except for the plain mean."""


def search_columns(rows: Iterable[Mapping[str, float]]) -> list[str]:
    """The names of the collections' figures among all names."""
    return list(dict.fromkeys(name for row in rows for name in row if name.endswith(SEARCH)))


@dataclass(frozen=True)
class Subject:
    """`embed` gives the vectors of sentences, `embed_queries` the vectors of search queries; see also `documents`.

    `digest` identifies everything that affects the vectors; finished tasks are kept under it. `size` is in bytes.
    `model` is the encoder in torch, for suites that look inside it; None for a graph or a server.
    """

    name: str
    embed: Embed
    embed_queries: Embed
    digest: str
    size: int | None = None
    model: nn.Module | None = None
    embed_documents: Embed | None = None

    @property
    def documents(self) -> Embed:
        """The embed for documents of a search: that of sentences, unless documents have their own template."""
        return self.embed_documents or self.embed

    def remembering(self) -> Self:
        """This subject with an `embed` that computes each text once. Documents are too many to be kept."""
        return replace(self, embed=_Remembered(self.embed), embed_documents=self.documents)

    @classmethod
    def of(cls, name: str, embed: Embed, digest: str = "") -> Self:
        """A subject that embeds queries and documents like sentences."""
        return cls(name, embed, embed, digest)


class _Remembered:
    """Texts (n) -> vectors (n, d) by `embed`, which is called once for each text: suites share many sentences."""

    def __init__(self, embed: Embed) -> None:
        self._embed = embed
        self._vectors: dict[str, NDArray[np.float32]] = {}

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        if not texts:
            return self._embed(texts)
        new = [text for text in dict.fromkeys(texts) if text not in self._vectors]
        if new:
            self._vectors |= zip(new, self._embed(new), strict=True)
        return np.stack([self._vectors[text] for text in texts])


@dataclass(frozen=True)
class Task(ABC):
    """A set of data and how it is scored. A subclass's fields are plain data that determine its scores completely."""

    suite: ClassVar[str]
    timed: ClassVar[bool] = False  # whether it measures the embedding itself, so that vectors must not be cached
    name: str

    @abstractmethod
    def run(self, subject: Subject) -> list[Score]:
        """The scores; the first is the one that compares models."""

    def obstacle(self, subject: Subject) -> str | None:
        """Why this subject cannot be scored at all, in one line; None if it can."""
        return None

    @cached_property
    def digest(self) -> str:
        content = json.dumps(
            [VERSION, self.suite, type(self).__name__, asdict(self)], ensure_ascii=False, sort_keys=True
        )
        return hashlib.sha256(content.encode()).hexdigest()


@dataclass(frozen=True)
class ScoreCache:
    """A folder with one subfolder per model and one file per finished task. Files are written atomically."""

    folder: Path

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Make the folder. Raises OptionError if nothing can be written to it, before anything is scored."""
        check_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)
        return cls(folder)

    def find(self, subject: Subject, task: Task) -> list[Score] | None:
        """The scores of a finished task; None if there are none, or if the file cannot be read."""
        try:
            records = json.loads(self._file(subject, task).read_text(encoding="utf-8"))
            return [Score.from_json(record) for record in records]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep(self, subject: Subject, task: Task, scores: Sequence[Score]) -> None:
        file = self._file(subject, task)
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as part:
            json.dump([score.as_json() for score in scores], part)
        os.replace(part.name, file)

    def _file(self, subject: Subject, task: Task) -> Path:
        return self.folder / subject.digest[:16] / f"{task.suite}-{task.digest[:16]}.json"


def score_tasks(
    subject: Subject, tasks: Sequence[Task], cache: ScoreCache | None = None, fresh: bool = False
) -> list[Score]:
    """All scores, in the tasks' order. Finished tasks are written to the cache and, unless `fresh`, read from it.

    Timed tasks are not cached: the digests do not include the device, or the machine and the settings of a server.
    Tasks that do not apply to this subject are skipped, with a message on stderr. Raises RunError if none is left.
    """
    obstacles = list(dict.fromkeys(reason for task in tasks if (reason := task.obstacle(subject))))
    tasks = [task for task in tasks if not task.obstacle(subject)]
    if obstacles and not tasks:
        raise RunError(obstacles[0])
    for reason in obstacles:
        print(f"skipped: {reason}", file=sys.stderr)
    scores: list[Score] = []
    remembering = subject.remembering()
    for task in bar(tasks, desc=subject.name, unit=" tasks"):
        kept = cache and not task.timed
        task_scores = cache.find(subject, task) if cache and kept and not fresh else None
        if task_scores is None:
            task_scores = task.run(subject if task.timed else remembering)
            if cache and kept:
                cache.keep(subject, task, task_scores)
        scores += [replace(score, data=task.digest[:16]) for score in task_scores]
    return scores
