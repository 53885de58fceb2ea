"""Measure the Python between two batches, as a GPU would wait for it: with a graph that computes nothing.

    python -m benchmarks.cycle [--bundle BUNDLE] [--batches 200] [--graph-ms 0] [--ahead 1]

Clients embed token ids without a pause, so that each batch is full: 2,048 texts of 16 tokens, and 256 of 128. The
session's graph is replaced by one that sleeps for `--graph-ms`; as on a GPU, one batch runs at a time and another is
prepared meanwhile, unless `--ahead 0`. For each shape the command prints the
time that the graph is idle between two batches, the median and the 95th percentile, and the CPU time of the process
for a batch.
"""

import argparse
import asyncio
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cloze.encoding.bundle import Bundle, locate
from cloze.machine import processor
from cloze.service.client import Client
from cloze.service.inference.admission import Admission
from cloze.service.inference.model import Cache, Model, Part
from cloze.service.inference.threads import Executors, Threads
from cloze.service.monitoring.metrics import Metrics
from cloze.service.settings import Settings

SHAPES: Final = ((2048, 16), (256, 128))  # texts of a batch, tokens of each
REQUESTS: Final = 8  # that share a batch; as many more wait meanwhile, twice


class Instant:
    """In the place of a graph's session: sleeps, gives the same vectors, and keeps when it began and ended."""

    def __init__(self, texts: int, dimension: int, seconds: float) -> None:
        self.vectors, self.seconds = np.ones((texts, dimension), np.float32), seconds
        self.spans: list[tuple[float, float]] = []

    def run(self, _: Sequence[str], feeds: Mapping[str, NDArray[np.int64]]) -> list[NDArray[np.float32]]:
        started = time.perf_counter()
        time.sleep(self.seconds)
        self.spans.append((started, time.perf_counter()))
        return [self.vectors[: len(feeds["input_ids"])]]


async def measure(bundle: Bundle, texts: int, tokens: int, batches: int, seconds: float, ahead: int) -> dict[str, Any]:
    """Run so many batches of one shape."""
    settings = Settings.read(["--max-batch-tokens", str(texts * tokens), "--provider", "cpu"], {})
    executors, metrics = Executors(Threads(1 + ahead, 1)), Metrics()
    model = Model(bundle, settings, executors, Admission(100, 10_000_000, 1 << 30), Cache(0))
    graph = Instant(texts, bundle.spec.dimension, seconds)
    model.session._session = graph
    model.batcher.parallel, model.batcher.ahead, model._turns = 1, ahead, BoundedSemaphore(1)  # as on a GPU
    model.start(metrics)
    ids = list(range(1000, 1000 + tokens - bundle.text_encoder.template_tokens))
    request = [[*ids[:-1], 1000 + number] for number in range(texts // REQUESTS)]

    async def client(number: int) -> None:
        part = Part([[2000 + number, *text_ids[1:]] for text_ids in request])
        while len(graph.spans) < batches:
            await model.embed(part, truncate=True, direction="right", client=Client(f"client {number}"))

    used = time.process_time()
    await asyncio.gather(*map(client, range(3 * REQUESTS)))
    used = time.process_time() - used
    spans = sorted(graph.spans)
    idle = [1000 * max(0.0, after[0] - before[1]) for before, after in pairwise(spans)]
    await executors.close(1.0)
    return {
        "texts": texts,
        "tokens": tokens,
        "batches": len(spans),
        "idle_ms": round(float(np.median(idle)), 2),
        "idle_p95_ms": round(float(np.percentile(idle, 95)), 2),
        "cpu_ms": round(1000 * used / len(spans), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", default="cloze-mini")
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--graph-ms", type=float, default=0.0)
    parser.add_argument("--ahead", type=int, default=1, choices=(0, 1))
    given = parser.parse_args()
    bundle = Bundle.load(locate(Path(given.bundle)))
    print(processor())
    for texts, tokens in SHAPES:
        print(asyncio.run(measure(bundle, texts, tokens, given.batches, given.graph_ms / 1000, given.ahead)))


if __name__ == "__main__":
    main()
