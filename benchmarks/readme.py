"""The figures in README.md, from the shipped model's own contract and the results beside this file.

python benchmarks/readme.py
"""

import json
from pathlib import Path

import throughput

from encoding.bundle import Bundle

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
    return f"{before}{BEGIN}\n{scores()}\n\n{speeds()}\n\n{soak()}\n\n{END}{rest.split(END)[1]}"


def scores() -> str:
    """The seven STS tasks: the shipped graph, the same before quantisation, its parent."""
    bundle = Bundle.load(MODEL)
    size = bundle.graph("int8").stat().st_size / 1e6
    rows = {
        f"**cloze-mini**, int8, {size:.1f} MB, [MASK]": bundle.spec.provenance.scores["int8"],
        "cloze-mini before quantisation, fp32, [MASK]": bundle.spec.provenance.scores["fp32"],
        "its parent all-MiniLM-L6-v2, fp32, mean": json.loads(PARENT.read_text(encoding="utf-8"))["scores"][
            "torch fp32"
        ],
    }
    lines = [f"| | {' | '.join(COLUMNS)} |", "| --- |" + " ---: |" * len(COLUMNS)]
    for name, row in rows.items():
        lines.append(f"| {name} | {' | '.join(f'{row[column]:.2f}' for column in COLUMNS)} |")
    return "\n".join(lines)


def speeds() -> str:
    results = json.loads(throughput.RESULTS.read_text(encoding="utf-8"))
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    return f"{throughput.table(results)}\n\n{results['texts']}, {results['machine']}; {versions}."


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


if __name__ == "__main__":
    README.write_text(with_figures(README.read_text(encoding="utf-8")), encoding="utf-8")
