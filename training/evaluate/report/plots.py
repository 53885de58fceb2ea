"""The figures of one model's scores. Each is drawn from the `details` of its scores, or is a gap with the reason."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from training.evaluate.measures import Score
from training.evaluate.report.contents import Figure, Gap, Row, Table
from training.evaluate.report.drawing import COLOURS, SERIES, canvas, inline, quiet_axes

__all__ = ["cosine_histograms", "layer_grid", "pair_map", "word_map"]

POOLINGS: Final = ("mean", "cls", "max")
SPREAD: Final = 0.62  # of the opacity between the lowest and the highest cell
FREQUENCY: Final = {"most frequent third": (0, 1 / 3), "middle third": (1 / 3, 2 / 3), "rarest third": (2 / 3, 2)}


def cosine_histograms(model: str, scores: Sequence[Score]) -> Figure | Gap:
    """A row per whole gold score, as in DiffCSE's Figure 2."""
    title = "Cosines by gold score"
    found = _details(scores, "space", "bins")
    if found is None:
        return Gap(title, f"{model} was not scored by the suite space")
    edges, bins = np.array(found["edges"]), found["bins"]
    figure, (axes,) = canvas(7, 3.8)
    for row, each in enumerate(bins):
        share = np.array(each["histogram"]) / max(1, *each["histogram"])
        axes.stairs(row + 0.85 * share, edges, baseline=row, fill=True, color=COLOURS["accent"], alpha=0.55)
        if each["mean"] is not None:
            axes.plot([each["mean"]] * 2, [row, row + 0.9], color=COLOURS["warm"], linewidth=2)
    labels = [_range(each["gold"]) for each in bins]
    axes.set_yticks(np.arange(len(bins)) + 0.4, labels)
    axes.set(xlabel="cosine", ylabel="gold score", xlim=_bounds(edges, bins))
    quiet_axes(axes, "x")
    rows = [
        Row([label, str(each["pairs"]), _number(each["mean"], 3)]) for label, each in zip(labels, bins, strict=True)
    ]
    says = (
        "How the cosines of the pairs of STS-B test are distributed for each gold score, 5 being equal in meaning; the "
        "upright line is the mean. The less the rows overlap, the better the cosine tells the scores apart."
    )
    table = Table("Mean cosine", ["gold score", "pairs", "mean cosine"], {"": rows})
    return _figure("cosines", model, title, says, figure, found, table)


def pair_map(model: str, scores: Sequence[Score]) -> Figure | Gap:
    """t-SNE with a number for each pair, as in SG-OPT's Figure 5."""
    title = "Map of sentence pairs"
    found = _details(scores, "maps", "pairs")
    if found is None:
        return Gap(title, f"{model} was not scored by the suite maps")
    figure, (axes,) = canvas(7, 5)
    for number, pair in enumerate(found["pairs"], 1):
        points, colour = np.array(pair["points"]), COLOURS["accent" if pair["positive"] else "warm"]
        axes.plot(*points.T, color=colour, linewidth=1, alpha=0.5)
        for x, y in points:
            axes.text(x, y, str(number), color=colour, ha="center", va="center", weight="bold")
    low, high = np.percentile([pair["points"] for pair in found["pairs"]], [0, 100], axis=(0, 1))
    margin = 0.04 * (high - low)
    axes.set(xlim=(low[0] - margin[0], high[0] + margin[0]), ylim=(low[1] - margin[1], high[1] + margin[1]))
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_color(COLOURS["line"])
    positives = sum(pair["positive"] for pair in found["pairs"])
    says = (
        f"t-SNE of pairs of STS-B dev: 1 to {positives} mean the same (score 5), {positives + 1} to "
        f"{len(found['pairs'])} have nothing in common (score 0). The two sentences of a pair have the same number "
        "and a line between them: short lines are right for the first, long ones for the others."
    )
    groups: dict[str, list[Row]] = {"Same meaning": [], "Different meaning": []}
    for number, pair in enumerate(found["pairs"], 1):
        cells = [str(number), _number(pair["cosine"], 2), *pair["texts"]]
        groups["Same meaning" if pair["positive"] else "Different meaning"].append(Row(cells))
    table = Table("The pairs", ["pair", "cosine", "sentence", "other sentence"], groups)
    return _figure("pairs", model, title, says, figure, found, table)


def word_map(model: str, scores: Sequence[Score]) -> Figure | Gap:
    """PCA of the static word vectors, as in PromptBERT's Figure 1."""
    title = "Map of word vectors"
    found = _details(scores, "maps", "words")
    if found is None:
        return Gap(title, f"{model} shows no word vectors (a graph or a server), or was not scored by the suite maps")
    words = found["words"]
    frequency = [next(name for name, (low, high) in FREQUENCY.items() if low <= word["place"] < high) for word in words]
    subword = ["subword" if word["kind"] == "subword" else "begins a word" for word in words]
    case = [word["kind"] if word["kind"] != "subword" else None for word in words]
    panels: dict[str, Sequence[str | None]] = {"frequency": frequency, "subword": subword}
    if "upper" in case:
        panels["case of words"] = case
    figure, all_axes = canvas(3.4 * len(panels), 3.8, len(panels))
    points = np.array([word["point"] for word in words])
    for axes, (name, kinds) in zip(all_axes, panels.items(), strict=True):
        for place, kind in enumerate(sorted({kind for kind in kinds if kind}, key=_order)):
            rows = np.array([each == kind for each in kinds])
            x, y = _dots(points[rows])
            axes.plot(x, y, color=COLOURS[SERIES[place]], linewidth=2.6, solid_capstyle="round", alpha=0.75, label=kind)
        axes.set(xticks=[], yticks=[], title=name)
        axes.spines[:].set_color(COLOURS["line"])
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0), handlelength=0.6, fontsize=10)
    uncased = "" if "upper" in case else " This vocabulary has no upper case."
    says = (
        f"The first two principal components of {len(words):,} static word vectors. Regions by colour are biases of "
        "the vocabulary that the average of a sentence's words takes over. Frequency is the place in the vocabulary, "
        f"which approximates it.{uncased}"
    )
    return _figure("words", model, title, says, figure, found)


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
    name: str, model: str, title: str, says: str, drawn: Any, data: Mapping[str, Any], table: Table | None = None
) -> Figure:
    """`name` becomes unique with the model's name, whatever letters that has."""
    unique = f"{name}-{model.encode().hex()}"
    return Figure(unique, f"{title}: {model}", says, inline(drawn, unique, f"{title}: {model}", says), data, table)


def _details(scores: Sequence[Score], suite: str, key: str) -> dict[str, Any] | None:
    return next((score.details for score in scores if score.suite == suite and key in score.details), None)


def _range(gold: Sequence[float]) -> str:
    return f"{gold[0]:g} to {gold[1]:g}"


def _bounds(edges: np.ndarray[Any, Any], bins: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """The range of the cosines that occur."""
    used = np.flatnonzero(np.sum([each["histogram"] for each in bins], axis=0))
    return (float(edges[used[0]]), float(edges[used[-1] + 1])) if len(used) else (-1.0, 1.0)


def _dots(points: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """One line with a gap behind each point: with round ends each is a dot, and the file stays small."""
    gaps = np.full((len(points), 3, 2), np.nan)
    gaps[:, 0], gaps[:, 1] = points, points + 1e-6
    x, y = gaps.reshape(-1, 2).T
    return x, y


def _order(kind: str) -> int:
    return [*FREQUENCY, "begins a word", "subword", "lower", "upper"].index(kind)


def _number(value: float | None, decimals: int) -> str:
    return "–" if value is None or not np.isfinite(value) else f"{value:.{decimals}f}".replace("-", "−")
