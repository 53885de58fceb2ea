"""Results of a soak test: criteria, percentiles, a table and a chart."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from matplotlib import pyplot as plt

from benchmarks.soak_requests import SIZES, Books
from cloze.training.evaluation.tables import markdown_table

GROWTH = 0.05
DEAF_GROWTH = 0.20  # from the fifth minute on, where answers wait for clients that do not read
BIN = 10  # seconds
PERCENTILES = {"p50": 50, "p90": 90, "p99": 99, "p99.9": 99.9, "max": 100}


class Sample(NamedTuple):
    """State of the server; one sample per second."""

    seconds: float
    rss_mb: float
    waiting: float  # texts
    texts: float
    tokens: float


@dataclass(frozen=True)
class Run:
    """What the clients and the server counted during the load."""

    books: Books
    samples: list[Sample]
    seconds: float
    statuses: dict[str, int]  # responses of the server, by status
    dropped: int  # requests whose client disconnected before the response
    texts: int  # embedded by the server
    tokens: int


def rss_growth(samples: Sequence[Sample], seconds: float, settled: float = 60.0) -> tuple[float, float]:
    """Memory in MiB when it has `settled`, in seconds, and at the end, each as the median of a window."""
    settle, window = min(settled, seconds / 4), min(60.0, seconds / 8)
    first = [sample.rss_mb for sample in samples if settle <= sample.seconds < settle + window]
    last = [sample.rss_mb for sample in samples if sample.seconds >= seconds - window]
    return median(first), median(last)


def criteria(run: Run, status: int, warnings: Sequence[str], *, deaf: bool = False) -> dict[str, bool]:
    """Each criterion and whether it holds; the server's exit status and warnings count too.

    Clients that are `deaf` lose their connection (504), and the log says that it lost records.
    """
    books, texts, server = run.books, run.books.texts, run.statuses
    sent, answered, refused, left = (books.counts[name] for name in ("sent", "answered", "refused", "left"))
    known = sum(server.values()) + run.dropped - server.get("499", 0)  # requests that reached the server
    first, last = rss_growth(run.samples, run.seconds, 300.0 if deaf else 60.0)
    growth, usual = (DEAF_GROWTH, {"200", "429", "499", "504"}) if deaf else (GROWTH, {"200", "429", "499"})
    if deaf:
        warnings = [line for line in warnings if "log records" not in line]
    return {
        "every answer is right": not books.wrong,
        "no request is lost: sent = answered + refused + left": sent == answered + refused + left,
        "the server has answered 200 or 429, or the client disconnected": set(server) <= usual,
        "the server's answers are the clients'": answered <= server.get("200", 0) <= answered + left,
        "the server's refusals are the clients'": refused <= server.get("429", 0) <= refused + left,
        "the server has seen what was sent": sent - left <= known <= sent,
        "the server's texts are the clients'": texts["answered"] <= run.texts <= texts["answered"] + texts["left"],
        f"RSS grows by less than {growth:.0%}": last / first - 1 < growth,
        "texts wait in 95 of 100 seconds or more": waiting_share(run.samples) >= 0.95,
        "the server ends with status 0, and its log warns of nothing": status == 0 and not warnings,
    }


def waiting_share(samples: Sequence[Sample]) -> float:
    return sum(sample.waiting > 0 for sample in samples) / len(samples)


def by_class(books: Books, key: Callable[[tuple[float, float, str, str]], str]) -> dict[str, dict[str, float]]:
    """Number of requests and percentiles of their latency in milliseconds, by class."""
    classes: dict[str, list[float]] = defaultdict(list)
    for request in books.latencies:
        classes[key(request)].append(1000 * request[1])
    return {
        name: {"requests": len(values), **percentiles(values)} for name, values in sorted(classes.items(), key=_order)
    }


def _order(named: tuple[str, list[float]]) -> tuple[int, str]:
    """Sort key: sizes in ascending order, then everything else by name."""
    sizes = [f"vectors, {size}" for size in SIZES]
    return (sizes.index(named[0]) if named[0] in sizes else len(sizes)), named[0]


def percentiles(values: Sequence[float]) -> dict[str, float]:
    return {name: round(float(np.percentile(values, rank)), 1) for name, rank in PERCENTILES.items()}


def size_of(request: tuple[float, float, str, str]) -> str:
    return "/tokenize" if request[2] == "/tokenize" else f"vectors, {request[3]}"


def over_time(run: Run) -> dict[str, list[float]]:
    """Memory, tokens per second and the latency in ms of requests with one text, for each BIN seconds."""
    bins = int(run.seconds // BIN)
    latencies: list[list[float]] = [[] for _ in range(bins)]
    for ended, latency, _, size in run.books.latencies:
        if size == "1 text" and ended < bins * BIN:
            latencies[int(ended // BIN)].append(1000 * latency)
    grouped = [[sample for sample in run.samples if place <= sample.seconds / BIN < place + 1] for place in range(bins)]
    series: dict[str, list[float]] = {
        "rss_mb": [round(median(sample.rss_mb for sample in group), 1) for group in grouped if group],
        "tokens_per_second": [
            round((later[-1].tokens - group[-1].tokens) / (later[-1].seconds - group[-1].seconds))
            for group, later in pairwise(grouped)
            if group and later
        ],
    }
    for name, rank in PERCENTILES.items():
        if name in ("p50", "p90", "p99", "max"):
            series[name] = [round(float(np.percentile(group, rank)), 1) for group in latencies if group]
    return series


def figures(run: Run) -> dict[str, Any]:
    """The content of soak.json."""
    books, seconds = run.books, run.seconds
    first, last = rss_growth(run.samples, seconds)
    outcomes = ("sent", "answered", "refused", "left", "lost")
    return {
        "minutes": round(seconds / 60, 2),
        "requests": {name: books.counts[name] for name in outcomes},
        "texts": {name: books.texts[name] for name in outcomes},
        "checked": books.checked,
        "wrong": books.wrong[:20],
        "server": {"statuses": run.statuses, "dropped": run.dropped, "texts": run.texts, "tokens": run.tokens},
        "texts_per_second": round(run.texts / seconds, 1),
        "tokens_per_second": round(run.tokens / seconds),
        "share_of_seconds_in_which_texts_wait": round(waiting_share(run.samples), 4),
        "rss_mb": {"after the first minute": round(first, 1), "at the end": round(last, 1)},
        "rss_growth": round(last / first - 1, 4),
        "by_size": by_class(books, size_of),
        "by_route": by_class(books, lambda request: request[2]),
        "seconds_a_step": BIN,
        "over_time": over_time(run),
    }


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw three panels over time as SVG, whose description is `digest` of the results."""
    plt.rcParams |= {"svg.hashsalt": "soak", "svg.fonttype": "none"}
    series = results["over_time"]
    panels: dict[str, Sequence[str]] = {
        "memory of the server, RSS in MiB": ["rss_mb"],
        "tokens per second": ["tokens_per_second"],
        "requests with one text, milliseconds": ["max", "p99", "p90", "p50"],
    }
    figure, axes = plt.subplots(len(panels), 1, figsize=(9, 7), sharex=True, layout="constrained")
    for axis, (title, names) in zip(axes, panels.items(), strict=True):
        for name in names:
            axis.plot(np.linspace(0, results["minutes"], len(series[name])), series[name], label=name)
        axis.set_title(title, loc="left", fontsize=10)
        axis.grid(alpha=0.3)
        axis.set_ylim(bottom=0)
    axes[-1].set(yscale="log", xlabel="minutes")
    axes[-1].legend(ncols=4)
    figure.savefig(path, metadata={"Date": None, "Description": digest(results)})


def digest(results: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(results["over_time"], sort_keys=True).encode()).hexdigest()


def table(results: dict[str, Any]) -> str:
    rows = [
        (name, str(row["requests"]), *(f"{row[rank]:.0f}" for rank in PERCENTILES))
        for name, row in {**results["by_size"], **results["by_route"]}.items()
    ]
    return markdown_table(["milliseconds", "requests", *PERCENTILES], rows)
