"""The table and the picture of benchmarks.roads: what each way of training gains, with and without the parent's share.

    python -m benchmarks.roads_report benchmarks/results/roads.jsonl

It prints the table and draws roads.svg beside the file: a dot is the gain on one collection with half of the parent's
weights, a bar the mean over the collections.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib import pyplot as plt

from cloze.training.evaluation.tables import markdown_table

SHARE: Final = "0.5"  # of the parent's weights, that is drawn

Rows = dict[str, dict[str, dict[str, Any]]]
"""Road -> collection -> its line."""


def read(file: Path) -> Rows:
    """The lines of the first seed."""
    rows: Rows = defaultdict(dict)
    for row in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
        if row["seed"] == 0:
            rows[row["road"]][row["collection"]] = row
    return rows


def collections_of(rows: Rows) -> list[str]:
    return list(dict.fromkeys(name for collections in rows.values() for name in collections))


def table(rows: Rows) -> str:
    """A road in each row: its gain without and with half of the parent, on each collection, and STS-B dev."""
    names = collections_of(rows)

    def gains(row: dict[str, Any] | None) -> str:
        return "" if row is None else f"{row['gains']['0.0']:+.1f}; {row['gains'][SHARE]:+.1f}"

    def elsewhere(collections: dict[str, dict[str, Any]]) -> str:
        return "; ".join(
            f"{np.mean([row['sts-b dev'][share] for row in collections.values()]):+.1f}" for share in ("0.0", SHARE)
        )

    lines = [
        (road, *(gains(collections.get(name)) for name in names), elsewhere(collections))
        for road, collections in rows.items()
    ]
    return markdown_table(["road", *names, "STS-B dev, mean"], lines)


def draw(rows: Rows, path: Path) -> None:
    plt.rcParams |= {"svg.hashsalt": "roads", "svg.fonttype": "none"}
    figure, axis = plt.subplots(figsize=(8, 0.35 * len(rows) + 1.2), layout="constrained")
    roads = list(rows)[::-1]
    means = [np.mean([row["gains"][SHARE] for row in rows[road].values()]) for road in roads]
    axis.barh(roads, means, color="0.85")
    for name in collections_of(rows):
        measured_roads = [road for road in roads if name in rows[road]]
        axis.plot([rows[road][name]["gains"][SHARE] for road in measured_roads], measured_roads, "o", label=name)
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_xlabel("gain in nDCG@10 with half of the parent's weights")
    axis.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="what benchmarks.roads wrote")
    options = parser.parse_args()
    rows = read(options.results)
    print(table(rows))
    draw(rows, options.results.with_suffix(".svg"))


if __name__ == "__main__":
    main()
