"""The tables and the pictures of benchmarks.adaptation and of benchmarks.roads.

    python -m benchmarks.adaptation_report benchmarks/results/adaptation.jsonl
    python -m benchmarks.adaptation_report benchmarks/results/roads.jsonl

The first shows what `cloze adapt` gains by the number of queries that it learns from, and has a table of the most
queries of each collection. The second shows what single ways of training gain: a dot is the gain on one collection with
half of the parent's weights, a bar the mean over the collections. The picture is drawn beside the file. All of it is of
the first seed.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from cloze.training.evaluation.tables import markdown_table

HEADER: Final = (
    "collection",
    "documents",
    "queries to learn from; to judge",
    "nDCG@10 before",
    "gain, 95 % interval",
    "what `adapt` said",
    "STS-B dev",
)

TICKS: Final = (0, 10, 30, 100, 300)  # queries
SHARE: Final = "0.5"  # of the parent's weights, that is drawn

Row = dict[str, Any]


def adaptation_table(rows: list[Row]) -> str:
    lines = []
    for name, (*_, row) in by_collection(rows).items():
        said = row["said"]["after"] - row["said"]["before"]
        low, high = row["interval"]
        lines.append(
            (
                name,
                f"{row['documents']:,}",
                f"{row['queries']}; {row['judging']}",
                f"{row['before']:.1f}",
                f"{row['gain']:+.1f} ({low:+.1f} to {high:+.1f})",
                f"{said:+.1f}",
                f"{row['sts-b dev']:+.2f}",
            )
        )
    return markdown_table(list(HEADER), lines)


def draw_adaptation(rows: list[Row], axis: Axes) -> None:
    collections = by_collection(rows)
    for number, (name, lines) in enumerate(collections.items()):
        offset = 1.03 ** (number - len(collections) / 2)  # so that bars do not hide each other
        places = [row["queries"] * offset for row in lines]
        gains = [row["gain"] for row in lines]
        below = [row["gain"] - row["interval"][0] for row in lines]
        above = [row["interval"][1] - row["gain"] for row in lines]
        axis.errorbar(places, gains, (below, above), fmt="o-", capsize=2, linewidth=1, label=name)
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set_xscale("symlog", linthresh=10)
    axis.set_xticks(TICKS, list(map(str, TICKS)))
    axis.minorticks_off()
    axis.set_xlabel("queries to learn from, with the documents that answer them")
    axis.set_ylabel("gain in nDCG@10 of other queries")


def by_collection(rows: list[Row]) -> dict[str, list[Row]]:
    """The lines of each, those with the fewest queries first."""
    collections: dict[str, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: int(row["queries"])):
        collections[row["collection"]].append(row)
    return {name: collections[name] for name in dict.fromkeys(row["collection"] for row in rows)}


def roads_table(rows: list[Row]) -> str:
    """A road in each row: its gain without and with half of the parent, on each collection, and STS-B dev."""
    names = list(dict.fromkeys(row["collection"] for row in rows))

    def gains(row: Row | None) -> str:
        return "" if row is None else f"{row['gains']['0.0']:+.1f}; {row['gains'][SHARE]:+.1f}"

    def elsewhere(collections: dict[str, Row]) -> str:
        return "; ".join(
            f"{np.mean([row['sts-b dev'][share] for row in collections.values()]):+.1f}" for share in ("0.0", SHARE)
        )

    lines = [
        (road, *(gains(collections.get(name)) for name in names), elsewhere(collections))
        for road, collections in by_road(rows).items()
    ]
    return markdown_table(["road", *names, "STS-B dev, mean"], lines)


def draw_roads(rows: list[Row], axis: Axes) -> None:
    by_name = by_road(rows)
    roads = list(by_name)[::-1]
    means = [np.mean([row["gains"][SHARE] for row in by_name[road].values()]) for road in roads]
    axis.barh(roads, means, color="0.85")
    for name in dict.fromkeys(row["collection"] for row in rows):
        measured_roads = [road for road in roads if name in by_name[road]]
        axis.plot([by_name[road][name]["gains"][SHARE] for road in measured_roads], measured_roads, "o", label=name)
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_xlabel("gain in nDCG@10 with half of the parent's weights")


def by_road(rows: list[Row]) -> dict[str, dict[str, Row]]:
    """Road -> collection -> its line."""
    roads: dict[str, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        roads[row["road"]][row["collection"]] = row
    return roads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="what benchmarks.adaptation or benchmarks.roads wrote")
    file = parser.parse_args().results
    lines = file.read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["seed"] == 0]
    roads = "road" in rows[0]
    print(roads_table(rows) if roads else adaptation_table(rows))
    plt.rcParams |= {"svg.hashsalt": file.stem, "svg.fonttype": "none"}
    height = 0.35 * len(by_road(rows)) + 1.2 if roads else 4.5
    figure, axis = plt.subplots(figsize=(8, height), layout="constrained")
    (draw_roads if roads else draw_adaptation)(rows, axis)
    axis.legend(fontsize=8)
    figure.savefig(file.with_suffix(".svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
