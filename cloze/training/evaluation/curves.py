"""Calibration curves: what a cosine of a bundle means, as a score or a probability.

Cross-validation compares two curves, isotonic regression and Platt's logistic curve (Platt 1999; Zadrozny and Elkan
2002). The one with the smaller squared error on held-out pairs is fitted to all pairs, once for each precision, and
becomes a file of the bundle. Vectors do not change.
"""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from sklearn.isotonic import IsotonicRegression  # type: ignore[import-untyped]
from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]
from sklearn.model_selection import KFold  # type: ignore[import-untyped]

from cloze.encoding.bundle import Bundle, changing, load_to_change
from cloze.encoding.calibration import CALIBRATION_FILE, Calibration, Curve, Meaning
from cloze.encoding.files import write_whole
from cloze.training.errors import CorpusError
from cloze.training.evaluation.card import write_section
from cloze.training.evaluation.measures import Pairs, cosines_of
from cloze.training.evaluation.own_data import columns_of, load_duplicates
from cloze.training.evaluation.sts import is_benchmark, load_pairs
from cloze.training.evaluation.tables import markdown_table
from cloze.training.evaluation.task import best_f1, least_threshold
from cloze.training.model.graph_encoder import GraphEncoder

LEAST: Final = 100  # pairs, or pairs of each label if there are labels
FOLDS: Final = 5
BINS: Final = 10  # for the calibration error
GRID: Final = np.linspace(-1, 1, 201)  # cosines at which Platt's curve is stored: an error below 1e-3 of the scale
TITLE: Final = "What a cosine means"
PLOT_FILE: Final = "reliability.svg"
GREY: Final = "#767676"  # legible on light and on dark
STYLE: Final[Any] = {"svg.hashsalt": "cloze"} | dict.fromkeys(
    ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY
)

Numbers = NDArray[np.float64]


def calibrate(path: Path, judged: Path, wanted_precision: float) -> None:
    """Learn the curves of a bundle from a file of judged pairs, and write them into it. Raises ClozeError."""
    bundle = load_to_change(path)
    pairs, meaning = _judged(judged)
    gold = np.array(pairs.gold)
    lowest, highest = float(gold.min()), float(gold.max())
    curves = {}
    for precision in bundle.precisions:
        cosines = cosines_of(GraphEncoder.of(bundle, precision).embed, pairs)
        curves[precision] = fit_curve(cosines, gold, wanted_precision if meaning == "probability" else None)
    calibration = Calibration(
        meaning=meaning, lowest=lowest, highest=highest, pairs=len(pairs), source=judged.name, curves=curves
    )
    _write(bundle, calibration)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for precision, curve in curves.items():
        console.print(
            f"{precision}: {curve.method}; calibration error {curve.error_before:.3f} before, {curve.error:.3f} after"
            + "".join(f"; for {name}: a probability of {value:.2f}" for name, value in curve.thresholds.items())
        )
    console.print(f"{bundle.path / CALIBRATION_FILE}: written, with a section of the card")


def fit_curve(cosines: Numbers, gold: Numbers, wanted_precision: float | None = None) -> Curve:
    """The better of the two curves for these pairs, (n) each; with `wanted_precision`, gold is 0 or 1.

    Probabilities are fitted to Platt's targets (1999, section 2.2), which are never exactly 0 or 1. Errors and
    thresholds are measured on held-out pairs: each fifth is predicted by the curve of the other four. Raises
    CorpusError if the correlation of cosines and gold is negative by more than two standard errors.
    """
    if np.corrcoef(cosines, gold)[0, 1] < -2 / np.sqrt(len(gold)):
        raise CorpusError(
            "pairs with higher judgements have lower cosines; check that a high judgement means "
            "similar texts, and that the model suits the text"
        )
    scale = gold.min(), np.ptp(gold)
    targets = gold
    if wanted_precision is not None:
        targets = np.clip(gold, 1 / ((gold == 0).sum() + 2), 1 - 1 / ((gold == 1).sum() + 2))
    held_out = {name: np.empty_like(cosines) for name in METHODS}
    for train, test in KFold(FOLDS, shuffle=True, random_state=0).split(cosines):
        for name, method in METHODS.items():
            points = method(cosines[train], targets[train], *scale)
            held_out[name][test] = np.interp(cosines[test], *points)
    curves = {name: method(cosines, targets, *scale) for name, method in METHODS.items()}
    rising = [name for name, (_, values) in curves.items() if (np.diff(values) >= 0).all()]  # isotonic always is
    name = min(rising, key=lambda name: float(((held_out[name] - gold) ** 2).mean()))
    knots, values = curves[name]
    before = scale[0] + np.clip(cosines, 0, 1) * scale[1]  # the cosine read as the value
    return Curve(
        method=name,
        cosines=tuple(knots.tolist()),
        values=tuple(values.tolist()),
        error_before=round(calibration_error(before, gold), 4),
        error=round(calibration_error(held_out[name], gold), 4),
        bins_before=_bins(before, gold),
        bins=_bins(held_out[name], gold),
        thresholds={} if wanted_precision is None else _thresholds(held_out[name], gold, wanted_precision),
    )


def calibration_error(predicted: Numbers, gold: Numbers) -> float:
    """The expected calibration error, as a share of gold's range (Naeini et al. 2015, with bins of equal counts).

    The pairs, (n), are divided into ten bins by their predicted value. The error of a bin is the difference between its
    means of predicted and gold; the result is the mean over all pairs.
    """
    errors = [abs(value - truth) * count for value, truth, count in _means(predicted, gold)]
    return float(sum(errors) / len(gold) / (np.ptp(gold) or 1))


def _bins(predicted: Numbers, gold: Numbers) -> tuple[tuple[float, float], ...]:
    """The means of predicted and gold in each bin."""
    return tuple((round(value, 4), round(truth, 4)) for value, truth, _ in _means(predicted, gold))


def _means(predicted: Numbers, gold: Numbers) -> list[tuple[float, float, int]]:
    """The means of predicted and gold and the number of pairs in each bin, lowest values first.

    Pairs with the same predicted value, which are frequent with an isotonic curve, count with the mean of their gold,
    so that it does not matter which of them are in which bin.
    """
    _, ties = np.unique(predicted, return_inverse=True)
    gold = (np.bincount(ties, gold) / np.bincount(ties))[ties]
    bins = np.array_split(np.argsort(predicted, kind="stable"), BINS)
    return [(float(predicted[rows].mean()), float(gold[rows].mean()), len(rows)) for rows in bins]


def _isotonic(cosines: Numbers, gold: Numbers, lowest: float, scale: float) -> tuple[Numbers, Numbers]:
    model = IsotonicRegression(out_of_bounds="clip").fit(cosines, gold)
    return model.X_thresholds_.astype(np.float64), model.y_thresholds_.astype(np.float64)


def _platt(cosines: Numbers, gold: Numbers, lowest: float, scale: float) -> tuple[Numbers, Numbers]:
    """A score between the ends of the scale counts partly as a positive pair and partly as a negative one."""
    share = (gold - lowest) / scale
    rows, labels = np.concatenate([cosines, cosines])[:, None], np.repeat([1, 0], len(gold))
    model = LogisticRegression(C=np.inf).fit(rows, labels, sample_weight=np.concatenate([share, 1 - share]))
    return GRID, lowest + scale * model.predict_proba(GRID[:, None])[:, 1]


METHODS: Final[dict[str, Callable[[Numbers, Numbers, float, float], tuple[Numbers, Numbers]]]] = {
    "isotonic": _isotonic,
    "platt": _platt,
}


def _thresholds(predicted: Numbers, gold: Numbers, wanted: float) -> dict[str, float]:
    """The probability with the best F1, and the lowest one at which the wanted precision is reached."""
    _, best = best_f1(predicted, gold)
    reached = least_threshold(predicted, gold, wanted)
    return {"F1": best} | ({} if reached is None else {f"precision {wanted:g}": reached})


def _judged(path: Path) -> tuple[Pairs, Meaning]:
    """Pairs, and the meaning of their gold. Raises CorpusError."""
    columns = {"score"} if is_benchmark(path) else columns_of(path)
    labelled = "label" in columns and "score" not in columns  # as evaluate reads such a file
    pairs = load_duplicates(path) if labelled else load_pairs(path)
    counts = [pairs.gold.count(label) for label in (0.0, 1.0)] if labelled else [len(pairs)]
    if min(counts) < LEAST:
        contents = f"{counts[0]} pairs labelled 0 and {counts[1]} labelled 1" if labelled else f"{len(pairs)} pairs"
        needed = f"{LEAST} of each label" if labelled else LEAST
        raise CorpusError(f"{path} has {contents}; a curve needs at least {needed}")
    return pairs, "probability" if labelled else "score"


def _write(bundle: Bundle, calibration: Calibration) -> None:
    """Add the file and a section of the card to the bundle, which is replaced atomically."""
    with changing(bundle) as folder:
        write_whole(folder / CALIBRATION_FILE, calibration.model_dump_json(indent=1) + "\n")
        write_section(folder, TITLE, _section(calibration, _plotted(calibration, folder / PLOT_FILE)))


def _plotted(calibration: Calibration, file: Path) -> bool:
    """Draw the curves' reliability to an SVG file; False without matplotlib, which the extra `report` installs."""
    file.unlink(missing_ok=True)
    if find_spec("matplotlib") is None:
        return False
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(4 * len(calibration.curves), 4), layout="constrained")
        plots = figure.subplots(1, len(calibration.curves), squeeze=False)[0]
        for axes, (precision, curve) in zip(plots, calibration.curves.items(), strict=True):
            axes.axline((calibration.lowest, calibration.lowest), slope=1, color=GREY, linewidth=0.8)
            axes.plot(*zip(*curve.bins_before, strict=True), "s", color="#c05a1c", label="cosine itself")
            axes.plot(*zip(*curve.bins, strict=True), "o", color="#1c87a6", label="calibrated")
            axes.set(title=precision, xlabel=f"mean value ({calibration.meaning})", ylabel="mean judgement")
            axes.legend(frameon=False)
        figure.savefig(file, transparent=True, metadata={"Date": None})
    return True


def _section(calibration: Calibration, plotted: bool) -> str:
    unit = "the probability that two texts mean the same" if calibration.meaning == "probability" else (
        f"the score, from {calibration.lowest:g} to {calibration.highest:g}, that people give a pair"
    )  # fmt: skip
    cells = [
        [f"{cosine:.1f}", *(f"{curve(cosine):.2f}" for curve in calibration.curves.values())]
        for cosine in np.arange(0, 1.01, 0.1)
    ]
    lines = [
        f"`calibration.json` turns a cosine into {unit}: fitted to {calibration.pairs:,} pairs of "
        f"{calibration.source}. It holds for text like theirs.",
        "",
        markdown_table(["cosine", *calibration.curves], cells),
        "",
    ]
    for precision, curve in calibration.curves.items():
        thresholds = "".join(f" The best threshold for {name} is {at:.2f}." for name, at in curve.thresholds.items())
        lines.append(
            f"{precision}: expected calibration error on held-out pairs, as a share of the scale, {curve.error:.3f} "
            f"({curve.error_before:.3f} where the cosine itself is read as the value; {curve.method}).{thresholds}"
        )
    if plotted:
        lines += [
            "",
            f"![Reliability: the mean judgement of held-out pairs against the mean value]({PLOT_FILE})",
            "",
            "Held-out pairs in ten bins; on the line, the value is what people say.",
        ]
    return "\n".join(lines)
