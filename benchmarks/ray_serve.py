"""Measure the application on Ray Serve: one replica on one core, and two nodes of which one is killed under load.

    python -m benchmarks.ray_serve --data DATA [--bundle models/cloze-mini]

First, short texts are sent one per request over a growing number of connections, to one replica through Ray's proxy and
to `cloze serve`. The replica, and the service, run on the last core; Ray's other processes and the clients run on
the first. Then two nodes serve one replica each, and the raylet of one is killed while clients send requests. Prints
the tables of docs/notes/scale.md.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx
import numpy as np
import psutil

from benchmarks.load import Workload, ask
from benchmarks.peers import Server
from benchmarks.ray_cluster import HANGING, ROOT, Nodes, load
from benchmarks.serving import workloads
from cloze.machine import processor, versions

CONNECTIONS: Final = (1, 2, 4, 8, 16, 32, 64, 128)
ROUNDS: Final = 3
STEADY: Final = 10.0  # seconds of load before and after each event
PACKAGES: Final = ("ray", "onnxruntime", "fastapi", "uvicorn", "numpy")


class Proxy:
    """Ray's proxy, as a server of `benchmarks.serving`."""

    path = "/v1/embeddings"
    request = Server.request

    def __init__(self, port: int, model: str) -> None:
        self.port, self.model = port, model


def curve(server: Any, processes: Sequence[psutil.Process], short: Workload) -> dict[int, list[float]]:
    """By number of connections: requests per second, ms of the 50th and 99th percentile, CPU ms of each process.

    Medians of ROUNDS. The CPU time is that of one request.
    """
    figures = {}
    for connections in CONNECTIONS:
        requests = [server.request(texts) for texts in short.requests(connections)]
        rounds = []
        for _ in range(ROUNDS):
            cpu, began = [cpu_seconds(process) for process in processes], time.perf_counter()
            _, seconds = asyncio.run(ask(server, requests, connections))
            rate = len(requests) / (time.perf_counter() - began)
            spent = [cpu_seconds(process) - before for process, before in zip(processes, cpu, strict=True)]
            percentiles = 1000 * np.percentile(seconds, [50, 99])
            rounds.append([rate, *percentiles, *(1000 * used / len(requests) for used in spent)])
        figures[connections] = [median(column) for column in zip(*rounds, strict=True)]
    return figures


def cpu_seconds(process: psutil.Process) -> float:
    return float(sum(process.cpu_times()[:2]))


def pin(process: psutil.Process, core: int) -> None:
    """Let all threads of a process run on one core."""
    for thread in process.threads():
        os.sched_setaffinity(thread.id, {core})


def throughput(bundle: Path, data: Path) -> None:
    """Print the table of one replica and of the plain service."""
    short = workloads(data, 1)["short, 1 per request"]
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:1])  # also of the processes that are started from here
    with closing(Nodes(1)) as nodes:
        nodes.deploy(bundle, 1, precision="int8")
        named = {" ".join(process.cmdline()): process for process in psutil.Process().children(recursive=True)}
        replica, proxy = (
            next(named[name] for name in named if actor in name) for actor in ("ServeReplica", "ProxyActor")
        )
        pin(replica, cores[-1])
        columns = [curve(Proxy(nodes.port, bundle.name), [replica, proxy], short)]
    command = [sys.executable, "-m", "cloze.service", "--bundle", str(bundle), "--precision", "int8", "--threads", "1"]
    server = Server(command, "/v1/embeddings", bundle.name)
    process = psutil.Process(server.process.pid)
    pin(process, cores[-1])
    columns.append(curve(server, [process], short))
    server.end()
    os.sched_setaffinity(0, cores)
    print("| connections | requests/s | p50 ms | p99 ms | CPU ms replica | CPU ms proxy "
          "| service: requests/s | p50 ms | p99 ms | CPU ms |")  # fmt: skip
    for connections in CONNECTIONS:
        print("|", connections, *(f"| {value:.2f}" for column in columns for value in column[connections]), "|")


def lost_node(bundle: Path, data: Path, lose: Callable[[Nodes], None]) -> None:
    """Print what became of the requests of 16 clients while one of two nodes was lost and another was added."""
    texts = workloads(data, 1)["short, 1 per request"].texts
    with closing(Nodes(2)) as nodes:
        nodes.deploy(bundle, 2, precision="int8")
        rows = httpx.post(f"{nodes.url}/embed", json={"inputs": texts}, timeout=HANGING).json()
        expected = dict(zip(texts, np.array(rows, dtype=np.float32), strict=True))
        with load(nodes.url, expected, clients=16) as answers:
            time.sleep(STEADY)
            lost = time.perf_counter()
            lose(nodes)
            while nodes.replicas > 1:
                time.sleep(0.1)
            noticed = time.perf_counter()
            time.sleep(STEADY)
            added = time.perf_counter()
            nodes.add()
            while nodes.replicas < 2:
                time.sleep(0.1)
            restored = time.perf_counter()
            time.sleep(STEADY)
    ended = np.array(sorted(answers.ended))
    gap = np.diff(ended[ended > lost - 1]).max()
    print(f"{lose.__name__}: requests {len(ended)}, lost {len(answers.lost)}, sent again {dict(answers.retries)}")
    print(f"slowest {max(answers.seconds):.1f} s, longest time without any answer {gap:.1f} s")
    for name, start in (("before", lost - STEADY), ("without", noticed), ("after", restored)):
        print(f"{name}: {np.sum((ended > start) & (ended < start + STEADY)) / STEADY:.0f} requests/s")
    print(f"one replica after {noticed - lost:.1f} s, and two {restored - added:.1f} s after the new node")
    print(*answers.lost[:5], sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, default=ROOT / "models/cloze-mini")
    parser.add_argument("--data", type=Path, required=True)
    arguments = parser.parse_args()
    print(processor(), versions(PACKAGES))
    throughput(arguments.bundle, arguments.data)
    for lose in (Nodes.kill, Nodes.freeze):
        lost_node(arguments.bundle, arguments.data, lose)


if __name__ == "__main__":
    main()
