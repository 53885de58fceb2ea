"""Measure where a calibration holds: expected calibration errors of cloze-mini's curve on other judged pairs.

    python -m benchmarks.calibration --data DATA [--bundle BUNDLE]

The bundle's own curve, which `cloze calibrate` has fitted to scores, predicts the scores of each set, scaled to the
curve's range. The command writes benchmarks/results/calibration.json and prints a table.
"""

import argparse
import json
from pathlib import Path
from typing import Final

import numpy as np

from cloze.encoding.bundle import Bundle, locate
from cloze.encoding.errors import BundleError
from cloze.training.evaluation.curves import calibration_error
from cloze.training.evaluation.measures import cosines_of, rank_correlation
from cloze.training.evaluation.sts import load_tasks
from cloze.training.model.graph_encoder import GraphEncoder

RESULTS: Final = Path(__file__).parent / "results" / "calibration.json"
SETS: Final = ("STS-B dev", "STS-B", "SICK-R", "STS16", "STS12")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--bundle", type=Path, default=locate("cloze-mini"))
    options = parser.parse_args()
    bundle = Bundle.load(options.bundle)
    if bundle.calibration is None:
        raise BundleError(f"{bundle.path} has no calibration; add one with `cloze calibrate`")
    calibration, precision = bundle.calibration, bundle.precisions[0]
    encoder, rows = GraphEncoder.of(bundle, precision), {}
    print("| | pairs | cosine itself | calibrated | mean absolute error of the score | Spearman |")
    for name, pairs in load_tasks(options.data, SETS).items():
        cosines, gold = cosines_of(encoder.embed, pairs), np.array(pairs.gold)
        low, span = calibration.lowest, calibration.highest - calibration.lowest
        gold = low + (gold - gold.min()) / np.ptp(gold) * span
        predicted = calibration.curves[precision](cosines)
        before = calibration_error(low + span * np.clip(cosines, 0, 1), gold)
        row = {
            "pairs": len(pairs),
            "before": round(before, 3),
            "after": round(calibration_error(predicted, gold), 3),
            "mean_absolute_error": round(float(np.abs(predicted - gold).mean()), 2),
            "spearman": round(float(rank_correlation(predicted, gold)), 2),
        }
        rows[name] = row
        print(f"| {name} | {' | '.join(map(str, row.values()))} |", flush=True)
    record = {"precision": precision, "source": calibration.source, "sets": rows}
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
