"""A server that answers, is busy, stays busy, refuses, or is something else."""

import json
import re
from collections.abc import Callable, Sequence

import httpx
import numpy as np
import pytest
from harness import NO_ROADS

from cloze.training.errors import ServerError
from cloze.training.evaluation.server import ATTEMPTS, ServerEncoder

INFO = {"model_id": "tiny", "model_sha": "abc", "max_client_batch_size": 2}
Answers = Callable[[httpx.Request], httpx.Response]


def embedded(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json=[[len(text), 1.0] for text in json.loads(request.content)["inputs"]])


def server(embed: Answers = embedded, info: object = INFO) -> tuple[ServerEncoder, list[float]]:
    """The encoder and the pauses it makes."""

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=info) if request.url.path == "/info" else embed(request)

    pauses: list[float] = []
    transport = httpx.MockTransport(answer)
    return ServerEncoder("http://host:1/", transport=transport, wait=pauses.append), pauses


def in_turn(*answers: Answers) -> Answers:
    """The answers one after the other, then the last one always."""
    waiting = list(answers)
    return lambda request: (waiting.pop(0) if len(waiting) > 1 else waiting[0])(request)


def busy(status: int = 503, **headers: str) -> Answers:
    return lambda _: httpx.Response(status, headers=headers, json={"error": "full", "error_type": "Overloaded"})


def unreachable(_: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused")


def test_texts_keep_their_order_over_several_requests() -> None:
    sizes: list[int] = []

    def counted(request: httpx.Request) -> httpx.Response:
        sizes.append(len(json.loads(request.content)["inputs"]))
        return embedded(request)

    encoder, pauses = server(counted)
    found = encoder.embed(["ccc", "a", "bb", "eeeee", "dddd"])
    np.testing.assert_array_equal(found[:, 0], [3, 1, 2, 5, 4])
    assert found.dtype == np.float32
    assert sizes == [2, 2, 1]
    assert pauses == []


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([busy(503, **{"retry-after": "7"}), embedded], [7.0]),
        ([busy(429, **{"retry-after": "0"}), busy(429, **{"retry-after": "999"}), embedded], [0.0, 60.0]),
        ([busy(), busy(504), embedded], [1.0, 2.0]),
        ([busy(503, **{"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}), embedded], [1.0]),
        ([unreachable, embedded], [1.0]),
    ],
)
def test_a_busy_server_is_asked_again(answers: Sequence[Answers], expected: list[float]) -> None:
    encoder, pauses = server(in_turn(*answers))
    assert encoder.embed(["abc"]).tolist() == [[3.0, 1.0]]
    assert pauses == expected


@pytest.mark.parametrize(("answer", "problem"), [(busy(), "answered 503: full"), (unreachable, "cannot be reached")])
def test_a_server_that_stays_busy_is_a_resumable_stop(answer: Answers, problem: str) -> None:
    encoder, pauses = server(answer)
    with pytest.raises(ServerError, match=rf"{problem}.*finished sets are kept: run the same command again"):
        encoder.embed(["abc"])
    assert len(pauses) == ATTEMPTS - 1


def test_a_refusal_is_not_repeated() -> None:
    encoder, pauses = server(lambda _: httpx.Response(401, json={"error": "no key", "error_type": "Unauthorized"}))
    with pytest.raises(ServerError, match="/embed answered 401: no key"):
        encoder.embed(["abc"])
    assert pauses == []


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (httpx.Response(200, json=[]), "did not return a vector for each of 1 texts"),
        (httpx.Response(200, text="<html>"), "did not return JSON"),
        (httpx.Response(200, json=["words"]), "did not return lists of numbers of one length"),
        (httpx.Response(200, json=[[None, 1.0]]), "did not return lists of numbers"),
    ],
)
def test_another_answer_is_named(answer: httpx.Response, message: str) -> None:
    encoder, _ = server(lambda _: answer)
    with pytest.raises(ServerError, match=message):
        encoder.embed(["abc"])


def test_vectors_of_several_lengths_are_named() -> None:
    encoder, _ = server(lambda _: httpx.Response(200, json=[[1.0], [1.0, 2.0]]))
    with pytest.raises(ServerError, match="of one length"):
        encoder.embed(["abc", "d"])


@pytest.mark.parametrize("kind", [httpx.ConnectError, httpx.ConnectTimeout])
def test_a_server_that_is_not_there_is_not_waited_for(kind: type[httpx.TransportError]) -> None:
    pauses: list[float] = []

    def absent(_: httpx.Request) -> httpx.Response:
        raise kind("refused")

    with pytest.raises(ServerError, match=r"http://host:1 cannot be reached \(refused\); start the server first"):
        ServerEncoder("http://host:1", transport=httpx.MockTransport(absent), wait=pauses.append)
    assert pauses == []


def test_another_server_is_named() -> None:
    with pytest.raises(ServerError, match="does not describe a model"):
        server(info={"status": "ok"})
    with pytest.raises(ServerError, match="is not an address"):
        ServerEncoder("http://host:port", wait=lambda _: None)


def test_the_digest_is_that_of_the_model_wherever_it_runs() -> None:
    known = server()[0].digest
    assert server(info=INFO | {"max_client_batch_size": 9})[0].digest == known
    assert server(info=INFO | {"model_sha": "other"})[0].digest != known
    assert server(info=INFO | {"bridge_sha": "other"})[0].digest != known
    assert server(info=INFO | {"model_type": {"embedding": {"pooling": "mean"}}})[0].digest != known
    assert server(info=INFO | {"max_input_length": 9})[0].digest != known
    assert server(info=INFO | {"embedding_space": "other"})[0].digest != known
    assert server(info=INFO | {"model_sha": None})[0].digest != known


def test_the_key_is_sent() -> None:
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("authorization", ""))
        return httpx.Response(200, json=INFO)

    ServerEncoder("http://host", "secret", transport=httpx.MockTransport(answer))
    assert seen == ["Bearer secret"]


@pytest.mark.parametrize(("name", "value"), NO_ROADS)
def test_this_machine_is_asked_without_the_environments_proxy(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    for url in ("http://127.0.0.1:9", "http://localhost:9", "http://[::1]:9"):
        with pytest.raises(ServerError, match=r"cannot be reached .*; start the server first$"):
            ServerEncoder(url)


@pytest.mark.parametrize(
    ("url", "name", "value", "said"),
    [
        ("http://host.invalid:80", "ALL_PROXY", "socks5h://me:secret@127.0.0.1:1", "ALL_PROXY=socks5h://127.0.0.1:1"),
        ("http://host.invalid:80", "http_proxy", "http://127.0.0.1:1", "or correct http_proxy=http://127.0.0.1:1"),
        ("https://host.invalid", "SSL_CERT_FILE", "/nonexistent.pem", "SSL_CERT_FILE=/nonexistent.pem"),
    ],
)
def test_a_proxy_or_a_certificate_that_cannot_be_used_is_named(
    url: str, name: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, value)
    with pytest.raises(ServerError, match=re.escape(said)) as caught:
        ServerEncoder(url)
    assert "secret" not in str(caught.value)
