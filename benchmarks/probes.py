"""Measure what models do not understand: the accuracies of the suite `probes`, with intervals, side by side.

    python -m benchmarks.probes MODEL ... --data DATA
    python -m benchmarks.probes --data DATA --triplets FILE

A sentence-transformers folder is scored as `[X]` with mean pooling, as all-MiniLM-L6-v2 was trained. The command adds
its figures to benchmarks/results/probes.json and prints all of them as a table. With `--triplets`, it writes triplets
to train on instead, which the same rules make of sentences of Wikipedia and Wikinews that no probe has.
"""

import argparse
import csv
import json
import random
from itertools import chain
from pathlib import Path
from typing import Any, Final

from cloze.encoding.bundle import SPEC_FILE
from cloze.training.data.corpus import read_lines
from cloze.training.evaluation.options import ModelOptions
from cloze.training.evaluation.subjects import subjects
from cloze.training.evaluation.suites.probes import FAR, PROBES, REWRITTEN, make_probes, tasks

RESULTS: Final = Path(__file__).parent / "results" / "probes.json"
OF_EACH: Final = 2500  # triplets of one rule, at most
TRIPLETS: Final = 5120
SHUFFLES: Final = (0, 3)  # seeds, one after the other, as for the triplets that cloze-mini learnt from


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--triplets", type=Path)
    options = parser.parse_args()
    if options.triplets:
        write_triplets(options.data, options.triplets)
        return
    known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    probes = tasks(options.data, [])
    for path in options.models:
        own: dict[str, Any] = {} if (path / SPEC_FILE).exists() else {"template": "[X]", "pooling": "mean"}
        subject = next(subjects(str(path), ModelOptions(**own)))
        known[path.name] = figures = {}
        for task in probes:
            accuracy, far = task.run(subject)
            figures[task.name] = {
                "accuracy": round(accuracy.value, 1),
                **accuracy.details,
                FAR: round(far.value, 3),
                **accuracy.counts,
            }
    RESULTS.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    print(f"| | {' | '.join(known)} |")
    for probe in PROBES:
        cells = [
            f"{row['accuracy']:.1f} ({row['interval'][0]:.0f} to {row['interval'][1]:.0f}), {row[FAR]:.2f}"
            for row in (figures[probe] for figures in known.values())
        ]
        print(f"| {probe} | {' | '.join(cells)} |")


def write_triplets(data: Path, out: Path) -> None:
    """Write a csv file with the columns sent0, sent1 and hard_neg."""
    corpus = {file: [line.strip() for line in read_lines(file)] for file in sorted((data / "corpus").glob("*.txt"))}
    scored = {
        text for triplets in make_probes(chain(*corpus.values())).values() for triplet in triplets for text in triplet
    }
    wiki = dict.fromkeys(chain(*(sentences for file, sentences in corpus.items() if "wiki" in file.name)))
    by_rule = make_probes((sentence for sentence in wiki if sentence not in scored), items=OF_EACH, seed=1)
    triplets = [triplet for name in REWRITTEN for triplet in by_rule[name]]
    for seed in SHUFFLES:
        random.Random(seed).shuffle(triplets)
    with out.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("sent0", "sent1", "hard_neg"), *triplets[:TRIPLETS]])
    counts = ", ".join(f"{name} {len(by_rule[name])}" for name in REWRITTEN)
    print(f"{out}: {min(len(triplets), TRIPLETS)} triplets, of {counts}")


if __name__ == "__main__":
    main()
