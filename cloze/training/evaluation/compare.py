"""Compare models, and show which of their differences are more than chance.

Intervals are from a paired bootstrap (Efron and Tibshirani, 1993, chapter 16): the items of a task are resampled with
replacement, the same ones for every model, and the figure is recomputed. A difference counts if the middle 95 % of the
recomputed differences do not contain 0.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cloze.encoding.files import check_new_file, write_whole
from cloze.training.bar import bar
from cloze.training.encoder_source import kind_of
from cloze.training.errors import RunError
from cloze.training.evaluation.options import NOT_COMPARED, OWN, CompareOptions, ScoringOptions
from cloze.training.evaluation.sts import STS_TASKS
from cloze.training.evaluation.subjects import applicable_options, is_server, subjects
from cloze.training.evaluation.suites import load_suites
from cloze.training.evaluation.tables import digits, print_table
from cloze.training.evaluation.task import MEASURES, Items, Score, ScoreCache, Task, score_tasks

Draws: TypeAlias = NDArray[np.float64]
INTERVAL: Final = (2.5, 97.5)  # percentiles
MEAN: Final = "mean"  # over the tasks of a suite that has several


@dataclass(frozen=True)
class Difference:
    """A model's figure, and its difference from the first model's. The first model has no difference."""

    suite: str
    task: str
    metric: str
    model: str
    value: float
    difference: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def verdict(self) -> str:
        """`higher` or `lower` than the first model; `undecided` if the interval contains 0."""
        if self.low is None or self.high is None:
            return ""
        return "higher" if self.low > 0 else "lower" if self.high < 0 else "undecided"

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"verdict": self.verdict}


def compared(scores: Mapping[str, Sequence[Score]], resamples: int) -> list[Difference]:
    """Compare every model with the first, on each task and on the mean of a suite's tasks. Raises RunError.

    For each task, the first score that has items is compared. The mean of `sts` is over the papers' seven sets.
    """
    models = {name: _comparable(row) for name, row in scores.items()}
    keys = [key for key in next(iter(models.values())) if all(key in row for row in models.values())]
    _refuse_other_items(models, keys)
    resamplings = [(name, seed, key) for name in models for seed, key in enumerate(keys)]
    samples = {
        (name, key): draws(_items(models[name][key]), resamples, seed)
        for name, seed, key in bar(resamplings, desc="resampling", unit=" tasks")
    }
    metrics = {key: next(iter(models.values()))[key].metric for key in keys}
    differences = []
    for suite in dict.fromkeys(suite for suite, _ in keys):
        tasks = [key for key in keys if key[0] == suite]
        groups = {task: [(suite, task)] for _, task in tasks} | _means(suite, tasks, metrics)
        for task, group in groups.items():
            differences += _group(models, samples, task, group)
    return differences


def draws(items: Items, resamples: int, seed: int) -> Draws:
    """The figure of `resamples` resamplings. Models with equally many items and the same seed draw the same items."""
    rng, measure = np.random.default_rng(seed), MEASURES[items.measure]
    values, gold = np.array(items.values), np.array(items.gold)
    figures = np.empty(resamples)
    for number in range(resamples):
        rows = rng.integers(len(values), size=len(values))
        figures[number] = measure(values[rows], gold[rows] if len(gold) else gold)
    return figures


def _group(
    models: Mapping[str, Mapping[tuple[str, str], Score]],
    samples: Mapping[tuple[str, tuple[str, str]], Draws],
    task: str,
    group: Sequence[tuple[str, str]],
) -> list[Difference]:
    """The models' mean figures over a group of tasks. A single task is its own group."""
    differences: list[Difference] = []
    first: tuple[float, Draws] | None = None
    for name, row in models.items():
        value = float(np.mean([row[key].value for key in group]))
        sample = np.mean([samples[name, key] for key in group], axis=0)
        record = (group[0][0], task, row[group[0]].metric, name, value)
        if first is None:
            first = value, sample
            differences.append(Difference(*record))
        else:
            low, high = np.percentile(sample - first[1], INTERVAL)
            differences.append(Difference(*record, value - first[0], float(low), float(high)))
    return differences


def _comparable(scores: Sequence[Score]) -> dict[tuple[str, str], Score]:
    comparable: dict[tuple[str, str], Score] = {}
    for score in scores:
        if score.items is not None:
            comparable.setdefault((score.suite, score.task), score)
    return comparable


def _means(
    suite: str, tasks: Sequence[tuple[str, str]], metrics: Mapping[tuple[str, str], str]
) -> dict[str, list[tuple[str, str]]]:
    """The groups that are averaged: tasks of a suite with the same metric."""
    papers = [(suite, task) for task in STS_TASKS]
    if suite == "sts":
        return {"Avg.": papers} if set(papers) <= set(tasks) else {}
    groups: dict[str, list[tuple[str, str]]] = {}
    for task in tasks:
        groups.setdefault(metrics[task], []).append(task)
    several = {metric: group for metric, group in groups.items() if len(group) > 1}
    return {MEAN if len(groups) == 1 else f"{MEAN}, {metric}": group for metric, group in several.items()}


def _items(score: Score) -> Items:
    assert score.items is not None, "only scores with items are compared. This is a bug."
    return score.items


def _refuse_other_items(models: Mapping[str, Mapping[tuple[str, str], Score]], keys: Sequence[tuple[str, str]]) -> None:
    if not keys:
        raise RunError(f"{', '.join(models)} have no scored set in common; score them on the same data")
    first, *others = models
    for key in keys:
        for other in others:
            if not _alike(models[first][key], models[other][key]):
                raise RunError(
                    f"{first} and {other} were scored on different data for {key[1]}; score one of them again"
                )


def _alike(score: Score, other: Score) -> bool:
    """Whether two scores are of the same data. Scores in files of an older Cloze do not name their data."""
    items, others = _items(score), _items(other)
    same = len(items.values) == len(others.values) and items.gold == others.gold and items.measure == others.measure
    return same and (score.data == other.data or not (score.data and other.data))


def compare(options: CompareOptions) -> None:
    """Show and write how the models differ that the options name. Raises ClozeError."""
    if options.out:
        check_new_file(options.out)
    tasks: list[Task] = []
    if all(map(_is_file, options.models)):
        if given := [name for name in ("suite", "data", *OWN) if name in options.model_fields_set]:
            raise RunError(
                f"--{given[0]} chooses the data to score models on, but files have their scores already; omit it"
            )
    elif not all(_is_file(model) for model in options.models):
        if without := [name for name in options.suite if name in NOT_COMPARED]:
            raise RunError(
                f"the suite {without[0]} has no scores of single items to compare; score it with cloze evaluate"
            )
        tasks = load_suites(options.data, options.suite, options.own)
    files = {model: _read(Path(model)) for model in options.models if _is_file(model)}
    if options.out and options.out.resolve() in [Path(file).resolve() for file in files]:
        raise RunError(f"{options.out} would overwrite one of the files that are read; name another file")
    models = [model for model in options.models if model not in files]
    for model in models:
        applicable_options(model, options)  # so that a wrong name is found before other models are scored
    if len(options.models) == 1 and models and (is_server(models[0]) or kind_of(models[0]) != "bundle"):
        raise RunError(f"{models[0]} is one model; give two or more to compare")
    if repeated := [model for model in options.models if options.models.count(model) > 1]:
        raise RunError(f"{repeated[0]} is named twice; name each model once")
    scores: dict[str, list[Score]] = {}
    for model in options.models:
        model_scores = files[model] if model in files else _score(model, tasks, options)
        if twice := model_scores.keys() & scores.keys():
            raise RunError(f"{min(twice)} is named twice; name each model once")
        scores |= model_scores
    if len(scores) < 2:
        raise RunError(f"{', '.join(scores)} is one model; give two or more to compare")
    differences = compared(scores, options.resamples)
    _show(differences)
    if options.out:
        content = {"first": next(iter(scores)), "resamples": options.resamples}
        rows = {"differences": [difference.as_json() for difference in differences]}
        write_whole(options.out, json.dumps(content | rows, indent=2) + "\n")


def _is_file(model: str) -> bool:
    return model.endswith(".json")


def _score(model: str, tasks: Sequence[Task], options: ScoringOptions) -> dict[str, list[Score]]:
    """The scores of a model, or of each precision of a bundle."""
    scores = {}
    for subject in subjects(model, applicable_options(model, options)):
        name = f"{model} {subject.name}"
        scores[name] = score_tasks(subject, tasks, ScoreCache.open(options.cache), options.fresh)
    return scores


def _read(file: Path) -> dict[str, list[Score]]:
    """The models of a file that `evaluate --json` wrote. Raises RunError."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        scores: dict[str, list[Score]] = {}
        for record in content["results"]:
            name = f"{file.with_suffix('')} {record.pop('model')}"
            score = Score.from_json(record)
            if (items := score.items) and not (items.measure in MEASURES and items.values and _finite(items)):
                raise ValueError(f"items of {score.task} that this Cloze cannot compare")
            scores.setdefault(name, []).append(score)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{file} cannot be read as the scores of evaluate --json ({error!r}); write it again") from error
    return scores


def _finite(items: Items) -> bool:
    return bool(np.isfinite(items.values).all() and np.isfinite(items.gold).all())


def _show(differences: Sequence[Difference]) -> None:
    """A table per suite, one row per set and model."""
    for suite in dict.fromkeys(row.suite for row in differences):
        lines = []
        task = ""
        for row in (row for row in differences if row.suite == suite):
            lines.append((row.task if row.task != task else "", row.model, row.metric, *_cells(row)))
            task = row.task
        columns = ("model", "metric", "figure", "difference", "95 % interval", "verdict")
        print_table(suite, columns, lines)


def _cells(row: Difference) -> tuple[str, ...]:
    value = digits(row.value, row.suite)
    if row.difference is None or row.low is None or row.high is None:
        return value, "", "", ""
    difference, low, high = (digits(gap, row.suite, signed=True) for gap in (row.difference, row.low, row.high))
    return value, difference, f"{low} to {high}", row.verdict
