"""Slow clients and large headers: nginx holds them, and the service never sees them."""

import select
import threading
from collections.abc import Iterator

import httpx
import pytest
from harness import PATIENCE, wait_until
from live import head, request
from logging_service import Service
from nginx_server import Connection, Edge, Nginx, refusal

WHOLE = request({"inputs": "a man"})
CHUNKED = head("transfer-encoding: chunked")


@pytest.fixture
def nginx(edge: Edge, service: Service) -> Nginx:
    """Its limits of time are not reached."""
    return edge(service.url)


@pytest.fixture
def unseen(service: Service) -> Iterator[None]:
    """The service sees no request of this test."""
    before = len(service.requests())
    yield
    assert service.requests()[before:] == []


def get(*headers: str, path: str = "/health") -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "host: test", *headers, "", ""]).encode()


# Headers


@pytest.mark.usefixtures("unseen")
def test_headers_that_do_not_end(edge: Edge, service: Service) -> None:
    sent = [b"", b"\r\n", b"G", b"GET / HTTP/1.1\r\nhost: te", get()[:-1], b"\r\n" * 4096]
    assert ask_side_by_side(edge(service.url, EDGE_HEADER_SECONDS=1), sent) == [b""] * len(sent)


def ask_side_by_side(nginx: Nginx, sent: list[bytes]) -> list[bytes]:
    """What nginx sends back for each, on a connection of its own, until it ends the connection."""
    connections = [nginx.connect() for _ in sent]
    for connection, part in zip(connections, sent, strict=True):
        connection.send(part)
    received = [connection.rest() for connection in connections]
    for connection in connections:
        connection.close()
    return received


@pytest.mark.usefixtures("unseen")
def test_headers_that_come_line_by_line_get_no_more_time(edge: Edge, service: Service) -> None:
    with edge(service.url, EDGE_HEADER_SECONDS=1).connect() as connection:
        connection.send(b"GET / HTTP/1.1\r\n")
        ended = threading.Event()

        def drip() -> None:
            while not ended.wait(0.02):
                connection.send(b"x: y\r\n")

        thread = threading.Thread(target=drip)
        thread.start()
        assert connection.rest() == b""
        ended.set()
        thread.join()


def test_the_next_request_has_its_own_time(edge: Edge, service: Service) -> None:
    """The limit is long enough that the first request, which arrives at once, does not reach it."""
    nginx = edge(service.url, EDGE_HEADER_SECONDS=10)
    connections = [nginx.connect() for _ in range(2)]
    for connection, sent in zip(connections, (b"GET / HT", b"\r\n"), strict=True):
        connection.send(get())
        assert connection.answer().status == 200
        connection.send(sent)
    assert [connection.rest() for connection in connections] == [b"", b""]
    for connection in connections:
        connection.close()


def test_a_header_may_be_as_long_as_the_limit(nginx: Nginx) -> None:
    with nginx.connect() as connection:
        connection.send(get("x: " + "y" * 8000, "z: " + "y" * 7000))
        assert connection.answer().status == 200


@pytest.mark.usefixtures("unseen")
@pytest.mark.parametrize(
    "sent",
    [
        get("x: " + "y" * 8192),
        get(*(f"h{number}: {'x' * 100}" for number in range(200))),
        get(path="/" + "a" * 8192),
        get("x" * 8192 + ": y"),
        b"GET / HTTP/1.1\r\nhost: test\r\nx: " + b"y" * 1_000_000,  # which never ends
    ],
    ids=["value", "many", "path", "name", "endless"],
)
def test_headers_over_the_limit_are_refused(nginx: Nginx, sent: bytes) -> None:
    (answer,) = nginx.ask(sent)
    refusal(answer, 431, "HeadersTooLarge")


# Bodies


@pytest.mark.usefixtures("unseen")
def test_bodies_that_do_not_end(edge: Edge, service: Service) -> None:
    nginx = edge(service.url, EDGE_BODY_SECONDS=1)
    sent = [
        WHOLE[:-1],
        CHUNKED,
        CHUNKED + b"5\r\nhel",
        CHUNKED + b"0\r\n",
        CHUNKED + b"5;" + b"x" * 8192,
        CHUNKED + b"0\r\nx-trailer: " + b"y" * 8192,
        CHUNKED + b"0\r\n" + b"x: y\r\n" * 999,
    ]
    before = len(timed_out(nginx))
    assert ask_side_by_side(nginx, sent) == [b""] * len(sent)
    wait_until(lambda: len(timed_out(nginx)) == before + len(sent))


def timed_out(nginx: Nginx) -> list[str]:
    """The requests that nginx logged with 408."""
    return [line["request_id"] for line in nginx.log() if (line["message"], line["status"]) == ("POST /embed", 408)]


def test_slow_bodies_do_not_hold_the_service(edge: Edge, service: Service) -> None:
    """nginx holds as many as one address may have. The service sees a request when its body is complete."""
    nginx, before = edge(service.url), len(service.requests())
    whole = request({"inputs": "a man"}, "/embed", "expect: 100-continue")
    slow = [nginx.connect("127.0.0.2") for _ in range(100)]
    for connection in slow:
        connection.send(whole[:-1])
        assert connection.interim() == b"HTTP/1.1 100 Continue\r\n"
    assert httpx.post(f"{nginx.url}/embed", json={"inputs": "a man"}, timeout=PATIENCE).status_code == 200
    assert len(service.requests()) == before + 1
    for connection in slow:
        connection.send(whole[-1:])
    assert {connection.answer().status for connection in slow} == {200}
    for connection in slow:
        connection.close()


@pytest.mark.parametrize("size", [1, 7])
def test_a_request_in_small_pieces(nginx: Nginx, size: int) -> None:
    sent = WHOLE + CHUNKED + b"12\r\n" + b'{"inputs":"a man"}' + b"\r\n0\r\n\r\n"
    with nginx.connect() as connection:
        connection.send(*(sent[start : start + size] for start in range(0, len(sent), size)))
        first, second = connection.answer(), connection.answer()
    assert first.status == 200
    assert first.body == second.body


# Answers


def test_a_client_that_does_not_read_is_cut_off(edge: Edge, service: Service) -> None:
    """The service has finished before that, although the client has read nothing. nginx has 10 s to take the answer."""
    nginx = edge(service.url, EDGE_SEND_SECONDS=10)
    body = {"inputs": ["a man"] * 1500}
    complete = len(httpx.post(f"{service.url}/embed", json=body, timeout=PATIENCE).content)
    with nginx.connect(receive_buffer=4096) as connection:
        connection.send(request(body, "/embed", "x-request-id: does-not-read"))
        wait_until(lambda: [line["status"] for line in service.of("does-not-read")] == [200])
        wait_until_reset(connection)
        assert len(connection.rest()) < complete
    wait_until(lambda: [line for line in nginx.log() if line["request_id"] == "does-not-read"])
    (line,) = (line for line in nginx.log() if line["request_id"] == "does-not-read")
    assert line["bytes"] < complete


def wait_until_reset(connection: Connection) -> None:
    """Without a read, which would make room for more of the answer."""
    poll = select.poll()
    poll.register(connection.socket, 0)
    assert poll.poll(1000 * PATIENCE)


def test_a_client_that_reads_slowly_gets_all_of_its_answer(edge: Edge, service: Service) -> None:
    body = {"inputs": ["a man"] * 500}
    direct = httpx.post(f"{service.url}/embed", json=body, timeout=PATIENCE).content
    with edge(service.url).connect(receive_buffer=4096) as connection:
        connection.send(request(body, "/embed", "x-request-id: reads-slowly"))
        wait_until(lambda: service.of("reads-slowly"))
        assert connection.answer().body == direct
