"""Tables and a chart of the serving benchmark's results."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from cloze.training.evaluation.tables import markdown_table

__all__ = ["INT8", "INT8_MIXED", "INT8_SHORT", "draw", "is_quantised", "ratio_rows", "ratios", "spread", "tables"]

INT8, FP32 = "Cloze, int8", "Cloze, fp32"
ALONE: Final = "{}, tokenising and session alone"
IN_PROCESS: Final = "in process"
INT8_MIXED: Final = "int8, mixed texts: throughput / infinity's best engine"
INT8_SHORT: Final = "int8, short texts: throughput / infinity's best engine"

Figures = Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]]  # connections -> contender -> figures by round
Measure = Callable[[Figures, str, int], float]


def tables(results: Mapping[str, Any]) -> str:
    return "\n\n".join(part(results) for part in (ratios, speeds, latencies, costs))


def ratios(results: Mapping[str, Any]) -> str:
    """Ratios of Cloze to the best of the other contenders, round by round, as a Markdown table."""
    title = f"ratio, median of {results['rounds']} rounds (lowest to highest)"
    return markdown_table(["", title], list(ratio_rows(results).items()))


def ratio_rows(results: Mapping[str, Any]) -> dict[str, str]:
    """What is compared -> the median ratio, and the lowest and the highest."""
    short, mixed = list(results["figures"].values())[:2]
    infinity = [name for name in short["1"] if name.startswith("infinity")]
    libraries = [name for name in mixed[IN_PROCESS] if not name.startswith("Cloze")]
    fp32 = [name for name in libraries if not is_quantised(name)]
    one_client, alone = _least("1", "p50"), _least(IN_PROCESS, "p50")
    rows: list[tuple[str, Figures, Measure, str, Measure, list[str]]] = [
        (INT8_MIXED, mixed, highest, INT8, highest, infinity),
        ("fp32, mixed texts: throughput / infinity's best engine", mixed, highest, FP32, highest, infinity),
        ("int8, mixed texts: throughput over HTTP / best library in process", mixed, highest, INT8, highest, libraries),
        ("fp32, mixed texts: throughput over HTTP / best fp32 library in process", mixed, highest, FP32, highest, fp32),
        (INT8_SHORT, short, highest, INT8, highest, infinity),
        ("int8, short texts: throughput over HTTP / best library in process", short, highest, INT8, highest, libraries),
        ("fp32, short texts: throughput over HTTP / best fp32 library in process", short, highest, FP32, highest, fp32),
        ("int8, short texts, one client: p50 latency / infinity's best engine",
         short, one_client, INT8, one_client, infinity),
        ("int8, short texts, one client: p50 latency / tokenising and session alone",
         short, one_client, INT8, alone, [ALONE.format(INT8)]),
    ]  # fmt: skip
    if "128" in short:
        last = _least("128", "p99")
        title = "int8, short texts, 128 clients: p99 latency / infinity's best engine"
        rows.append((title, short, last, INT8, last, infinity))
    lines = {}
    for name, figures, measure, contender, other_measure, others in rows:
        if others:
            against = [
                measure(figures, contender, number) / max(other_measure(figures, other, number) for other in others)
                for number in range(results["rounds"])
            ]
            lines[name] = f"{median(against):.2f} ({min(against):.2f} to {max(against):.2f})"
    return lines


def spread(results: Mapping[str, Any]) -> tuple[float, float]:
    """Throughput of the fastest round over that of the slowest: median and maximum of contenders and workloads."""
    factors = []
    for levels in results["figures"].values():
        for rows in levels.values():
            for rounds in rows.values():
                speeds = [figures["texts_per_second"] for figures in rounds]
                factors.append(max(speeds) / min(speeds))
    return median(factors), max(factors)


def is_quantised(contender: str) -> bool:
    return "int8" in contender or "q8_0" in contender


def highest(figures: Figures, contender: str, number: int) -> float:
    """A contender's highest throughput in one round, over all numbers of connections."""
    return max(rows[contender][number]["texts_per_second"] for rows in figures.values() if contender in rows)


def _least(level: str, key: str) -> Measure:
    """A figure for which lower is better, negated, so that the highest value is the best."""
    return lambda figures, contender, number: -figures[level][contender][number][key]


def speeds(results: Mapping[str, Any]) -> str:
    """Highest throughput by workload, and what the vectors are worth, as a Markdown table."""
    work: Mapping[str, Figures] = results["figures"]
    names = list(dict.fromkeys(name for figures in work.values() for rows in figures.values() for name in rows))
    lines = []
    for name in names:
        rates = [
            median(highest(figures, name, number) for number in range(results["rounds"])) for figures in work.values()
        ]
        worth = [""] * 3
        if accuracy := results["accuracy"].get(name):
            worth = [f"{accuracy['STS-B dev']:.2f}", f"{accuracy['least']:.4f}", f"{accuracy['batch']:.0e}"]
        lines.append((name, *(f"{rate:.0f}" for rate in rates), *worth))
    titles = ["texts per second", *work, "STS-B dev", "lowest cosine to torch", "changed by the batch"]
    return markdown_table(titles, lines)


def latencies(results: Mapping[str, Any]) -> str:
    """Latency of short texts, one per request, as a Markdown table."""
    figures: Figures = next(iter(results["figures"].values()))
    levels = _levels(figures)
    titles, lines = [f"{level} client{'s' * (level != '1')}" for level in levels], []
    for name in figures[levels[0]]:
        cells = []
        for level in levels:
            p50, p99 = (median(1000 * run[key] for run in figures[level][name]) for key in ("p50", "p99"))
            cells.append(f"{p50:.1f} / {p99:.1f}")
        lines.append((name, *cells))
    return markdown_table(["p50 / p99 in ms", *titles], lines)


def costs(results: Mapping[str, Any]) -> str:
    """Start-up time, memory and CPU time of each contender, as a Markdown table."""
    mixed: Figures = list(results["figures"].values())[1]
    rows = {**mixed[_levels(mixed)[-1]], **mixed[IN_PROCESS]}
    lines = []
    for name, rounds in rows.items():
        server = results["servers"].get(name)
        cells = [f"{server['started']:.1f}", f"{server['peak_mb']:.0f}"] if server else ["", ""]
        lines.append((name, *cells, f"{median(run['cpu'] for run in rounds):.2f}"))
    return markdown_table(["", "seconds to first answer", "peak memory, MiB", "CPU seconds, mixed texts"], lines)


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw throughput by connections, one panel for each workload; dotted lines for contenders in process."""
    from matplotlib import colormaps, pyplot, rc_context

    colours = colormaps["tab20"]
    work: Mapping[str, Figures] = results["figures"]
    with rc_context({"svg.hashsalt": "cloze"}):  # the same file from the same figures
        figure, panels = pyplot.subplots(1, len(work), figsize=(4 * len(work), 4), layout="constrained")
        for panel, (name, figures) in zip(panels, work.items(), strict=True):
            levels = _levels(figures)
            for place, contender in enumerate(figures[levels[0]]):
                rates = [median(run["texts_per_second"] for run in figures[level][contender]) for level in levels]
                panel.plot(levels, rates, marker="o", color=colours(place), label=contender)
            for place, (contender, rounds) in enumerate(figures[IN_PROCESS].items(), start=len(figures[levels[0]])):
                rate = median(run["texts_per_second"] for run in rounds)
                panel.axhline(rate, linestyle=":", color=colours(place), label=contender)
            panel.set(title=name, xlabel="connections", ylim=(0, None))
        panels[0].set_ylabel("texts per second")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


def _levels(figures: Figures) -> list[str]:
    return [level for level in figures if level != IN_PROCESS]
