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

Found = Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]]  # connections -> contender -> figures by round
Figure = Callable[[Found, str, int], float]


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
    rows: list[tuple[str, Found, Figure, str, Figure, list[str]]] = [
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
    for name, found, figure, one, other_figure, others in rows:
        if others:
            against = [
                figure(found, one, number) / max(other_figure(found, other, number) for other in others)
                for number in range(results["rounds"])
            ]
            lines[name] = f"{median(against):.2f} ({min(against):.2f} to {max(against):.2f})"
    return lines


def spread(results: Mapping[str, Any]) -> tuple[float, float]:
    """Throughput of the fastest round over that of the slowest: median and maximum of contenders and workloads."""
    found = []
    for levels in results["figures"].values():
        for rows in levels.values():
            for rounds in rows.values():
                speeds = [each["texts_per_second"] for each in rounds]
                found.append(max(speeds) / min(speeds))
    return median(found), max(found)


def is_quantised(contender: str) -> bool:
    return "int8" in contender or "q8_0" in contender


def highest(found: Found, contender: str, number: int) -> float:
    """A contender's highest throughput in one round, over all numbers of connections."""
    return max(rows[contender][number]["texts_per_second"] for rows in found.values() if contender in rows)


def _least(level: str, key: str) -> Figure:
    """A figure for which lower is better, negated, so that the highest value is the best."""
    return lambda found, contender, number: -found[level][contender][number][key]


def speeds(results: Mapping[str, Any]) -> str:
    """Highest throughput by workload, and what the vectors are worth, as a Markdown table."""
    work: Mapping[str, Found] = results["figures"]
    names = list(dict.fromkeys(name for found in work.values() for rows in found.values() for name in rows))
    lines = []
    for name in names:
        rates = [median(highest(found, name, number) for number in range(results["rounds"])) for found in work.values()]
        found = results["accuracy"].get(name)
        worth = [f"{found['STS-B dev']:.2f}", f"{found['least']:.4f}", f"{found['batch']:.0e}"] if found else [""] * 3
        lines.append((name, *(f"{rate:.0f}" for rate in rates), *worth))
    titles = ["texts per second", *work, "STS-B dev", "lowest cosine to torch", "changed by the batch"]
    return markdown_table(titles, lines)


def latencies(results: Mapping[str, Any]) -> str:
    """Latency of short texts, one per request, as a Markdown table."""
    found: Found = next(iter(results["figures"].values()))
    levels = _levels(found)
    titles, lines = [f"{level} client{'s' * (level != '1')}" for level in levels], []
    for name in found[levels[0]]:
        cells = []
        for level in levels:
            p50, p99 = (median(1000 * each[key] for each in found[level][name]) for key in ("p50", "p99"))
            cells.append(f"{p50:.1f} / {p99:.1f}")
        lines.append((name, *cells))
    return markdown_table(["p50 / p99 in ms", *titles], lines)


def costs(results: Mapping[str, Any]) -> str:
    """Start-up time, memory and CPU time of each contender, as a Markdown table."""
    mixed: Found = list(results["figures"].values())[1]
    rows = {**mixed[_levels(mixed)[-1]], **mixed[IN_PROCESS]}
    lines = []
    for name, rounds in rows.items():
        server = results["servers"].get(name)
        cells = [f"{server['started']:.1f}", f"{server['peak_mb']:.0f}"] if server else ["", ""]
        lines.append((name, *cells, f"{median(each['cpu'] for each in rounds):.2f}"))
    return markdown_table(["", "seconds to first answer", "peak memory, MiB", "CPU seconds, mixed texts"], lines)


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw throughput by connections, one panel for each workload; dotted lines for contenders in process."""
    from matplotlib import colormaps, pyplot, rc_context

    colours = colormaps["tab20"]
    work: Mapping[str, Found] = results["figures"]
    with rc_context({"svg.hashsalt": "cloze"}):  # the same file from the same figures
        figure, panels = pyplot.subplots(1, len(work), figsize=(4 * len(work), 4), layout="constrained")
        for panel, (name, found) in zip(panels, work.items(), strict=True):
            levels = _levels(found)
            for place, contender in enumerate(found[levels[0]]):
                rates = [median(each["texts_per_second"] for each in found[level][contender]) for level in levels]
                panel.plot(levels, rates, marker="o", color=colours(place), label=contender)
            for place, (contender, rounds) in enumerate(found[IN_PROCESS].items(), start=len(found[levels[0]])):
                rate = median(each["texts_per_second"] for each in rounds)
                panel.axhline(rate, linestyle=":", color=colours(place), label=contender)
            panel.set(title=name, xlabel="connections", ylim=(0, None))
        panels[0].set_ylabel("texts per second")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


def _levels(found: Found) -> list[str]:
    return [level for level in found if level != IN_PROCESS]
