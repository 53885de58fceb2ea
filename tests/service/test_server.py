"""A real server: sockets, clients that leave, SIGTERM under load, and how it refuses to start."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
import uvicorn
from fastapi import FastAPI
from harness import ROOT, Process, Serve
from numpy.typing import NDArray

from encoding.text import Batch
from service.app import create_app
from service.settings import Settings

BODY = json.dumps({"inputs": "a man"}).encode()
PATIENCE = 60.0


@pytest.fixture(scope="module")
def server(serve: Serve, bundle: Path) -> Process:
    return serve("--bundle", str(bundle), "--threads", "1", "--max-body-bytes", "10000")


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), PATIENCE)


def head(length: str, path: str = "/embed") -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{length}\r\n\r\n".encode()


def answer(stream: socket.socket) -> tuple[int, bytes]:
    """Read one whole answer."""
    file = stream.makefile("rb")
    status = int(file.readline().split()[1])
    headers = dict(line.lower().strip().split(b": ", 1) for line in iter(file.readline, b"\r\n"))
    return status, file.read(int(headers[b"content-length"]))


def test_a_body_in_slow_pieces(server: Process) -> None:
    with connect(server.url) as stream:
        stream.sendall(head(f"content-length: {len(BODY)}"))
        for byte in BODY:
            stream.sendall(bytes([byte]))
        assert answer(stream)[0] == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_far_over_the_limit_is_refused_before_it_has_all_come(server: Process, chunked: bool) -> None:
    with connect(server.url) as stream:
        if chunked:
            stream.sendall(head("transfer-encoding: chunked") + b"c350\r\n" + b"x" * 50_000 + b"\r\n")
        else:
            stream.sendall(head("content-length: 1000000000"))
        status, body = answer(stream)
        assert (status, json.loads(body)["error_type"]) == (413, "PayloadTooLarge")


def test_who_sends_a_body_over_the_limit_reads_the_answer(server: Process) -> None:
    """Not a reset connection: the body is read to its end and dropped."""
    for _ in range(20):
        with connect(server.url) as stream:
            stream.sendall(head("content-length: 39000"))
            for _ in range(39):
                stream.sendall(b"x" * 1000)
            status, body = answer(stream)
            assert (status, json.loads(body)["error_type"]) == (413, "PayloadTooLarge")


def test_two_requests_on_one_connection_at_once(server: Process) -> None:
    with connect(server.url) as stream:
        stream.sendall(2 * (head(f"content-length: {len(BODY)}") + BODY))
        assert answer(stream)[0] == 200


def test_what_is_no_http(server: Process) -> None:
    with connect(server.url) as stream:
        stream.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
        assert stream.recv(100).startswith(b"HTTP/1.1 400")
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_client_that_leaves_in_the_middle_of_its_body(server: Process) -> None:
    with connect(server.url) as stream:
        stream.sendall(head("content-length: 9000") + b'{"inp')
    assert httpx.post(f"{server.url}/embed", content=BODY, headers={"content-type": "application/json"}).is_success


class Gate:
    """A session's `run` that waits until it is opened, and knows how many texts it was given."""

    def __init__(self, run: Callable[[Batch], NDArray[np.float32]]) -> None:
        self.run = run
        self.texts = 0
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self, batch: Batch) -> NDArray[np.float32]:
        self.texts += len(batch.input_ids)
        self.entered.set()
        assert self.opened.wait(PATIENCE)
        return self.run(batch)


@contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """uvicorn in a thread, over real sockets."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        running = uvicorn.Server(uvicorn.Config(app, log_config=None, ws="none", lifespan="on"))
        thread = threading.Thread(target=running.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            running.should_exit = True
            thread.join()


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread will do; only a hang runs out of patience."""
    waiting = threading.Event()
    for _ in range(int(PATIENCE / 0.01)):
        if condition():
            return
        waiting.wait(0.01)
    raise AssertionError("it never came true")


def test_a_client_that_leaves_costs_nothing(bundle: Path) -> None:
    app = create_app(Settings(bundle=bundle, threads=1))
    embedder = app.state.embedder
    with served(app) as url:
        httpx.get(f"{url}/health")  # the warm-up is over
        gate = embedder.session.run = Gate(embedder.session.run)
        with connect(url) as first:
            first.sendall(head(f"content-length: {len(BODY)}") + BODY)
            assert gate.entered.wait(PATIENCE)
            many = json.dumps({"inputs": ["a"] * 7}).encode()
            leavers = [connect(url) for _ in range(5)]
            for stream in leavers:
                stream.sendall(head(f"content-length: {len(many)}") + many)
            until(lambda: embedder.batcher.waiting_items == 35)
            for stream in leavers:
                stream.close()
            until(lambda: embedder.batcher.waiting_items == 0)
            gate.opened.set()
            assert answer(first)[0] == 200
        assert httpx.post(f"{url}/embed", json={"inputs": "a"}).is_success
        assert gate.texts == 2
        assert 'cloze_failures_total{reason="Dropped"} 5.0' in httpx.get(f"{url}/metrics").text


async def load(url: str, until_stopped: asyncio.Event, answered: list[int]) -> str:
    """Send requests one after another until one is not taken; the way it was not taken."""
    async with httpx.AsyncClient(timeout=PATIENCE) as http:
        while True:
            try:
                response = await http.post(f"{url}/embed", json={"inputs": ["a man plays the guitar"] * 8})
            except httpx.TransportError as error:
                return type(error).__name__
            assert response.status_code == 200, response.text
            assert len(response.json()) == 8
            answered.append(1)
            if len(answered) == 40:
                until_stopped.set()


def test_sigterm_under_load_answers_every_request_it_took(serve: Serve, slow_bundle: Path) -> None:
    process = serve("--bundle", str(slow_bundle), "--threads", "1", "--max-batch-tokens", "64")

    async def run() -> tuple[list[int], list[str]]:
        answered: list[int] = []
        busy = asyncio.Event()
        clients: list[Awaitable[str]] = [asyncio.create_task(load(process.url, busy, answered)) for _ in range(12)]
        await busy.wait()
        process.process.send_signal(signal.SIGTERM)
        return answered, list(await asyncio.gather(*clients))

    answered, ends = asyncio.run(run())
    assert process.wait() == 0, process.log
    assert set(ends) <= {"ConnectError", "RemoteProtocolError", "ReadError", "WriteError"}
    draining = re.search(r"draining requests=(\d+)", process.log)
    drained = re.search(r"drained requests=(\d+) given_up=0 answered_in_all=(\d+)", process.log)
    assert draining
    assert drained
    assert int(draining[1]) > 0
    assert int(drained[1]) >= int(draining[1])
    assert int(drained[2]) == len(answered)  # what the server says it answered is what the clients have
    assert "Traceback" not in process.log


def test_a_drain_that_lasts_too_long_tells_the_clients(serve: Serve, slow_bundle: Path) -> None:
    process = serve("--bundle", str(slow_bundle), "--threads", "1", "--max-batch-tokens", "32", "--drain-seconds", "1")
    long = json.dumps({"inputs": ["a"] * 16_000}).encode()
    with connect(process.url) as stream:
        stream.sendall(head(f"content-length: {len(long)}") + long)
        until(lambda: "cloze_batch_texts_count 0.0" not in httpx.get(f"{process.url}/metrics").text)
        process.process.send_signal(signal.SIGTERM)
        status, body = answer(stream)
    assert (status, json.loads(body)["error_type"]) == (503, "Unhealthy")
    assert process.wait() == 0
    assert "given_up=1" in process.log
    assert "Traceback" not in process.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_ends_with_status_0(serve: Serve, bundle: Path, number: int) -> None:
    process = serve("--bundle", str(bundle))
    with connect(process.url):  # an idle connection does not hold it
        assert process.end(number) == 0
    assert "Traceback" not in process.log
    assert re.search(r"bundle=tiny dimension=16 .* provider=cpu precision=fp32 threads=\d+", process.log)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "service", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE)


def test_help_lists_every_setting() -> None:
    found = run("--help")
    assert found.returncode == 0
    words = found.stdout.replace("\n", " ")
    for name in Settings.model_fields:
        assert f"--{name.replace('_', '-')}" in words


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "bundle is not set"),
        (["--port", "x"], "--port (CLOZE_PORT) is 'x'"),
        (["--bundle", "absent"], "absent is not a folder"),
        (["--bundle", "BUNDLE", "--precision", "int8"], "has no int8 graph"),
        (["--bundle", "BUNDLE", "--host", "256.256.256.256"], "cannot listen on host '256.256.256.256'"),
    ],
)
def test_a_start_that_cannot_be_is_one_line_and_status_2(bundle: Path, arguments: list[str], words: str) -> None:
    found = run(*(str(bundle) if word == "BUNDLE" else word for word in arguments))
    assert found.returncode == 2
    assert found.stderr.startswith("error: ")
    assert words in found.stderr
    assert len(found.stderr.splitlines()) == 1


def test_a_port_that_is_taken_is_one_line_and_status_2(bundle: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = run("--bundle", str(bundle), "--port", str(taken.getsockname()[1]))
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith("error: cannot listen on host '127.0.0.1'")
    assert len(found.stderr.splitlines()) == 1
