"""Spans as a collector gets them over OTLP/HTTP: their names, parents and counts, and no text among them."""

import gzip
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from fastapi import Body, FastAPI
from harness import PATIENCE, open_client
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from pydantic import SecretStr

from cloze.encoding.errors import OptionError
from cloze.service import VERSION
from cloze.service.app import create_app
from cloze.service.monitoring.tracing import Tracing, configure_tracing
from cloze.service.settings import Settings

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SECRET = "a text that nobody else may read"
KEY = "a-key-that-nobody-else-may-read"


class Collector(ThreadingHTTPServer):
    """Keeps what is sent to it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Receiver)
        self.paths: list[str] = []
        self.bodies: list[bytes] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def spans(self) -> dict[str, Span]:
        """By name; all that a test has made."""
        sent = [ExportTraceServiceRequest.FromString(body) for body in self.bodies]
        found = [
            span
            for each in sent
            for group in each.resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        ]
        assert len({span.name for span in found}) == len(found)
        return {span.name: span for span in found}

    def resource(self) -> dict[str, Any]:
        return attributes(ExportTraceServiceRequest.FromString(self.bodies[0]).resource_spans[0].resource)


class Receiver(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.paths.append(self.path)
        self.server.bodies.append(gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body)
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setattr("cloze.service.monitoring.tracing.FLUSH_SECONDS", PATIENCE)
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def make(tracing: Tracing) -> FastAPI:
    """Routes that say how long each stage took."""
    app = FastAPI(telemetry=tracing.telemetry)

    @app.post("/models/{model}/embed")
    async def embed(model: str, inputs: str = Body(embed=True)) -> int:
        stages = {"tokenize": 0.001, "queue": 0.002, "inference": 0.25}
        tracing.stages(1_700_000_000_000_000_000, stages, model=model, texts=1, tokens=7)
        return len(inputs)

    @app.get("/health/live")
    async def live() -> str:
        return "ok"

    @app.get("/models/{model}/health")
    async def health(model: str) -> str:
        return model

    @app.get("/fails")
    async def fails() -> None:
        raise ValueError(SECRET)

    return app


async def ask(app: FastAPI, method: str, path: str, **more: Any) -> int:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return (await client.request(method, path, **more)).status_code


def attributes(holder: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in holder.attributes}


@pytest.mark.anyio
async def test_a_request_and_its_stages_in_the_callers_trace(collector: Collector) -> None:
    tracing = configure_tracing(collector.url)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "authorization": f"Bearer {SECRET}"}
    path = f"/models/tiny/embed?text={SECRET}"
    assert await ask(make(tracing), "POST", path, json={"inputs": SECRET}, headers=headers) == 200
    tracing.close()

    spans = collector.spans()
    server = spans.pop("POST /models/{model}/embed")
    assert server.kind == Span.SPAN_KIND_SERVER
    assert (server.trace_id.hex(), server.parent_span_id.hex()) == (TRACE, PARENT)
    found = attributes(server)
    assert found["http.route"] == "/models/{model}/embed"
    assert found["http.response.status_code"] == 200

    assert list(spans) == ["tokenize", "queue", "inference"]
    assert {span.parent_span_id for span in spans.values()} == {server.span_id}
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
    assert all(
        attributes(span) == {"cloze.model": "tiny", "cloze.texts": 1, "cloze.tokens": 7} for span in spans.values()
    )
    times = [
        (span.start_time_unix_nano - 1_700_000_000_000_000_000, span.end_time_unix_nano) for span in spans.values()
    ]
    assert [start for start, _ in times] == [0, 1_000_000, 3_000_000]
    assert times[2][1] == 1_700_000_000_253_000_000

    resource = collector.resource()
    assert (resource["service.name"], resource["service.version"]) == ("cloze", VERSION)
    assert set(collector.paths) == {"/v1/traces"}
    sent = b"".join(collector.bodies)
    assert b"nobody" not in sent
    assert b"POST" in sent


@pytest.mark.anyio
async def test_probes_make_no_span_and_errors_tell_no_message(collector: Collector) -> None:
    tracing = configure_tracing(f"{collector.url}/own/path")
    app = make(tracing)
    assert await ask(app, "GET", "/health/live") == 200
    assert await ask(app, "GET", "/models/tiny/health") == 200
    assert await ask(app, "GET", "/fails") == 500
    tracing.close()
    (failed,) = collector.spans().values()
    assert failed.name == "GET /fails"
    assert attributes(failed)["error.type"] == "ValueError"
    assert set(collector.paths) == {"/own/path"}
    assert b"nobody" not in b"".join(collector.bodies)


@pytest.mark.anyio
async def test_a_trace_that_its_caller_does_not_sample_is_not_sent(collector: Collector) -> None:
    tracing = configure_tracing(collector.url)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    assert await ask(make(tracing), "POST", "/models/tiny/embed", json={"inputs": "a"}, headers=headers) == 200
    tracing.close()
    assert collector.bodies == []


@pytest.mark.anyio
@pytest.mark.parametrize("listening", [True, False])
async def test_a_collector_that_does_not_answer_holds_up_nothing(
    listening: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cloze.service.monitoring.tracing.FLUSH_SECONDS", 0.01)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        if not listening:
            taken.close()
        tracing = configure_tracing(url)
        assert await ask(make(tracing), "POST", "/models/tiny/embed", json={"inputs": SECRET}) == 200
        tracing.close()
        for last in threading.enumerate():
            if last.name == "last spans":  # it waits, nobody else; refused at once, it may be gone
                last.join(PATIENCE)
    assert "Failed to export" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.anyio
async def test_without_an_endpoint_nothing_is_sent() -> None:
    tracing = configure_tracing("")
    assert await ask(make(tracing), "POST", "/models/tiny/embed", json={"inputs": "a"}) == 200
    tracing.close()


def test_an_endpoint_that_is_no_url(subtests: pytest.Subtests) -> None:
    message = "not an HTTP URL; write http://collector:4318"
    for endpoint in (
        "collector:4318",
        "grpc://collector:4317",
        "http://",
        "/v1/traces",
        "http://[::1:4318",
        "http://a:x",
    ):
        with subtests.test(endpoint), pytest.raises(OptionError, match=message):
            configure_tracing(endpoint)


def test_the_sdk_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(OptionError, match=r"install the extra otel"):
        configure_tracing("http://collector:4318")


def test_without_an_endpoint_the_sdk_is_not_imported() -> None:
    program = (
        "import sys; from cloze.service.monitoring.tracing import configure_tracing;"
        "configure_tracing('');"
        "print([name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert done.stdout.strip() == "[]"


@pytest.mark.anyio
@pytest.mark.parametrize(("key", "status", "stages"), [(KEY, 200, ["tokenize", "queue", "inference"]), ("", 401, [])])
async def test_the_service_tells_a_request_by_its_id(
    collector: Collector, settings: Settings, key: str, status: int, stages: list[str]
) -> None:
    changes = {"otlp_endpoint": collector.url, "api_keys": SecretStr(KEY)}
    async with open_client(create_app(settings.model_copy(update=changes))) as http:
        headers = {"authorization": f"Bearer {key}", "x-request-id": "the-id"}
        assert (await http.post("/embed", json={"inputs": SECRET}, headers=headers)).status_code == status
    spans = collector.spans()
    server = spans.pop("POST /embed" if status == 200 else "POST")  # a request that is refused has no route
    assert attributes(server)["cloze.request_id"] == "the-id"
    assert attributes(server).get("http.route") == ("/embed" if status == 200 else None)
    assert list(spans) == stages
    sent = b"".join(collector.bodies)
    assert SECRET.encode() not in sent
    assert KEY.encode() not in sent
