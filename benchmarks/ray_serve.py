"""Measure the application on Ray Serve: one replica on one core, and two nodes of which one is killed under load.

    python -m benchmarks.ray_serve --data DATA [--bundle models/cloze-mini]

First, short texts are sent one per request over a growing number of connections, to one replica through Ray's proxy and
to `python -m service`. The replica, and the service, run on the last core; Ray's other processes and the clients run on
the first. Then two nodes serve one replica each, and the raylet of one is killed while clients send requests. Prints
the tables of docs/ray-serve.md.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx
import numpy as np
import psutil

from benchmarks.machine import processor, versions
from benchmarks.peers import Server
from benchmarks.ray_cluster import HANGING, ROOT, Nodes, load
from benchmarks.serving import Workload, ask, workloads

CONNECTIONS: Final = (1, 2, 4, 8, 16, 32, 64, 128)
ROUNDS: Final = 3
STEADY: Final = 10.0  # seconds of load before and after each event
PACKAGES: Final = ("ray", "onnxruntime", "fastapi", "uvicorn", "numpy")


class Proxy:
    """Ray's proxy as a server of `benchmarks.serving`."""

    path = "/v1/embeddings"
    request = Server.request

    def __init__(self, port: int, model: str) -> None:
        self.port, self.model = port, model


def curve(server: Any, short: Workload) -> dict[int, tuple[float, float, float]]:
    """Requests per second, and the milliseconds of the 50th and the 99th percentile, by number of connections."""
    found = {}
    for connections in CONNECTIONS:
        requests = [server.request(texts) for texts in short.requests(connections)]
        rounds = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            _, seconds = asyncio.run(ask(server, requests, connections))
            rate = len(requests) / (time.perf_counter() - began)
            rounds.append((rate, *(1000 * np.percentile(seconds, [50, 99]))))
        rates, p50, p99 = zip(*rounds, strict=True)
        found[connections] = (median(rates), median(p50), median(p99))
    return found


def pin(processes: Iterable[psutil.Process], core: int) -> None:
    """Let all threads of the processes run on one core."""
    for process in processes:
        for thread in process.threads():
            os.sched_setaffinity(thread.id, {core})


def throughput(bundle: Path, data: Path) -> None:
    """Print the table of one replica and of the plain service."""
    short = workloads(data, 1)["short, 1 per request"]
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:1])  # also of the processes that are started from here
    with closing(Nodes(1)) as nodes:
        nodes.deploy(bundle, 1, precision="int8")
        started = psutil.Process().children(recursive=True)
        pin((each for each in started if "ServeReplica" in " ".join(each.cmdline())), cores[-1])
        replica = curve(Proxy(nodes.port, bundle.name), short)
    command = [sys.executable, "-m", "service", "--bundle", str(bundle), "--precision", "int8", "--threads", "1"]
    server = Server(command, "/v1/embeddings", bundle.name)
    pin([psutil.Process(server.process.pid)], cores[-1])
    plain = curve(server, short)
    server.end()
    os.sched_setaffinity(0, cores)
    print("| connections | replica: requests/s | p50 ms | p99 ms | service: requests/s | p50 ms | p99 ms |")
    print("|---|---|---|---|---|---|---|")
    for connections in CONNECTIONS:
        print("|", connections, *(f"| {value:.0f}" for value in replica[connections] + plain[connections]), "|")


def lost_node(bundle: Path, data: Path) -> None:
    """Print what became of the requests of 16 clients while one of two nodes was lost and another was added."""
    texts = workloads(data, 1)["short, 1 per request"].texts
    with closing(Nodes(2)) as nodes:
        nodes.deploy(bundle, 2, precision="int8")
        rows = httpx.post(f"{nodes.url}/embed", json={"inputs": texts}, timeout=HANGING).json()
        expected = dict(zip(texts, np.array(rows, dtype=np.float32), strict=True))
        with load(nodes.url, expected, clients=16) as answers:
            time.sleep(STEADY)
            killed = time.perf_counter()
            nodes.kill()
            time.sleep(STEADY)
            added = time.perf_counter()
            nodes.add()
            while nodes.replicas < 2:
                time.sleep(0.1)
            restored = time.perf_counter()
            time.sleep(STEADY)
    ended = np.array(sorted(answers.ended))
    after = ended[ended > killed - 1]
    print(f"requests {len(ended)}, lost {len(answers.lost)}, sent again {dict(answers.retries)}")
    print(f"slowest {max(answers.seconds):.1f} s, longest time without an answer {np.diff(after).max():.1f} s")
    for name, start in (("before", killed - STEADY), ("without", added - STEADY / 2), ("after", restored + STEADY / 2)):
        print(f"{name}: {np.sum((ended > start) & (ended < start + STEADY / 2)) / (STEADY / 2):.0f} requests/s")
    print(f"the new node's replica answered after {restored - added:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, default=ROOT / "models/cloze-mini")
    parser.add_argument("--data", type=Path, required=True)
    arguments = parser.parse_args()
    print(processor(), versions(PACKAGES))
    throughput(arguments.bundle, arguments.data)
    lost_node(arguments.bundle, arguments.data)


if __name__ == "__main__":
    main()
