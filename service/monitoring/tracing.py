"""OpenTelemetry traces, sent over OTLP/HTTP where the setting `otlp_endpoint` names a collector.

    tracing = configure(settings.otlp_endpoint, "cloze", VERSION)
    app = FastAPI(…, telemetry=tracing.telemetry)  # a span a request, by route, in the caller's trace (traceparent)
    tracing.stages(begun, found.timing._asdict(), model=…, texts=…, tokens=…)  # in a request, when it has its vectors
    await asyncio.to_thread(tracing.close)  # at the end of the lifespan

FastAPI makes the server's spans; probes and scrapes get none. Attributes are names and counts, never a text: a URL's
query, which no route reads, is left out as well. The SDK is imported where there is an endpoint, and nowhere else; its
OTEL_* variables (sampler, headers, resource) hold as ever. A collector that does not answer costs a request nothing.
"""

import re
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from fastapi.telemetry import TelemetryConfig
from starlette.types import Scope

from service.errors import BadSettings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


OFF: Final[TelemetryConfig] = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
QUIET: Final = re.compile(r"(/models/[^/]+)?/health(/\w+)?|/metrics")  # paths of probes and scrapes
FLUSH_SECONDS: Final = 2.0


class Tracing:
    """Where spans go; nowhere without a provider, and then every method costs nothing."""

    def __init__(self, provider: "TracerProvider | None" = None) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("cloze") if provider else None

    @property
    def enabled(self) -> bool:
        return self._provider is not None

    @property
    def telemetry(self) -> TelemetryConfig:
        """What FastAPI takes: spans of requests alone, for metrics and logs are the service's own."""
        if self._provider is None:
            return OFF
        on: TelemetryConfig = {"tracing": True, "tracer_provider": self._provider, "operation_spans": False}
        return {**OFF, **on, "exclude": _is_quiet}

    def stages(self, begun: int, seconds: Mapping[str, float], *, model: str, **counts: int) -> None:
        """Spans of the current request, one after the other from `begun`, nanoseconds of `time.time_ns()`.

        Made when all is over, as only then it is known how long each took.
        """
        if self._tracer is None:
            return
        attributes: dict[str, str | int] = {
            "cloze.model": model,
            **{f"cloze.{name}": count for name, count in counts.items()},
        }
        for name, lasted in seconds.items():
            ended = begun + round(lasted * 1e9)
            self._tracer.start_span(name, attributes=attributes, start_time=begun).end(ended)
            begun = ended

    def close(self) -> None:
        """Send what is left, and wait two seconds for it at most: a collector that is gone holds up no stop."""
        if self._provider is not None:
            last = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
            last.start()
            last.join(FLUSH_SECONDS)


def configure(endpoint: str, service_name: str, version: str) -> Tracing:
    """Send spans to `endpoint`, a collector's address or the whole URL of its traces; nowhere if it is empty.

    Raises BadSettings where that is no URL, or OpenTelemetry's SDK is not installed.
    """
    if not endpoint:
        return Tracing()
    url = _url(endpoint)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import Span, SpanProcessor, TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise BadSettings("otlp_endpoint needs OpenTelemetry: install cloze[otel], or unset it") from error

    class Redact(SpanProcessor):
        """A URL's query may hold anything."""

        def on_start(self, span: Span, parent_context: object = None) -> None:
            if "url.query" in (span.attributes or {}):
                span.set_attribute("url.query", "REDACTED")

    resource = Resource.create({"service.name": service_name, "service.version": version})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(Redact())
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url)))
    return Tracing(provider)


def _url(endpoint: str) -> str:
    try:
        parts = urlsplit(endpoint)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a bracket that stays open, a port that is no number
        usable = False
    if not usable:
        raise BadSettings(f"otlp_endpoint is {endpoint!r}, no HTTP URL; write it as http://collector:4318")
    return endpoint if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/v1/traces"


def _is_quiet(scope: Scope) -> bool:
    return QUIET.fullmatch(scope["path"]) is not None
