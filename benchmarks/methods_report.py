"""Write methods.md from results/methods/: python -m benchmarks.methods_report [PLAN]

With another plan, the page has the plan's name: methods_gpu.toml gives methods_gpu.md.
"""

import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from scipy.stats import ttest_1samp

from benchmarks.methods_plan import FULL, Plan, Run
from cloze.training.evaluation.sts import STS_TASKS
from cloze.training.evaluation.tables import markdown_table

COLUMNS = ("STS-B dev", *STS_TASKS, "Avg.")
CONFIDENCE = 0.95


class Difference(NamedTuple):
    """How much one row is above another: the mean over seeds, and its 95 % interval (Student's t)."""

    seeds: int
    mean: float
    low: float
    high: float

    def verdict(self, paper: float | None) -> str:
        """Whether the runs show a difference or its reverse, exclude one as large as the paper's, or none of these."""
        if self.seeds < 2:
            return "one seed"
        if self.low > 0:
            return "shown"
        if self.high < 0:
            return "not shown, reversed"
        return "undecided" if paper is None or self.high >= paper else "not shown, smaller"

    def beside(self, paper: float) -> str:
        """Where the paper's difference lies."""
        if self.low <= paper <= self.high:
            return "the interval contains the paper's figure"
        return f"the paper's figure is {'below' if paper < self.low else 'above'} the interval"


def difference(gaps: Sequence[float]) -> Difference:
    """The mean of the differences of two rows, one for each seed, with its interval; a single seed has none."""
    gaps = [round(gap, 2) for gap in gaps]
    if len(gaps) == 1:
        return Difference(1, gaps[0], float("nan"), float("nan"))
    interval = ttest_1samp(gaps, 0).confidence_interval(CONFIDENCE)
    return Difference(len(gaps), mean(gaps), float(interval.low), float(interval.high))


def page(plan: Plan) -> str:
    """The complete text of the page."""
    texts = plan.content["page"]
    measured = {name: runs for name in plan.rows if (runs := plan.shown(name))}
    parts = [texts["intro"].strip()]
    for group, names in groupby(measured, key=lambda name: plan.rows[name]["group"]):
        table = _templates if group == "Templates" else _scores
        parts.append(f"## {group}\n\n" + table(plan, {name: measured[name] for name in names}))
    parts.append(f"## Learning rates\n\n{texts['rates'].strip()}\n\n{_rates(plan)}")
    if compared := [order for order in texts["orders"] if _paired(plan, order)]:
        parts.append(f"## The papers' claims\n\n{texts['claims'].strip()}\n\n{_claims(plan, compared)}")
        parts.append(f"### What the runs show\n\n{_shown(plan, compared)}")
    parts.append(texts["limits"].strip())
    machines = sorted({run["machine"] for runs in measured.values() for run in runs})
    parts.append(f"Machines: {'; '.join(machines)}.")
    return "\n\n".join(parts) + "\n"


def _scores(plan: Plan, measured: dict[str, list[Run]]) -> str:
    columns = ["", "dev before", *COLUMNS, "seeds", "learning rate", "paper's Avg."]
    return markdown_table(columns, (_cells(plan, name, runs) for name, runs in measured.items()))


def _cells(plan: Plan, name: str, runs: Sequence[Run]) -> list[str]:
    row, trained = plan.rows[name], name in plan.trained
    cells = [row["title"], _spread([run["before"] for run in runs]) if trained else ""]
    cells += [_spread([run["scores"][column] for run in runs]) for column in COLUMNS]
    cells += [str(len(runs)), f"{runs[0]['recipe']['learning_rate']:g}"] if trained else ["", ""]
    paper = row.get("paper")
    return [*cells, f"{paper['average']:.2f} ({paper['of']})" if paper else ""]


def _spread(values: Sequence[float]) -> str:
    """Mean and standard deviation over seeds."""
    return f"{mean(values):.2f}" if len(set(values)) == 1 else f"{mean(values):.2f} ± {stdev(values):.2f}"


def _templates(plan: Plan, measured: dict[str, list[Run]]) -> str:
    """The greedy search of PromptBERT's table 4, best template first."""
    ((*_, run),) = measured.values()  # the newest parent's
    papers = plan.content["page"]["table_4"]
    rows = [
        (f"`{template}`", f"{score:.2f}", f"{papers[template]:.2f}" if papers.get(template) else "")
        for template, score in run["templates"].items()
    ]
    table = markdown_table(["template", "STS-B dev", "the paper's"], rows)
    return f"{plan.content['page']['templates'].strip()}\n\n{table}"


def _rates(plan: Plan) -> str:
    lines = ["| | STS-B dev, by rate | chosen |", "| --- | --- | ---: |"]
    largest = []
    for name, row in plan.rows.items():
        if tried := plan.tried(name):
            scores = ", ".join(f"{rate:g}: {score:.2f}" for rate, score in tried.items())
            lines.append(f"| {row['title']} | {scores} | {plan.best_rate(name):g} |")
            largest += [row["title"]] * (plan.best_rate(name) == max(tried))
    if largest:
        lines += ["", f"The largest rate was chosen, so a larger one may be better: {'; '.join(largest)}."]
    return "\n".join(lines)


def _paired(plan: Plan, order: dict[str, Any]) -> list[tuple[float, float]]:
    return plan.paired(order["better"], order["worse"], order.get("on", "Avg."))


def _difference(plan: Plan, order: dict[str, Any]) -> Difference:
    return difference([better - worse for better, worse in _paired(plan, order)])


def _claims(plan: Plan, orders: Sequence[dict[str, Any]]) -> str:
    """The table of the papers' claims: each difference with its interval and verdict."""
    lines = [
        "| claim | on | seeds | difference | 95 % interval | the paper's difference (SD over seeds) | verdict |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for order in orders:
        gap, paper = _difference(plan, order), order.get("paper")
        printed = "" if paper is None else f"{_signed(paper)} ({order.get('seeds', 'one run')})"
        cells = [order["claim"], order.get("on", "Avg."), str(gap.seeds), _signed(gap.mean), _interval(gap), printed]
        lines.append(f"| {' | '.join((*cells, gap.verdict(paper)))} |")
    return "\n".join(lines)


def _shown(plan: Plan, orders: Sequence[dict[str, Any]]) -> str:
    """Each claim in one sentence; those with one seed come last."""
    lines, single = [], []
    for order in orders:
        gap, claim = _difference(plan, order), order["claim"]
        if gap.seeds > 1:
            lines.append(f"- {claim}: {_verdict(gap, order.get('paper'))}")
        else:
            ((better, worse),) = _paired(plan, order)
            on = order.get("on", "Avg.")
            single.append(f"- {claim}: {_signed(gap.mean)} ({on} {better:.2f} and {worse:.2f})")
    if single:
        lines += [
            *([""] if lines else []),
            "These claims have one seed, which decides nothing. In brackets are the scores of its two runs:",
            "",
        ]
    return "\n".join(lines + single)


def _verdict(gap: Difference, paper: float | None) -> str:
    beside = "" if paper is None else f", and {gap.beside(paper)}"
    mean = f"{_signed(gap.mean)} over {gap.seeds} seeds ({_interval(gap)})"
    return f"{gap.verdict(paper)}. The difference is {mean}{beside}."


def _interval(gap: Difference) -> str:
    return "" if gap.seeds < 2 else f"{_signed(gap.low)} to {_signed(gap.high)}"


def _signed(value: float) -> str:
    return f"{round(value, 2) + 0.0:+.2f}"  # + 0.0 turns -0.0 into 0.0


if __name__ == "__main__":
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else FULL
    (FULL.parent / f"{file.stem}.md").write_text(page(Plan.load(file)), encoding="utf-8")
