"""Bulk embedding: what Ray costs beside the session alone, and what several nodes do.

    python -m benchmarks.scale demo  --bundle B --texts FILE --rows 20000    # make bulk-demo
    python -m benchmarks.scale nodes --bundle B --texts FILE --rows 20000    # clusters of 1, 2 and 4 nodes
    python -m benchmarks.scale memory --bundle B --texts FILE --rows 20000   # and of ten times as many rows

`demo` alternates the command `cloze bulk` with a loop over the session, in the same precision, and compares the
vectors with those of `POST /embed`. `nodes` starts Ray clusters on this machine. All processes of a node are bound to
one CPU, and so are the driver and Ray's own processes with the first node; more nodes than CPUs share them. Both write
benchmarks/results/scale.json.
"""

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final

import httpx
import numpy as np
import psutil
import pyarrow.parquet as pq

from cloze.encoding.bundle import Bundle
from cloze.machine import available_cpus, processor, versions
from cloze.service.inference.session import Session
from cloze.service.inference.threads import share_threads

RESULTS: Final = Path(__file__).parent / "results" / "scale.json"
SAMPLE_SECONDS: Final = 4  # measuring shared memory takes a moment of a CPU
PACKAGES: Final = ("ray", "pyarrow", "onnxruntime", "tokenizers", "numpy")
DONE: Final = re.compile(
    r"embedded (\d+) rows with (\d+) tokens .* in ([\d.]+) s, .*; starting Ray and its workers took ([\d.]+) s"
)


def raw(bundle: Path, precision: str, texts: list[str]) -> float:
    """Seconds to tokenise and run the texts, sorted by length, with as many batches at once as the service runs."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    shared, loaded = share_threads(0), Bundle.load(bundle)
    session = Session.load(loaded, precision=precision, provider="cpu", threads=shared.per_batch)  # type: ignore[arg-type]
    encoder, size = loaded.text_encoder, session.batches.tokens
    started = perf_counter()
    with ThreadPoolExecutor(shared.batches) as pool:
        slices = [texts[first : first + 256] for first in range(0, len(texts), 256)]
        ids = sorted(
            (tokens.ids for part in pool.map(encoder.encode, slices) for tokens in part), key=len, reverse=True
        )
        batches: list[list[list[int]]] = [[]]
        for sequence in ids:
            if batches[-1] and len(batches[-1][0]) * (len(batches[-1]) + 1) > size:
                batches.append([])
            batches[-1].append(sequence)
        for _ in pool.map(lambda batch: session.run(encoder.pad(batch)), batches):
            pass
    return perf_counter() - started


def bulk(bundle: Path, precision: str, source: Path, out: Path, *options: str) -> dict[str, float]:
    """Run the command. Return its rows, seconds, seconds to start, and the most memory of all its processes in MB."""
    words = [str(source), str(out), "--bundle", str(bundle), "--precision", precision, *options]
    started = perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "cloze.service.bulk", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        peak = 0.0
        while process.poll() is None:
            peak = max(peak, _memory(process.pid))
            try:
                process.wait(SAMPLE_SECONDS)
            except subprocess.TimeoutExpired:
                continue
        assert process.stdout is not None
        match = DONE.search(process.stdout.read())
    if match is None:
        raise SystemExit(f"the command failed with status {process.returncode}")
    figures = dict(zip(("rows", "tokens", "seconds", "engine"), map(float, match.groups()), strict=True))
    return figures | {"wall": perf_counter() - started, "peak_mb": peak}


def demo(bundle: Path, source: Path, texts: list[str], rounds: int) -> dict[str, Any]:
    """Alternate the session alone with the whole command."""
    precision = Session.load(Bundle.load(bundle), provider="cpu", threads=1).precision
    results: dict[str, Any] = {"precision": precision, "raw": [], "bulk": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            results["raw"].append(raw(bundle, precision, texts))
            results["bulk"].append(bulk(bundle, precision, source, Path(folder, str(number))))
            took, alone = results["bulk"][-1], results["raw"][-1]
            print(f"round {number + 1}: session alone {alone:.1f} s, cloze bulk {took['seconds']:.1f} s", flush=True)
        results["difference"] = asyncio.run(_difference(bundle, precision, Path(folder, "0")))
    results["ratio"] = median(
        took["seconds"] / alone for took, alone in zip(results["bulk"], results["raw"], strict=True)
    )
    print(
        f"{len(texts)} texts, {precision}: cloze bulk took {results['ratio']:.2f} times as long as the session alone; "
        f"Ray and its workers took {median(took['engine'] for took in results['bulk']):.1f} s more to start. "
        f"The largest difference from POST /embed is {results['difference']:.1e}"
    )
    return results


async def _difference(bundle: Path, precision: str, out: Path) -> float:
    """Largest difference between the written vectors and the service's, over all rows."""
    from cloze.service.app import create_app
    from cloze.service.settings import Settings

    table = pq.read_table(out / "vectors")
    app = create_app(Settings(bundle=bundle, precision=precision, provider="cpu"))
    served: list[np.ndarray] = []
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here", timeout=600) as http,
    ):
        texts = table.column("text").to_pylist()
        for first in range(0, len(texts), 1000):
            body = {"inputs": texts[first : first + 1000]}
            answer = await http.post("/embed", json=body, headers={"accept": "application/octet-stream"})
            served.append(np.frombuffer(answer.content, "<f4"))
    written = table.column("embedding").combine_chunks().flatten().to_numpy()
    return float(np.abs(written - np.concatenate(served)).max())


def nodes(bundle: Path, precision: str, source: Path, counts: list[int], rounds: int) -> dict[str, Any]:
    """Run the command on clusters of so many nodes of one CPU each, in turn."""
    results: dict[str, Any] = {str(count): [] for count in counts}
    for number in range(rounds):
        for count in counts:
            with tempfile.TemporaryDirectory() as folder, cluster(count) as address:
                options = ("--address", address, "--worker-cpus", "1", "--rows-per-file", "1024")
                took = bulk(bundle, precision, source, Path(folder, "out"), *options)
            results[str(count)].append(took)
            print(f"round {number + 1}: {count} nodes, {took['rows'] / took['seconds']:.0f} rows/s", flush=True)
    rates = {count: median(took["rows"] / took["seconds"] for took in runs) for count, runs in results.items()}
    for nodes, rate in rates.items():
        share = rate / rates["1"] / min(int(nodes), available_cpus())
        print(f"{nodes} nodes: {rate:.0f} rows/s, {share:.2f} of one node's for each CPU")
    return results


@contextmanager
def cluster(count: int) -> Iterator[str]:
    """Start a Ray cluster whose node n has CPU n; this process is left on the first node's CPU."""
    from ray.cluster_utils import Cluster

    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cpus[:1])
    ray_cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        for number in range(1, count):
            os.sched_setaffinity(0, [cpus[number % len(cpus)]])
            ray_cluster.add_node(num_cpus=1)
        os.sched_setaffinity(0, cpus[:1])
        yield ray_cluster.address
    finally:
        ray_cluster.shutdown()
        os.sched_setaffinity(0, cpus)


def first_lines(texts: Path, rows: int, out: Path) -> list[str]:
    """Write the first lines of a file to another one, and return them."""
    with texts.open(encoding="utf-8") as file:
        lines = [line.rstrip("\n") for line in islice(file, rows)]
    out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return lines


def _memory(pid: int) -> float:
    """MB of memory of a process and of all below it; what they share is counted once (PSS)."""
    total = 0.0
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        try:
            total += process.memory_full_info().pss / 1e6
        except psutil.Error:
            continue
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("demo", "nodes", "memory"))
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--texts", type=Path, required=True, help="file with a text in each line")
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", default="int8", help="graph of `nodes`; `demo` takes the fastest")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "texts.txt")
        texts = first_lines(options.texts, options.rows, source)
        if options.part == "demo":
            figures = demo(options.bundle, source, texts, options.rounds)
        elif options.part == "nodes":
            figures = nodes(options.bundle, options.precision, source, [1, 2, 4], options.rounds)
        else:
            figures = {"runs": [bulk(options.bundle, options.precision, source, Path(folder, "one"))]}
            first_lines(options.texts, 10 * options.rows, source)
            figures["runs"].append(bulk(options.bundle, options.precision, source, Path(folder, "ten")))
    machine = {"processor": processor(), "cpus": available_cpus(), "versions": versions(PACKAGES), "rows": len(texts)}
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(results | {options.part: machine | figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
