"""The main figures, as numbers, as text and as tables: in the terminal one per suite, with one row per model.

`digits` decides the decimals in all tables of scores, on a page or in the terminal.
"""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cloze.training.evaluation.sts import DEV_TASKS, STS_TASKS, average
from cloze.training.evaluation.task import SEARCH, Score, search_columns

KNOWN: Final = {*STS_TASKS, *DEV_TASKS}
DECIMALS: Final = {"space": 3, "cost": 1}  # of suites whose figures are not x100; the papers print 3 for `space`
BY_METRIC: Final = ("baselines",)  # suites that have many metrics, the same for each set
WIDTH: Final = 110  # for a pipe, which has no width


def figures(scores: Sequence[Score]) -> dict[str, float]:
    """Set -> Spearman, collection -> nDCG@10, both x100 with two decimals. Other figures by suite, set and metric.

    `Avg.` is the papers' last column, the mean of the seven rounded STS figures.
    """
    values: dict[str, float] = {}
    for score in scores:
        if score.suite == "sts" and score.metric == "spearman":
            values[score.task] = round(score.value, 2)
        elif score.suite == "retrieval" and score.metric == SEARCH.strip():
            values[score.task + SEARCH] = round(score.value, 2)
        elif score.suite not in ("sts", "retrieval"):
            values[f"{score.suite} {score.task} {score.metric}"] = round(score.value, 4)
    return values | ({"Avg.": average(values)} if set(STS_TASKS) <= set(values) else {})


def digits(value: float, suite: str = "sts", signed: bool = False) -> str:
    """A figure of a suite, or a difference of two, as text."""
    return f"{value:{'+' if signed else ''},.{DECIMALS.get(suite, 2)}f}"


def machines(scores: Mapping[str, Sequence[Score]]) -> dict[str, str]:
    """Model -> the machine that measured its speed, for the models that have a speed."""
    return {
        name: score.details["machine"] for name, row in scores.items() for score in row if "machine" in score.details
    }


def machine_note(models: Iterable[str], machines: Mapping[str, str]) -> str:
    """A sentence that names the machine of these models' speeds, or one machine per model if they differ."""
    models_by_machine: dict[str, list[str]] = {}
    for model in models:
        models_by_machine.setdefault(machines.get(model, "a machine that was not recorded"), []).append(model)
    if len(models_by_machine) == 1:
        return f"Machine: {next(iter(models_by_machine))}."
    clauses = (f"{' and '.join(names)} on {machine}" for machine, names in models_by_machine.items())
    return f"Machines: {'; '.join(clauses)}."


def show(path: str, scores: Mapping[str, Sequence[Score]]) -> None:
    """Print the papers' columns first, then every metric of the other sets."""
    short = {name: figures(row) for name, row in scores.items()}
    known: dict[str, Sequence[str]] = {
        f"{path}: STS test sets, Spearman x100 ('all')": (*STS_TASKS, "Avg."),
        "Development sets": DEV_TASKS,
        "Search, nDCG@10 x100": search_columns(short.values()),
    }
    for title, columns in known.items():
        if columns and all(column in row for row in short.values() for column in columns):
            cells = [[name, *(digits(row[column]) for column in columns)] for name, row in short.items()]
            print_table(title, [column.removesuffix(SEARCH) for column in columns], cells)
    for suite in dict.fromkeys(score.suite for row in scores.values() for score in row):
        if suite in BY_METRIC:
            _show_metrics(suite, scores)
        else:
            _show_suite(suite, scores)


def _show_suite(suite: str, scores: Mapping[str, Sequence[Score]]) -> None:
    """One table per set, with its metrics as columns. The papers' STS sets are omitted, since they are shown above."""
    tables: dict[str, dict[str, dict[str, str]]] = {}
    for name, row in scores.items():
        for score in row:
            if score.suite == suite and not (suite == "sts" and score.task in KNOWN):
                tables.setdefault(score.task, {}).setdefault(name, {})[score.metric] = digits(score.value, suite)
    for task, rows in tables.items():
        columns = list(dict.fromkeys(metric for row in rows.values() for metric in row))
        cells = [[name, *(row.get(column, "") for column in columns)] for name, row in rows.items()]
        print_table(f"{suite}: {task}", columns, cells)


def _show_metrics(suite: str, scores: Mapping[str, Sequence[Score]]) -> None:
    """One table per model, for suites with many metrics. The columns are the sets, and then their mean."""
    for name, row in scores.items():
        rows: dict[str, dict[str, float]] = {}
        for score in row:
            if score.suite == suite:
                rows.setdefault(score.metric, {})[score.task] = score.value
        columns = list(dict.fromkeys(task for values in rows.values() for task in values))
        cells = [
            [metric, *(digits(value, suite) for value in (*values.values(), fmean(values.values())))]
            for metric, values in rows.items()
        ]
        print_table(f"{suite}: {name}", [*columns, "Avg."], cells)


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown. The first column has the names; the others are right-aligned."""
    head, *body = ([_in_cell(cell) for cell in row] for row in (columns, *rows))
    lines = [f"| {' | '.join(head)} |" if head[0] else f"| | {' | '.join(head[1:])} |"]
    lines.append("| --- |" + " ---: |" * (len(head) - 1))
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in body)])


def _in_cell(text: str) -> str:
    """Text that neither begins another cell nor ends the row. A vertical bar may already be escaped."""
    return re.sub(r"(?<!\\)\|", r"\|", text).replace("\n", " ")


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], first: str = "") -> None:
    """Print to the terminal. A row begins with its name. Brackets are printed as they are."""
    table = Table(title=Text(title), title_justify="left")
    table.add_column(first, overflow="fold")
    for column in columns:
        table.add_column(Text(column), justify="right")
    for row in rows:
        table.add_row(*map(Text, row))
    width = None if sys.stdout.isatty() else WIDTH
    Console(width=width).print(table)
