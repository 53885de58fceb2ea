"""A service over real sockets, its graphs held still or let go by the test, and clients that misbehave on them."""

import json
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import numpy as np
import onnx
import uvicorn
from fastapi import FastAPI
from harness import PATIENCE, Process, samples_of, services, wait_until
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from tiny_bundle import graph, vocabulary

from cloze.encoding.bundle import INPUTS, OUTPUT
from cloze.encoding.text import Batch
from cloze.service.inference.session import Session
from cloze.service.server import uvicorn_config

BODY = json.dumps({"inputs": "a man"}).encode()


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), PATIENCE)


def small_connection(url: str) -> socket.socket:
    """A connection on which little waits for its reader."""
    host, port = url.removeprefix("http://").split(":")
    stream = socket.socket()
    stream.settimeout(PATIENCE)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    stream.connect((host, int(port)))
    return stream


def ask_for_megabytes(url: str) -> socket.socket:
    """A connection on which an answer of a model with 512 dimensions comes, more than the sockets hold."""
    stream = small_connection(url)
    stream.sendall(request({"inputs": ["a man"] * 3000}))
    return stream


def head(length: str, path: str = "/embed", *lines: str) -> bytes:
    first = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", *lines, length, "", ""]
    return "\r\n".join(first).encode()


def request(body: object, path: str = "/embed", *lines: str) -> bytes:
    """A whole one."""
    content = json.dumps(body).encode()
    return head(f"content-length: {len(content)}", path, *lines) + content


def answer(stream: socket.socket) -> tuple[int, bytes]:
    """Read one whole answer."""
    file = stream.makefile("rb", buffering=0)  # a buffer would swallow the beginning of the next answer
    status = int(file.readline().split()[1])
    headers = dict(line.lower().strip().split(b": ", 1) for line in iter(file.readline, b"\r\n"))
    length, body = int(headers[b"content-length"]), b""
    while len(body) < length:
        part = file.read(length - len(body))
        assert part, f"{len(body)} of {length} bytes"
        body += part
    return status, body


def ask(url: str, body: object, path: str = "/embed", *lines: str) -> tuple[int, bytes]:
    """Status and body of the answer to a request that arrives at once: no limit of its body can be reached."""
    with connect(url) as stream:
        stream.sendall(request(body, path, *lines))
        return answer(stream)


def reset(stream: socket.socket) -> None:
    """Close without a farewell: whatever is on its way is lost."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.close()


class Background(threading.Thread):
    """Calls something; `result` waits for what it gave, or raises what it raised."""

    def __init__(self, task: Callable[[], Any]) -> None:
        super().__init__()
        self._task = task
        self._result: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._task()
        except BaseException as error:
            self._error = error

    @property
    def result(self) -> Any:
        self.join(PATIENCE)
        assert not self.is_alive()
        if self._error is not None:
            raise self._error
        return self._result


class Gate:
    """A session's `run` that lets so many batches through, and knows what it was given. After its block it is open."""

    def __init__(self, session: Session) -> None:
        self._run = session.run
        self._passes = threading.Semaphore(0)
        self.batches: list[int] = []  # texts of each batch that has come
        session.run = self  # type: ignore[method-assign, assignment]

    def __call__(self, batch: Batch) -> NDArray[np.float32]:
        self.batches.append(len(batch.input_ids))
        assert self._passes.acquire(timeout=PATIENCE)
        return self._run(batch)

    def let(self, batches: int = 1_000_000) -> None:
        self._passes.release(batches)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.let()


@contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """The app in a thread, with all that uvicorn is asked in a process of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        running = uvicorn.Server(uvicorn_config(app, services(app).settings))
        thread = threading.Thread(target=running.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            running.should_exit = True
            thread.join()


def metrics(url: str) -> dict[str, float]:
    return samples_of(httpx.get(f"{url}/metrics").raise_for_status().text)


def statuses(url: str, route: str = "/embed") -> dict[int, int]:
    """How many answers of each status the server has counted on a route."""
    start = f"cloze_requests_total{{route={route},status="
    found = {name: count for name, count in metrics(url).items() if name.startswith(start) and count}
    return {int(name.removeprefix(start).rstrip("}")): int(count) for name, count in found.items()}


def quiet(url: str) -> bool:
    """Whether this request is the only one in flight."""
    found = metrics(url)
    waiting = sum(count for name, count in found.items() if name.startswith("cloze_queue_texts"))
    return found["cloze_requests_in_flight"] == 1 and found["cloze_tokens_in_flight"] == waiting == 0


def embed(url: str, texts: Sequence[str], path: str = "/embed", **headers: str) -> NDArray[np.float32]:
    response = httpx.post(f"{url}{path}", json={"inputs": list(texts)}, headers=headers, timeout=PATIENCE)
    assert response.status_code == 200, response.text
    return np.array(response.json(), dtype=np.float32)


def hanging() -> onnx.ModelProto:
    """The tiny graph; a batch in which the word "dogs" is never ends, for a loop in it runs 10¹⁵ times."""
    model = graph()
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["goes"]),
            helper.make_node("Mul", ["value", "value"], ["next"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("round", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("value", TensorProto.FLOAT, []),
        ],
        [
            helper.make_tensor_value_info("goes", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.FLOAT, []),
        ],
    )
    nodes = model.graph.node
    nodes[-1].output[0] = "finished"  # what was the graph's own output
    nodes.extend(
        [
            helper.make_node("Equal", [INPUTS[0], "dogs"], ["found"]),
            helper.make_node("Cast", ["found"], ["counted"], to=TensorProto.INT64),
            helper.make_node("ReduceMax", ["counted"], ["any"], keepdims=0),
            helper.make_node("Mul", ["any", "many"], ["rounds"]),
            helper.make_node("Loop", ["rounds", "", "nothing"], ["still"], body=body),
            helper.make_node("Add", ["finished", "still"], [OUTPUT]),
        ]
    )
    constants = {"dogs": np.array(vocabulary()["dogs"]), "many": np.array(10**15), "nothing": np.float32(0)}
    model.graph.initializer.extend(numpy_helper.from_array(np.array(value), name) for name, value in constants.items())
    return model


TIMED = """
import signal, sys, threading
from cloze.command import run
from cloze.service.__main__ import main
from cloze.service.inference import session, threads
from cloze.service.inference.session import Session
from cloze.service.inference import health

passed, monotonic = 0.0, session.monotonic

def pass_time(number, frame):
    global passed
    passed += {seconds}

session.monotonic = threads.monotonic = lambda: monotonic() + passed
health.FROZEN = float("inf")  # a pause of the process, which the machine may impose, is of no test
signal.signal(signal.SIGUSR2, pass_time)
{changes}
sys.exit(run(main))
"""


class Timed(Process):
    """A server of which the test says how long a batch has run, or a model has failed; `stall_seconds` is PATIENCE."""

    def __init_subclass__(cls, changes: str) -> None:
        cls.program = ("-c", TIMED.format(seconds=2.5 * PATIENCE, changes=changes))

    def pass_time(self) -> None:
        """After this the service is not ready, but not hung; a model that fails is lost. Again, and it is hung."""
        self.process.send_signal(signal.SIGUSR2)


HELD = f"""
opened, forward = threading.Event(), Session._forward

def held(self, batch):
    if {vocabulary()["dogs"]} in batch.input_ids:
        print("a batch is held", file=sys.stderr, flush=True)
        opened.wait()
    return forward(self, batch)

Session._forward = held
signal.signal(signal.SIGUSR1, lambda number, frame: opened.set())
"""


class Held(Timed, changes=HELD):
    """A server in which a batch with the word "dogs" waits until the test opens."""

    def wait_for_batch(self) -> None:
        wait_until(lambda: "a batch is held" in self.log)

    def open(self) -> None:
        self.process.send_signal(signal.SIGUSR1)


ServeHeld = Callable[..., Held]

BREAKABLE = """
def lost(self, batch):
    raise RuntimeError("the device is lost")

def lose(number, frame):
    Session._forward = lost

signal.signal(signal.SIGUSR1, lose)
"""


class Breakable(Timed, changes=BREAKABLE):
    """A server whose graphs fail after `lose`, as after the loss of a GPU."""

    def lose(self) -> None:
        self.process.send_signal(signal.SIGUSR1)


def files(process: Process) -> int:
    """How many files and sockets a process has open."""
    return len(list(Path(f"/proc/{process.process.pid}/fd").iterdir()))


def unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)  # type: ignore[no-any-return]
