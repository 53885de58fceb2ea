"""Measure how many labelled texts a head needs: accuracy on SentEval's tasks of single texts by examples of each label.

    python -m benchmarks.heads --data DATA [--bundle BUNDLE] [--setfit MODEL]

Texts are drawn from the training part, as many of each label, ten times (three for SetFit), with other texts each time.
Accuracy is that on the test part, or on 2,000 texts that are never drawn. With `--setfit`, a sentence-transformers
folder is fine-tuned by SetFit (arXiv:2209.11055, its defaults) on the same draws of the smallest sizes. The command
adds its figures to benchmarks/results/heads.json and prints them.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cloze.encoding.bundle import Bundle, locate
from cloze.training.evaluation.classifiers import fit_head
from cloze.training.evaluation.measures import units
from cloze.training.evaluation.suites.transfer import Labelled, load_transfer
from cloze.training.model.graph_encoder import GraphEncoder

RESULTS: Final = Path(__file__).parent / "results" / "heads.json"
SIZES: Final = (8, 16, 32, 64)  # examples of each label
SETFIT_SIZES: Final = (8, 16)
DRAWS: Final = 10
SETFIT_DRAWS: Final = 3
KEPT: Final = 2000  # texts to score on, of sets without a test part
LEARN_FROM: Final = 6000  # texts at most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--bundle", type=Path, default=locate("cloze-mini"))
    parser.add_argument("--setfit", type=Path)
    parser.add_argument("--sets", nargs="+")
    options = parser.parse_args()
    bundle = Bundle.load(options.bundle)
    encoder = GraphEncoder.of(bundle, bundle.precisions[0])
    known: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name, rows in load_transfer(options.data).items():
        if rows.train.second or (options.sets and name not in options.sets):
            continue  # heads take single texts
        train, test = parts(rows.train, rows.test)
        sizes: Sequence[int]
        if options.setfit:
            learn, sizes, draws = setfit_of(options.setfit, train, test), SETFIT_SIZES, SETFIT_DRAWS
            key = f"SetFit, {options.setfit.name}"
        else:
            vectors = [units(encoder.embed(part.texts)) for part in (train, test)]
            learn, sizes, draws = head_of(vectors, train, test), SIZES, DRAWS
            key = f"cloze head, {bundle.name}"
        row: dict[str, Any] = {"labels": len(set(train.labels)), "scored": len(test)}
        known.setdefault(key, {})[name] = row
        for size in sizes:
            trials = [learn(places) for places in drawn(np.array(train.labels), size, draws)]
            accuracies, seconds = np.array(trials).T
            row[str(size)] = {
                "accuracy": round(100 * accuracies.mean(), 2),
                "deviation": round(100 * accuracies.std(ddof=1), 2),
                "seconds": round(float(np.median(seconds)), 2),
            }
            print(key, name, size, row[str(size)], flush=True)
        if not options.setfit:
            accuracy, seconds = learn(np.arange(len(train)))
            row["all"] = {"texts": len(train), "accuracy": round(100 * accuracy, 2), "seconds": round(seconds, 2)}
            print(key, name, row["all"], flush=True)
        RESULTS.write_text(json.dumps(known, indent=1) + "\n")


def parts(train: Labelled, test: Labelled | None) -> tuple[Labelled, Labelled]:
    """Texts to draw from, `LEARN_FROM` at most, and texts to score on."""
    order = np.random.default_rng(1).permutation(len(train)).tolist()
    if test is None:
        order, test = order[KEPT:], chosen(train, order[:KEPT])
    return chosen(train, order[:LEARN_FROM]), test


def chosen(texts: Labelled, rows: list[int]) -> Labelled:
    return Labelled([texts.texts[row] for row in rows], [texts.labels[row] for row in rows])


def drawn(labels: NDArray[np.int64], size: int, draws: int) -> Iterator[NDArray[np.int64]]:
    for seed in range(draws):
        rng = np.random.default_rng(seed)
        yield np.concatenate(
            [rng.choice(np.flatnonzero(labels == label), size, replace=False) for label in np.unique(labels)]
        )


Learn = Callable[[NDArray[np.int64]], tuple[float, float]]
"""Places of the training texts -> accuracy, and the seconds that learning took, the texts' vectors not included."""


def head_of(vectors: list[NDArray[np.float64]], train: Labelled, test: Labelled) -> Learn:
    names = sorted(map(str, set(train.labels)))
    gold, truth = (np.array([names.index(str(label)) for label in part.labels]) for part in (train, test))

    def learn(places: NDArray[np.int64]) -> tuple[float, float]:
        started = time.perf_counter()
        head = fit_head(vectors[0][places], gold[places], names, "", balanced=False, wanted=0.95)
        seconds = time.perf_counter() - started
        return float((head.scores(vectors[1]).argmax(axis=1) == truth).mean()), seconds

    return learn


def setfit_of(model: Path, train: Labelled, test: Labelled) -> Learn:
    from datasets import Dataset
    from setfit import SetFitModel, Trainer, TrainingArguments  # type: ignore[import-not-found]

    def learn(places: NDArray[np.int64]) -> tuple[float, float]:
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            data = Dataset.from_dict(
                {"text": [train.texts[row] for row in places], "label": [int(train.labels[row]) for row in places]}
            )
            arguments = TrainingArguments(output_dir=folder, report_to="none", save_strategy="no")
            trainer = Trainer(model=SetFitModel.from_pretrained(str(model)), args=arguments, train_dataset=data)
            trainer.train()
        seconds = time.perf_counter() - started
        predicted = np.array(trainer.model.predict(test.texts, show_progress_bar=False))
        return float((predicted == np.array(test.labels)).mean()), seconds

    return learn


if __name__ == "__main__":
    main()
