"""What holds for every route: ids, deadlines, timings, keys, CORS, the switches, and what the log says of a request."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from time import perf_counter, sleep
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest
from harness import (
    PATIENCE,
    Hold,
    MakeApp,
    MakeClient,
    default_model,
    distinct,
    open_client,
    samples_of,
    services,
    until,
)
from starlette.types import Message, Receive, Scope, Send
from tiny_bundle import sequence

from cloze.encoding.errors import OptionError
from cloze.service.inference import vectors
from cloze.service.inference.model import Model
from cloze.service.monitoring.logs import JSON, Text, current_request

pytestmark = pytest.mark.anyio

KEY, OTHER_KEY, ADMIN_KEY = "key-0123456789abcdef", "key-fedcba9876543210", "admin-0123456789abcdef"
EMBEDDING = {
    "/embed": {"inputs": "a man"},
    "/": {"inputs": "a man"},
    "/similarity": {"inputs": {"source_sentence": "a", "sentences": ["man"]}},
    "/search": {"query": "a", "texts": ["man"]},
    "/explain": {"inputs": ["a", "man"]},
    "/predict": {"inputs": "a man"},
    "/v1/embeddings": {"input": "a man"},
    "/embeddings": {"input": "a man"},
    "/models/other": {"inputs": "a man"},
    "/models/other/embed": {"inputs": "a man"},
    "/models/other/v1/embeddings": {"input": "a man"},
    "/v2/embed": {"texts": ["a man"]},
    "/models/other/v2/embed": {"texts": ["a man"]},
}
TIMES = ("x-compute-time", "x-total-time", "x-tokenization-time", "x-queue-time", "x-inference-time")


# Timings


async def test_the_headers_tell_what_the_work_was(both: httpx.AsyncClient, subtests: pytest.Subtests) -> None:
    for path in EMBEDDING:
        with subtests.test(path=path):
            headers = (await both.post(path, json=EMBEDDING[path])).headers
            assert headers["x-compute-type"] == "cpu"
            assert headers["x-compute-characters"] == ("4" if path in ("/similarity", "/search", "/explain") else "5")
            ms = {name: int(headers[name]) for name in TIMES}
            assert ms["x-compute-time"] <= ms["x-total-time"]
            parts = dict(part.strip().split(";dur=") for part in headers["server-timing"].split(","))
            timing = {name: float(value) for name, value in parts.items()}
            assert list(timing) == ["tokenize", "queue", "inference", "total"]
            assert sum(list(timing.values())[:3]) <= timing["total"] + 0.02  # each is rounded to 0.01
            for name, header in (("tokenize", "tokenization"), ("queue", "queue"), ("inference", "inference")):
                assert abs(ms[f"x-{header}-time"] - timing[name]) <= 0.51
            texts = ["a", "man"] if headers["x-compute-characters"] == "4" else ["a man"]
            template = "[X]" if "other" in path else 'This sentence of "[X]" means [MASK].'
            assert headers["x-compute-tokens"] == str(sum(len(sequence(text, template)) for text in texts))


async def test_waiting_is_told_as_waiting(make_app: MakeApp, hold: Hold) -> None:
    """Of two requests the second waits for as long as the first is in the graph."""
    app = make_app()
    async with open_client(app) as http:
        with hold():
            first = asyncio.create_task(http.post("/embed", json={"inputs": "a"}))
            await until(lambda: services(app).executors.busy_for)
            second = asyncio.create_task(http.post("/embed", json={"inputs": "a man"}))
            await until(lambda: default_model(app).batcher.waiting_items)
            waited = services(app).executors.busy_for
            await until(lambda: services(app).executors.busy_for > waited + 0.05)
        one, two = (await first).headers, (await second).headers
    assert int(one["x-inference-time"]) >= 50
    assert int(two["x-queue-time"]) >= 50


async def test_the_total_counts_the_writing_of_the_answer(
    both: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokenising and writing are each made to last 30 ms."""
    encode, units, times = Model._encode, vectors._units, list[float]()

    def slow_encode(self: Model, *arguments: Any) -> Any:
        times.append(perf_counter())
        sleep(0.03)
        return encode(self, *arguments)

    def slow_units(rows: vectors.Vectors) -> Any:
        sleep(0.03)
        times.append(perf_counter())
        return units(rows)

    monkeypatch.setattr(Model, "_encode", slow_encode)
    monkeypatch.setattr(vectors, "_units", slow_units)
    for path, body in EMBEDDING.items():
        times.clear()
        headers = (await both.post(path, json=body)).headers
        assert float(headers["server-timing"].rpartition("total;dur=")[2]) >= 1000 * (times[-1] - times[0]) - 0.01, path


# Request ids


async def test_a_visible_request_id_is_kept(both: httpx.AsyncClient, subtests: pytest.Subtests) -> None:
    for path in ["/embed", "/v1/embeddings", "/nothing"]:
        with subtests.test(path=path):
            for sent in ("abc-1", "!~" * 64):
                response = await both.post(path, json=EMBEDDING.get(path), headers={"x-request-id": sent})
                assert response.headers["x-request-id"] == sent


async def test_any_other_is_made_anew(both: httpx.AsyncClient, subtests: pytest.Subtests) -> None:
    for sent in [None, "", "two words", "x" * 129, "tab\there", "Zwölf".encode(), b"\xff"]:
        with subtests.test(sent=sent):
            headers = {} if sent is None else {"x-request-id": sent}
            found = [(await both.get("/health", headers=headers)).headers["x-request-id"] for _ in range(2)]
            assert found[0] != found[1]
            assert all(len(made) == 32 and made.isalnum() for made in found)


async def test_the_id_is_left_for_a_refusal_while_the_request_is_at_work(make_app: MakeApp) -> None:
    app = make_app()

    @app.get("/seen")
    async def seen() -> str:
        record = current_request.get()
        return record.id if record else ""

    async with open_client(app) as http:
        response = await http.get("/seen")
    assert response.json() == response.headers["x-request-id"]


# Deadlines


async def test_a_request_has_the_time_that_its_client_gives_it(make_app: MakeApp, hold: Hold) -> None:
    app = make_app()
    async with open_client(app) as http:
        with hold():
            for path, body in EMBEDDING.items():
                if "other" not in path:
                    late = await http.post(path, json=body, headers={"x-request-timeout": "0.01"})
                    assert late.status_code == 504
                    assert "not answered within 0.01 s" in late.text
            native = await http.post("/embed", json={"inputs": "a"}, headers={"x-request-timeout": "0.01"})
            assert native.json()["error_type"] == "Timeout"
            assert int(native.headers["retry-after"]) >= 1
            model = default_model(app)
            await until(lambda: not model.batcher.waiting_items)  # their texts left the queue with them
        for generous in (f"{PATIENCE:g}", "1e9", "inf"):
            found = await http.post("/embed", json={"inputs": "a"}, headers={"x-request-timeout": generous})
            assert found.status_code == 200


async def test_what_the_body_took_to_come_is_of_that_time(both: httpx.AsyncClient) -> None:
    async def endless() -> AsyncIterator[bytes]:
        yield b'{"inputs": '
        await asyncio.Event().wait()

    headers = {"content-type": "application/json", "x-request-timeout": "0.05"}
    late = await both.post("/embed", content=endless(), headers=headers)
    assert late.status_code == 504
    assert "not answered within 0.05 s" in late.text


async def test_a_deadline_may_be_over_when_the_request_begins(make_app: MakeApp, hold: Hold) -> None:
    async with open_client(make_app()) as http:
        with hold():
            late = await http.post("/embed", json={"inputs": "a"}, headers={"x-request-timeout": "1e-9"})
        assert late.status_code == 504
        assert (await http.post("/embed", json={"inputs": "a"})).status_code == 200


async def test_nothing_keeps_a_request_alive_after_its_response(make_app: MakeApp, hold: Hold) -> None:
    """A timer or a task would hold the memory of a request until the end of its deadline, which is a day."""
    app = make_app()

    async def sent(body: bytes, seconds: str) -> tuple[int, weakref.ref[Marker]]:
        marker, statuses = Marker(), list[int]()

        async def receive() -> Message:
            return {"type": "http.request", "body": body}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        headers = [(b"content-type", b"application/json"), (b"x-request-timeout", seconds.encode())]
        scope = {"type": "http", "method": "POST", "path": "/embed", "query_string": b"", "headers": headers}
        await app(scope | {"marker": marker}, receive, send)
        return statuses[0], weakref.ref(marker)

    async with open_client(app):
        served = [await sent(b'{"inputs": "a man"}', "86400"), await sent(b"{", "86400")]
        with hold():
            served.append(await sent(b'{"inputs": "the guitar"}', "0.01"))
        assert [status for status, _ in served] == [200, 400, 504]
        await until(lambda: gc.collect() >= 0 and not any(marker() for _, marker in served))  # cycles too


class Marker:
    """An object of a request, which is freed with it."""


async def test_the_setting_is_the_most(client: MakeClient, hold: Hold) -> None:
    async with client(request_seconds=0.05) as http:
        with hold():
            late = await http.post("/embed", json={"inputs": "a"}, headers={"x-request-timeout": f"{PATIENCE:g}"})
        assert late.status_code == 504
        assert "0.05 s" in late.json()["error"]


async def test_a_deadline_is_seconds(both: httpx.AsyncClient, subtests: pytest.Subtests) -> None:
    for sent in ["", "soon", "0", "-1", "nan"]:
        with subtests.test(sent=sent):
            for path in ("/embed", "/v1/embeddings"):
                response = await both.post(path, json=EMBEDDING[path], headers={"x-request-timeout": sent})
                assert response.status_code == (422 if path == "/embed" else 400)
                assert f"x-request-timeout is '{sent}'; write a number of seconds" in response.text


# Priorities


async def test_a_request_is_of_the_class_that_it_or_its_key_says(
    client: MakeClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"search {KEY}\nnightly {OTHER_KEY} bulk\n")
    caplog.set_level("INFO")
    classes = list[tuple[str, str | None, str | None]]()
    async with client(api_keys=f"@{keys}") as http:
        for key in (KEY, OTHER_KEY):
            for asked in (None, "interactive", "bulk"):
                headers = {"authorization": key} | ({"x-priority": asked} if asked else {})
                caplog.clear()
                assert (await http.post("/embed", json={"inputs": "a"}, headers=headers)).status_code == 200
                [fields] = [record.fields for record in caplog.records if record.getMessage() == "POST /embed"]
                classes.append((fields["client"], asked, fields.get("priority")))
        found = samples_of((await http.get("/metrics")).text)
    assert classes == [
        ("search", None, None),
        ("search", "interactive", None),
        ("search", "bulk", "bulk"),
        ("nightly", None, "bulk"),
        ("nightly", "interactive", "bulk"),
        ("nightly", "bulk", "bulk"),
    ]
    counts = [found[f"cloze_request_seconds_count{{priority={each},route=/embed}}"] for each in ("interactive", "bulk")]
    assert counts == [2, 4]


async def test_another_class_is_refused(both: httpx.AsyncClient) -> None:
    for path in ("/embed", "/v1/embeddings", "/v2/embed"):
        response = await both.post(path, json=EMBEDDING[path], headers={"x-priority": "urgent"})
        assert response.status_code in (400, 422)
        assert "x-priority is 'urgent'; write interactive, the default, or bulk" in response.text


async def test_bulk_leaves_places_to_interactive_requests(make_app: MakeApp, hold: Hold) -> None:
    app = make_app(max_concurrent_requests=10)
    async with open_client(app) as http:

        def post(priority: str) -> asyncio.Task[httpx.Response]:
            return asyncio.create_task(http.post("/embed", json={"inputs": "a"}, headers={"x-priority": priority}))

        with hold():
            taken = [post("bulk") for _ in range(9)]
            await until(lambda: services(app).traffic.in_flight == 9)
            assert "the limit is 9 for bulk requests" in (await post("bulk")).json()["error"]
            own = post("interactive")
            await until(lambda: services(app).traffic.in_flight == 10)
        assert [(await each).status_code for each in [*taken, own]] == [200] * 10


async def test_an_answer_that_is_complete_is_not_one_of_a_client_that_left(make_app: MakeApp) -> None:
    """A file is closed in a thread after its last byte, and then the server says that the client has disconnected."""
    app, answered, seen = make_app(), asyncio.Event(), asyncio.Event()

    async def slow(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"file"})
        answered.set()
        await seen.wait()
        await asyncio.sleep(0)  # what is cancelled meanwhile ends here

    async def receive() -> Message:
        await answered.wait()
        seen.set()
        return {"type": "http.disconnect"}

    app.mount("/slow", slow)
    async with open_client(app) as http:
        scope = {"type": "http", "method": "GET", "path": "/slow/file", "headers": [], "query_string": b""}
        await app(scope, receive, AsyncMock())
        found = samples_of((await http.get("/metrics")).text)
    assert found["cloze_failures_total{reason=Dropped}"] == 0


async def test_a_client_that_has_gone_takes_its_texts_with_it(make_app: MakeApp, hold: Hold) -> None:
    app = make_app()
    async with open_client(app) as http:
        with hold():
            first = asyncio.create_task(http.post("/embed", json={"inputs": "a"}))
            await until(lambda: services(app).executors.busy_for)
            second = asyncio.create_task(http.post("/embed", json={"inputs": distinct(100)}))
            batcher = default_model(app).batcher
            await until(lambda: batcher.waiting_items == 100)
            second.cancel()
            await until(lambda: not batcher.waiting_items)
        assert (await first).status_code == 200


# Keys


async def test_a_key_is_needed(client: MakeClient) -> None:
    async with client(api_keys=f"{KEY},{OTHER_KEY}") as http:
        openai = ("/v1/embeddings", "/embeddings", "/models/tiny/v1/embeddings")
        for path, shape in (("/embed", "native"), ("/nothing", "native"), *((path, "openai") for path in openai)):
            for header in (None, "Bearer wrong-0123456789abc", "wrong", "", "Basic abc"):
                headers = {} if header is None else {"authorization": header}
                response = await http.post(path, json=EMBEDDING.get(path), headers=headers)
                assert response.status_code == 401
                assert response.headers["www-authenticate"] == "Bearer"
                assert "x-request-id" in response.headers
                error = response.json()["error"]
                if shape == "native":
                    assert response.json()["error_type"] == "Unauthorized"
                    assert "API key" in error
                else:
                    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        for header in (f"Bearer {KEY}", f"bearer {OTHER_KEY}", KEY):
            for path in ("/embed", "/v1/embeddings"):
                response = await http.post(path, json=EMBEDDING[path], headers={"authorization": header})
                assert response.status_code == 200
        for path in ("/info", "/v1/models", "/models/tiny", "/models/tiny/health"):
            assert (await http.get(path)).status_code == 401
            assert (await http.get(path, headers={"authorization": KEY})).status_code == 200


async def test_probes_scrapes_and_pages_need_none(client: MakeClient) -> None:
    async with client(api_keys=KEY) as http:
        for path in ("/health", "/health/live", "/health/ready", "/health/startup", "/metrics", "/docs", "/"):
            assert (await http.get(path)).status_code == 200
        assert (await http.get("/openapi.json")).status_code == 200
        assert (await http.get("/playground/playground.js")).status_code == 200
        assert (await http.post("/", json={"inputs": "a"})).status_code == 401


async def test_admin_is_closed_without_a_key_of_its_own(client: MakeClient) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    for keys in ("", KEY):
        async with client(api_keys=keys) as http:
            response = await http.post("/admin/reload", headers=headers)
            assert response.status_code == 401
            assert "CLOZE_ADMIN_KEYS" in response.json()["error"]
    async with client(api_keys=KEY, admin_keys=ADMIN_KEY) as http:
        assert (await http.post("/admin/reload")).status_code == 401
        assert (await http.post("/admin/reload", headers=headers)).status_code == 401
        admin = {"authorization": f"Bearer {ADMIN_KEY}"}
        response = await http.post("/admin/reload", headers=admin)
        assert response.json() == {
            "added": [], "changed": [], "removed": [], "unchanged": ["tiny"], "default": "tiny"
        }  # fmt: skip
        assert (await http.post("/embed", json={"inputs": "a"}, headers=admin)).status_code == 401


def test_keys_that_cannot_be_used_are_told_and_not_shown(make_app: MakeApp) -> None:
    for keys in ("short", f"{KEY},{KEY}", "key with a blank in it", ","):
        for name in ("api_keys", "admin_keys"):
            with pytest.raises(OptionError) as caught:
                make_app(**{name: keys})
            assert keys == "," or not any(key in str(caught.value) for key in keys.split(","))


# Switches


PREFLIGHT = {
    "origin": "https://page.example",
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-request-id",
}


async def test_cors_is_off_by_default(both: httpx.AsyncClient) -> None:
    response = await both.options("/embed", headers=PREFLIGHT)
    assert response.status_code == 405
    answer = await both.post("/embed", json={"inputs": "a"}, headers={"origin": "https://page.example"})
    assert not any(name.startswith("access-control") for name in (*response.headers, *answer.headers))


@pytest.mark.parametrize(("origins", "status"), [("https://page.example", 200), ("*", 400)])
async def test_a_page_of_an_origin_given_may_ask_in_its_users_network(
    client: MakeClient, origins: str, status: int
) -> None:
    async with client(cors_allow_origin=origins) as http:
        asked = PREFLIGHT | {"access-control-request-private-network": "true"}
        response = await http.options("/embed", headers=asked)
        assert response.status_code == status
        assert (response.headers.get("access-control-allow-private-network") == "true") == (status == 200)


async def test_cors_is_on_for_an_origin_given(client: MakeClient) -> None:
    async with client(cors_allow_origin="https://page.example, https://other.example", api_keys=KEY) as http:
        response = await http.options("/embed", headers=PREFLIGHT)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "https://page.example"
        assert "authorization" in response.headers["access-control-allow-headers"]
        origin = {"origin": "https://other.example"}
        answer = await http.post("/embed", json={"inputs": "a"}, headers={**origin, "authorization": KEY})
        refused = await http.post("/embed", json={"inputs": "a"}, headers=origin)
        assert (answer.status_code, refused.status_code) == (200, 401)
        for each in (answer, refused):  # a page could not read why otherwise
            assert each.headers["access-control-allow-origin"] == "https://other.example"
        foreign = await http.options("/embed", headers={**PREFLIGHT, "origin": "https://foreign.example"})
        assert "access-control-allow-origin" not in foreign.headers


async def test_no_answer_is_taken_for_another_type(both: httpx.AsyncClient, subtests: pytest.Subtests) -> None:
    for path in ["/info", "/%3Cscript%3E", "/docs", "/metrics"]:
        with subtests.test(path=path):
            assert (await both.get(path)).headers["x-content-type-options"] == "nosniff"


async def test_one_client_cannot_take_every_place(make_app: MakeApp, hold: Hold) -> None:
    app = make_app(max_concurrent_requests=10, api_keys=f"{KEY},{OTHER_KEY}")

    async with open_client(app) as http:

        def post(key: str) -> asyncio.Task[httpx.Response]:
            return asyncio.create_task(http.post("/embed", json={"inputs": "a"}, headers={"authorization": key}))

        with hold():
            taken = [post(KEY) for _ in range(9)]
            await until(lambda: services(app).traffic.in_flight == 9)
            refused = await post(KEY)
            assert (refused.status_code, refused.json()["error_type"]) == (429, "Overloaded")
            assert (
                "9 requests are in flight and the request adds 1; the limit is 9 for a client"
                in refused.json()["error"]
            )
            other = post(OTHER_KEY)
            await until(lambda: services(app).traffic.in_flight == 10)
            assert (await post(OTHER_KEY)).status_code == 429
        assert [(await each).status_code for each in [*taken, other]] == [200] * 10
        assert (await post(KEY)).status_code == 200  # every place was given back


async def test_who_finds_no_place_is_told_when_to_come_again(make_app: MakeApp, hold: Hold) -> None:
    """By how long the work before took; the clock is the test's."""
    app = make_app(max_concurrent_requests=1)
    now, waits = 1000.0, []
    services(app).admission._clock = lambda: now
    async with open_client(app) as http:
        for seconds in (29.5, 0):
            with hold():
                work = asyncio.create_task(http.post("/embed", json={"inputs": "a"}))
                await until(lambda: services(app).executors.busy_for)
                now += seconds
                refused = await http.post("/embed", json={"inputs": "a"})
                assert refused.status_code == 429
                waits.append(refused.headers["retry-after"])
            assert (await work).status_code == 200
    assert waits == ["1", "30"]


async def test_docs_and_playground_can_be_left_out(client: MakeClient) -> None:
    async with client(ui=False) as http:
        for path in ("/docs", "/openapi.json", "/redoc", "/playground/playground.js"):
            response = await http.get(path)
            assert response.status_code == 404
            assert "/docs lists" not in response.json()["error"]
        page = await http.get("/")
        assert (page.status_code, page.content) == (200, b"")
        assert (await http.head("/")).status_code == 200
        assert (await http.post("/", json={"inputs": "a"})).status_code == 200
    async with client() as http:
        assert "text/html" in (await http.get("/")).headers["content-type"]
        assert (await http.get("/docs")).status_code == 200


# The log


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level("DEBUG")
    return caplog


def line_of(log: pytest.LogCaptureFixture, path: str) -> dict[str, Any]:
    """The one line about this path."""
    [record] = [
        record for record in log.records if record.name == "cloze.service.http.middleware" and record.args[1] == path
    ]
    return {"level": record.levelname, **record.fields}


async def test_each_post_is_one_line(client: MakeClient, log: pytest.LogCaptureFixture) -> None:
    async with client(api_keys=KEY) as http:
        http.headers["authorization"] = KEY
        await http.post("/embed", json={"inputs": ["a", "dogs run"]})
        await http.post("/v1/embeddings", json={"input": "poison"})
        await http.post("/similarity", json={"inputs": "a"})
        await http.post("/tokenize", json={"inputs": "a"})
        await http.get("/info")
    of_work = {"client": "key-1", "model": "tiny"}
    found = {path: line_of(log, path) for path in ("/embed", "/v1/embeddings", "/similarity", "/tokenize", "/info")}
    assert all(line.pop("ms") >= 0 for line in found.values())
    tokens = len(sequence("a")) + len(sequence("dogs run"))
    assert found == {
        "/embed": {"level": "INFO", "status": 200, "texts": 2, "tokens": tokens, **of_work},
        "/v1/embeddings": {"level": "INFO", "status": 500, "error_type": "Backend", "texts": 1, **of_work},
        "/similarity": {"level": "INFO", "status": 422, "error_type": "Validation", "client": "key-1"},
        "/tokenize": {"level": "INFO", "status": 200, **of_work},
        "/info": {"level": "DEBUG", "status": 200, **of_work},
    }


async def test_a_refused_client_is_known_by_its_address(client: MakeClient, log: pytest.LogCaptureFixture) -> None:
    async with client() as http:
        await http.post("/embed", json={"inputs": "a"})
    assert line_of(log, "/embed")["client"] == "127.0.0.1"
    log.clear()
    async with client(api_keys=KEY) as http:
        await http.post("/embed", json={"inputs": "a"})
        await http.get("/v1/models", headers={"authorization": f"Bearer {OTHER_KEY}"})
    for path in ("/embed", "/v1/models"):
        line = line_of(log, path)
        assert line.pop("ms") >= 0
        assert line == {"level": "INFO", "status": 401, "client": "127.0.0.1", "error_type": "Unauthorized"}


async def test_a_path_forges_no_field(client: MakeClient, log: pytest.LogCaptureFixture) -> None:
    async with client() as http:
        await http.post("/x%20status=200%20client=root%0A", json={})
        await http.post("/" + "x" * 10_000, json={})
    forged, long = [each for each in log.records if each.name == "cloze.service.http.middleware"]
    assert " POST /x%20status%3D200%20client%3Droot%0A status=404 " in Text().format(forged)
    assert len(Text().format(long)) < 500


async def test_neither_texts_nor_keys_are_logged(
    client: MakeClient, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, hold: Hold
) -> None:
    """Whatever becomes of the request, down to a bug's traceback, as text and as JSON."""
    secret = "guitar"
    bodies: list[tuple[str, Any]] = [
        ("/embed", {"inputs": secret}),
        ("/embed", {"inputs": f"poison {secret}"}),
        ("/embed", {"inputs": f"{secret} " * 100, "truncate": False}),
        ("/embed", {"inputs": [secret, 1]}),
        ("/embed", {"inputs": {secret: secret}}),
        ("/embed", {"inputs": "a", "normalize": secret}),
        ("/embed", {"inputs": "a", "prompt_name": secret}),
        ("/embed", {"inputs": "a", "model": secret}),
        ("/similarity", {"inputs": {"source_sentence": secret, "sentences": [secret, None]}}),
        ("/similarity", {"inputs": {"pairs": [[secret, "poison"]]}}),
        ("/search", {"query": secret, "texts": [secret, f"poison {secret}"], "return_text": True}),
        ("/explain", {"inputs": [secret, f"poison {secret}"]}),
        ("/predict", {"inputs": [[secret], [f"poison {secret}"]]}),
        ("/predict", {"inputs": secret, "head": secret}),
        ("/tokenize", {"inputs": secret}),
        ("/tokenize", {"inputs": [secret, 5]}),
        ("/decode", {"ids": [secret]}),
        ("/v1/embeddings", {"input": secret, "user": secret}),
        ("/v1/embeddings", {"input": [f"poison {secret}"]}),
        ("/v1/embeddings", {"input": secret, "encoding_format": secret}),
    ]
    async with client(api_keys=KEY, admin_keys=ADMIN_KEY, max_client_batch_size=50) as http:
        for header in (f"Bearer {KEY}", "Bearer wrong-key-of-guitar", ADMIN_KEY):
            http.headers["authorization"] = header
            for path, body in bodies:
                await http.post(path, json=body)
            await http.post("/embed", content=f'{{"inputs": "{secret}'.encode())
            await http.post("/admin/reload")
        http.headers["authorization"] = KEY
        await http.post("/embed", json={"inputs": [secret] * 51})
        with hold():
            await http.post("/embed", json={"inputs": secret}, headers={"x-request-timeout": "0.01"})

        def broken(*args: object, **options: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr("cloze.service.http.embed.to_json", broken)
        assert (await http.post("/embed", json={"inputs": secret})).status_code == 500
    assert len(log.records) > 60
    written = "\n".join(
        form.format(record) for record in log.records if record.name != "httpx" for form in (Text(), JSON())
    )
    assert "ZeroDivisionError" in written
    for unwanted in (secret, KEY, ADMIN_KEY, "wrong-key"):
        assert unwanted not in written


async def test_a_slash_too_many_is_named(both: httpx.AsyncClient, subtests: pytest.Subtests) -> None:
    for path, meant in [
        *(("//embed", "/embed"), ("/embed/", "/embed"), ("/v1//embeddings", "/v1/embeddings")),
        *(("/models/tiny/embed/", "/models/tiny/embed"), ("/embeddings//", "/embeddings")),
    ]:
        with subtests.test(path=path):
            response = await both.post(f"http://test{path}", json={})
            assert response.status_code == 404
            assert f"POST {path}: Not Found; ask for {meant}" in response.text
            assert "lists the routes" in (await both.post("/embedd/", json={})).text
    assert "ask for" not in (await both.post("http://test/models//embed", json={})).text  # a model's name is missing
