"""The short form of many scores: one name and one number for each set, as model cards and tables have them."""

from collections.abc import Mapping, Sequence

from training.data.sts_sets import STS_TASKS, average
from training.evaluate.measures import SEARCH, Score

__all__ = ["figures", "machines"]


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


def machines(scores: Mapping[str, Sequence[Score]]) -> dict[str, str]:
    """Model -> the machine that measured its speed, of the models that have a speed."""
    return {name: each.details["machine"] for name, row in scores.items() for each in row if "machine" in each.details}
