"""The short form of many scores: one name and one number for each set, as model cards and tables have them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from training.data.sts_sets import STS_TASKS, average
from training.evaluate.measures import Score

__all__ = ["SEARCH", "figures", "search_columns"]

SEARCH: Final = " nDCG@10"  # ends the name of a collection's figure


def figures(scores: Sequence[Score]) -> dict[str, float]:
    """Set -> Spearman, collection -> nDCG@10, both x100 with two decimals; other suites by suite, set and metric.

    `Avg.` is the papers' last column, the mean of the seven rounded STS figures.
    """
    found: dict[str, float] = {}
    for score in scores:
        if score.suite == "sts" and score.metric == "spearman":
            found[score.task] = round(score.value, 2)
        elif score.suite == "retrieval" and score.metric == SEARCH.strip():
            found[score.task + SEARCH] = round(score.value, 2)
        elif score.suite not in ("sts", "retrieval"):
            found[f"{score.suite} {score.task} {score.metric}"] = round(score.value, 4)
    return found | ({"Avg.": average(found)} if set(STS_TASKS) <= set(found) else {})


def search_columns(rows: Iterable[Mapping[str, float]]) -> list[str]:
    """The names of the collections' figures among others."""
    return list(dict.fromkeys(name for row in rows for name in row if name.endswith(SEARCH)))
