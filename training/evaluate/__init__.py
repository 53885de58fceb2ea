"""Evaluation: suites that score an encoder; `python -m training.evaluate` runs them."""

from training.data.sts_sets import COUNTS, STS_TASKS, average, evaluate_sts, load_tasks, sts_dev

__all__ = ["COUNTS", "STS_TASKS", "average", "evaluate_sts", "load_tasks", "sts_dev"]
