"""The request middleware over real sockets: a body that is late, and a client that is right to wait."""

import asyncio
import json
import re
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import Mock

import pytest
import uvicorn
from harness import LIMITS, PATIENCE, Process, Serve, default_model, until, wait_until
from live import BODY, Gate, answer, connect, head, metrics, request, served
from starlette.types import Receive, Send
from uvicorn.server import ServerState

from cloze.service.app import create_app
from cloze.service.http.protocol import MAX_WAITING, Protocol
from cloze.service.settings import Settings


@pytest.fixture(scope="module")
def server(serve: Serve, bundle: Path) -> Process:
    return serve("--bundle", str(bundle), "--threads", "1")


@pytest.fixture(scope="module")
def impatient(serve: Serve, bundle: Path) -> Process:
    """For bodies that never arrive."""
    return serve("--bundle", str(bundle), "--threads", "1", "--body-seconds", "0.5")


def lines(server: Process, identity: str) -> list[str]:
    wait_until(lambda: f"request_id={identity}" in server.log)
    return [line for line in server.log.splitlines() if f"request_id={identity}" in line]


@pytest.mark.parametrize("begun", [b"", BODY[:5]])
def test_a_body_that_does_not_arrive_is_answered_408_and_the_connection_closed(
    impatient: Process, begun: bytes
) -> None:
    before = metrics(impatient.url)
    with connect(impatient.url) as stream:
        stream.sendall(head(f"content-length: {len(BODY)}", "/embed?key=secret", "x-request-id: late") + begun)
        status, body = answer(stream)
        assert (status, json.loads(body)["error_type"]) == (408, "Slow")
        assert "did not arrive within 0.5 s, the limit" in json.loads(body)["error"]
        assert stream.recv(100) == b""
    (*_, line) = lines(impatient, "late")
    assert re.search(r" INFO \S+ POST /embed status=408 ms=\S+ client=\S+ error_type=Slow ", line)
    assert "secret" not in impatient.log
    after = metrics(impatient.url)
    for name in ("cloze_requests_total{route=/embed,status=408}", "cloze_failures_total{reason=Slow}"):
        assert after[name] == before[name] + 1


def test_drops_of_a_body_gain_no_time(impatient: Process) -> None:
    answered = threading.Event()
    with connect(impatient.url) as stream:
        stream.sendall(head("content-length: 1000000"))

        def drip() -> None:
            with suppress(BrokenPipeError, ConnectionResetError):  # the server closes behind its answer
                while not answered.wait(0.05):
                    stream.sendall(b"x")

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            assert answer(stream)[0] == 408
        finally:
            answered.set()
            thread.join()


def test_a_late_body_of_openais_route_is_answered_in_its_shape(impatient: Process) -> None:
    with connect(impatient.url) as stream:
        stream.sendall(head("content-length: 9", "/models/tiny/v1/embeddings"))
        status, body = answer(stream)
    assert (status, json.loads(body)["error"]["type"]) == (408, "timeout_error")


def test_a_client_that_waits_for_100_continue_gets_it(server: Process) -> None:
    with connect(server.url) as stream:
        stream.sendall(head(f"content-length: {len(BODY)}", "/embed", "expect: 100-continue"))
        assert stream.recv(100).startswith(b"HTTP/1.1 100 ")
        stream.sendall(BODY)
        assert answer(stream)[0] == 200


def test_a_body_behind_a_long_answer_is_not_late(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request takes longer than a body may; the second one's time begins when it is served."""
    app = create_app(Settings(bundle=bundle, threads=1, **LIMITS))
    with served(app) as url, Gate(default_model(app).session) as gate, connect(url) as stream:
        stream.sendall(request({"inputs": "a man"}) + request({"inputs": "a"}))
        wait_until(lambda: gate.batches)
        monkeypatch.setattr("cloze.service.http.middleware.perf_counter", lambda: perf_counter() + 2 * PATIENCE)
        gate.let()
        assert [answer(stream)[0] for _ in range(2)] == [200, 200]


@pytest.mark.parametrize("connection", ["close", "TE, Close"])
def test_who_closes_the_connection_reads_why_it_is_refused(server: Process, connection: str) -> None:
    """The body of a refused request is read, so that no reset takes the answer away."""
    content = json.dumps({"inputs": "a" * 8_000_000}).encode()
    for _ in range(5):
        client = HTTPConnection(server.url.removeprefix("http://"), timeout=PATIENCE)
        headers = {"content-type": "application/json", "x-priority": "high", "connection": connection}
        client.request("POST", "/embed", content, headers)
        refused = client.getresponse()
        assert refused.status == 422
        assert "write interactive, the default, or bulk" in refused.read().decode()
        client.close()


def test_pipelined_requests_are_answered_in_order(server: Process) -> None:
    with connect(server.url) as stream:
        stream.sendall(b"".join(request({"inputs": ["a"] * count}) for count in (1, 2, 3)))
        assert [len(json.loads(answer(stream)[1])) for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("begun", [b"", b"POST /embed HTTP/1.1\r\nhost: x\r\n"])
def test_a_head_that_does_not_end_is_cut_off(bundle: Path, monkeypatch: pytest.MonkeyPatch, begun: bytes) -> None:
    """Also one that never begins."""
    monkeypatch.setattr(Protocol, "head_seconds", 0.2)
    with served(create_app(Settings(bundle=bundle, threads=1, **LIMITS))) as url, connect(url) as stream:
        stream.sendall(begun)
        assert stream.makefile("rb").read() == b""


def test_a_second_head_that_does_not_end_is_cut_off(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(create_app(Settings(bundle=bundle, threads=1, **LIMITS))) as url, connect(url) as stream:
        stream.sendall(request({"inputs": "a"}))
        assert answer(stream)[0] == 200
        monkeypatch.setattr(Protocol, "head_seconds", 0.2)
        stream.sendall(b"GET /he")
        assert stream.makefile("rb").read() == b""


def connected(app: Callable[[Any, Receive, Send], Awaitable[None]]) -> Protocol:
    """A protocol of a connection that takes whatever is written."""
    config, loop = uvicorn.Config(app, interface="asgi3", access_log=False), asyncio.get_running_loop()
    config.load()
    protocol = Protocol(config=config, server_state=ServerState(), app_state={}, _loop=loop)
    transport = Mock(spec=asyncio.Transport)
    transport.get_extra_info.return_value = None
    transport.is_closing.return_value = False
    protocol.connection_made(transport)
    return protocol


async def answered_at_once(_scope: object, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})


@pytest.mark.anyio
async def test_what_waits_of_one_connection_has_a_limit() -> None:
    protocol = connected(answered_at_once)
    one = b"GET /health/live HTTP/1.1\r\n\r\n"
    protocol.data_received(one * (MAX_WAITING + 1))
    assert len(protocol.pipeline) == MAX_WAITING
    while protocol.pipeline:
        protocol.flow.resume_reading()  # as the request does that is served
        assert protocol.flow.read_paused  # nothing is read while others wait
        await asyncio.sleep(0)
    await until(lambda: protocol.cycle.response_complete)
    assert not protocol.flow.read_paused
    protocol.data_received(one * (MAX_WAITING + 2))
    assert len(protocol.pipeline) == MAX_WAITING
    await asyncio.sleep(0)
    transport = vars(protocol.transport)["_transport"]
    assert not any(b"400 Bad Request" in call.args[0] for call in transport.write.call_args_list)
    await until(lambda: any(b"400 Bad Request" in call.args[0] for call in transport.write.call_args_list))
    answers = b"".join(call.args[0] for call in transport.write.call_args_list)
    assert answers.count(b"HTTP/1.1 200 OK") == 2 * (MAX_WAITING + 1)  # first those before it
    transport.close.assert_called_once()


@pytest.mark.parametrize(
    "rest", [b"\0\0\0\r\n", b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nnot a size\r\n"]
)
def test_what_is_no_http_is_refused_behind_the_answers_before_it(server: Process, rest: bytes) -> None:
    with connect(server.url) as stream:
        stream.sendall(head(f"content-length: {len(BODY)}", "/embed") + BODY + rest)
        assert [answer(stream)[0] for _ in range(2)] == [200, 400]


@pytest.mark.anyio
@pytest.mark.parametrize(
    "rest", [b"GET /x HTTP/1.1\r\nx: " + b"y" * 70_000, b"\r\n" * 35_000, b"GET /x HT" + b"@" * 70_000]
)
async def test_a_head_that_is_too_large_is_refused_behind_the_answers_before_it(rest: bytes) -> None:
    finish = asyncio.Event()

    async def app(scope: object, receive: Receive, send: Send) -> None:
        await finish.wait()
        await answered_at_once(scope, receive, send)

    protocol = connected(app)
    transport = vars(protocol.transport)["_transport"]
    protocol.data_received(b"GET /health/live HTTP/1.1\r\n\r\n")
    protocol.data_received(rest)
    await asyncio.sleep(0)
    transport.write.assert_not_called()
    finish.set()
    await until(lambda: transport.close.called)
    written = b"".join(call.args[0] for call in transport.write.call_args_list)
    assert re.findall(rb"HTTP/1.1 (\d+)", written) in ([b"200", b"431"], [b"200", b"400"])


@pytest.mark.parametrize("trailer", [b"content-type: text/plain", b"connection: close"])
def test_trailers_are_no_headers(server: Process, trailer: bytes) -> None:
    """In one read with the head they came before it was looked at. With `close` nothing behind them is parsed."""
    chunks = b"%x\r\n%s\r\n0\r\n%s\r\n\r\n" % (len(BODY), BODY, trailer)
    with connect(server.url) as stream:
        stream.sendall(head("transfer-encoding: chunked", "/embed") + chunks)
        assert answer(stream)[0] == 200
        if b"close" in trailer:
            assert stream.recv(1) == b""


def test_the_body_of_a_get_is_ignored_however_long(server: Process) -> None:
    with connect(server.url) as stream:
        stream.sendall(b"GET / HTTP/1.1\r\nhost: a\r\ncontent-length: 999999999\r\n\r\n")
        status, body = answer(stream)
    assert (status, body.startswith(b"<!doctype html>")) == (200, True)


@pytest.mark.anyio
async def test_a_closed_connection_waits_a_while_for_a_client_that_does_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cloze.service.http.protocol.UNREAD", 0)
    protocol = connected(answered_at_once)
    transport = vars(protocol.transport)["_transport"]
    for waiting, aborts in ((0, 0), (1, 1)):
        transport.get_write_buffer_size.return_value = waiting
        protocol.transport.close()
        await asyncio.sleep(0.01)
        assert transport.abort.call_count == aborts


@pytest.mark.anyio
async def test_the_beginning_of_a_head_behind_a_request_has_its_time() -> None:
    protocol = connected(answered_at_once)
    protocol.data_received(b"GET /health/live HTTP/1.1\r\n\r\nGET /hea")
    await until(lambda: protocol.cycle.response_complete)
    assert protocol._late is not None
    protocol.data_received(b"lth HTTP/1.1\r\n\r\n")
    assert protocol._late is None


@pytest.mark.anyio
async def test_an_empty_line_behind_a_request_is_no_beginning_of_a_head() -> None:
    """It began the time of a head, which closed the connection under a request that took longer."""
    finish = asyncio.Event()

    async def app(scope: object, receive: Receive, send: Send) -> None:
        await finish.wait()
        await answered_at_once(scope, receive, send)

    protocol = connected(app)
    protocol.data_received(b"GET /health/live HTTP/1.1\r\n\r\n")
    protocol.data_received(b"\r\nGET /hea")
    assert protocol._late is None
    finish.set()
    await until(lambda: protocol.cycle.response_complete)
    assert protocol._late is not None  # the next head has begun
    protocol._late.cancel()


@pytest.mark.anyio
async def test_a_body_of_tiny_chunks_is_read_at_once() -> None:
    """A hundred thousand of them would take seconds of the loop one by one."""
    protocol = connected(answered_at_once)
    protocol.data_received(head("transfer-encoding: chunked"))
    taken = Mock(wraps=protocol.cycle.message_event.set)
    protocol.cycle.message_event.set = taken
    protocol.data_received(b"1\r\na\r\n" * 5000)
    protocol.data_received(b"1\r\nb\r\n" * 5000 + b"0\r\n\r\n")
    assert (protocol.cycle.body, protocol.cycle.more_body) == (b"a" * 5000 + b"b" * 5000, False)
    assert taken.call_count == 3


@pytest.mark.anyio
async def test_a_client_that_leaves_before_its_answer_is_written_is_no_error() -> None:
    protocol = connected(answered_at_once)
    protocol.data_received(b"GET /health/live HTTP/1.1\r\n\r\n")
    transport = vars(protocol.transport)["_transport"]
    transport.write.side_effect = RuntimeError("the handler is closed")
    transport.is_closing.return_value = True
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: errors.append(context))
    await until(lambda: protocol.cycle.response_complete)
    await asyncio.sleep(0)
    assert errors == []


@pytest.mark.parametrize("codings", [["gzip, chunked"], ["gzip", "chunked"]])
def test_a_body_in_another_transfer_coding_is_refused(server: Process, codings: list[str]) -> None:
    """It would be read as it comes."""
    with connect(server.url) as stream:
        fields = [f"transfer-encoding: {coding}" for coding in codings]
        stream.sendall(head(fields[-1], "/embed", *fields[:-1]) + b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY))
        assert answer(stream)[0] == 400


@pytest.mark.anyio
async def test_the_rest_of_an_answered_requests_body_keeps_no_connection_open() -> None:
    """The time until the next request runs from the answer, however slowly the body comes."""
    answered = asyncio.Event()

    async def app(_scope: object, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})
        answered.set()

    protocol = connected(app)
    for _ in range(2):
        protocol.data_received(head("content-length: 10"))
        assert protocol.timeout_keep_alive_task is None
        await answered.wait()
        answered.clear()
        timer = protocol.timeout_keep_alive_task
        assert timer is not None
        for segment in (b"01234", b"56789"):
            protocol.data_received(segment)
            assert protocol.timeout_keep_alive_task is timer
            assert not timer.cancelled()


@pytest.mark.anyio
async def test_the_framing_of_a_chunk_is_no_beginning_of_a_head() -> None:
    """Read on its own it began the time of a head, which closed the connection under a request that took longer."""
    asked = asyncio.Event()

    async def app(_scope: object, receive: Receive, _send: object) -> None:
        while (await receive())["more_body"]:
            pass
        asked.set()

    protocol = connected(app)
    for segment in (head("transfer-encoding: chunked"), b"5\r\n", b"hello", b"\r\n", b"0\r\n", b"\r\n"):
        protocol.data_received(segment)
    await asked.wait()
    assert protocol._late is None
