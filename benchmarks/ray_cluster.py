"""A Ray cluster on this machine that serves the application, and clients that put load on it."""

import asyncio
import os
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from unittest import mock

import httpx
import numpy as np
import psutil
import ray
from numpy.typing import NDArray
from ray import serve
from ray.cluster_utils import Cluster

from cloze.service.ray import Replicas, app

ROOT: Final = Path(__file__).parents[1]
RETRIED: Final = (429, 503, 504)  # the statuses after which docs/api.md says to send the request again
HANGING: Final = 120.0  # seconds after which a request counts as lost


class Nodes:
    """A Ray cluster on this machine, of nodes with one CPU each. The proxy on the first node listens on `url`."""

    def __init__(self, count: int) -> None:
        with socket.socket() as line:
            line.bind(("127.0.0.1", 0))
            self.port = int(line.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._environ = mock.patch.dict(os.environ, {"PYTHONPATH": str(ROOT)})  # of the processes that Ray starts
        self._environ.start()
        self._folder = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
        head = {"num_cpus": 1, "include_dashboard": False, "temp_dir": self._folder.name}
        self._frozen: list[psutil.Process] = []
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(count - 1):
            self.add()
        ray.init(address=self._cluster.address, namespace="serve", log_to_driver=False)
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": self.port})

    def add(self) -> None:
        """Add a node."""
        self._newest = self._cluster.add_node(num_cpus=1)

    def kill(self) -> None:
        """Send SIGKILL to every process of the newest node at once: its raylet, its replica and its agents."""
        for process in self._processes():
            process.kill()

    def freeze(self) -> None:
        """Stop every process of the newest node, so that its connections stay open, as after the loss of a network."""
        self._frozen = self._processes()
        for process in self._frozen:
            process.suspend()

    def _processes(self) -> list[psutil.Process]:
        raylet = psutil.Process(self._newest.all_processes["raylet"][0].process.pid)
        return [raylet, *raylet.children(recursive=True)]

    def deploy(self, bundle: Path, replicas: int, **settings: object) -> None:
        """Deploy, or deploy again, and wait until every replica is ready."""
        environ = {f"CLOZE_{name.upper()}": str(value) for name, value in settings.items()}
        with mock.patch.dict(os.environ, environ | {"CLOZE_BUNDLE": str(bundle)}):
            serve.run(app(Replicas(min_replicas=replicas, max_replicas=replicas)))

    @property
    def replicas(self) -> int:
        """Return the number of replicas that run."""
        states = serve.status().applications["default"].deployments["Cloze"].replica_states
        return int(states.get("RUNNING", 0))

    def close(self) -> None:
        for process in self._frozen:
            process.kill()
        serve.shutdown()
        ray.shutdown()
        self._cluster.shutdown()
        self._environ.stop()
        self._folder.cleanup()


@dataclass
class Answers:
    """What the clients of `load` have seen."""

    seconds: list[float] = field(default_factory=list)  # of each request, from its first try to its answer
    ended: list[float] = field(default_factory=list)  # when each was answered, by `time.perf_counter`
    retries: Counter[str] = field(default_factory=Counter)  # tries that had to be repeated, by the reason
    lost: list[str] = field(default_factory=list)  # requests with another error, with a wrong answer, or without one


@contextmanager
def load(url: str, expected: Mapping[str, NDArray[np.float32]], clients: int) -> Iterator[Answers]:
    """Send texts, one per request, while the block runs, and wait for the answers. `expected` are their vectors.

    A request is sent again after a status in RETRIED, when its `Retry-After` has passed, and after a lost connection.
    """
    answers, stop = Answers(), threading.Event()

    async def run() -> None:
        limits = httpx.Limits(max_connections=clients)
        async with httpx.AsyncClient(base_url=url, timeout=HANGING, limits=limits) as http:
            turns = iter(list(expected) * 1000)
            await asyncio.gather(*(_client(http, turns, expected, answers, stop) for _ in range(clients)))

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        yield answers
    finally:
        stop.set()
        thread.join()


async def _client(
    http: httpx.AsyncClient,
    turns: Iterator[str],
    expected: Mapping[str, NDArray[np.float32]],
    answers: Answers,
    stop: threading.Event,
) -> None:
    while not stop.is_set():
        text, began = next(turns), time.perf_counter()
        while True:
            try:
                response = await http.post("/embed", json={"inputs": text})
            except httpx.TimeoutException:
                answers.lost.append(f"{text}: no answer in {HANGING:g} s")
                break
            except httpx.TransportError as error:
                answers.retries[type(error).__name__] += 1
                continue
            if response.status_code in RETRIED and "retry-after" in response.headers:
                answers.retries[str(response.status_code)] += 1
                await asyncio.sleep(float(response.headers["retry-after"]))
                continue
            if response.status_code != 200:
                answers.lost.append(f"{text}: {response.status_code} {response.text[:200]}")
            elif not np.allclose(response.json()[0], expected[text], atol=1e-5):
                answers.lost.append(f"{text}: another vector")
            answers.ended.append(time.perf_counter())
            answers.seconds.append(answers.ended[-1] - began)
            break
