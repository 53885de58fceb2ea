"""Figures over steps and over models: a run's training curves, and score against speed."""

import json
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Final

from training.evaluate.report.contents import Figure, Gap, Row, Table
from training.evaluate.report.drawing import COLOURS, MARKERS, SERIES, canvas, inline, quiet_axes

__all__ = ["SPEED", "speed_plot", "training_curves"]

EVALUATED: Final = {  # beginning of a name in the log -> title, name of the table, decimals
    "eval_dev_": ("development sets, ×100", "Development scores", 2),
    "eval_held_out_": ("held-out rows", "Figures of held-out rows", 4),
}
SPEED: Final = "cost STS-B sentences/s"


def training_curves(path: Path) -> Figure | Gap:
    """The loss in a run's log.jsonl, and what chose the checkpoint: development scores, or figures of held-out rows."""
    title, log = "Loss and evaluations", path / "log.jsonl"
    if not log.is_file():
        return Gap(title, "only a run has a log of its training (log.jsonl)")
    entries = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    loss = [(entry["step"], entry["loss"]) for entry in entries if "loss" in entry]
    begins = next((begins for begins in EVALUATED if any(name.startswith(begins) for name in chain(*entries))), None)
    if not loss or begins is None:
        return Gap(title, "the run's log has no losses or no evaluations")
    heading, table_title, decimals = EVALUATED[begins]
    found: dict[str, list[tuple[int, float]]] = {}
    for entry in entries:
        for name in entry:
            if name.startswith(begins):
                found.setdefault(name.removeprefix(begins).replace("_", " "), []).append((entry["step"], entry[name]))
    figure, (left, right) = canvas(8, 3.4, 2)
    left.plot(*zip(*loss, strict=True), color=COLOURS["accent"], linewidth=1.8)
    left.set(title="loss", xlabel="step")
    for place, (name, points) in enumerate(found.items()):
        style: Any = {"color": COLOURS[SERIES[place % 4]], "marker": MARKERS[place % 4]}
        right.plot(*zip(*points, strict=True), label=name, linewidth=1.8, markersize=4, **style)
    right.set(title=heading, xlabel="step")
    right.legend(fontsize=10)
    for axes in (left, right):
        quiet_axes(axes)
    says = "The loss at each logged step, and the evaluations that chose the checkpoint."
    steps = sorted({step for points in found.values() for step, _ in points})
    by_step = {name: dict(points) for name, points in found.items()}
    rows = [
        Row([str(step), *(f"{row[step]:.{decimals}f}" if step in row else "–" for row in by_step.values())])
        for step in steps
    ]
    table = Table(table_title, ["step", *found], {"": rows})
    return Figure(
        "curves", title, says, inline(figure, "curves", title, says), {"loss": loss, "evaluations": found}, table
    )


def speed_plot(shorts: Mapping[str, Mapping[str, float]]) -> Figure | Gap:
    """The average of the STS sets against sentences per second, a point for each model's `figures`."""
    title = "Score against speed"
    points = {name: (row[SPEED], row["Avg."]) for name, row in shorts.items() if SPEED in row and "Avg." in row}
    if len(points) < 2:
        return Gap(
            title,
            "it needs two models or precisions that the suites sts and cost have scored; --beside adds those of a file",
        )
    figure, (axes,) = canvas(6, 3.4)
    for place, (name, point) in enumerate(points.items()):
        axes.plot(*point, MARKERS[place % 4], color=COLOURS[SERIES[place % 4]], markersize=8, label=name)
        axes.annotate(name, point, xytext=(8, 6), textcoords="offset points")
    axes.margins(0.25)
    axes.set(xlabel="sentences per second", ylabel="STS average, Spearman ×100")
    quiet_axes(axes, "both")
    says = "Higher is better, and further right is faster. Each speed is that of the machine that measured it."
    data: dict[str, Any] = {name: {"sentences/s": x, "Avg.": y} for name, (x, y) in points.items()}
    return Figure("speed", title, says, inline(figure, "speed", title, says), data)
