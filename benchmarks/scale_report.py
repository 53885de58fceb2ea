"""The tables of docs/scale.md and docs/notes/scale.md, from benchmarks/results/scale.json, by `make reference`."""

import json
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.readme import MODEL
from cloze.encoding.bundle import Bundle

RESULTS: Final = Path(__file__).parent / "results" / "scale.json"
SIZES: Final = (10**6, 10**8, 10**9)  # texts
TEXT_TOKENS: Final = 30
BYTES: Final = {"float32": 4.0, "float16": 2.0, "int8": 1.0, "binary": 1 / 8}  # of one dimension
CORES: Final = (2, 16, 256)


def figures() -> str:
    """Return what was measured, one machine against the session alone and nodes against one node."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    demo, nodes = results["demo"], results["nodes"]
    memory = [f"{took['rows']:,.0f} rows: {took['peak_mb']:,.0f} MB" for took in results["memory"]["runs"]]
    engine = median(took["engine"] for took in demo["bulk"])
    rows = {
        f"time of `cloze bulk` / time of the session alone, {demo['rows']:,} texts": f"{demo['ratio']:.2f}",
        "rows per second; tokens per second": f"{_rate(demo):,.0f}; {tokens_per_second(results):,.0f}",
        "starting Ray and its workers": f"{engine:.0f} s",
        "largest difference from the vectors of `POST /embed`": f"{demo['difference']:g}",
        "memory of all processes, at most": "; ".join(memory),
    }
    one_node = _node_rate(nodes["1"])
    for count in filter(str.isdecimal, nodes):
        cpus, rate = min(int(count), nodes["cpus"]), _node_rate(nodes[count])
        name = f"{count} node{'s' * (count != '1')} on {cpus} CPU{'s' * (cpus > 1)}"
        rows[f"rows per second of {name}; for each CPU, relative to one node"] = (
            f"{rate:,.0f}; {rate / one_node / cpus:.2f}"
        )
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def setting() -> str:
    """Return the machine and the versions."""
    demo = json.loads(RESULTS.read_text(encoding="utf-8"))["demo"]
    versions = ", ".join(f"{name} {number}" for name, number in demo["versions"].items())
    return f"cloze-mini in {demo['precision']}, {demo['cpus']} CPUs, {demo['processor']}. Versions: {versions}."


def plans() -> str:
    """Return hours and disk for SIZES texts of TEXT_TOKENS tokens, from the measured tokens per second of one core."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    bundle = Bundle.load(MODEL)
    length, width = TEXT_TOKENS + bundle.text_encoder.template_tokens, bundle.spec.dimension
    a_core = tokens_per_second(results) / results["demo"]["cpus"]
    rows = [
        f"| texts | core-hours | {' | '.join(f'hours on {cores} cores' for cores in CORES)} | {' | '.join(BYTES)} |",
        "|---" * (2 + len(CORES) + len(BYTES)) + "|",
    ]
    for texts in SIZES:
        hours = texts * length / a_core / 3600
        disk = [_size(texts * width * component_bytes) for component_bytes in BYTES.values()]
        cells = [f"{texts:,}", _number(hours), *(_number(hours / cores) for cores in CORES), *disk]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def tokens_per_second(results: dict[str, Any]) -> float:
    return float(median(took["tokens"] / took["seconds"] for took in results["demo"]["bulk"]))


def _rate(demo: dict[str, Any]) -> float:
    return float(demo["rows"] / median(took["seconds"] for took in demo["bulk"]))


def _node_rate(runs: list[dict[str, float]]) -> float:
    return median(took["rows"] / took["seconds"] for took in runs)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1g}"


def _size(size: float) -> str:
    return next(f"{size / unit:,.3g} {name}" for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")) if size >= unit)
