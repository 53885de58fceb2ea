"""What the service tells Prometheus. One registry an app, every label set there from the start."""

from collections.abc import Callable, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from service.errors import ERROR_TYPES

__all__ = ["ROUTES", "Metrics"]

ROUTES = ("/", "/embed", "/similarity", "/health", "/info", "/metrics", "/docs", "/openapi.json", "other")
DROPPED = "Dropped"  # the client went before its answer
SECONDS = tuple(0.0005 * 2**power for power in range(16))  # 0.5 ms to 16 s
SIZES = tuple(float(2**power) for power in range(15))  # 1 to 16 384


disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each, which nothing here reads


class Metrics:
    """The service's metrics, all named cloze_…; durations in seconds."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._requests = self._counter("cloze_requests", "Requests answered", "route", "status")
        self._failures = self._counter("cloze_failures", "Requests that failed, by error type", "reason")
        for route in ROUTES:
            self._requests.labels(route, "200")
        for reason in (*ERROR_TYPES, DROPPED):
            self._failures.labels(reason)
        self.texts = self._counter("cloze_texts", "Texts embedded")
        self.tokens = self._counter("cloze_tokens", "Tokens embedded, template and special tokens included")
        self.truncations = self._counter("cloze_truncations", "Texts that were cut")
        self.request_seconds = self._histogram("cloze_request_seconds", "From the head of a request to its answer")
        self.tokenize_seconds = self._histogram("cloze_tokenize_seconds", "Tokenising one request, waiting included")
        self.queue_seconds = self._histogram("cloze_queue_seconds", "One text's wait for its batch")
        self.inference_seconds = self._histogram("cloze_inference_seconds", "One batch in the graph")
        self.batch_texts = self._histogram("cloze_batch_texts", "Texts of one batch", SIZES)
        self.batch_tokens = self._histogram("cloze_batch_tokens", "Padded tokens of one batch", SIZES)
        self.padding = self._counter("cloze_padding_tokens", "Padding run through the graph")
        self._in_flight = self._gauge("cloze_requests_in_flight", "Requests at work")
        self._queue_texts = self._gauge("cloze_queue_texts", "Texts that wait for a batch")
        self._queue_tokens = self._gauge("cloze_queue_tokens", "Tokens that wait for a batch")

    def answered(self, route: str, status: int, seconds: float, reason: str | None) -> None:
        """Count one answer; `reason` is its error type."""
        self._requests.labels(route if route in ROUTES else "other", str(status)).inc()
        self.request_seconds.observe(seconds)
        if reason is not None:
            self._failures.labels(reason).inc()

    def dropped(self) -> None:
        """Count one client that went before its answer."""
        self._failures.labels(DROPPED).inc()

    def batch(self, waits: Sequence[float], tokens: int, padded: int, seconds: float) -> None:
        """Count one batch that was run: each text's wait, the tokens, with padding, and the time in the graph."""
        for wait in waits:
            self.queue_seconds.observe(wait)
        self.batch_texts.observe(len(waits))
        self.batch_tokens.observe(padded)
        self.padding.inc(padded - tokens)
        self.inference_seconds.observe(seconds)

    def watch(
        self, in_flight: Callable[[], float], queue_texts: Callable[[], float], queue_tokens: Callable[[], float]
    ) -> None:
        """Read these at each scrape."""
        self._in_flight.set_function(in_flight)
        self._queue_texts.set_function(queue_texts)
        self._queue_tokens.set_function(queue_tokens)

    def inform(self, **labels: str) -> None:
        """Say once what is served."""
        info = Gauge("cloze_model_info", "What is served; always 1", list(labels), registry=self.registry)
        info.labels(**labels).set(1)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(name, meaning, labels, registry=self.registry)

    def _gauge(self, name: str, meaning: str) -> Gauge:
        return Gauge(name, meaning, registry=self.registry)

    def _histogram(self, name: str, meaning: str, buckets: Sequence[float] = SECONDS) -> Histogram:
        return Histogram(name, meaning, buckets=buckets, registry=self.registry)
