"""What the service's tests drive it with: a client of an app, and a server in a process of its own."""

import asyncio
import contextlib
import os
import random
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from functools import cache
from pathlib import Path
from threading import Event, Thread
from typing import ClassVar

import httpx
import onnxruntime as ort
from fastapi import FastAPI
from patience import PATIENCE
from patience import wait_until as wait_until
from prometheus_client.parser import text_string_to_metric_families
from tiny_bundle import graph

from cloze.service.inference.model import Model
from cloze.service.services import Services
from cloze.service.settings import variable

ROOT = Path(__file__).parents[2]

# The service's own limits of time, which a busy machine must not reach. A test of one sets it.
LIMITS = dict.fromkeys(
    ("request_seconds", "queue_seconds", "body_seconds", "stall_seconds", "drain_seconds"), int(PATIENCE)
)

MakeBundle = Callable[..., Path]
MakeApp = Callable[..., FastAPI]
MakeClient = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]
Hold = Callable[[], AbstractContextManager[None]]


@cache
def has_cuda() -> bool:
    """Whether ONNX Runtime finds a CUDA device; where it has CUDA and no device, a session is on the CPU in silence."""
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        return False
    ort.preload_dlls()
    wanted = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    return ort.InferenceSession(graph().SerializeToString(), providers=wanted).get_providers()[0] == wanted[0]


@asynccontextmanager
async def open_client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an app that has started; it stops with the block."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        yield http


def services(app: FastAPI) -> Services:
    """What an app consists of."""
    found: Services = app.state.services
    return found


def default_model(app: FastAPI) -> Model:
    models = services(app).models
    return models.served[models.default]


def distinct(count: int) -> list[str]:
    """So many texts of five tokens each, no two equal: equal ones would be computed once."""
    return [" ".join(f"{number:05}") for number in range(count)]


async def until(condition: Callable[[], object]) -> None:
    """Wait for what a task will do."""
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.001)


def healthy(url: str) -> bool:
    """Whether a server answers there, and is ready."""
    try:
        return httpx.get(f"{url}/health", timeout=PATIENCE).status_code == 200
    except httpx.TransportError:
        return False


def free_port() -> int:
    """A port for a server that cannot choose one: below those that the system gives to a program that asks for any."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def samples_of(text: str) -> dict[str, float]:
    """`name{label=value}`, or `name` where there is no label, to value; without the histograms' buckets."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            if not sample.name.endswith("_bucket"):
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


# variables of an environment in which no server could be reached through the proxy or with the certificates it names
NO_ROADS = [
    ("ALL_PROXY", "socks5h://127.0.0.1:1"),
    ("http_proxy", "http://127.0.0.1:1"),
    ("SSL_CERT_FILE", "/nonexistent.pem"),
]


class Process:
    """A server in a process of its own, with LIMITS; `log` is all it wrote once it has ended."""

    program: ClassVar[tuple[str, ...]] = ("-m", "cloze.service")

    def __init__(self, *arguments: str) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("CLOZE_")}
        environ |= {variable(name): str(value) for name, value in LIMITS.items()}
        self.process = subprocess.Popen(
            [sys.executable, *self.program, "--port", "0", *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
            cwd=ROOT,
        )
        self.log, self.url = "", ""
        self._served = Event()
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._served.wait(PATIENCE):
            self.close()
        assert self.url, f"the server did not serve:\n{self.log}"

    def _read(self) -> None:
        """Take the log until the end: each POST is a line of it, and a full pipe would hold the server up."""
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self.log += line
                if found := re.search(r"serving (http://[\w.:\[\]]+)", line):
                    self.url = found[1]
                    self._served.set()
        self._served.set()

    def end(self, number: int) -> int:
        """Send a signal, and wait for the status."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        self._reader.join(PATIENCE)
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.wait()


Serve = Callable[..., Process]
