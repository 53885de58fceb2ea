"""OpenTelemetry traces over OTLP/HTTP, if the setting `otlp_endpoint` names a collector.

FastAPI makes a span per request, in the caller's trace (traceparent), except for probes and scrapes. The SDK's OTEL_*
variables (sampler, headers, resource) apply. Attributes are names and counts, never a text; a URL's query, which no
route reads, is redacted. The SDK is imported only if there is an endpoint. A collector that does not answer does not
slow down requests.
"""

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from fastapi.telemetry import TelemetryConfig

from cloze.encoding.errors import OptionError
from cloze.service import VERSION

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

OFF: Final[TelemetryConfig] = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
QUIET: Final = re.compile(r"(/models/[^/]+)?/health(/\w+)?|/metrics")  # paths of probes and scrapes
FLUSH_SECONDS: Final = 2.0


@dataclass(frozen=True)
class Tracing:
    """Where spans go; without a provider, tracing is off."""

    provider: "TracerProvider | None" = None

    @property
    def telemetry(self) -> TelemetryConfig:
        """Return FastAPI's configuration: spans of requests only. Metrics and logs are the service's own."""
        if self.provider is None:
            return OFF
        on: TelemetryConfig = {"tracing": True, "tracer_provider": self.provider, "operation_spans": False}
        return {**OFF, **on, "exclude": lambda scope: QUIET.fullmatch(scope["path"]) is not None}

    def stages(self, begun: int, seconds: Mapping[str, float], *, model: str, **counts: int) -> None:
        """Add consecutive spans to the current request, from `begun`, nanoseconds of `time.time_ns()`.

        They are made at the end, when it is known how long each stage took.
        """
        if self.provider is None:
            return
        tracer = self.provider.get_tracer("cloze")
        attributes: dict[str, str | int] = {"cloze.model": model}
        attributes |= {f"cloze.{name}": count for name, count in counts.items()}
        for name, lasted in seconds.items():
            ended = begun + round(lasted * 1e9)
            tracer.start_span(name, attributes=attributes, start_time=begun).end(ended)
            begun = ended

    def close(self) -> None:
        """Send the remaining spans, and wait FLUSH_SECONDS at most, so that a lost collector cannot delay the end."""
        if self.provider is not None:
            last = threading.Thread(target=self.provider.shutdown, name="last spans", daemon=True)
            last.start()
            last.join(FLUSH_SECONDS)


def configure_tracing(endpoint: str) -> Tracing:
    """Send spans to `endpoint`, a collector's address or the full URL of its traces; tracing is off if it is empty.

    Raises OptionError if it is not a URL, or if OpenTelemetry's SDK is not installed.
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
        raise OptionError("otlp_endpoint needs OpenTelemetry: install the extra otel, or unset it") from error

    class Redact(SpanProcessor):
        """Redacts a URL's query, which may contain anything."""

        def on_start(self, span: Span, parent_context: object = None) -> None:
            if "url.query" in (span.attributes or {}):
                span.set_attribute("url.query", "REDACTED")

    resource = Resource.create({"service.name": "cloze", "service.version": VERSION})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(Redact())
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url)))
    return Tracing(provider)


def _url(endpoint: str) -> str:
    try:
        parts = urlsplit(endpoint)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # an unclosed bracket, or a port that is not a number
        usable = False
    if not usable:
        raise OptionError(f"otlp_endpoint is {endpoint!r}, which is not an HTTP URL; write http://collector:4318")
    return endpoint if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/v1/traces"
