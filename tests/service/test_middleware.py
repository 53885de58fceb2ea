"""The request middleware over real sockets: a body that is late, and a client that is right to wait."""

import json
import re

import pytest
from harness import Process, Serve, wait_until
from live import BODY, answer, connect, head, metrics, request


@pytest.fixture(scope="module")
def server(serve: Serve, slow_bundle: object) -> Process:
    return serve("--bundle", str(slow_bundle), "--threads", "1", "--body-seconds", "0.5")


def lines(server: Process, identity: str) -> list[str]:
    wait_until(lambda: f"request_id={identity}" in server.log)
    return [line for line in server.log.splitlines() if f"request_id={identity}" in line]


@pytest.mark.parametrize("begun", [b"", BODY[:5]])
def test_a_body_that_does_not_arrive_is_answered_408_and_the_connection_closed(server: Process, begun: bytes) -> None:
    before = metrics(server.url)
    with connect(server.url) as stream:
        stream.sendall(head(f"content-length: {len(BODY)}", "/embed?key=secret", "x-request-id: late") + begun)
        status, body = answer(stream)
        assert (status, json.loads(body)["error_type"]) == (408, "Slow")
        assert "did not arrive within 0.5 seconds" in json.loads(body)["error"]
        assert stream.recv(100) == b""
    assert re.search(r" INFO \S+ POST /embed status=408 ms=\S+ client=\S+ error_type=Slow ", lines(server, "late")[-1])
    assert "secret" not in server.log
    after = metrics(server.url)
    for name in ("cloze_requests_total{route=/embed,status=408}", "cloze_failures_total{reason=Slow}"):
        assert after[name] == before[name] + 1


def test_drops_of_a_body_gain_no_time(server: Process) -> None:
    with connect(server.url) as stream:
        stream.settimeout(0.1)
        stream.sendall(head("content-length: 100000"))
        for _ in range(600):
            stream.sendall(b"x")
            try:
                assert stream.recv(12) == b"HTTP/1.1 408"
                return
            except TimeoutError:
                pass
    pytest.fail("it was never answered")


def test_a_late_body_of_openais_route_is_answered_in_its_shape(server: Process) -> None:
    with connect(server.url) as stream:
        stream.sendall(head("content-length: 9", "/models/tiny/v1/embeddings"))
        status, body = answer(stream)
    assert (status, json.loads(body)["error"]["type"]) == (408, "timeout_error")


def test_a_client_that_waits_for_100_continue_gets_it(server: Process) -> None:
    with connect(server.url) as stream:
        stream.sendall(head(f"content-length: {len(BODY)}", "/embed", "expect: 100-continue"))
        assert stream.recv(100).startswith(b"HTTP/1.1 100 ")
        stream.sendall(BODY)
        assert answer(stream)[0] == 200


def test_a_body_behind_a_long_answer_is_not_late(server: Process) -> None:
    """The first request takes longer than a body may; the second one's time begins when it is served."""
    with connect(server.url) as stream:
        stream.sendall(request({"inputs": [f"a man {number}" for number in range(400)]}) + request({"inputs": "a"}))
        assert [answer(stream)[0] for _ in range(2)] == [200, 200]


def test_pipelined_requests_are_answered_in_order(server: Process) -> None:
    with connect(server.url) as stream:
        stream.sendall(b"".join(request({"inputs": ["a"] * count}) for count in (1, 2, 3)))
        assert [len(json.loads(answer(stream)[1])) for _ in range(3)] == [1, 2, 3]
