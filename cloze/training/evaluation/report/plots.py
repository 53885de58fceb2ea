"""The report's figures: inline SVG of matplotlib whose colours are CSS variables, so that they follow light and dark.

A figure is drawn with the placeholders in `COLOURS`; `inline` replaces each by its variable. Text stays text.
"""

import io
import re
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from cloze.training.evaluation.report.contents import Figure, Gap, Row, Table
from cloze.training.evaluation.task import Score
from cloze.training.run_folder import Run

SVG: Final = "{http://www.w3.org/2000/svg}"
HREF: Final = "{http://www.w3.org/1999/xlink}href"
NAMES: Final = ("ink", "quiet", "line", "surface", "accent", "warm", "third", "fourth")
COLOURS: Final = {name: f"#01fe{number:02x}" for number, name in enumerate(NAMES)}
"""CSS variable -> its placeholder colour while matplotlib draws."""
SERIES: Final = ("accent", "warm", "third", "fourth")
MARKERS: Final = ("o", "s", "^", "D")
STYLE: Final[Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "cloze",
    "text.parse_math": False,
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.unicode_minus": True,
    "text.color": COLOURS["ink"],
    "axes.labelcolor": COLOURS["ink"],
    "axes.edgecolor": COLOURS["line"],
    "xtick.color": COLOURS["line"],
    "ytick.color": COLOURS["line"],
    "xtick.labelcolor": COLOURS["quiet"],
    "ytick.labelcolor": COLOURS["quiet"],
    "grid.color": COLOURS["line"],
    "legend.frameon": False,
}

POOLINGS: Final = ("mean", "cls", "max")
SPREAD: Final = 0.62  # difference in opacity between the lowest and the highest cell
FREQUENCY: Final = {"most frequent third": (0, 1 / 3), "middle third": (1 / 3, 2 / 3), "rarest third": (2 / 3, 2)}

EVALUATED: Final = {  # prefix of a name in the log -> title, name of the table, decimals
    "eval_dev_": ("development sets, ×100", "Development scores", 2),
    "eval_held_out_": ("held-out rows", "Figures of held-out rows", 4),
}
SPEED: Final = "cost STS-B sentences/s"


def canvas(width: float, height: float, columns: int = 1) -> tuple[Canvas, Sequence[Axes]]:
    """A figure of this size in inches, with axes side by side."""
    figure = Canvas(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def quiet_axes(axes: Axes, grid: str = "y") -> None:
    """Show only the lower spine and a faint grid."""
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0)
    axes.set_axisbelow(True)
    axes.grid(axis=grid, linewidth=0.8)  # type: ignore[arg-type]


def inline(figure: Canvas, name: str, title: str, description: str) -> str:
    """The figure as an SVG element for an HTML page. Its ids begin with `name`, which must be unique on the page."""
    text = io.StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # letters that the font lacks: the browser's fonts draw them
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    root = ElementTree.fromstring(text.getvalue())  # noqa: S314 - our own text
    for metadata in root.findall(f"{SVG}metadata"):
        root.remove(metadata)
    _rename(root, name)
    for attribute in ("width", "height"):
        root.attrib.pop(attribute, None)
    root.attrib |= {"role": "img", "aria-labelledby": f"{name}-title {name}-description"}
    for place, (tag, content) in enumerate((("title", title), ("desc", description))):
        element = ElementTree.Element(f"{SVG}{tag}", id=f"{name}-{'title' if tag == 'title' else 'description'}")
        element.text = content
        root.insert(place, element)
    ElementTree.register_namespace("", SVG[1:-1])
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", ElementTree.tostring(root, encoding="unicode"))
    for variable, colour in COLOURS.items():
        svg = svg.replace(colour, f"var(--{variable})")
    return svg


def _rename(root: ElementTree.Element, name: str) -> None:
    """Keep only ids that are referred to, prefix them with `name`, and link only with href."""
    used = set(re.findall(r"#([\w-]+)", ElementTree.tostring(root, encoding="unicode")))
    for element in root.iter():
        if "id" in element.attrib and element.attrib["id"] not in used:
            del element.attrib["id"]
        for key, value in list(element.attrib.items()):
            if key == "id":
                element.attrib["id"] = f"{name}-{value}"
            elif key == HREF:
                del element.attrib[key]
                element.attrib["href"] = f"#{name}-{value[1:]}"
            elif "url(#" in value:
                element.attrib[key] = value.replace("url(#", f"url(#{name}-")


def cosine_histograms(model: str, scores: Sequence[Score]) -> Figure | Gap:
    """One row per integer gold score, as in DiffCSE's Figure 2."""
    title = "Cosines by gold score"
    details = _details(scores, "space", "bins")
    if details is None:
        return Gap(title, f"{model} was not scored by the suite space")
    edges, bins = np.array(details["edges"]), details["bins"]
    figure, (axes,) = canvas(7, 3.8)
    for row, score_bin in enumerate(bins):
        share = np.array(score_bin["histogram"]) / max(1, *score_bin["histogram"])
        axes.stairs(row + 0.85 * share, edges, baseline=row, fill=True, color=COLOURS["accent"], alpha=0.55)
        if score_bin["mean"] is not None:
            axes.plot([score_bin["mean"]] * 2, [row, row + 0.9], color=COLOURS["warm"], linewidth=2)
    labels = [_range(score_bin["gold"]) for score_bin in bins]
    axes.set_yticks(np.arange(len(bins)) + 0.4, labels)
    axes.set(xlabel="cosine", ylabel="gold score", xlim=_bounds(edges, bins))
    quiet_axes(axes, "x")
    rows = [
        Row([label, str(score_bin["pairs"]), _number(score_bin["mean"], 3)])
        for label, score_bin in zip(labels, bins, strict=True)
    ]
    says = (
        "How the cosines of the pairs of STS-B test are distributed for each gold score, 5 being equal in meaning; the "
        "upright line is the mean. The less the rows overlap, the better the cosine tells the scores apart."
    )
    table = Table("Mean cosine", ["gold score", "pairs", "mean cosine"], {"": rows})
    return _figure("cosines", model, title, says, figure, details, table)


def pair_map(model: str, scores: Sequence[Score]) -> Figure | Gap:
    """t-SNE with a number for each pair, as in SG-OPT's Figure 5."""
    title = "Map of sentence pairs"
    details = _details(scores, "maps", "pairs")
    if details is None:
        return Gap(title, f"{model} was not scored by the suite maps")
    figure, (axes,) = canvas(7, 5)
    for number, pair in enumerate(details["pairs"], 1):
        points, colour = np.array(pair["points"]), COLOURS["accent" if pair["positive"] else "warm"]
        axes.plot(*points.T, color=colour, linewidth=1, alpha=0.5)
        for x, y in points:
            axes.text(x, y, str(number), color=colour, ha="center", va="center", weight="bold")
    low, high = np.percentile([pair["points"] for pair in details["pairs"]], [0, 100], axis=(0, 1))
    margin = 0.04 * (high - low)
    axes.set(xlim=(low[0] - margin[0], high[0] + margin[0]), ylim=(low[1] - margin[1], high[1] + margin[1]))
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_color(COLOURS["line"])
    positives = sum(pair["positive"] for pair in details["pairs"])
    says = (
        f"t-SNE of pairs of STS-B dev: 1 to {positives} mean the same (score 5), {positives + 1} to "
        f"{len(details['pairs'])} have nothing in common (score 0). The two sentences of a pair have the same number "
        "and a line between them: short lines are right for the first, long ones for the others."
    )
    groups: dict[str, list[Row]] = {"Same meaning": [], "Different meaning": []}
    for number, pair in enumerate(details["pairs"], 1):
        cells = [str(number), _number(pair["cosine"], 2), *pair["texts"]]
        groups["Same meaning" if pair["positive"] else "Different meaning"].append(Row(cells))
    table = Table("The pairs", ["pair", "cosine", "sentence", "other sentence"], groups)
    return _figure("pairs", model, title, says, figure, details, table)


def word_map(model: str, scores: Sequence[Score]) -> Figure | Gap:
    """PCA of the static word vectors, as in PromptBERT's Figure 1."""
    title = "Map of word vectors"
    details = _details(scores, "maps", "words")
    if details is None:
        return Gap(title, f"{model} shows no word vectors (a graph or a server), or was not scored by the suite maps")
    words = details["words"]
    frequency = [next(name for name, (low, high) in FREQUENCY.items() if low <= word["place"] < high) for word in words]
    subword = ["subword" if word["kind"] == "subword" else "begins a word" for word in words]
    case = [word["kind"] if word["kind"] != "subword" else None for word in words]
    panels: dict[str, Sequence[str | None]] = {"frequency": frequency, "subword": subword}
    if "upper" in case:
        panels["case of words"] = case
    figure, all_axes = canvas(3.4 * len(panels), 3.8, len(panels))
    points = np.array([word["point"] for word in words])
    for axes, (name, values) in zip(all_axes, panels.items(), strict=True):
        for place, category in enumerate(sorted({category for category in values if category}, key=_order)):
            rows = np.array([value == category for value in values])
            x, y = _dots(points[rows])
            axes.plot(
                x, y, color=COLOURS[SERIES[place]], linewidth=2.6, solid_capstyle="round", alpha=0.75, label=category
            )
        axes.set(xticks=[], yticks=[], title=name)
        axes.spines[:].set_color(COLOURS["line"])
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0), handlelength=0.6, fontsize=10)
    uncased = "" if "upper" in case else " This vocabulary has no upper case."
    says = (
        f"The first two principal components of {len(words):,} static word vectors. Regions by colour are biases of "
        "the vocabulary that the average of a sentence's words takes over. Frequency is the place in the vocabulary, "
        f"which approximates it.{uncased}"
    )
    return _figure("words", model, title, says, figure, details)


def layer_grid(model: str, scores: Sequence[Score]) -> Figure | Gap:
    """The mean over the STS sets for each layer and pooling, from the metrics `layer N mean`, `cls` and `max`."""
    title = "Layers and pooling"
    cells: dict[tuple[int, str], list[float]] = {}
    for score in scores:
        match score.metric.split():
            case ["layer", number, pooling] if score.suite == "baselines" and pooling in POOLINGS:
                cells.setdefault((int(number), pooling), []).append(score.value)
    if not cells:
        return Gap(title, f"{model} was not scored by the suite baselines, which needs a run or an encoder")
    layers = sorted({layer for layer, _ in cells})
    poolings = [name for name in POOLINGS if any(pooling == name for _, pooling in cells)]
    values = np.array([[np.mean(cells.get((layer, name), np.nan)) for layer in layers] for name in poolings])
    figure, (axes,) = canvas(max(5.0, 0.62 * len(layers) + 1), 0.5 * len(poolings) + 1)
    low, high = np.nanmin(values), np.nanmax(values)
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            alpha = 0.04 + SPREAD * (value - low) / max(high - low, 1e-9)
            axes.fill(
                column + np.array([0, 1, 1, 0]), row + np.array([0, 0, 1, 1]), color=COLOURS["accent"], alpha=alpha
            )
            axes.text(column + 0.5, row + 0.5, f"{value:.1f}", ha="center", va="center", fontsize=10)
    axes.set_xticks(np.arange(len(layers)) + 0.5, [str(layer) for layer in layers])
    axes.set_yticks(np.arange(len(poolings)) + 0.5, poolings)
    axes.set(xlabel="layer (0: embeddings)", xlim=(0, len(layers)), ylim=(len(poolings), 0))
    quiet_axes(axes)
    axes.grid(False)
    rows = [Row([name, *(_number(value, 2) for value in line)]) for name, line in zip(poolings, values, strict=True)]
    data = {"layers": layers, "poolings": poolings, "values": values.tolist()}
    says = "Mean of the seven STS sets (Spearman ×100) for a vector read from each layer by each pooling, untrained."
    table = Table("Layers and pooling", ["pooling", *map(str, layers)], {"": rows})
    return _figure("layers", model, title, says, figure, data, table)


def _figure(
    name: str, model: str, title: str, says: str, drawing: Any, data: Mapping[str, Any], table: Table | None = None
) -> Figure:
    """Make a figure. `name` becomes unique with the model's name, whatever characters that has."""
    unique = f"{name}-{model.encode().hex()}"
    return Figure(unique, f"{title}: {model}", says, inline(drawing, unique, f"{title}: {model}", says), data, table)


def _details(scores: Sequence[Score], suite: str, key: str) -> dict[str, Any] | None:
    return next((score.details for score in scores if score.suite == suite and key in score.details), None)


def _range(gold: Sequence[float]) -> str:
    return f"{gold[0]:g} to {gold[1]:g}"


def _bounds(edges: np.ndarray[Any, Any], bins: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """The range of the cosines that occur."""
    used = np.flatnonzero(np.sum([score_bin["histogram"] for score_bin in bins], axis=0))
    return (float(edges[used[0]]), float(edges[used[-1] + 1])) if len(used) else (-1.0, 1.0)


def _dots(points: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """One line with a gap after each point: round line ends make each a dot, and the file stays small."""
    gaps = np.full((len(points), 3, 2), np.nan)
    gaps[:, 0], gaps[:, 1] = points, points + 1e-6
    x, y = gaps.reshape(-1, 2).T
    return x, y


def _order(category: str) -> int:
    return [*FREQUENCY, "begins a word", "subword", "lower", "upper"].index(category)


def _number(value: float | None, decimals: int) -> str:
    return "–" if value is None or not np.isfinite(value) else f"{value:.{decimals}f}".replace("-", "−")


def training_curves(path: Path) -> Figure | Gap:
    """The loss in a run's log.jsonl, and the figures that chose the checkpoint: from dev data or held-out rows."""
    title, run = "Loss and evaluations", Run(path)
    if not run.log_file.is_file():
        return Gap(title, "only a run has a log of its training (log.jsonl)")
    entries = run.logged()
    loss = [(entry["step"], entry["loss"]) for entry in entries if "loss" in entry]
    begins = next((begins for begins in EVALUATED if any(name.startswith(begins) for name in chain(*entries))), None)
    if not loss or begins is None:
        return Gap(title, "the run's log has no losses or no evaluations")
    heading, table_title, decimals = EVALUATED[begins]
    curves: dict[str, list[tuple[int, float]]] = {}
    for entry in entries:
        for name in entry:
            if name.startswith(begins):
                curves.setdefault(name.removeprefix(begins).replace("_", " "), []).append((entry["step"], entry[name]))
    figure, (left, right) = canvas(8, 3.4, 2)
    left.plot(*zip(*loss, strict=True), color=COLOURS["accent"], linewidth=1.8)
    left.set(title="loss", xlabel="step")
    for place, (name, points) in enumerate(curves.items()):
        style: Any = {"color": COLOURS[SERIES[place % 4]], "marker": MARKERS[place % 4]}
        right.plot(*zip(*points, strict=True), label=name, linewidth=1.8, markersize=4, **style)
    right.set(title=heading, xlabel="step")
    right.legend(fontsize=10)
    for axes in (left, right):
        quiet_axes(axes)
    says = "The loss at each logged step, and the evaluations that chose the checkpoint."
    steps = sorted({step for points in curves.values() for step, _ in points})
    by_step = {name: dict(points) for name, points in curves.items()}
    rows = [
        Row([str(step), *(f"{row[step]:.{decimals}f}" if step in row else "–" for row in by_step.values())])
        for step in steps
    ]
    table = Table(table_title, ["step", *curves], {"": rows})
    return Figure(
        "curves", title, says, inline(figure, "curves", title, says), {"loss": loss, "evaluations": curves}, table
    )


def speed_plot(shorts: Mapping[str, Mapping[str, float]]) -> Figure | Gap:
    """The average of the STS sets against sentences per second, with a point for each model's `figures`."""
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
