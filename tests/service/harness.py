"""What the service's tests drive it with: a client of an app, and a server in a process of its own."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from pathlib import Path
from threading import Event, Thread
from typing import ClassVar

import httpx
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]

MakeBundle = Callable[..., Path]
MakeApp = Callable[..., FastAPI]
MakeClient = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]
Hold = Callable[[], AbstractContextManager[None]]


@asynccontextmanager
async def open_client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an app that has started; it stops with the block."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        yield http


async def until(condition: Callable[[], object]) -> None:
    """Wait for it, and fail after half a minute."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


def samples_of(text: str) -> dict[str, float]:
    """`name{label=value}` to value, without the histograms' buckets."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            if not sample.name.endswith("_bucket"):
                found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


class Process:
    """A server in a process of its own; `log` is all it wrote once it has ended."""

    program: ClassVar[tuple[str, ...]] = ("-m", "service")

    def __init__(self, *arguments: str) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("CLOZE_")}
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
        self._served.wait()
        assert self.url, f"the server ended before it served:\n{self.log}"

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
        self._reader.join(60)
        return self.process.wait(60)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.wait()


Serve = Callable[..., Process]
