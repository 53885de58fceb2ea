"""The protocol over real sockets: what each limit answers, whom it leaves alone, and that no timer is left."""

import asyncio
import gc
import io
import json
import logging
import re
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
import uvicorn
from harness import wait_until
from starlette.types import Receive, Scope, Send

from service.logs import Text
from service.protocol import Protocol, protocol
from service.settings import Settings

SOON, NEVER = 0.6, 600.0
LARGE = 32 * 1024 * 1024  # more than the kernel takes
SMALL = 60_000  # less than asyncio's high-water mark
LIMITS = {"max_header_bytes": 2048, "header_seconds": NEVER, "body_seconds": NEVER, "send_seconds": NEVER}


class App:
    """Reads the body, and answers with it; a path chooses what it does besides. `seen` is what became of each."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.scopes: list[Scope] = []
        self.go_on = threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        if scope["path"] == "/early":  # answered before its body
            await self.answer(send, b"early", 413)
            return
        if scope["path"] == "/named":
            scope["state"]["request_id"] = "the-applications"
        if scope["path"] == "/wait":
            await asyncio.to_thread(self.go_on.wait)
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.seen.append("disconnect")
                return
            body, more = body + message["body"], message["more_body"]
        if scope["path"] == "/watch":  # works until its client leaves
            self.seen.append("/watch")
            while (await receive())["type"] != "http.disconnect":
                pass
            self.seen.append("disconnect")
            return
        if scope["path"] == "/slow":
            await asyncio.to_thread(self.go_on.wait)
        if scope["path"] == "/large":
            body = bytes(LARGE)
        if scope["path"] == "/small":
            body = bytes(SMALL)
        await self.answer(send, body)
        self.seen.append(scope["path"])

    async def answer(self, send: Send, body: bytes, status: int = 200) -> None:
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@dataclass
class Running:
    """A server in a thread."""

    app: App
    server: uvicorn.Server
    thread: threading.Thread
    port: int
    counted: list[str]

    def connect(self, kernel_buffer: int = 0) -> "Client":
        connected = socket.socket()
        if kernel_buffer:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, kernel_buffer)
        connected.settimeout(30)
        connected.connect(("127.0.0.1", self.port))
        return Client(connected)

    def only(self) -> Protocol:
        """The one connection."""
        wait_until(lambda: len(self.server.server_state.connections) == 1)
        (found,) = self.server.server_state.connections
        assert isinstance(found, Protocol)
        return found

    def call(self, function: Callable[..., None], *arguments: object) -> None:
        """In the server's thread, to its end."""
        done = threading.Event()
        loop = self.only().loop
        loop.call_soon_threadsafe(lambda: (function(*arguments), done.set()))
        assert done.wait(30)

    def ask(self, *parts: bytes) -> bytes:
        """Everything that comes back until the server ends the connection."""
        with self.connect() as client:
            client.send(*parts)
            return client.rest()


class Client:
    """One connection, byte by byte."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.file = connected.makefile("rb")

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
        self.socket.close()

    def send(self, *parts: bytes) -> None:
        for part in parts:
            self.socket.sendall(part)

    def rest(self) -> bytes:
        return self.file.read()

    def answer(self) -> tuple[int, bytes]:
        """One answer of a connection that goes on."""
        status = int(self.file.readline().split()[1])
        length = 0
        while (line := self.file.readline()) not in (b"\r\n", b""):
            if line.lower().startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        return status, self.file.read(length)


Start = Callable[..., Running]


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[object, Running]]:
    """One for each set of limits; they end with the module's tests."""
    running: dict[object, Running] = {}
    yield running
    for one in running.values():
        one.server.should_exit = True
    for one in running.values():
        one.thread.join(30)
        assert not one.thread.is_alive()


@pytest.fixture(params=["asyncio", "uvloop"])
def start(request: pytest.FixtureRequest, servers: dict[object, Running]) -> Iterator[Start]:
    """A server with these limits that has seen nothing yet."""
    used: list[Running] = []

    def begin(kernel_buffer: int = 0, **limits: float) -> Running:
        key = (request.param, kernel_buffer, *sorted(limits.items()))
        if key not in servers:
            servers[key] = launch(request.param, kernel_buffer, limits)
        used.append(servers[key])
        return servers[key]

    yield begin
    for running in used:
        running.app.go_on.set()
        wait_until(lambda running=running: not running.server.server_state.connections)
        running.app.go_on.clear()
        running.app.seen.clear()
        running.app.scopes.clear()
        running.counted.clear()


def launch(loop: Literal["asyncio", "uvloop"], kernel_buffer: int, limits: dict[str, float]) -> Running:
    settings = Settings(bundle=Path("none"), **(LIMITS | limits))
    listener = socket.create_server(("127.0.0.1", 0))
    if kernel_buffer:  # connections inherit it
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, kernel_buffer)
    app, counted = App(), []
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        loop=loop,
        http=protocol(settings, counted.append),
        ws="none",
        lifespan="off",
        timeout_keep_alive=600,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    return Running(app, server, thread, listener.getsockname()[1], counted)


def post(body: bytes, path: str = "/echo", *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: test", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def get(*headers: str, path: str = "/echo") -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "host: test", *headers, "", ""]).encode()


def refusal(answered: bytes, status: int, error_type: str) -> str:
    """The message of an answer that is one refusal and nothing else."""
    head, _, body = answered.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answered[:200]
    headers = httpx.Headers([tuple(line.split(b": ", 1)) for line in head.split(b"\r\n")[1:]])
    assert headers["connection"] == "close"
    assert headers["content-type"] == "application/json"
    assert int(headers["content-length"]) == len(body)
    assert headers["x-request-id"]
    told = json.loads(body)
    assert set(told) == {"error", "error_type"}
    assert told["error_type"] == error_type
    return str(told["error"])


# Heads that are too large


def head_of(size: int) -> bytes:
    return get("x: " + "y" * (size - len(get("x: "))))


def test_a_head_may_be_as_large_as_the_limit(start: Start) -> None:
    running = start()
    with running.connect() as client:
        client.send(head_of(2048))
        assert client.answer() == (200, b"")
        client.send(head_of(2048)[:700], head_of(2048)[700:])
        assert client.answer() == (200, b"")
    assert running.counted == []


@pytest.mark.parametrize("split", [1, 700, 2047])
def test_a_head_one_byte_larger_is_refused(start: Start, split: int) -> None:
    running = start()
    message = refusal(running.ask(head_of(2049)[:split], head_of(2049)[split:]), 431, "HeadersTooLarge")
    assert message == "the request's head is longer than 2048 bytes, the limit; send less in it"
    assert running.counted == ["HeadersTooLarge"]
    assert running.app.scopes == []


@pytest.mark.parametrize(
    "sent",
    [
        get(*(f"h{number}:" for number in range(1000))),
        get(path="/" + "a" * 4096),
        get("x" * 4096 + ": y"),
        b"\r\n" * 4096,
        b"GET / HTTP/1.1\r\nx: " + b"y" * 1_000_000,  # which never ends, and is answered while it is sent
    ],
    ids=["many", "path", "name", "empty lines", "endless"],
)
def test_heads_too_large_of_any_kind(start: Start, sent: bytes) -> None:
    running = start()
    refusal(running.ask(sent), 431, "HeadersTooLarge")
    assert running.counted == ["HeadersTooLarge"]


CHUNKED = b"POST /echo HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "endless", [b"5;" + b"x" * 8192, b"0\r\nx-trailer: " + b"y" * 8192, b"0\r\n" + b"x: y\r\n" * 999]
)
def test_what_is_no_body_is_limited_in_a_body_too(start: Start, endless: bytes) -> None:
    running = start()
    refusal(running.ask(CHUNKED, endless), 431, "HeadersTooLarge")
    assert running.counted == ["HeadersTooLarge"]
    assert "/echo" not in running.app.seen


def test_a_body_is_not_limited(start: Start) -> None:
    running = start()
    body = bytes(range(256)) * 4096
    chunks = b"".join(
        b"%x;name=value\r\n%s\r\n" % (len(part), part) for part in (body[:5], body[5:70_000], body[70_000:])
    )
    with running.connect() as client:
        client.send(post(body))
        assert client.answer() == (200, body)
        client.send(CHUNKED, chunks, b"0\r\nauthorization: trailer\r\n\r\n")
        assert client.answer() == (200, body)
    assert all(name != b"authorization" for name, _ in running.app.scopes[1]["headers"])
    assert running.counted == []


# Slow clients


@pytest.mark.parametrize("sent", [b"G", b"GET / HTTP/1.1\r\nhost: te", get()[:-1]])
def test_a_head_that_does_not_end(start: Start, sent: bytes) -> None:
    running = start(header_seconds=SOON)
    message = refusal(running.ask(sent), 408, "Slow")
    assert message == f"the request's head did not come within {SOON:g} seconds, the limit"
    assert running.counted == ["Slow"]
    assert running.app.scopes == []


def test_drops_of_a_head_win_no_time(start: Start) -> None:
    running = start(header_seconds=SOON)
    with running.connect() as client:
        client.send(b"GET / HTTP/1.1\r\n")
        stop = threading.Event()

        def drip() -> None:
            while not stop.wait(0.02):
                try:
                    client.send(b"x: y\r\n")
                except OSError:
                    return

        thread = threading.Thread(target=drip)
        thread.start()
        refusal(client.rest(), 408, "Slow")
        stop.set()
        thread.join()


@pytest.mark.parametrize("sent", [b"", b"\r\n"])
def test_a_connection_without_a_request_is_closed(start: Start, sent: bytes) -> None:
    running = start(header_seconds=SOON)
    assert running.ask(sent) == b""
    assert running.counted == []


def test_the_next_request_has_its_own_time(start: Start) -> None:
    running = start(header_seconds=SOON)
    with running.connect() as client:
        client.send(get())
        assert client.answer()[0] == 200
        client.send(b"GET / HT")
        refusal(client.rest(), 408, "Slow")


def test_a_stray_line_end_between_requests_does_not_hold_the_connection(start: Start) -> None:
    running = start(header_seconds=SOON)
    with running.connect() as client:
        client.send(get())
        assert client.answer()[0] == 200
        client.send(b"\r\n")
        assert client.rest() == b""
    assert running.counted == []


@pytest.mark.parametrize("sent", [post(bytes(10))[:-1], CHUNKED + b"5\r\nhel", CHUNKED, CHUNKED + b"0\r\n"])
def test_a_body_that_does_not_end(start: Start, sent: bytes) -> None:
    running = start(body_seconds=SOON)
    message = refusal(running.ask(sent), 408, "Slow")
    assert message == f"the request's body did not come within {SOON:g} seconds, the limit"
    assert running.counted == ["Slow"]
    wait_until(lambda: running.app.seen == ["disconnect"])
    assert running.app.scopes[0]["state"] == {"error_type": "Slow"}


def test_an_openai_path_is_answered_in_its_shape(start: Start) -> None:
    answered = start(body_seconds=SOON).ask(post(bytes(10), "/v1/embeddings", "x-request-id: mine")[:-1])
    assert b"\r\nx-request-id: mine\r\n" in answered
    assert json.loads(answered.partition(b"\r\n\r\n")[2])["error"]["type"] == "timeout_error"


def test_a_body_that_is_late_after_its_answer_ends_the_connection(start: Start, log: io.StringIO) -> None:
    running = start(body_seconds=SOON)
    with running.connect() as client:
        client.send(post(bytes(10), "/early")[:-1])
        assert client.answer() == (413, b"early")
        assert client.rest() == b""
    assert running.counted == []  # one request, one answer
    assert log.getvalue() == ""


def let_time_pass(running: Running) -> None:
    """As long as each limit, and longer: others are late by then, and nobody else."""
    before = list(running.counted)
    for _ in range(2):
        refusal(running.ask(post(bytes(10))[:-1]), 408, "Slow")
    assert running.counted == [*before, "Slow", "Slow"]


def test_an_answer_may_take_its_time(start: Start) -> None:
    """The limits pass while the application works, and the requests behind it wait for their turn."""
    running = start(header_seconds=SOON, body_seconds=SOON, send_seconds=SOON)
    with running.connect() as client:
        client.send(post(b"one", "/slow") + post(b"two") + post(b"three")[:30])
        let_time_pass(running)
        running.app.go_on.set()
        assert client.answer() == (200, b"one")
        assert client.answer() == (200, b"two")
        refusal(client.rest(), 408, "Slow")  # now it is the client's turn


def test_a_body_behind_an_answer_may_wait(start: Start) -> None:
    running = start(body_seconds=SOON)
    with running.connect() as client:
        client.send(post(b"one", "/slow") + post(b"two")[:-1])
        let_time_pass(running)
        running.app.go_on.set()
        assert client.answer() == (200, b"one")
        refusal(client.rest(), 408, "Slow")


def test_a_client_that_waits_for_100_continue_is_not_late(start: Start) -> None:
    running = start(body_seconds=SOON)
    with running.connect() as client:
        client.send(post(bytes(5), "/wait", "expect: 100-continue")[:-5])
        let_time_pass(running)
        running.app.go_on.set()
        assert client.file.readline() == b"HTTP/1.1 100 Continue\r\n"
        assert client.file.readline() == b"\r\n"
        refusal(client.rest(), 408, "Slow")


def test_a_body_that_is_not_read_is_not_late(start: Start) -> None:
    running = start(body_seconds=SOON)
    with running.connect() as client:
        client.send(post(bytes(300_000), "/wait")[:-1])
        let_time_pass(running)
        running.app.go_on.set()
        refusal(client.rest(), 408, "Slow")


def test_a_client_that_does_not_read_is_cut_off(start: Start) -> None:
    running = start(send_seconds=SOON)
    with running.connect() as client:
        client.send(get(path="/large"))
        wait_until(lambda: running.counted == ["Slow"])
        wait_until(lambda: not running.server.server_state.connections)
        assert len(client.rest()) < LARGE


def test_a_small_answer_that_is_not_read_is_cut_off(start: Start) -> None:
    """Less than what makes the transport pause the application, and more than the kernel takes."""
    running = start(send_seconds=SOON, kernel_buffer=4096)
    with running.connect(kernel_buffer=4096) as client:
        client.send(get(path="/small"))
        wait_until(lambda: running.counted == ["Slow"])
        assert running.app.seen == ["/small"]
        assert len(client.rest()) < SMALL


def test_a_client_that_reads_slowly_is_not_cut_off(start: Start) -> None:
    """The clock is the test's: the limit passes whenever it says so."""
    running = start()
    with running.connect(kernel_buffer=262_144) as client:  # else the kernel may take the whole answer
        client.send(get(path="/large"))
        connection = running.only()
        wait_until(lambda: connection.flow.write_paused)
        read = 0
        for _ in range(3):
            left = connection.transport.get_write_buffer_size()
            read += len(client.file.read(LARGE // 8))
            wait_until(lambda left=left: connection.transport.get_write_buffer_size() < left - 65_536)
            running.call(connection._output_is_late, left)
            assert not connection.transport.is_closing()
        running.call(lambda: connection._output_is_late(connection.transport.get_write_buffer_size()))
        assert connection.transport.is_closing()
        assert running.counted == ["Slow"]
        assert read + len(client.rest()) < LARGE


# What is no HTTP

HEAD = b"POST /echo HTTP/1.1\r\nhost: test\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        b"hello\r\n\r\n",
        b"GET / HTTP/1.2\r\nhost: a\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /\xc3\xa9 HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET http://a HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET / HTTP/1.1\nhost: a\n\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
        b"CONNECT a:80 HTTP/1.1\r\nhost: a\r\n\r\n",
        HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
        HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        HEAD + b"content-length: +5\r\n\r\nhello",
        HEAD + b"content-length: 5, 5\r\n\r\nhello",
        HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: identity\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET / HTTP/0.9\r\nhost: x\r\n\r\n",
        b"GET / HTTP/2.0\r\nhost: x\r\n\r\n",
        HEAD + b"x: a\r\n b\r\n\r\n",
        HEAD + b"x: a\x00b\r\n\r\n",
        HEAD + b"x\x00y: b\r\n\r\n",
        HEAD + b"x: a\rb\r\n\r\n",
        HEAD + b"x y: a\r\n\r\n",
        HEAD + b": a\r\n\r\n",
    ],
)
def test_what_is_no_http_never_reaches_the_application(
    start: Start, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    running = start()
    refusal(running.ask(sent), 400, "BadRequest")
    assert running.counted == ["BadRequest"]
    assert running.app.scopes == []
    assert "Invalid HTTP" not in caplog.text
    assert all(record.exc_info is None for record in caplog.records)


@pytest.mark.parametrize(
    "chunks",
    [b"zz\r\n", b"0x5\r\nhello\r\n", b"5\nhello\n", b"5\r\nhelloX", b"f" * 17 + b"\r\n", b"-1\r\n", b"5 \r\nhello\r\n"],
)
def test_a_chunk_that_is_none(start: Start, chunks: bytes) -> None:
    running = start()
    refusal(running.ask(CHUNKED + chunks), 400, "BadRequest")
    assert running.counted == ["BadRequest"]
    wait_until(lambda: running.app.seen == ["disconnect"])


@pytest.mark.parametrize("broken", [b"zz\r\n\r\n", CHUNKED + b"zz\r\n", HEAD + b"x: a\x00b\r\n\r\n"])
def test_requests_before_what_is_no_http_are_answered_first(start: Start, broken: bytes) -> None:
    running = start(body_seconds=SOON)
    with running.connect() as client:
        client.send(post(b"one", "/slow") + post(b"two") + broken)
        wait_until(lambda: running.counted == ["BadRequest"])
        let_time_pass(running)
        running.app.go_on.set()
        assert client.answer() == (200, b"one")
        assert client.answer() == (200, b"two")
        refusal(client.rest(), 400, "BadRequest")
    wait_until(lambda: running.app.seen == ["disconnect"] * 2 + ["/slow", "/echo"])


# What the log has of those that are refused


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[io.StringIO]:
    """The lines as the service writes them."""
    written = io.StringIO()
    handler, logger = logging.StreamHandler(written), logging.getLogger("service.protocol")
    handler.setFormatter(Text())
    caplog.set_level("INFO", logger.name)
    logger.addHandler(handler)
    yield written
    logger.removeHandler(handler)


SECRET = "authorization: Bearer secret"


@pytest.mark.parametrize(
    ("sent", "status", "error_type", "path"),
    [
        (get(SECRET, path="/embed?key=secret#secret")[:-1], 408, "Slow", "/embed"),
        (get(SECRET, "host: b", path="http://me:secret@a/x%20y=1%0A?secret"), 400, "BadRequest", "/x%20y%3D1%0A"),
        (get(SECRET, path="/" + "a" * 4096), 431, "HeadersTooLarge", "/" + "a" * 199),
        (b"secret\r\n\r\n", 400, "BadRequest", '""'),
        (b"GET http://me:secret", 408, "Slow", '""'),
        (post(b"secret", "/embed?secret", "x-request-id: mine")[:-1], 408, "Slow", "/embed"),
        (CHUNKED + b"secret\r\n", 400, "BadRequest", "/echo"),
    ],
)
def test_a_refusal_is_a_line_with_the_id_that_is_sent(
    start: Start, log: io.StringIO, sent: bytes, status: int, error_type: str, path: str
) -> None:
    answered = start(header_seconds=SOON, body_seconds=SOON).ask(sent)
    refusal(answered, status, error_type)
    found = re.search(rb"x-request-id: (\S+)", answered)
    assert found
    assert (found[1] == b"mine") == (b"mine" in sent)
    (line,) = log.getvalue().splitlines()
    told = f"status={status} client=127.0.0.1 error_type={error_type} path={path} request_id={found[1].decode()}"
    assert line.partition(" ")[2] == f"INFO service.protocol refused {told}"


def test_a_request_that_has_begun_keeps_the_id_that_the_application_gave_it(start: Start, log: io.StringIO) -> None:
    answered = start(body_seconds=SOON).ask(post(bytes(10), "/named")[:-1])
    assert b"\r\nx-request-id: the-applications\r\n" in answered
    assert log.getvalue().endswith(" request_id=the-applications\n")


def test_a_refusal_is_not_taken_for_the_request_before_it(start: Start, log: io.StringIO) -> None:
    with start().connect() as client:
        client.send(get("x-request-id: mine", path="/v1/embeddings"))
        assert client.answer()[0] == 200
        client.send(b"\r\n" * 4096)
        answered = client.rest()
    refusal(answered, 431, "HeadersTooLarge")
    assert b"mine" not in answered
    assert "mine" not in log.getvalue()
    assert ' path="" ' in log.getvalue()


# What goes on as ever


def test_pipelined_requests(start: Start) -> None:
    running = start()
    bodies = [b"%d" % number * 1000 for number in range(50)]
    with running.connect() as client:
        client.send(b"".join(map(post, bodies)))
        assert [client.answer() for _ in bodies] == [(200, body) for body in bodies]
    assert running.counted == []


def test_who_leaves_stops_the_request_at_work_and_not_only_the_last_one(start: Start) -> None:
    running = start()
    with running.connect() as client:
        client.send(post(b"one", "/watch") + post(b"two"))
        wait_until(lambda: running.app.seen == ["/watch"])
    wait_until(lambda: running.app.seen == ["/watch", "disconnect"])
    assert len(running.app.scopes) == 1


@pytest.mark.parametrize("size", [1, 7])
def test_a_request_in_small_pieces(start: Start, size: int) -> None:
    running = start()
    sent = post(b"hello") + CHUNKED + b"5\r\nhello\r\n0\r\n\r\n"
    with running.connect() as client:
        client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.send(*(sent[start : start + size] for start in range(0, len(sent), size)))
        assert [client.answer(), client.answer()] == [(200, b"hello")] * 2


@pytest.mark.parametrize("wish", ["upgrade: h2c", "upgrade: websocket"])
def test_an_upgrade_is_declined_and_the_body_kept(start: Start, wish: str) -> None:
    """As Java's own client asks for HTTP/2 without TLS."""
    running = start()
    head = ("connection: Upgrade, HTTP2-Settings", wish, "http2-settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA")
    with running.connect() as client:
        client.send(post(b"hello", "/echo", *head) + post(b"again"))
        assert [client.answer(), client.answer()] == [(200, b"hello"), (200, b"again")]
        client.send(post(b"hello", "/echo", "connection: close, upgrade", wish))
        assert client.rest().endswith(b"hello")
    assert all(name != b"upgrade" for name, _ in running.app.scopes[0]["headers"])
    assert running.counted == []


def test_a_head_that_declines_an_upgrade_is_checked(start: Start) -> None:
    running = start()
    refusal(running.ask(get("connection: upgrade", "upgrade: h2c", "host: other")), 400, "BadRequest")
    assert running.app.scopes == []


def test_http_1_0(start: Start) -> None:
    answered = start().ask(b"POST /echo HTTP/1.0\r\ncontent-length: 5\r\n\r\nhello")
    assert re.match(rb"HTTP/1.1 200 .*\r\n\r\nhello$", answered, re.DOTALL)


# Nothing stays


def test_thousands_of_connections_leave_nothing(start: Start) -> None:
    running = start()
    living: weakref.WeakSet[Any] = weakref.WeakSet()
    made = Protocol.connection_made

    def note(self: Protocol, transport: asyncio.Transport) -> None:
        living.add(self)
        made(self, transport)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Protocol, "connection_made", note)
        for number in range(1000):
            with running.connect() as client:
                match number % 6:
                    case 0:
                        client.send(get())
                        client.answer()
                    case 1:
                        client.send(b"GET /")
                    case 2:
                        client.send(post(b"hello")[:-2])
                    case 3:
                        client.send(b"bad\r\n\r\n")
                        client.rest()
                    case 4:
                        client.send(get())
                        client.answer()
                        reset(client)
        wait_until(lambda: not running.server.server_state.connections)

    def gone() -> bool:
        gc.collect()
        return len(living) <= 1  # a loop may hold its last callback

    wait_until(gone)


def reset(client: Client) -> None:
    """Close so that the server sees a reset connection."""
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
