"""Requests that two parsers could read in two ways: nginx refuses them, or writes them anew for the service."""

import re
import socket
import threading
from collections.abc import Iterator

import httpx
import pytest
from harness import PATIENCE
from live import request
from logging_service import Service
from nginx_server import Edge, Nginx, refusal

SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
LAST = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
HEAD = b"POST /embed HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
BODY = b'{"inputs": "a man"}'
WITH_BODY = b"content-length: 19\r\n\r\n" + BODY


@pytest.fixture
def nginx(edge: Edge, service: Service) -> Nginx:
    """It waits for the rest of no request: each is complete, or refused."""
    return edge(service.url)


# How two parsers could differ. That nginx refuses such a request is its own; these show that its 400 is ours.
AMBIGUOUS = [
    # The length of the body
    HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    HEAD + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
    HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello",
    HEAD + b"content-length: 0x5\r\n\r\nhello",
    HEAD + b"content-length: 5, 5\r\n\r\nhello",
    HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    HEAD + b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n\r\n0\r\n\r\n",
    HEAD + b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n",
    b"POST /embed HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    # Header lines
    HEAD + b"x: a\r\n transfer-encoding: chunked\r\ncontent-length: 0\r\n\r\n",
    HEAD + b"x: a\x00b\r\n\r\n",
    HEAD + b"x: a\rb\r\n\r\n",
    HEAD + b"x y: a\r\n\r\n",
    b"GET /health HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
    # Chunks
    CHUNKED + b"zz\r\n",
    CHUNKED + b"5\r\nhelloX",
    CHUNKED + b"f" * 17 + b"\r\n",
    # What is not HTTP/1.x
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /health HTTP/2.0\r\nhost: x\r\n\r\n",
]


def test_an_ambiguous_request_is_refused_and_ends_the_connection(
    nginx: Nginx, service: Service, subtests: pytest.Subtests
) -> None:
    for sent in AMBIGUOUS:
        with subtests.test(sent=sent):
            before = len(service.requests())
            (answer,) = nginx.ask(sent + SMUGGLED + LAST)
            refusal(answer, 400, "BadRequest")
            assert service.requests()[before:] == []


def test_a_method_for_proxies_is_refused(nginx: Nginx, service: Service) -> None:
    before = len(service.requests())
    for sent in (b"CONNECT a:80 HTTP/1.1\r\nhost: a\r\n\r\n", b"TRACE / HTTP/1.1\r\nhost: a\r\n\r\n"):
        (answer,) = nginx.ask(sent + SMUGGLED + LAST)
        assert answer.status in (400, 405), sent
        assert service.requests()[before:] == [], sent


CONTENT = b"%x" % len(SMUGGLED)


@pytest.mark.parametrize(
    ("sent", "line"),
    [
        (HEAD.replace(b"\r\n", b"\n") + b"content-length: %d\n\n" % len(SMUGGLED) + SMUGGLED, "POST /embed"),
        (CHUNKED + CONTENT + b"\n" + SMUGGLED + b"\n0\n\n", "POST /embed"),
        (CHUNKED + CONTENT + b" \r\n" + SMUGGLED + b"\r\n0\r\n\r\n", "POST /embed"),
        (CHUNKED + CONTENT + b';x="\r\n' + SMUGGLED + b"\r\n0\r\n\r\n", "POST /embed"),
        (CHUNKED + CONTENT + b"\r\n" + SMUGGLED + b"\r\n000\r\ncontent-length: 9\r\n\r\n", "POST /embed"),
        (HEAD + b"Transfer-Encoding: CHUNKED\r\n\r\n13\r\n" + BODY + b"\r\n0\r\n\r\n", "POST /embed"),
        (HEAD + b"transfer_encoding: chunked\r\n" + WITH_BODY, "POST /embed"),
        (HEAD + b"connection: content-length\r\n" + WITH_BODY, "POST /embed"),
        (HEAD + b"connection: upgrade\r\nupgrade: websocket\r\n" + WITH_BODY, "POST /embed"),
        (b"GET /health HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(SMUGGLED) + SMUGGLED, "GET /health"),
        (b"GET http://a/health HTTP/1.1\r\nhost: b\r\n\r\n", "GET /health"),
        (b"GET /health HTTP/1.2\r\nhost: a\r\n\r\n", "GET /health"),
    ],
)
def test_what_nginx_accepts_is_one_request(nginx: Nginx, service: Service, sent: bytes, line: str) -> None:
    """A newer nginx refuses some of these. The service sees the same requests as nginx, and each has its answer."""
    before = len(service.requests())
    found = nginx.ask(sent + LAST)
    reached = service.requests()[before:]
    if len(found) == 1:
        refusal(found[0], 400, "BadRequest")
        assert reached == []
    else:
        assert [one["message"] for one in reached] == [line, "GET /health"]
        assert [one["request_id"] for one in reached] == [answer.headers["x-request-id"] for answer in found]


def test_a_path_that_is_not_ascii_is_not_served(nginx: Nginx) -> None:
    """nginx passes it on, and the service's parser refuses it."""
    first, last = nginx.ask(b"GET /\xc3\xa9 HTTP/1.1\r\nhost: a\r\n\r\n" + LAST)
    assert (first.status, last.status) == (400, 200)


def test_pipelined_requests_are_answered_in_order(nginx: Nginx, service: Service) -> None:
    texts = ["a man", "two dogs run", "the guitar"] * 10
    found = nginx.ask(*(request({"inputs": text}) for text in texts), LAST)[:-1]
    direct = [httpx.post(f"{service.url}/embed", json={"inputs": text}).content for text in texts]
    assert [answer.body for answer in found] == direct


@pytest.mark.parametrize("broken", [b"zz\r\n\r\n", CHUNKED + b"zz\r\n", HEAD + b"x: a\x00b\r\n\r\n"])
def test_requests_before_a_bad_one_are_answered_first(nginx: Nginx, broken: bytes) -> None:
    first, second, third = nginx.ask(request({"inputs": "a man"}) * 2 + broken + SMUGGLED)
    assert (first.status, second.status) == (200, 200)
    refusal(third, 400, "BadRequest")


@pytest.mark.parametrize("upgrade", ["h2c", "websocket"])
def test_an_upgrade_is_declined_and_its_body_kept(nginx: Nginx, service: Service, upgrade: str) -> None:
    """Java's HTTP client asks for HTTP/2 in this way."""
    wish = ("connection: Upgrade, HTTP2-Settings", f"upgrade: {upgrade}", "http2-settings: AAEAAEAAAAIAAAABAAMAAABk")
    first, second, _ = nginx.ask(request({"inputs": "a man"}, "/embed", *wish), request({"inputs": "a man"}), LAST)
    assert (first.status, second.status) == (200, 200)
    assert first.body == second.body


def test_http_1_0(nginx: Nginx) -> None:
    head = f"POST /embed HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {len(BODY)}\r\n\r\n"
    (answer,) = nginx.ask(head.encode() + BODY)
    assert answer.status == 200


# What nginx writes


class Recorder(threading.Thread):
    """Stands in for the service: keeps the bytes of each connection, and answers each with an empty object."""

    def __init__(self) -> None:
        super().__init__()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.received: list[bytes] = []
        self.start()

    def run(self) -> None:
        while True:
            connection, _ = self.listener.accept()
            with connection:
                connection.settimeout(PATIENCE)
                self.received.append(self._request(connection))
                if not self.received[-1]:
                    return
                connection.sendall(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}")

    def _request(self, connection: socket.socket) -> bytes:
        received = b""
        while part := connection.recv(65_536):
            received += part
            head, end, body = received.partition(b"\r\n\r\n")
            length = re.search(rb"(?i)content-length: (\d+)", head)
            if end and len(body) >= int(length[1] if length else 0):
                break
        return received

    def close(self) -> None:
        """End it by a connection without a request."""
        host, port = self.address.split(":")
        socket.create_connection((host, int(port))).close()
        self.join(PATIENCE)
        self.listener.close()


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    running = Recorder()
    yield running
    running.close()


def test_the_service_receives_one_plain_request(edge: Edge, recorder: Recorder) -> None:
    """It has a length, the client's real address, and no header that concerns only the connection to nginx."""
    lines = [
        "POST /embed?x=1 HTTP/1.1",
        "host: embeddings.example:8000",
        "content-type: application/json",
        "authorization: Bearer key",
        "x-request-id: mine",
        "x-forwarded-for: 192.0.2.1",
        "x-forwarded-for: 192.0.2.2",
        "X-Forwarded-Proto: https",
        "connection: upgrade, x-hop",
        "upgrade: h2c",
        "te: trailers",
        "expect: 100-continue",
        "transfer-encoding: chunked",
        "",
        "5\r\nhello\r\n3;x=y\r\nyou\r\n0\r\ncontent-length: 0\r\n\r\n",
    ]
    with edge(recorder.address).connect("127.0.0.2") as connection:
        connection.send("\r\n".join(lines).encode())
        assert connection.interim() == b"HTTP/1.1 100 Continue\r\n"
        assert connection.answer().body == b"{}"
    (received,) = recorder.received
    head, _, body = received.partition(b"\r\n\r\n")
    first, *headers = head.decode().lower().split("\r\n")
    assert body == b"helloyou"
    assert first == "post /embed?x=1 http/1.1"
    assert {line for line in headers if not line.startswith("te:")} == {
        "host: embeddings.example",
        "content-length: 8",
        "content-type: application/json",
        "authorization: bearer key",
        "x-forwarded-for: 127.0.0.2",
        "x-forwarded-proto: http",
        "x-request-id: mine",
    }
