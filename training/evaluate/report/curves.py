"""Figures over steps and over models: a run's training curves, and score against speed."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from training.evaluate.measures import Score
from training.evaluate.report.contents import Figure, Gap, Row, Table
from training.evaluate.report.drawing import COLOURS, MARKERS, SERIES, canvas, inline, quiet_axes

__all__ = ["speed_plot", "training_curves"]

DEV: Final = "eval_dev_"


def training_curves(path: Path) -> Figure | Gap:
    """The loss and the development scores of a run's log.jsonl."""
    title, log = "Loss and development scores", path / "log.jsonl"
    if not log.is_file():
        return Gap(title, "only a run has a log of its training (log.jsonl)")
    entries = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    loss = [(entry["step"], entry["loss"]) for entry in entries if "loss" in entry]
    dev: dict[str, list[tuple[int, float]]] = {}
    for entry in entries:
        for name in entry:
            if name.startswith(DEV):
                dev.setdefault(name.removeprefix(DEV).replace("_", " "), []).append((entry["step"], entry[name]))
    if not loss or not dev:
        return Gap(title, "the run's log has no losses or no development scores")
    figure, (left, right) = canvas(8, 3.4, 2)
    left.plot(*zip(*loss, strict=True), color=COLOURS["accent"], linewidth=1.8)
    left.set(title="loss", xlabel="step")
    for place, (name, points) in enumerate(dev.items()):
        style: Any = {"color": COLOURS[SERIES[place % 4]], "marker": MARKERS[place % 4]}
        right.plot(*zip(*points, strict=True), label=name, linewidth=1.8, markersize=4, **style)
    right.set(title="development sets, ×100", xlabel="step")
    right.legend(fontsize=10)
    for axes in (left, right):
        quiet_axes(axes)
    says = "The loss at each logged step, and the scores on the development sets that chose the checkpoint."
    steps = sorted({step for points in dev.values() for step, _ in points})
    by_step = {name: dict(points) for name, points in dev.items()}
    rows = [
        Row([str(step), *(f"{row[step]:.2f}" if step in row else "–" for row in by_step.values())]) for step in steps
    ]
    table = Table("Development scores", ["step", *dev], {"": rows})
    return Figure("curves", title, says, inline(figure, "curves", title, says), {"loss": loss, "dev": dev}, table)


def speed_plot(scores: Mapping[str, Sequence[Score]], averages: Mapping[str, float]) -> Figure | Gap:
    """The average of the STS sets against sentences per second, a point for each model."""
    title, points = "Score against speed", dict[str, tuple[float, float]]()
    for name, row in scores.items():
        speed = next((score.value for score in row if score.metric == "sentences/s"), None)
        if speed is not None and name in averages:
            points[name] = speed, averages[name]
    if len(points) < 2:
        return Gap(title, "it needs two models or precisions that the suites sts and cost have scored")
    figure, (axes,) = canvas(6, 3.4)
    for place, (name, point) in enumerate(points.items()):
        axes.plot(*point, MARKERS[place % 4], color=COLOURS[SERIES[place % 4]], markersize=8, label=name)
        axes.annotate(name, point, xytext=(8, 6), textcoords="offset points")
    axes.margins(0.25)
    axes.set(xlabel="sentences per second", ylabel="STS average, Spearman ×100")
    quiet_axes(axes, "both")
    says = "Higher is better, and further right is faster. The speed is that of this machine."
    data: dict[str, Any] = {name: {"sentences/s": x, "Avg.": y} for name, (x, y) in points.items()}
    return Figure("speed", title, says, inline(figure, "speed", title, says), data)
