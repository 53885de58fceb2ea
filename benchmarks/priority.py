"""Measure what one interactive text waits while 64 clients embed in bulk.

    python -m benchmarks.priority --data DATA [--bundle BUNDLE] [--requests 300]

One client sends a sentence at a time, with a pause of 20 ms after each answer: to an idle server, then beside 64
clients that send 32 sentences a request without a pause, first without the header `x-priority`, then as bulk. The
clients of the load run in a process of their own. The command writes benchmarks/results/priority.json and prints the
figures.
"""

import argparse
import asyncio
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.peers import Server
from cloze.encoding.bundle import locate
from cloze.machine import available_cpus, processor, versions
from cloze.training.evaluation.sts import load_pairs

RESULTS: Final = Path(__file__).parent / "results" / "priority.json"
PACKAGES: Final = ("onnxruntime", "tokenizers", "numpy", "fastapi", "uvicorn")
CLIENTS: Final = 64
TEXTS: Final = 32  # of a request of the load
PAUSE: Final = 0.02  # seconds between two interactive requests
LOADS: Final[dict[str, dict[str, str] | None]] = {
    "idle server": None,
    "64 clients without the header": {},
    "64 clients in bulk": {"x-priority": "bulk"},
}


async def _load(url: str, sentences: list[str], headers: dict[str, str]) -> None:
    """Send requests from all clients until the process is ended."""

    async def work(number: int) -> None:
        draw = np.random.default_rng(number)
        while True:
            await http.post("/embed", json={"inputs": draw.choice(sentences, TEXTS).tolist()}, headers=headers)

    limits = httpx.Limits(max_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as http:
        await asyncio.gather(*map(work, range(CLIENTS)))


@contextmanager
def load(url: str, sentences: list[str], headers: dict[str, str] | None) -> Iterator[None]:
    """Keep the clients of the load running within the block, from when texts wait for a batch."""
    if headers is None:
        yield
        return
    process = multiprocessing.get_context("spawn").Process(target=_run, args=(url, sentences, headers))
    process.start()
    try:
        while not metrics(url)["cloze_queue_texts"]:
            time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.join()


def _run(url: str, sentences: list[str], headers: dict[str, str]) -> None:
    asyncio.run(_load(url, sentences, headers))


def metrics(url: str) -> dict[str, float]:
    """The server's metrics of one model, by name."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    return {sample.name: sample.value for family in families for sample in family.samples if "model" in sample.labels}


def measure(url: str, sentences: list[str], requests: int) -> dict[str, float]:
    """Milliseconds of single texts, and of a batch meanwhile; texts a second of all clients."""
    before, began, seconds = metrics(url), time.perf_counter(), list[float]()
    with httpx.Client(base_url=url, timeout=None) as http:
        for number in range(requests):
            started = time.perf_counter()
            http.post("/embed", json={"inputs": sentences[number % len(sentences)]}).raise_for_status()
            seconds.append(time.perf_counter() - started)
            time.sleep(PAUSE)
    took, after = time.perf_counter() - began, metrics(url)
    grown = {name: after[name] - before[name] for name in before}
    batches = grown["cloze_inference_seconds_count"]
    p50, p99 = 1000 * np.percentile(seconds, [50, 99])
    return {
        "p50_ms": round(float(p50), 1),
        "p99_ms": round(float(p99), 1),
        "batch_ms": round(1000 * grown["cloze_inference_seconds_sum"] / batches, 1),
        "texts_per_second": round(grown["cloze_texts_total"] / took, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--bundle", type=Path, default=locate("cloze-mini"))
    parser.add_argument("--requests", type=int, default=300)
    options = parser.parse_args()
    pairs = load_pairs(options.data / "senteval/downstream/STS/STSBenchmark/sts-dev.csv")
    sentences = sorted({*pairs.left, *pairs.right})
    server = Server([sys.executable, "-m", "cloze.service", "--bundle", str(options.bundle)], "/v1/embeddings", "")
    url = f"http://127.0.0.1:{server.port}"
    try:
        figures = {}
        for name, headers in LOADS.items():
            with load(url, sentences, headers):
                figures[name] = measure(url, sentences, options.requests)
            print(name, figures[name], flush=True)
    finally:
        server.end()
    idle, bulk = figures["idle server"], figures["64 clients in bulk"]
    limit = 2 * idle["p99_ms"] + bulk["batch_ms"]
    print(f"p99 in bulk {bulk['p99_ms']} ms; twice that of an idle server plus one batch: {limit:.1f} ms")
    machine = {"cpus": available_cpus(), "processor": processor(), "versions": versions(PACKAGES)}
    RESULTS.write_text(json.dumps({"machine": machine, "loads": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
