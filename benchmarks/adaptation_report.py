"""The table and the picture of benchmarks.adaptation: what `cloze adapt` gains with so many queries to learn from.

    python -m benchmarks.adaptation_report benchmarks/results/adaptation.jsonl

It prints the table of the most queries of each collection, and draws adaptation.svg beside the file: the gain on the
other half of the queries by the number of those that were learnt from, with its 95 % interval.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

from matplotlib import pyplot as plt

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

Rows = dict[str, list[dict[str, Any]]]
"""Collection -> its lines of the first seed, those with the fewest queries first."""


def read(file: Path) -> Rows:
    rows: Rows = defaultdict(list)
    for row in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
        if row["seed"] == 0:
            rows[row["collection"]].append(row)
    return {name: sorted(lines, key=lambda row: int(row["queries"])) for name, lines in rows.items()}


def table(rows: Rows) -> str:
    lines = []
    for name, (*_, row) in rows.items():
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


def draw(rows: Rows, path: Path) -> None:
    plt.rcParams |= {"svg.hashsalt": "adaptation", "svg.fonttype": "none"}
    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for number, (name, lines) in enumerate(rows.items()):
        places = [row["queries"] * 1.03 ** (number - len(rows) / 2) for row in lines]  # apart, so that bars do not hide
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
    axis.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="what benchmarks.adaptation wrote")
    options = parser.parse_args()
    rows = read(options.results)
    print(table(rows))
    draw(rows, options.results.with_suffix(".svg"))


if __name__ == "__main__":
    main()
