"""Classifiers on a bundle's vectors, learnt from labelled texts: the heads of the bundle.

A head is a logistic regression on unit vectors: one for all labels, or one for each label if a text may have several.
Its penalty is chosen by the log loss of five folds. Its scores are divided by one temperature (Guo et al. 2017,
arXiv:1706.04599, section 4.2), which is fitted on those folds, so that probabilities are calibrated. The head becomes a
file of the bundle. Vectors do not change.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]
from sklearn.metrics import f1_score  # type: ignore[import-untyped]
from sklearn.model_selection import StratifiedKFold, cross_val_predict  # type: ignore[import-untyped]

from cloze.encoding.bundle import Bundle, changing
from cloze.encoding.files import write_whole
from cloze.encoding.heads import HEAD_FOLDER, ClassifierHead
from cloze.training.bar import bar
from cloze.training.evaluation.card import write_section
from cloze.training.evaluation.curves import calibration_error
from cloze.training.evaluation.measures import units
from cloze.training.evaluation.own_data import load_label_sets, load_labels
from cloze.training.evaluation.tables import markdown_table
from cloze.training.evaluation.task import least_threshold
from cloze.training.model.graph_encoder import GraphEncoder

LEAST: Final = 8  # texts of each label, and also texts without it if a text may have several
FOLDS: Final = 5
PENALTIES: Final = tuple(4.0**power / 1024 for power in range(6))  # scikit-learn's C, the inverse of the penalty
MOST_STEPS: Final = 1000
TOLERANCE: Final = 1e-3
TEMPERATURES: Final = (np.log(0.01), np.log(100))  # natural logarithms
DIGITS: Final = 6  # significant digits of stored numbers, as in float32
KEPT: Final = "kept"  # figure: the share of answers whose probability reaches the threshold
SHOWN: Final = 12  # labels of a head that the card lists
TITLE: Final = "Labels"

Numbers = NDArray[np.float64]


class Fit(NamedTuple):
    """A row of weights and a bias for each score, and the scores (n, labels) of held-out texts."""

    weights: Numbers
    biases: Numbers
    held_out: Numbers


def learn_head(bundle: Bundle, train: Path, separator: str, *, balanced: bool, wanted: float) -> ClassifierHead:
    """The head for a file of texts and labels. With a separator, a text may have several labels.

    Raises CorpusError.
    """
    if separator:
        texts, sets = load_label_sets(train, separator, LEAST)
        labels = sorted({label for text_labels in sets for label in text_labels})
        gold = np.array([[label in text_labels for label in labels] for text_labels in sets])
    else:
        texts, named = load_labels(train, LEAST)
        labels, gold = sorted(set(named)), np.unique(named, return_inverse=True)[1]
    vectors = units(GraphEncoder.of(bundle, bundle.precisions[0]).embed(texts))
    return fit_head(vectors, gold, labels, train.name, balanced=balanced, wanted=wanted)


def fit_head(
    vectors: Numbers, gold: NDArray[np.generic], labels: Sequence[str], source: str, *, balanced: bool, wanted: float
) -> ClassifierHead:
    """The head for unit vectors (n, d).

    `gold` has the index of each text's label, (n), or for each text and label whether it applies, (n, labels). The
    figures are measured on held-out texts, but the penalty and the temperature were chosen by the same folds.
    """
    several = gold.ndim == 2
    if several:
        fits = [_fit(vectors, column.astype(int), balanced) for column in gold.T]
        weights, biases, held_out = zip(*fits, strict=True)
        fit = Fit(np.concatenate(weights), np.concatenate(biases), np.concatenate(held_out, axis=1))
    else:
        fit = _fit(vectors, gold, balanced)
        if len(labels) == 2:  # one score: each label gets half of it
            both = np.array([[-0.5], [0.5]])
            fit = Fit(both @ fit.weights, both[:, 0] * fit.biases, fit.held_out @ both.T)
    head = ClassifierHead(
        labels=tuple(labels),
        several=several,
        weights=tuple(tuple(map(_rounded, row)) for row in fit.weights.tolist()),
        biases=tuple(map(_rounded, fit.biases.tolist())),
        threshold=None,
        texts=len(gold),
        source=source,
        figures={},
    )
    probabilities = head.probabilities(fit.held_out)
    figures, confidence, right = _figures(probabilities, gold, several)
    threshold = least_threshold(confidence, right, wanted)
    if threshold is not None:
        figures[KEPT] = float((confidence >= threshold).mean())
    return head.model_copy(update={"threshold": threshold, "figures": {n: round(x, 4) for n, x in figures.items()}})


def _fit(vectors: Numbers, gold: NDArray[np.generic], balanced: bool) -> Fit:
    """Logistic regression with the best penalty. Two classes have one score."""
    scale = vectors.shape[1] ** 0.5  # unit vectors have components of about 1 / scale; the solver expects about 1
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0)
    fits = []
    for penalty in bar(PENALTIES, desc="fitting", unit=" penalties"):
        model = LogisticRegression(
            C=penalty, class_weight="balanced" if balanced else None, max_iter=MOST_STEPS, tol=TOLERANCE
        )
        scores = cross_val_predict(model, scale * vectors, gold, cv=folds, method="decision_function")
        scores = scores.reshape(len(gold), -1)
        fits.append((_temperature(scores, np.eye(gold.max() + 1)[gold])[0], model, scores))
    _, model, scores = min(fits, key=lambda fit: fit[0])
    _, temperature = _temperature(scores, _targets(gold))
    model.fit(scale * vectors, gold)
    return Fit(scale * model.coef_ / temperature, model.intercept_ / temperature, scores / temperature)


def _targets(gold: NDArray[np.generic]) -> Numbers:
    """Target probabilities (n, labels): the label's own is below 1, and closer to 1 the more texts there are.

    For two labels these are Platt's targets (1999, section 2.2). With targets of 1 and 0, a head without errors on a
    few texts would be certain of every answer.
    """
    texts = np.bincount(gold)  # of each label
    others = 1 / (texts[gold] * len(texts) / 2 + 2) / (len(texts) - 1)  # (n), the probability of each other label
    own = np.eye(len(texts))[gold]  # (n, labels)
    targets: Numbers = np.where(own == 1, 1 - others[:, None] * (len(texts) - 1), others[:, None])
    return targets


def _temperature(scores: Numbers, wanted: Numbers) -> tuple[float, float]:
    """The least log loss of scores divided by a temperature, and the temperature; `wanted` is (n, labels)."""
    if scores.shape[1] == 1:
        scores = np.hstack([np.zeros_like(scores), scores])  # gives the same probabilities

    def loss(logarithm: float) -> float:
        scaled = scores / np.exp(logarithm)
        return float((np.logaddexp.reduce(scaled, axis=1) - (wanted * scaled).sum(axis=1)).mean())

    minimum = minimize_scalar(loss, bounds=TEMPERATURES, method="bounded")
    return float(minimum.fun), float(np.exp(minimum.x))


def _figures(
    probabilities: Numbers, gold: NDArray[np.generic], several: bool
) -> tuple[dict[str, float], Numbers, Numbers]:
    """Figures, and the probability and the correctness of each answer.

    An answer is the most probable label of a text; with several labels, each that is more probable than not.
    """
    if several:
        predicted = probabilities >= 0.5
        confidence, right = probabilities[predicted], gold[predicted].astype(float)
        figures = {
            "micro F1": float(f1_score(gold, predicted, average="micro", zero_division=0)),
            "macro F1": float(f1_score(gold, predicted, average="macro", zero_division=0)),
            "calibration error": calibration_error(probabilities.ravel(), gold.ravel().astype(float)),
        }
    else:
        predicted = probabilities.argmax(axis=1)
        confidence, right = probabilities.max(axis=1), (predicted == gold).astype(float)
        figures = {
            "accuracy": float(right.mean()),
            "macro F1": float(f1_score(gold, predicted, average="macro", zero_division=0)),
            "calibration error": calibration_error(confidence, right),
        }
    return figures, confidence, right


def _rounded(number: float) -> float:
    return float(f"{number:.{DIGITS}g}")


def write(bundle: Bundle, heads: dict[str, ClassifierHead]) -> None:
    """Add the files and a section of the card to the bundle, which is replaced atomically."""
    with changing(bundle) as folder:
        shutil.rmtree(folder / HEAD_FOLDER, ignore_errors=True)
        if heads:
            (folder / HEAD_FOLDER).mkdir()
        for name, head in heads.items():
            write_whole(folder / HEAD_FOLDER / f"{name}.json", head.model_dump_json() + "\n")
        write_section(folder, TITLE, _section(heads))


def _section(heads: dict[str, ClassifierHead]) -> str:
    if not heads:
        return ""
    lines = [
        "Heads that `POST /predict` answers with. Figures are of held-out texts of the same file; `kept` is the share "
        "of answers that remain where the head may abstain.",
        "",
    ]
    rows = []
    for name, head in sorted(heads.items()):
        labels = ", ".join(head.labels[:SHOWN])
        more = f" and {len(head.labels) - SHOWN} more" if len(head.labels) > SHOWN else ""
        figures = ", ".join(f"{figure} {value:.3f}" for figure, value in head.figures.items())
        texts = f"{head.texts:,} texts of {head.source}"
        rows.append((name, labels + more, "several" if head.several else "one", texts, figures))
    table = markdown_table(["head", "labels", "of a text", "learnt from", "figures"], rows)
    return "\n".join([*lines, table])
