"""The figures in README.md, from the shipped model's own contract and the results beside this file.

python -m benchmarks.readme
"""

import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks import graphs, serving, serving_report, training
from encoding.bundle import Bundle
from training.evaluate.suite import search_columns

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
MODEL = ROOT / "models" / "cloze-mini"
RESULTS = Path(__file__).parent / "results"
PARENT = RESULTS / "all-MiniLM-L6-v2.json"
COLUMNS = ("STS12", "STS13", "STS14", "STS15", "STS16", "STS-B", "SICK-R", "Avg.")
BEGIN, END = "<!-- figures: made by benchmarks/readme.py -->\n", "<!-- end of figures -->"


def with_figures(page: str) -> str:
    """The page with the tables as they must be."""
    before, rest = page.split(BEGIN)
    parts = (scores(COLUMNS), search(), graph_speeds(), served(), trained(), soak())
    text = "\n\n".join(parts)
    return f"{before}{BEGIN}\n{text}\n\n{END}{rest.split(END)[1]}"


def scores(columns: Sequence[str]) -> str:
    """Figures of the shipped graph, of the same before quantisation, and of its parent."""
    bundle = Bundle.load(MODEL)
    size = bundle.graph("int8").stat().st_size / 1e6
    rows = {
        f"**cloze-mini**, int8, {size:.1f} MB, [MASK]": bundle.spec.provenance.scores["int8"],
        "cloze-mini before quantisation, fp32, [MASK]": bundle.spec.provenance.scores["fp32"],
        "its parent all-MiniLM-L6-v2, fp32, mean": parent(),
    }
    lines = [f"| | {' | '.join(columns)} |", "| --- |" + " ---: |" * len(columns)]
    for name, row in rows.items():
        lines.append(f"| {name} | {' | '.join(f'{row[column]:.2f}' for column in columns)} |")
    return "\n".join(lines)


def search() -> str:
    return scores(search_columns([parent()]))


def graph_speeds() -> str:
    results = _results(graphs)
    return f"{graphs.table(results)}\n\n{results['texts']}, in process, {results['machine']}; {_versions(results)}."


def served() -> str:
    results = _results(serving)
    counts = ", ".join(f"{count} {name.partition(',')[0]}" for name, count in results["texts"].items())
    return (
        f"{serving_report.tables(results)}\n\n{counts} texts, {results['rounds']} rounds "
        f"([chart](benchmarks/results/serving.svg)), {results['machine']}; {_versions(results)}."
    )


def trained() -> str:
    results = _results(training)
    return f"{training.table(results)}\n\n{results['texts']}, {results['machine']}; {_versions(results)}."


def soak() -> str:
    found = json.loads((RESULTS / "soak.json").read_text(encoding="utf-8"))
    requests, (before, after) = found["requests"], found["rss_mb"].values()
    return (
        f"{found['minutes']:.0f} minutes at saturation, {len(found['models'])} models, {found['clients']} clients on "
        f"the same CPUs ([chart](benchmarks/results/soak.svg)): {requests['sent']:,} requests sent, "
        f"{requests['answered']:,} answered, {requests['left']} left before the answer, {requests['refused']} refused, "
        f"{requests['lost']} lost; {found['checked']:,} rows held against the idle service's, {len(found['wrong'])} "
        f"wrong; the server's memory {before:.0f} MB after the first minute, {after:.0f} at the end."
    )


def parent() -> dict[str, float]:
    """The parent's figures, as `python -m training.evaluate --json` wrote them."""
    found: dict[str, float] = json.loads(PARENT.read_text(encoding="utf-8"))["scores"]["torch fp32"]
    return found


def _results(benchmark: ModuleType) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(benchmark.RESULTS.read_text(encoding="utf-8"))
    return found


def _versions(results: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in results["versions"].items())


if __name__ == "__main__":
    README.write_text(with_figures(README.read_text(encoding="utf-8")), encoding="utf-8")
