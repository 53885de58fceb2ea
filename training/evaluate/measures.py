"""The record of one figure, and the functions that compute a figure of its items.

A figure is always `MEASURES[items.measure](values, gold)`, so that a bootstrap can draw items again and recompute it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.stats import pearsonr
from sklearn.metrics import precision_recall_curve, v_measure_score  # type: ignore[import-untyped]

from training.data.similarity import average_precision, rank_correlation

__all__ = ["MEASURES", "SEARCH", "Items", "Score", "best_f1", "measured", "search_columns"]

SEARCH: Final = " nDCG@10"  # ends the name of a collection's figure

Numbers: TypeAlias = Sequence[float] | NDArray[Any]
Array: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Items:
    """What a figure is computed of, one number per item. `gold` is empty if the measure is a mean."""

    measure: str
    values: list[float]
    gold: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Score:
    """One figure. `counts` has the number of pairs, queries or texts; `details` what a report shows beside it.

    Correlations, accuracies and search metrics are x100. `items` is None for a figure that no items give, such as a
    speed or the mean of other figures. `data` is the digest of the task that gave it.
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
    def from_json(cls, found: dict[str, Any]) -> Self:
        """The inverse of `as_json`. Raises KeyError or TypeError if it is another record."""
        items = found["items"]
        return cls(**found | {"items": None if items is None else Items(**items)})


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
    """The score whose value is the measure of these items."""
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
"""Values (n) and gold (n) -> a figure; x100 but for the plain mean."""


def search_columns(rows: Iterable[Mapping[str, float]]) -> list[str]:
    """The names of the collections' figures among others."""
    return list(dict.fromkeys(name for row in rows for name in row if name.endswith(SEARCH)))
