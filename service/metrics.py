"""What the service tells Prometheus. One registry an app, every label set there from the start.

Rates are Prometheus' matter: the service counts, and docker/monitoring/rules.yml makes tokens per second, the share
of padding and the share of failures of it. A rate made here would fix its window, and lose what passes between two
scrapes.
"""

import re
from collections.abc import Callable, Sequence
from typing import Final, Literal, NamedTuple, Protocol, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from service.cache import Cache
from service.errors import ANSWERS, ERROR_TYPES
from service.space import Space

__all__ = ["GONE", "REASONS", "ROUTES", "Metrics", "ModelMetrics", "Outcome", "Queue", "table"]

Outcome = Literal["swapped", "unchanged", "failed"]

MODEL_ROUTES: Final = (  # those that run a model
    *("/", "/embed", "/similarity", "/search"),
    *("/models/{model}", "/models/{model}/embed", "/models/{model}/similarity", "/models/{model}/search"),
    *("/v1/embeddings", "/embeddings", "/models/{model}/v1/embeddings"),
)
TOKEN_ROUTES: Final = ("/tokenize", "/decode", "/models/{model}/tokenize", "/models/{model}/decode")
READ_ROUTES: Final = ("GET /", "GET /models/{model}")  # no texts come where these are not posted to
STATUS_ROUTES: Final = (
    *("/info", "/models/{model}/info", "/models/{model}/health"),
    *("/v1/models", "/v1/models/{model}", "/models", "/models/{model}/v1/models"),
    *("/health", "/health/live", "/health/ready", "/health/startup", "/metrics"),
    *READ_ROUTES,
    *("/docs", "/docs/{name}", "/openapi.json", "/playground/{name}", "/admin/reload"),
)
OTHER: Final = "other"  # no route, or none of these
ROUTES: Final = (*MODEL_ROUTES, *TOKEN_ROUTES, *STATUS_ROUTES, OTHER)
PATTERNS: Final = [(re.compile(re.sub(r"{\w+}", "[^/]+", route)), route) for route in ROUTES if "{" in route]

GONE: Final = 499  # the client; nobody reads it
STATUSES: Final = (200, 400, 401, 404, 405, 408, 413, 415, 422, 424, 429, 431, GONE, 500, 503, 504)
STATUS_STATUSES: Final = (200, 304, 401, 404, 405, 409, 429, 500, 503)  # of routes that take no texts

DROPPED: Final = "Dropped"  # the client went before its answer
HTTP: Final = "Http"  # any other status of Starlette's own
REASONS: Final = (*ERROR_TYPES, HTTP, DROPPED)
REFUSALS: Final = {known.error_type: known.status for known in ANSWERS.values()}

SECONDS: Final = tuple(0.0005 * 2**power for power in range(18))  # 0.5 ms to 66 s
TEXTS: Final = tuple(float(2**power) for power in range(13))  # 1 to 4096
TOKENS: Final = tuple(float(2**power) for power in range(4, 18))  # 16 to 131 072


disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each, which nothing here reads


class Queue(Protocol):
    """What waits for a batch; a Batcher."""

    @property
    def waiting(self) -> int: ...

    @property
    def waiting_items(self) -> int: ...

    @property
    def age(self) -> float: ...


class Definition(NamedTuple):
    """One metric, as the table tells it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


class Metrics:
    """The service's metrics, all named cloze_…; durations in seconds. `model` begins a model's label sets."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.definitions: list[Definition] = []
        self._per_model: list[MetricWrapperBase] = []
        ProcessCollector(registry=self.registry)
        self._of_requests()
        self._of_service()
        self._of_models()
        self._of_batches()
        self._of_spaces()

    def answered(self, method: str, path: str, status: int, seconds: float, reason: str | None) -> None:
        """Count one answer; `path` is what was asked for, or what the route declares, `reason` its error type."""
        route = _route(method, path)
        self._requests.labels(route, str(status)).inc()
        if status < 400 and reason is None and route in MODEL_ROUTES:
            self._request_seconds.labels(route).observe(seconds)
        if reason is not None:
            self._failures.labels(reason).inc()

    def refused(self, reason: str) -> None:
        """Count one request that was refused before it had a route: too slow, too large a head, no HTTP."""
        self._requests.labels(OTHER, str(REFUSALS[reason])).inc()
        self._failures.labels(reason).inc()

    def dropped(self) -> None:
        """Count one client that went before its answer."""
        self._failures.labels(DROPPED).inc()

    def reloaded(self, outcome: Outcome) -> None:
        """Count one reload."""
        self._reloads.labels(outcome).inc()

    def watch(
        self,
        *,
        requests: Callable[[], float],
        requests_limit: float,
        tokens: Callable[[], float],
        tokens_limit: float,
        ready: Callable[[], bool],
        cache: Cache,
    ) -> None:
        """Read at each scrape what is at work, and whether the service is ready."""
        self._in_flight.set_function(requests)
        self._in_flight_limit.set(requests_limit)
        self._tokens_in_flight.set_function(tokens)
        self._tokens_limit.set(tokens_limit)
        self._ready.set_function(lambda: float(ready()))
        self._cache_bytes.set_function(lambda: cache.size)
        self._cache_texts.set_function(lambda: len(cache))

    def model(
        self,
        name: str,
        queue: Queue,
        *,
        provider: str,
        precision: str,
        version: str,
        pooling: str,
        dimension: int,
        sha256: str,
        load_seconds: float,
    ) -> "ModelMetrics":
        """Begin to count for a model that is loaded and about to serve; its label sets are there from now on.

        A model of that name before it gives way: counters go on, its facts, its queue and its space do not.
        """
        self.info.remove_by_labels({"model": name})
        self.info.labels(name, provider, precision, version, pooling, str(dimension), sha256).set(1)
        self.loaded.labels(name).set(1)
        self.load_seconds.labels(name).set(load_seconds)
        self.queue_age.labels(name).set_function(lambda: queue.age)
        self.queue_texts.labels(name).set_function(lambda: queue.waiting_items)
        self.queue_tokens.labels(name).set_function(lambda: queue.waiting)
        space = self.spaces.by_model[name] = Space(dimension)
        return ModelMetrics(self, name, space)

    def forget(self, name: str) -> None:
        """Drop every label set of a model that is no longer served; what it still answers is not counted."""
        for metric in self._per_model:
            metric.remove_by_labels({"model": name})
        self.spaces.by_model.pop(name, None)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def _of_requests(self) -> None:
        self._requests = self._counter(
            "cloze_requests", "requests answered; status 499 is a client that had gone", "route", "status"
        )
        self._failures = self._counter(
            "cloze_failures", "requests that failed, by error type; Dropped is a client that went first", "reason"
        )
        self._request_seconds = self._histogram(
            "cloze_request_seconds",
            "from the head of a request to the end of its answer; only successes, on the routes that run a model",
            "route",
        )
        for route in ROUTES:
            for status in STATUS_STATUSES if route in STATUS_ROUTES else STATUSES:
                self._requests.labels(route, str(status))
        for reason in REASONS:
            self._failures.labels(reason)
        for route in MODEL_ROUTES:
            self._request_seconds.labels(route)

    def _of_service(self) -> None:
        self._ready = self._gauge("cloze_ready", "1 while the service is ready, else 0")
        self._in_flight = self._gauge("cloze_requests_in_flight", "requests at work, GETs too")
        self._in_flight_limit = self._gauge("cloze_requests_in_flight_limit", "how many POSTs may be; `max_requests`")
        self._tokens_in_flight = self._gauge("cloze_tokens_in_flight", "tokens of the requests at work")
        self._tokens_limit = self._gauge("cloze_tokens_in_flight_limit", "how many may be; `max_tokens_in_flight`")
        self._cache_bytes = self._gauge("cloze_cache_bytes", "memory used by cached vectors, at most `cache_mb`")
        self._cache_texts = self._gauge("cloze_cache_texts", "texts whose vectors are cached")
        self._reloads = self._counter("cloze_reloads", "reloads; one that failed changed nothing", "outcome")
        for outcome in get_args(Outcome):
            self._reloads.labels(outcome)

    def _of_models(self) -> None:
        facts = ("provider", "precision", "version", "pooling", "dimension", "sha256")
        self.info = self._gauge("cloze_model_info", "always 1; the labels say what is served", "model", *facts)
        self.loaded = self._gauge("cloze_model_loaded", "1 for each model that is served", "model")
        self.load_seconds = self._gauge("cloze_model_load_seconds", "loading and warming it took", "model")
        self.texts = self._counter("cloze_texts", "texts embedded", "model")
        self.cache_hits = self._counter("cloze_cache_hits", "texts whose vector came from the cache", "model")
        self.tokens = self._counter("cloze_tokens", "tokens embedded, those of the template included", "model")
        self.truncations = self._counter("cloze_truncations", "texts that were cut", "model")
        self.tokenize_seconds = self._histogram(
            "cloze_tokenize_seconds", "tokenising one request, waiting for a thread included", "model"
        )

    def _of_batches(self) -> None:
        self.queue_age = self._gauge("cloze_queue_age_seconds", "how long the oldest text has waited", "model")
        self.queue_texts = self._gauge("cloze_queue_texts", "texts that wait for a batch", "model")
        self.queue_tokens = self._gauge("cloze_queue_tokens", "tokens that wait for a batch", "model")
        self.queue_seconds = self._histogram("cloze_queue_seconds", "one text's wait for its batch", "model")
        self.inference_seconds = self._histogram("cloze_inference_seconds", "one batch in the graph", "model")
        self.inference_failures = self._counter(
            "cloze_inference_failures", "batches that failed, each half that was tried again included", "model"
        )
        self.batch_texts = self._histogram("cloze_batch_texts", "distinct texts of one batch", "model", buckets=TEXTS)
        self.batch_tokens = self._histogram(
            "cloze_batch_tokens", "tokens of one batch, padding included", "model", buckets=TOKENS
        )
        self.padding = self._counter("cloze_padding_tokens", "padding run through the graph", "model")

    def _of_spaces(self) -> None:
        self.spaces = _Spaces()
        self.registry.register(self.spaces)
        for family in self.spaces.describe():
            self.definitions.append(Definition(family.name, "gauge", ("model",), family.documentation))

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        made = Counter(name, meaning, labels, registry=self.registry)
        self._note(made, f"{name}_total", "counter", labels, meaning)
        return made

    def _gauge(self, name: str, meaning: str, *labels: str) -> Gauge:
        made = Gauge(name, meaning, labels, registry=self.registry)
        self._note(made, name, "gauge", labels, meaning)
        return made

    def _histogram(self, name: str, meaning: str, *labels: str, buckets: Sequence[float] = SECONDS) -> Histogram:
        made = Histogram(name, meaning, labels, buckets=buckets, registry=self.registry)
        self._note(made, name, "histogram", labels, meaning)
        return made

    def _note(self, made: MetricWrapperBase, name: str, kind: str, labels: tuple[str, ...], meaning: str) -> None:
        self.definitions.append(Definition(name, kind, labels, meaning))
        if "model" in labels:
            self._per_model.append(made)


def _route(method: str, path: str) -> str:
    """The label of a path, also of one that was refused before it found its route."""
    found = path if path in ROUTES else next((route for pattern, route in PATTERNS if pattern.fullmatch(path)), OTHER)
    if method == "POST" or found not in (*MODEL_ROUTES, *TOKEN_ROUTES):
        return found
    read = f"GET {found}"
    return read if read in READ_ROUTES and method in ("GET", "HEAD") else OTHER


class ModelMetrics:
    """One model's counts and its space. Its label sets are held, so that a model that was forgotten stays forgotten."""

    def __init__(self, metrics: Metrics, name: str, space: Space) -> None:
        self.space = space
        self._texts = metrics.texts.labels(name)
        self._cache_hits = metrics.cache_hits.labels(name)
        self._tokens = metrics.tokens.labels(name)
        self._truncations = metrics.truncations.labels(name)
        self._tokenize_seconds = metrics.tokenize_seconds.labels(name)
        self._queue_seconds = metrics.queue_seconds.labels(name)
        self._inference_seconds = metrics.inference_seconds.labels(name)
        self._inference_failures = metrics.inference_failures.labels(name)
        self._batch_texts = metrics.batch_texts.labels(name)
        self._batch_tokens = metrics.batch_tokens.labels(name)
        self._padding = metrics.padding.labels(name)

    def tokenized(self, seconds: float) -> None:
        """Count one request that was tokenised."""
        self._tokenize_seconds.observe(seconds)

    def batch(self, waits: Sequence[float], tokens: int, padded: int, seconds: float) -> None:
        """Count one batch that was run: each text's wait, the tokens, with padding, and the time in the graph."""
        for wait in waits:
            self._queue_seconds.observe(wait)
        self._batch_texts.observe(len(waits))
        self._batch_tokens.observe(padded)
        self._padding.inc(padded - tokens)
        self._inference_seconds.observe(seconds)

    def failed(self) -> None:
        """Count one batch that gave no usable vectors."""
        self._inference_failures.inc()

    def embedded(self, texts: int, tokens: int, cut: int, known: int) -> None:
        """Count one request that has its vectors: its texts, their tokens, how many were cut, how many known."""
        self._texts.inc(texts)
        self._cache_hits.inc(known)
        self._tokens.inc(tokens)
        self._truncations.inc(cut)


class _Spaces(Collector):
    """The spaces of the models that are served, measured at each scrape.

    Until a space has a shape it has no series: a zero would be a lie, and one NaN would make a day's average NaN.
    `cloze_space_texts` is there from the start and tells why.
    """

    def __init__(self) -> None:
        self.by_model: dict[str, Space] = {}

    def describe(self) -> list[GaugeMetricFamily]:
        return [
            GaugeMetricFamily(name, meaning, labels=["model"])
            for name, meaning in (
                ("cloze_space_texts", "different texts in the sample of live traffic that the next three describe"),
                ("cloze_space_mean_cosine", "mean cosine of all pairs of the sample; near 1, all texts look alike"),
                ("cloze_space_mean_norm", "mean length of the sample's vectors, before normalisation"),
                ("cloze_space_truncated_ratio", "share of the sample's texts that were cut"),
            )
        ]

    def collect(self) -> list[GaugeMetricFamily]:
        texts, *measures = families = self.describe()
        for model, space in self.by_model.items():
            texts.add_metric([model], len(space))
            for family, value in zip(measures, space.shape() or (), strict=False):
                family.add_metric([model], value)
        return families


def table() -> str:
    """The metrics as a Markdown table."""
    rows = ["| Name | Type | Labels | Meaning |", "|---|---|---|---|"]
    for name, kind, labels, meaning in Metrics().definitions:
        rows.append(f"| `{name}` | {kind} | {', '.join(f'`{label}`' for label in labels)} | {meaning} |")
    rows.append("| `process_*` | | | memory, CPU time, open files and the start of the process |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
