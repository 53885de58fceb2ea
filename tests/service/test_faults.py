"""What goes wrong around the service and inside it: what was sent, answered, refused and lost; the books balance."""

import asyncio
import json
import random
import re
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from harness import LIMITS, PATIENCE, MakeBundle, Process, Serve, default_model, distinct, free_port, wait_until
from live import (
    Background,
    Breakable,
    Gate,
    ServeHeld,
    answer,
    ask,
    ask_for_megabytes,
    connect,
    embed,
    files,
    head,
    metrics,
    quiet,
    request,
    reset,
    served,
    statuses,
    unit,
)
from tiny_bundle import sequence, vector

from cloze.service.app import create_app
from cloze.service.inference.health import HUNG, LOST
from cloze.service.inference.model import Model
from cloze.service.settings import Settings

POST, GET = (partial(send, timeout=PATIENCE) for send in (httpx.post, httpx.get))
TEXTS = ["a man", "two dogs run", "the guitar", "a man plays the guitar"]
EXPECTED = unit(np.stack([vector(sequence(text)) for text in TEXTS]))
KEYS = {name: f"the-key-of-client-{name}" for name in ("one", "two", "three", "four")}


def authorization(client: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[client]}"}


def assert_right(body: bytes, texts: int = len(TEXTS)) -> None:
    """The vectors of TEXTS, as often as asked."""
    found = np.array(json.loads(body), dtype=np.float32)
    np.testing.assert_allclose(found, np.tile(EXPECTED, (texts // len(TEXTS), 1)), atol=1e-5)


@pytest.fixture(scope="module")
def server(serve: Serve, bundle: Path) -> Process:
    """For what must leave no trace; each test counts from what was there before it."""
    return serve("--bundle", str(bundle), "--threads", "1", "--payload-limit", "100000")


class Change:
    """What the server has counted since."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.statuses = Counter(statuses(url))
        self.metrics = metrics(url)

    def of(self, name: str) -> int:
        return int(metrics(self.url)[name] - self.metrics[name])

    def by_status(self) -> dict[int, int]:
        return dict(Counter(statuses(self.url)) - self.statuses)


# Clients that leave, that are slow, that do not read


def leave(url: str, rng: random.Random, body: bytes) -> str:
    """Leave at some point; where, in a word."""
    stream = connect(url)
    whole = head(f"content-length: {len(body)}") + body
    point = rng.choice(["connected", "head", "body", "sent", "read"])
    if point == "head":
        stream.sendall(whole[: rng.randrange(1, len(whole) - len(body) - 1)])
    elif point == "body":
        stream.sendall(whole[: rng.randrange(len(whole) - len(body), len(whole))])
    elif point in ("sent", "read"):
        stream.sendall(whole)
    if point == "read":
        stream.recv(rng.randrange(1, 100))
    rng.choice([reset, socket.socket.close])(stream)
    return point


def test_a_storm_of_clients_that_leave(server: Process) -> None:
    """300 leave; the 100 that stay have their answers, and nothing of the others is left."""
    before, opened = Change(server.url), files(server)
    rng = random.Random(0)
    body = json.dumps({"inputs": TEXTS * 10}).encode()
    left: Counter[str] = Counter()
    with ExitStack() as stack:
        stayed = []
        for number in range(400):
            if number % 4:
                left[leave(server.url, rng, body)] += 1
            else:
                stream = stack.enter_context(connect(server.url))
                stream.sendall(head(f"content-length: {len(body)}") + body)
                stayed.append(stream)
        answers = [answer(stream) for stream in stayed]
    for status, content in answers:
        assert status == 200
        assert_right(content, 40)
    wait_until(lambda: quiet(server.url))
    wait_until(lambda: files(server) <= opened)
    found = before.by_status()
    assert set(found) <= {200, 499}
    assert left["read"] <= found[200] - len(answers) <= left["sent"] + left["read"]
    assert sum(found.values()) <= len(answers) + left["sent"] + left["read"]
    assert before.of("cloze_failures_total{reason=Dropped}") <= left["body"] + left["sent"]


def test_slow_writers_are_refused_in_time_and_hold_up_nobody(serve: Serve, bundle: Path) -> None:
    """Requests that arrive at once are never too slow."""
    server = serve("--bundle", str(bundle), "--threads", "1", "--body-seconds", "2")
    opened = files(server)
    with ExitStack() as stack:
        streams = []
        for _ in range(80):
            streams.append(stack.enter_context(connect(server.url)))
            streams[-1].sendall(request({"inputs": TEXTS})[:-1])
        assert_right(ask(server.url, {"inputs": TEXTS})[1])
        answers = [answer(stream) for stream in streams]
    assert Counter((status, json.loads(body)["error_type"]) for status, body in answers) == {(408, "Slow"): 80}
    wait_until(lambda: files(server) <= opened)
    wait_until(lambda: quiet(server.url))
    assert metrics(server.url)["cloze_failures_total{reason=Slow}"] == 80
    assert_right(ask(server.url, {"inputs": TEXTS})[1])


def test_an_answer_that_is_not_read_keeps_its_place(serve: Serve, make_bundle: MakeBundle) -> None:
    """So that answers in memory are as many as `max_concurrent_requests` at most."""
    wide = make_bundle(dimension=512)
    server = serve("--bundle", str(wide), "--threads", "1", "--max-concurrent-requests", "1")
    with ask_for_megabytes(server.url) as stream:
        start = stream.recv(2000)
        assert start.startswith(b"HTTP/1.1 200")
        assert POST(f"{server.url}/embed", json={"inputs": "a"}).status_code == 429
        (length,) = re.findall(rb"content-length: (\d+)", start)
        left = int(length) - len(start.partition(b"\r\n\r\n")[2])
        while left:
            left -= len(stream.recv(left))
        wait_until(lambda: quiet(server.url))
        assert POST(f"{server.url}/embed", json={"inputs": "a"}).status_code == 200


@pytest.mark.parametrize("length", ["content-length: 40000", "transfer-encoding: chunked"])
def test_bodies_that_never_end_hold_no_more_bytes_than_are_allowed(serve: Serve, bundle: Path, length: str) -> None:
    """By what the head declares, or by what has arrived; a client that has no bytes in flight is served meanwhile."""
    server = serve(
        "--bundle",
        str(bundle),
        "--max-bytes-in-flight",
        "100000",
        "--api-keys",
        "the-key-of-a-client,the-key-of-another",
    )
    begun = [head(length, "/embed", "authorization: Bearer the-key-of-a-client")]
    if "chunked" in length:
        begun.append(b"9c40\r\n" + b" " * 40_000 + b"\r\n")
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(connect(server.url)).sendall(b"".join(begun))
        wait_until(lambda: metrics(server.url)["cloze_bytes_in_flight"] == 80_000)
        third = stack.enter_context(connect(server.url))
        third.sendall(b"".join(begun))
        status, body = answer(third)
        assert status == 429
        assert "80000 bytes are in flight" in json.loads(body)["error"]
        assert metrics(server.url)["cloze_bytes_in_flight"] == 80_000
        assert ask(server.url, {"inputs": "a"}, "/embed", "authorization: Bearer the-key-of-another")[0] == 200
    wait_until(lambda: metrics(server.url)["cloze_bytes_in_flight"] == 0)


def test_answers_that_are_not_read_hold_no_more_bytes_than_are_allowed(serve: Serve, make_bundle: MakeBundle) -> None:
    server = serve("--bundle", str(make_bundle(dimension=512)), "--max-bytes-in-flight", "30000000")
    with ask_for_megabytes(server.url) as first:
        assert first.recv(2000).startswith(b"HTTP/1.1 200")
        held = metrics(server.url)["cloze_bytes_in_flight"]
        assert held > 10_000_000
        found = POST(f"{server.url}/embed", json={"inputs": ["a man"] * 3000})
        assert (found.status_code, found.json()["error_type"]) == (429, "Overloaded")
        assert POST(f"{server.url}/embed", json={"inputs": "a"}).status_code == 200
        reset(first)
    wait_until(lambda: metrics(server.url)["cloze_bytes_in_flight"] == 0)


def read_all(stream: socket.socket) -> int:
    """How many bytes there are until it ends, one way or another."""
    size = 0
    try:
        while part := stream.recv(65_536):
            size += len(part)
    except ConnectionError:
        pass
    return size


# Bodies that are none


MALFORMED: list[tuple[bytes, int]] = [
    (b"", 400),
    (b"{", 400),
    (b'{"inputs": "a man"', 400),
    (b'{"inputs": NaN}', 400),
    (b'{"inputs": "\xff\xfe"}', 400),
    (b'{"inputs": "\\ud800"}', 400),
    (b"[" * 5000, 400),
    (b"\x00" * 100, 400),
    (b"null", 422),
    (b"[]", 422),
    (b"{}", 422),
    (b'{"inputs": null}', 422),
    (b'{"inputs": 1e400}', 400),
    (b'{"inputs": [[["a"]]]}', 422),
    (b'{"inputs": ["a", 1]}', 422),
    (b'{"inputs": [1, 2, 3]}', 422),
    (b'{"inputs": "a", "dimensions": 0}', 422),
    (b'{"inputs": "a", "dimensions": 17}', 422),
    (b'{"inputs": "a", "encoding_format": "float128"}', 422),
    (b'{"inputs": "a", "truncation_direction": "up"}', 422),
    (b'{"inputs": []}', 400),
    (b'{"inputs": "a", "model": "none"}', 404),
    (b'{"inputs": "' + b"x" * 120_000 + b'"}', 413),
    (b'{"inputs": ["poison"]}', 424),
]


def test_bodies_that_are_none_in_bulk(server: Process) -> None:
    """Each gets its own answer, every time, between good ones that are all answered."""
    before, rng = Change(server.url), random.Random(1)
    sent = [*MALFORMED * 10, *[(json.dumps({"inputs": TEXTS}).encode(), 200)] * 50]
    rng.shuffle(sent)
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
        for body, status in sent:
            response = http.post("/embed", content=body, headers={"content-type": "application/json"})
            assert response.status_code == status, (body[:80], response.text)
            if status == 200:
                assert_right(response.content)
            else:
                assert set(response.json()) == {"error", "error_type"}
    assert before.by_status() == Counter(status for _, status in sent)


def test_random_bytes_for_a_body(server: Process) -> None:
    before, rng = Change(server.url), random.Random(2)
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
        for _ in range(300):
            body = bytearray(request({"inputs": TEXTS, "dimensions": 4}).partition(b"\r\n\r\n")[2])
            for _ in range(rng.randrange(1, 6)):
                body[rng.randrange(len(body))] = rng.randrange(256)
            http.post("/embed", content=bytes(body), headers={"content-type": "application/json"})
    found = before.by_status()
    assert set(found) <= {200, 400, 422}
    assert sum(found.values()) == 300


def test_requests_that_are_not_http_in_bulk(server: Process) -> None:
    opened = files(server)
    sent = (
        b"\x16\x03\x01\x02\x00 hello\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
    )
    for _ in range(20):
        for data in sent:
            with connect(server.url) as stream:
                stream.sendall(data)
                assert stream.recv(100).startswith(b"HTTP/1.1 400 "), data[:80]
    wait_until(lambda: files(server) <= opened)
    assert_right(POST(f"{server.url}/embed", json={"inputs": TEXTS}).content)


# A full house


class House:
    """An app whose graphs wait for the test."""

    def __init__(self, url: str, gate: Gate, model: Model) -> None:
        self.url, self.gate, self.model = url, gate, model

    def post(self, texts: list[str], client: str) -> Background:
        body = {"inputs": texts}
        return Background(lambda: POST(f"{self.url}/embed", json=body, headers=authorization(client)))


@pytest.fixture
def house(bundle: Path) -> Iterator[Callable[..., House]]:
    with ExitStack() as stack:

        def make(**changes: Any) -> House:
            settings = Settings(bundle=bundle, threads=1, api_keys=",".join(KEYS.values()), **LIMITS, **changes)
            app = create_app(settings)
            model = default_model(app)
            gate = Gate(model.session)
            stack.callback(gate.let)
            return House(stack.enter_context(served(app)), gate, model)

        yield make


def test_a_full_queue_refuses_whole_requests_and_answers_all_that_it_took(house: Callable[..., House]) -> None:
    made = house(max_tokens_in_flight=500)
    names = list(KEYS)
    texts = [distinct(320)[8 * number :][:8] for number in range(40)]
    posts = [made.post(each, names[number % 4]) for number, each in enumerate(texts)]
    wait_until(lambda: sum(not post.is_alive() for post in posts) + at_work(made.url) == 40)
    assert metrics(made.url)["cloze_tokens_in_flight"] <= 500
    assert GET(f"{made.url}/health/ready").status_code == 200
    made.gate.let()
    answers = [post.result for post in posts]
    counts = Counter(response.status_code for response in answers)
    assert set(counts) == {200, 429}
    assert counts.total() == 40  # sent = answered + refused; none lost
    for response, each in zip(answers, texts, strict=True):
        if response.status_code == 200:
            rows = np.stack([vector(sequence(text)) for text in each])
            expected = rows / np.linalg.norm(rows, axis=1, keepdims=True)
            np.testing.assert_allclose(response.json(), expected, atol=1e-5)
        else:
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error_type"] == "Overloaded"
    assert statuses(made.url) == dict(counts)
    assert sum(made.gate.batches) == 8 * counts[200]  # of those refused not one text was run
    assert metrics(made.url)["cloze_tokens_in_flight"] == 0
    again = made.post(TEXTS, "one").result
    assert_right(again.content)


def at_work(url: str) -> int:
    return int(metrics(url)["cloze_requests_in_flight"]) - 1


def test_too_many_requests_at_once(house: Callable[..., House]) -> None:
    """One beyond is refused; the probes are not."""
    made = house(max_concurrent_requests=5)  # four, for one client
    posts = [made.post(TEXTS, "one") for _ in range(12)]
    wait_until(lambda: sum(not post.is_alive() for post in posts) == 8)
    for path in ("/health", "/health/live", "/health/ready", "/metrics"):
        assert GET(f"{made.url}{path}").status_code == 200
    made.gate.let()
    counts = Counter(post.result.status_code for post in posts)
    assert counts == {200: 4, 429: 8}
    assert all(int(post.result.headers["retry-after"]) >= 1 for post in posts if post.result.status_code == 429)
    assert statuses(made.url) == dict(counts)


def test_ten_thousand_texts_of_one_do_not_hold_up_one_text_of_another(house: Callable[..., House]) -> None:
    """One text is in the third small batch at the latest."""
    made = house(max_batch_tokens=64)
    many = made.post(distinct(10_000), "one")
    wait_until(lambda: made.gate.batches)
    tokens = metrics(made.url)["cloze_tokens_in_flight"]
    single = made.post(["a man"], "two")
    wait_until(lambda: metrics(made.url)["cloze_tokens_in_flight"] > tokens)  # it waits, too
    made.gate.let(3)
    response = single.result
    assert response.status_code == 200
    assert many.is_alive()
    wait_until(lambda: made.model.batcher.waiting_items > 9_900)  # they enter in slices, also after the answer
    made.gate.let()
    assert len(many.result.json()) == 10_000
    assert statuses(made.url) == {200: 2}


def test_a_busy_service_is_ready(house: Callable[..., House]) -> None:
    made = house(max_batch_tokens=64)
    texts = [distinct(1600)[200 * number :][:200] for number in range(8)]
    posts = [made.post(each, name) for each, name in zip(texts, list(KEYS) * 2, strict=True)]
    wait_until(lambda: metrics(made.url)["cloze_queue_texts{model=tiny}"] > 1500)
    assert made.gate.batches
    assert Counter(GET(f"{made.url}/health/ready").status_code for _ in range(50)) == {200: 50}
    made.gate.let()
    for post, each in zip(posts, texts, strict=True):
        expected = unit(np.stack([vector(sequence(text)) for text in each]))
        np.testing.assert_allclose(post.result.json(), expected, atol=1e-5)
    assert statuses(made.url) == {200: 8}


# A graph that breaks


def throws(*arguments: Any) -> Any:
    raise RuntimeError("CUDA error 700")


def gives(value: float, *shape: int) -> Callable[..., Any]:
    """One value everywhere, in an array of that shape."""
    return lambda outputs, inputs: [np.full(shape, value, dtype=np.float32)]


def fills(value: float) -> Callable[..., Any]:
    """One value everywhere, in an array of the right shape."""
    return lambda outputs, inputs: [np.full((len(inputs["input_ids"]), 16), value, dtype=np.float32)]


BROKEN = {
    "it throws": throws,
    "NaN": fills(np.nan),
    "infinite": fills(np.inf),
    "other rows": gives(1.0, 1000, 16),
    "too narrow": gives(1.0, 1, 8),
    "no matrix": gives(1.0),
    "nothing": lambda outputs, inputs: [],
}


class Broken:
    """Stands for ONNX Runtime's session, and does what the test says."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run


@pytest.mark.parametrize("fault", list(BROKEN))
def test_a_graph_that_breaks_is_told_and_tried_again(bundle: Path, fault: str) -> None:
    app = create_app(Settings(bundle=bundle, provider="cpu", threads=1, **LIMITS))
    session = default_model(app).session
    good = session._session
    with served(app) as url:
        session._session = Broken(BROKEN[fault])
        posts = [Background(lambda: POST(f"{url}/embed", json={"inputs": TEXTS})) for _ in range(10)]
        openai = POST(f"{url}/v1/embeddings", json={"input": TEXTS})
        for post in posts:
            assert (post.result.status_code, post.result.json()["error_type"]) == (424, "Backend")
        assert (openai.status_code, openai.json()["error"]["type"]) == (500, "server_error")
        ready = GET(f"{url}/health/ready")
        assert (ready.status_code, ready.json()["error_type"]) == (503, "Unhealthy")
        assert "model tiny: the last batch failed, and so does a test" in ready.json()["error"]
        assert metrics(url)["cloze_ready"] == 0
        assert GET(f"{url}/health/live").status_code == 200
        session._session = good
        assert GET(f"{url}/health/ready").status_code == 200
        assert_right(POST(f"{url}/embed", json={"inputs": TEXTS}).content)
        assert statuses(url) == {200: 1, 424: 10}
        assert metrics(url)["cloze_ready"] == 1


def test_a_text_that_breaks_the_graph_fails_alone(server: Process) -> None:
    """Whatever shares its batch is answered, and the service stays ready."""
    before = Change(server.url)
    posts = [
        Background(lambda text=text: POST(f"{server.url}/embed", json={"inputs": [*TEXTS, text]}))
        for text in ["poison", "a man", "a man", "a man"] * 5
    ]
    assert Counter(post.result.status_code for post in posts) == {200: 15, 424: 5}
    assert before.by_status() == {200: 15, 424: 5}
    assert GET(f"{server.url}/health/ready").status_code == 200


def test_a_batch_that_hangs_ends_the_process(serve_held: ServeHeld, bundle: Path) -> None:
    """Not ready first, then status 70; the client sees its connection end."""
    server = serve_held("--bundle", str(bundle), "--threads", "1")
    np.testing.assert_allclose(embed(server.url, ["a man"]), EXPECTED[:1], atol=1e-5)
    with connect(server.url) as stream:
        stream.sendall(request({"inputs": "two dogs run"}))
        server.wait_for_batch()
        assert GET(f"{server.url}/health/ready").status_code == 200
        server.pass_time()
        wait_until(lambda: GET(f"{server.url}/health/ready").status_code == 503)
        assert "a batch has run for" in GET(f"{server.url}/health/ready").json()["error"]
        assert GET(f"{server.url}/health/live").status_code == 200
        server.pass_time()
        assert server.wait() == HUNG
        assert read_all(stream) == 0
    assert "the process ends with status 70" in server.log


def test_a_model_that_is_lost_ends_the_process(bundle: Path) -> None:
    server = Breakable("--bundle", str(bundle), "--provider", "cpu", "--threads", "1")
    try:
        assert_right(POST(f"{server.url}/embed", json={"inputs": TEXTS}).content)
        server.lose()
        wait_until(lambda: POST(f"{server.url}/embed", json={"inputs": TEXTS}).status_code == 424)
        assert GET(f"{server.url}/health/ready").status_code == 503
        server.pass_time()
        assert server.wait() == LOST
        assert "model tiny has failed for" in server.log
        assert "the process ends with status 71" in server.log
    finally:
        server.close()


# The end of the process without a word


@pytest.mark.long
def test_killed_under_load_and_started_again(bundle: Path) -> None:
    """Requests in flight are lost, and the clients know; on the same port the same answers come again."""
    port = str(free_port())
    arguments = ["--bundle", str(bundle), "--threads", "1", "--port", port]
    server = Process(*arguments)
    counts: Counter[str] = Counter()

    async def client() -> None:
        async with httpx.AsyncClient(timeout=PATIENCE) as http:
            while True:
                counts["sent"] += 1
                try:
                    response = await http.post(f"{server.url}/embed", json={"inputs": TEXTS * 5})
                except httpx.TransportError:
                    counts["lost"] += 1
                    return
                assert response.status_code == 200
                assert_right(response.content, 20)
                counts["answered"] += 1
                if counts["answered"] == 50:
                    server.process.kill()

    async def load() -> None:
        await asyncio.gather(*(client() for _ in range(8)))

    asyncio.run(load())
    assert server.wait() == -signal.SIGKILL
    assert counts["sent"] == counts["answered"] + counts["lost"]
    assert counts["lost"] == 8
    again = Process(*arguments)
    try:
        assert again.url == server.url
        assert_right(POST(f"{again.url}/embed", json={"inputs": TEXTS}).content)
        assert statuses(again.url) == {200: 1}
    finally:
        again.close()
