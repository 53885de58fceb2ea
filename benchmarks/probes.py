"""Measure what models do not understand: the accuracies of the suite `probes`, with intervals, side by side.

    python -m benchmarks.probes MODEL ... --data DATA

A sentence-transformers folder is scored as `[X]` with mean pooling, as all-MiniLM-L6-v2 was trained. The command adds
its figures to benchmarks/results/probes.json and prints all of them as a table.
"""

import argparse
import json
from pathlib import Path
from typing import Final

from encoding.bundle import SPEC_FILE
from evaluation.options import ModelOptions
from evaluation.subjects import subjects
from evaluation.suites.probes import FAR, PROBES, tasks

RESULTS: Final = Path(__file__).parent / "results" / "probes.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    options = parser.parse_args()
    known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    probes = tasks(options.data, [])
    for path in options.models:
        own = {} if (path / SPEC_FILE).exists() else {"template": "[X]", "pooling": "mean"}
        subject = next(subjects(str(path), ModelOptions(**own)))
        known[path.name] = found = {}
        for task in probes:
            accuracy, far = task.run(subject)
            found[task.name] = {
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
            for row in (each[probe] for each in known.values())
        ]
        print(f"| {probe} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
