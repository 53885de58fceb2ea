"""nginx in front of the service: answers pass unchanged, limits apply, and the service sees the real client."""

import json
import socket
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from harness import PATIENCE, free_port, wait_until
from live import head, request
from logging_service import ADMIN_KEY, Service
from nginx_server import Edge, Nginx, refusal, shipped

from cloze.service.settings import Settings

LIMIT = 16 * 1024 * 1024
TEXTS = ["a man plays the guitar", "two dogs run", 'It says "[MASK]".']


@pytest.fixture(scope="session")
def nginx(edge: Edge, service: Service) -> Nginx:
    """With the shipped limits, except those of time."""
    return edge(service.url)


def test_the_limit_on_a_body_is_the_services() -> None:
    assert int(shipped()["CLOZE_PAYLOAD_LIMIT"]) == Settings.model_fields["payload_limit"].default == LIMIT


# What passes


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/embed", {"inputs": TEXTS}),
        ("/v1/embeddings", {"input": TEXTS, "model": "none"}),
        ("/embed", {"inputs": ["poison"]}),
        ("/nothing", {}),
    ],
)
def test_an_answer_is_the_services_own(nginx: Nginx, service: Service, path: str, body: dict[str, Any]) -> None:
    same = {"x-request-id": "same"}  # which OpenAI's answer repeats
    found, direct = (
        httpx.post(f"{url}{path}", json=body, headers=same, timeout=PATIENCE) for url in (nginx.url, service.url)
    )
    assert found.content == direct.content
    assert found.status_code == direct.status_code
    assert found.headers["content-type"] == direct.headers["content-type"]


def test_a_body_at_the_limit_passes(nginx: Nginx, service: Service) -> None:
    body = json.dumps({"inputs": TEXTS}).encode().ljust(LIMIT)
    headers = {"content-type": "application/json"}
    found = httpx.post(f"{nginx.url}/embed", content=body, headers=headers, timeout=PATIENCE)
    assert found.content == httpx.post(f"{service.url}/embed", json={"inputs": TEXTS}).content


def test_a_large_answer_passes(nginx: Nginx, service: Service) -> None:
    body = {"inputs": ["a man"] * 3000}
    found, direct = (httpx.post(f"{url}/embed", json=body, timeout=PATIENCE) for url in (nginx.url, service.url))
    assert len(found.content) > 8 * 1024 * 1024
    assert found.content == direct.content


def test_a_connection_serves_many_requests(nginx: Nginx) -> None:
    with nginx.connect() as connection:
        for _ in range(50):
            connection.send(request({"inputs": "a man"}))
            assert connection.answer().status == 200


def test_a_client_that_expects_100_continue_gets_it(nginx: Nginx) -> None:
    whole = request({"inputs": "a man"}, "/embed", "expect: 100-continue")
    with nginx.connect() as connection:
        connection.send(whole[:-5])
        assert connection.interim() == b"HTTP/1.1 100 Continue\r\n"
        connection.send(whole[-5:])
        assert connection.answer().status == 200


# Who asks


def test_the_service_sees_the_clients_address(nginx: Nginx, service: Service) -> None:
    forged = ("x-forwarded-for: 192.0.2.1", "X-Forwarded-For: 127.0.0.1, 192.0.2.2", "forwarded: for=192.0.2.3")
    for source in ("127.0.0.2", "127.0.0.3"):
        with nginx.connect(source) as connection:
            connection.send(request({"inputs": "a man"}, "/embed", f"x-request-id: from-{source}", *forged))
            assert connection.answer().status == 200
        (line,) = service.of(f"from-{source}")
        assert line["client"] == source


def test_a_request_keeps_its_id(nginx: Nginx, service: Service) -> None:
    with nginx.connect() as connection:
        connection.send(request({"inputs": "a man"}, "/embed", "x-request-id: mine"))
        assert connection.answer().headers.get_list("x-request-id") == ["mine"]
        assert service.of("mine")


@pytest.mark.parametrize("lines", [(), ("x-request-id: " + "a" * 129,), ("x-request-id: a b",)])
def test_a_request_without_a_valid_id_gets_one(nginx: Nginx, service: Service, lines: tuple[str, ...]) -> None:
    with nginx.connect() as connection:
        connection.send(request({"inputs": "a man"}, "/embed", *lines))
        (identity,) = connection.answer().headers.get_list("x-request-id")
        assert len(service.of(identity)) == 1


# What nginx refuses


@pytest.mark.parametrize(
    "length", [f"content-length: {LIMIT + 1}", "transfer-encoding: chunked"], ids=["declared", "chunked"]
)
def test_a_body_over_the_limit_is_refused(nginx: Nginx, service: Service, length: str) -> None:
    body = bytes(LIMIT + 1)
    if "chunked" in length:
        body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    (answer,) = nginx.ask(head(length, "/embed", "x-request-id: too-large"), body)
    assert "16777216 bytes" in refusal(answer, 413, "PayloadTooLarge")
    assert answer.headers["x-request-id"] == "too-large"
    assert service.of("too-large") == []


METRICS = ["/metrics", "/metrics?x=1", "/./metrics", "//metrics", "/%6detrics", "/health/../metrics", "/metrics#x"]
ADMIN = ["/admin", "/admin/reload", "/%61dmin/reload", "/admin%2freload", "//admin/reload", "/x/%2e%2e/admin/reload"]


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_what_is_for_operators_is_closed(
    nginx: Nginx, service: Service, method: str, subtests: pytest.Subtests
) -> None:
    key = f"authorization: Bearer {ADMIN_KEY}"
    for path in (*METRICS, *ADMIN, "http://admin.example/admin/reload", "/edge/error"):
        with subtests.test(path):
            before = len(service.requests())
            lines = [f"{method} {path} HTTP/1.1", "host: x", key, "content-length: 0", "connection: close", "", ""]
            (answer,) = nginx.ask("\r\n".join(lines).encode())
            refusal(answer, 404, "NotFound")
            assert service.requests()[before:] == []


def test_the_services_own_port_stays_open_for_operators(service: Service) -> None:
    assert httpx.get(f"{service.url}/metrics").status_code == 200
    key = {"authorization": f"Bearer {ADMIN_KEY}"}
    assert httpx.post(f"{service.url}/admin/reload", headers=key, timeout=PATIENCE).status_code == 200


def test_one_address_may_not_open_more_requests_than_the_limit(edge: Edge, service: Service) -> None:
    nginx = edge(service.url, EDGE_CONNECTIONS=2)
    whole = request({"inputs": "a man"}, "/embed", "expect: 100-continue")
    first, second, third, other = (nginx.connect(source) for source in (*["127.0.0.2"] * 3, "127.0.0.3"))
    for held in (first, second):
        held.send(whole[:-1])
        assert held.interim() == b"HTTP/1.1 100 Continue\r\n"  # it is counted
    third.send(request({"inputs": "a man"}, "/embed", "x-request-id: third"))
    refused = third.answer()
    assert "more than 2 requests" in refusal(refused, 429, "Overloaded")
    assert refused.headers["retry-after"] == "1"
    other.send(request({"inputs": "a man"}))
    assert other.answer().status == 200
    first.send(whole[-1:])
    assert first.answer().status == 200

    def taken() -> bool:
        third.send(request({"inputs": "a man"}))
        return third.answer().status == 200

    wait_until(taken)  # nginx gives the place back a moment after the answer
    assert service.of("third") == []
    for connection in (first, second, third, other):
        connection.close()


def test_a_service_that_is_down_is_unhealthy(edge: Edge) -> None:
    nginx = edge(f"127.0.0.1:{free_port()}")
    answer = nginx.ask(request({"inputs": "a man"}, "/embed", "connection: close"))[0]
    refusal(answer, 503, "Unhealthy")
    assert answer.headers["retry-after"] == "5"
    wait_until(nginx.log)
    (line,) = nginx.log()
    assert (line["message"], line["status"]) == ("POST /embed", 503)


def test_a_service_that_accepts_no_connection_is_logged_as_late(edge: Edge) -> None:
    with ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):  # the kernel queues one or two
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        nginx = edge(f"127.0.0.1:{full.getsockname()[1]}")
        answer = nginx.ask(request({"inputs": "a man"}, "/embed", "connection: close"))[0]
    refusal(answer, 504, "Timeout")
    wait_until(nginx.log)
    (line,) = nginx.log()
    assert (line["message"], line["status"]) == ("POST /embed", 504)


def test_an_error_of_the_services_own_is_logged_there_alone(edge: Edge) -> None:
    with socket.create_server(("127.0.0.1", 0)) as upstream:
        nginx = edge(f"127.0.0.1:{upstream.getsockname()[1]}")
        client = nginx.connect()
        client.send(request({"inputs": "a man"}, "/embed", "connection: close"))
        accepted, _ = upstream.accept()
        with accepted:
            accepted.recv(65536)
            accepted.sendall(b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 2\r\nconnection: close\r\n\r\nno")
            assert (client.answer().status, nginx.log()) == (502, [])
        client.close()
    nginx.ask(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    wait_until(nginx.log)
    assert [line["status"] for line in nginx.log()] == [404]  # and no line before it


def test_the_log_has_what_nginx_answered_and_no_query(nginx: Nginx) -> None:
    last = ("connection: close", "content-length: 0")
    for path in ("/embed?secret", "/metrics?secret", "http://me:secret@x/metrics"):
        head_of = "\r\n".join([f"GET {path} HTTP/1.1", "host: x", "x-request-id: logged", *last, "", ""])
        nginx.ask(head_of.encode())
    wait_until(lambda: [line for line in nginx.log() if line["request_id"] == "logged"])
    (line,) = (line for line in nginx.log() if line["request_id"] == "logged")
    assert (line["message"], line["status"], line["client"]) == ("GET /metrics", 404, "127.0.0.1")
    assert "secret" not in nginx.output


def test_the_pages_pass(nginx: Nginx) -> None:
    for path in ("/", "/docs", "/openapi.json", "/health", "/info"):
        assert httpx.get(f"{nginx.url}{path}").status_code == 200
