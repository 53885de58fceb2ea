"""Load on a server: wrk measures it, and a simple client reads its vectors."""

import asyncio
import json
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.peers import Server

__all__ = ["Figures", "Workload", "ask", "load"]

SCRIPT: Final = Path(__file__).with_name("wrk.lua")
WRK: Final = ("wrk", "--threads", "1", "--duration", "1h", "--timeout", "1m", "--script", str(SCRIPT))


@dataclass(frozen=True)
class Workload:
    """Texts, the number of texts in one request, and the numbers of connections that are tried."""

    texts: list[str]
    texts_per_request: int
    connections: tuple[int, ...] = (8,)

    def requests(self, connections: int) -> list[list[str]]:
        """Requests of this workload; over one connection only a quarter of the texts is sent."""
        texts = self.texts[: len(self.texts) // 4] if connections == 1 else self.texts
        return [texts[first : first + self.texts_per_request] for first in range(0, len(texts), self.texts_per_request)]


@dataclass(frozen=True)
class Figures:
    """One contender's result for one workload, number of connections and round. Times are seconds."""

    texts_per_second: float
    p50: float
    p99: float
    cpu: float  # CPU seconds of the contender's processes, for all texts


async def ask(server: Server, requests: Sequence[bytes], connections: int) -> tuple[list[bytes], list[float]]:
    """The response bodies, in order, and the seconds of each."""
    bodies, seconds = [b""] * len(requests), [0.0] * len(requests)
    turns = iter(range(len(requests)))

    async def work() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for place in turns:
            began = time.perf_counter()
            writer.write(requests[place])
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            bodies[place] = await reader.readexactly(int(head.lower().split(b"content-length:")[1].split()[0]))
            seconds[place] = time.perf_counter() - began
        writer.close()

    await asyncio.gather(*(work() for _ in range(min(connections, len(requests)))))
    return bodies, seconds


def load(server: Server, workload: Workload, connections: int) -> Figures:
    """Send the texts over all connections at once, by wrk. Raises OSError if an answer is an error.

    The work of other connections is not counted that is in flight when the last awaited answer arrives.
    """
    requests = workload.requests(connections)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as bodies:
        bodies.writelines(json.dumps({"model": server.model, "input": texts}) + "\n" for texts in requests)
        bodies.flush()
        url = f"http://127.0.0.1:{server.port}{server.path}"
        arguments = ["--connections", str(connections), url, "--", bodies.name, str(len(requests))]
        with subprocess.Popen([*WRK, *arguments], stdout=subprocess.PIPE, text=True) as wrk:
            try:
                took, cpu = _until_ended(wrk, server)
                latency = json.loads(_line(wrk, "{"))
            finally:
                wrk.kill()
    return Figures(sum(map(len, requests)) / took, latency["p50"], latency["p99"], cpu)


def _until_ended(wrk: subprocess.Popen[str], server: Server) -> tuple[float, float]:
    """Seconds of the load, and the server's CPU seconds."""
    _line(wrk, "began")
    began, cpu = time.perf_counter(), server.cpu_seconds
    _line(wrk, "ended")
    took = time.perf_counter() - began
    wrk.send_signal(signal.SIGINT)
    return took, server.cpu_seconds - cpu


def _line(wrk: subprocess.Popen[str], start: str) -> str:
    """The next line that begins so. Raises OSError if wrk reports an error or ends."""
    assert wrk.stdout is not None
    for line in wrk.stdout:
        if line.startswith(start):
            return line
        if line.startswith("status"):
            raise OSError(f"the server answered with {line.strip()}")
    raise OSError(f"wrk ended before it wrote {start!r}")
