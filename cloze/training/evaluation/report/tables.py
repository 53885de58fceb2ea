"""Scores as tables: with the papers' rows from published.toml, if there are any; else one table for each suite."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from statistics import fmean
from typing import Final

from cloze.training.evaluation.report.contents import Card, Examples, Row, Table
from cloze.training.evaluation.tables import digits
from cloze.training.evaluation.task import Score

AVERAGED: Final = ("sts", "transfer")  # suites whose rows end with an average

OWN: Final = "This evaluation"
AVERAGE: Final = "Avg."
FITTED: Final = {"whitening": "first-last", "BERT-flow": "last-two"}  # baseline -> the mean that it changes

Scores = Mapping[str, Sequence[Score]]


@dataclass(frozen=True)
class Published:
    """A row of a paper. `cells` is set or metric -> figure. `average` is the printed average, None if there is none."""

    name: str
    group: str
    source: str
    cells: dict[str, float]
    average: float | None = None

    @property
    def mean(self) -> float | None:
        """The mean of the printed cells, with two decimals, which the printed average should equal."""
        return round(fmean(self.cells.values()) + 1e-9, 2) if self.cells and self.average is not None else None


def published(suite: str) -> list[Published]:
    """The rows of a suite, in the file's order."""
    content = tomllib.loads(files(__package__).joinpath("published.toml").read_text(encoding="utf-8"))
    rows = []
    for table in content["tables"]:
        for name, *numbers in table["rows"] if table["suite"] == suite else ():
            average = numbers.pop() if suite in AVERAGED else None
            cells = dict(zip(table["columns"], numbers, strict=True))
            rows.append(Published(name, table["group"], table["source"], cells, average))
    return rows


def beside_papers(suite: str, title: str, scores: Scores) -> Table | None:
    """The models' rows and then the papers'; None if no model has all of the papers' columns."""
    rows = published(suite)
    columns = list(next(row.cells for row in rows if row.cells))
    own = []
    for name, row in scores.items():
        values = _columns(suite, row)
        if set(columns) <= set(values):
            cells = [_number(values[column], suite) for column in columns]
            if suite in AVERAGED:
                cells.append(_number(sum(round(values[column], 2) for column in columns) / len(columns), suite))
            own.append(Row([name, *cells], own=True))
    if not own:
        return None
    sources = list(dict.fromkeys(row.source for row in rows))
    groups, notes = {OWN: own}, [f"[{place}] {source}" for place, source in enumerate(sources, 1)]
    for paper in rows:
        cells = [_number(paper.cells.get(column), suite) for column in columns]
        if suite in AVERAGED:
            cells.append(_number(paper.average, suite) + ("*" if _differs(paper) else ""))
            notes += _note(paper) if _differs(paper) else []
        name = f"{paper.name} [{sources.index(paper.source) + 1}]"
        groups.setdefault(f"Published, {paper.group.lower()}", []).append(Row([name, *cells]))
    return Table(title, ["", *columns, *([AVERAGE] if suite in AVERAGED else [])], groups, notes)


def plain_table(suite: str, title: str, scores: Scores) -> Table | None:
    """A row for each set and model with every metric. None if there are no rows."""
    groups: dict[str, list[Row]] = {}
    figures: dict[tuple[str, str], dict[str, float]] = {}
    for name, row in scores.items():
        for score in row:
            if score.suite == suite:
                figures.setdefault((name, score.task), {})[score.metric] = score.value
    columns = list(dict.fromkeys(metric for values in figures.values() for metric in values))
    for (name, task), values in figures.items():
        cells = [_number(values.get(metric), suite) for metric in columns]
        groups.setdefault(task, []).append(Row([name, *cells], own=True))
    return Table(title, ["", *columns], groups) if groups else None


def baseline_table(model: str, scores: Sequence[Score]) -> Table | None:
    """A row for each of a model's baselines, with the sets and their average; None if there are no baselines."""
    baselines: dict[str, dict[str, float]] = {}
    for score in scores:
        if score.suite == "baselines":
            baselines.setdefault(score.metric, {})[score.task] = score.value
    if not baselines:
        return None
    averages = {metric: fmean(values.values()) for metric, values in baselines.items()}
    rows = [
        Row([metric, *(_number(value) for value in (*values.values(), averages[metric]))], own=True)
        for metric, values in baselines.items()
    ]
    gains = {
        (name, mean): averages[name] - averages[mean] for name, mean in FITTED.items() if {name, mean} <= {*averages}
    }
    notes = [
        f"{name} is {digits(abs(gain))} {'above' if gain > 0 else 'below'} {mean}, the mean that it is fitted on."
        for (name, mean), gain in gains.items()
    ]
    columns = ["", *next(iter(baselines.values())), AVERAGE]
    return Table(f"Baselines, Spearman ×100: {model}", columns, {"": rows}, notes)


def neighbour_examples(model: str, scores: Sequence[Score]) -> Examples | None:
    """Queries with their nearest sentences, as in DiffCSE's Table 9."""
    examples = next((score.details["examples"] for score in scores if "examples" in score.details), None)
    if examples is None:
        return None
    cards = []
    for example in examples:
        lines = [
            f"{_number(cosine)}  {text}" + ("  ✓" if text == example["positive"] else "")
            for text, cosine in example["neighbours"]
        ]
        cards.append(Card(example["query"], lines))
    says = "The nearest sentences of STS-B test with their cosines; ✓ marks the one that people scored 5."
    return Examples(f"Nearest sentences: {model}", says, cards)


def _columns(suite: str, scores: Sequence[Score]) -> dict[str, float]:
    """A papers' column -> figure: the set's first metric, or the metrics of a suite that has one set."""
    columns: dict[str, float] = {}
    for score in scores:
        if score.suite == suite:
            columns.setdefault(score.task if suite in AVERAGED else score.metric, score.value)
    return columns


def _differs(row: Published) -> bool:
    return row.mean is not None and row.mean != row.average


def _note(row: Published) -> list[str]:
    return [f"* {row.name}: printed {row.average:.2f}, the mean of the printed cells is {row.mean:.2f}"]


def _number(value: float | None, suite: str = "sts") -> str:
    return "–" if value is None else digits(value, suite).replace("-", "−")
