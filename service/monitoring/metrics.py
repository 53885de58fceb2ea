"""What the service reports to Prometheus. One registry per app; every label set exists from the start.

The service counts; docker/monitoring/rules.yml derives rates and shares from the counts. A rate computed here would
have a fixed window, and would miss what happens between two scrapes.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeVar, get_args

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

from service.errors import ERROR_TYPES, STATUSES
from service.monitoring.drift import DriftSample

Metric = TypeVar("Metric", bound=MetricWrapperBase)
Outcome = Literal["swapped", "unchanged", "failed"]

MODEL_ROUTES: Final = ("/", "/embed", "/similarity", "/search", "/v1/embeddings")
TOKEN_ROUTES: Final = ("/tokenize", "/decode")
STATUS_ROUTES: Final = (
    *("GET /", "/info", "/v1/models", "/v1/models/{model}", "/metrics", "/admin/reload"),
    *("/health", "/health/live", "/health/ready", "/health/startup"),
    *("/docs", "/docs/{name}", "/openapi.json", "/playground/{name}"),
)
OTHER: Final = "other"
ROUTES: Final = (*MODEL_ROUTES, *TOKEN_ROUTES, *STATUS_ROUTES, OTHER)

FACTS: Final = ("provider", "precision", "version", "pooling", "dimension", "sha256")  # labels of cloze_model_info

CLIENT_GONE: Final = 499  # the client left before the answer, so nobody reads it
DROPPED: Final = "Dropped"
REASONS: Final = (*ERROR_TYPES, DROPPED)

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


@dataclass(frozen=True)
class ModelMetrics:
    """The series of one served model. They are held here, so that a model that was removed does not come back."""

    drift: DriftSample
    texts: Counter
    cache_hits: Counter
    tokens: Counter
    truncations: Counter
    tokenize_seconds: Histogram
    queue_seconds: Histogram
    inference_seconds: Histogram
    inference_failures: Counter
    batch_texts: Histogram
    batch_tokens: Histogram
    padding: Counter


class Metrics:
    """The service's metrics, all named cloze_…; durations are in seconds."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._per_model: list[MetricWrapperBase] = []
        ProcessCollector(registry=self.registry)
        self._define_requests()
        self._define_service()
        self._define_models()
        self._drift = _Drift()
        self.registry.register(self._drift)

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def watch(
        self,
        *,
        requests: Callable[[], float],
        requests_limit: float,
        tokens: Callable[[], float],
        tokens_limit: float,
        ready: Callable[[], bool],
        cache_bytes: Callable[[], float],
        cache_texts: Callable[[], float],
    ) -> None:
        """Set the limits, and read the present values at each scrape."""
        self.in_flight.set_function(requests)
        self.in_flight_limit.set(requests_limit)
        self.tokens_in_flight.set_function(tokens)
        self.tokens_limit.set(tokens_limit)
        self.ready.set_function(lambda: float(ready()))
        self.cache_bytes.set_function(cache_bytes)
        self.cache_texts.set_function(cache_texts)

    def serve(self, name: str, queue: Queue, load_seconds: float, **facts: str) -> ModelMetrics:
        """Begin to count for a model that is about to serve; `facts` are the labels of `cloze_model_info`.

        Where a model of that name was served before, the counters continue; the facts, the queue and the drift sample
        are the new model's.
        """
        self.info.remove_by_labels({"model": name})
        self.info.labels(name, *(facts[fact] for fact in FACTS)).set(1)
        self.loaded.labels(name).set(1)
        self.load_seconds.labels(name).set(load_seconds)
        self.queue_age.labels(name).set_function(lambda: queue.age)
        self.queue_texts.labels(name).set_function(lambda: queue.waiting_items)
        self.queue_tokens.labels(name).set_function(lambda: queue.waiting)
        self._drift.by_model[name] = drift = DriftSample(int(facts["dimension"]))
        return ModelMetrics(
            drift,
            texts=self.texts.labels(name),
            cache_hits=self.cache_hits.labels(name),
            tokens=self.tokens.labels(name),
            truncations=self.truncations.labels(name),
            tokenize_seconds=self.tokenize_seconds.labels(name),
            queue_seconds=self.queue_seconds.labels(name),
            inference_seconds=self.inference_seconds.labels(name),
            inference_failures=self.inference_failures.labels(name),
            batch_texts=self.batch_texts.labels(name),
            batch_tokens=self.batch_tokens.labels(name),
            padding=self.padding.labels(name),
        )

    def forget(self, name: str) -> None:
        """Remove the series of a model that is no longer served; what it still answers is not counted."""
        for metric in self._per_model:
            metric.remove_by_labels({"model": name})
        self._drift.by_model.pop(name, None)

    def _define_requests(self) -> None:
        self.requests = self._counter(
            "requests", "Requests answered. Status 499: the client left before its answer.", "route", "status"
        )
        self.failures = self._counter(
            "failures", "Requests that failed, by error type. Dropped: the client left first.", "reason"
        )
        self.request_seconds = self._histogram(
            "request_seconds",
            "Seconds from the head of a request to the end of its answer. Successes on routes that run a model only.",
            "route",
        )
        for route in ROUTES:
            for status in (*STATUSES, CLIENT_GONE) if route not in STATUS_ROUTES else (*STATUSES, 304):
                self.requests.labels(route, str(status))
        for reason in REASONS:
            self.failures.labels(reason)
        for route in MODEL_ROUTES:
            self.request_seconds.labels(route)

    def _define_service(self) -> None:
        self.ready = self._gauge("ready", "1 while the service is ready, 0 otherwise.")
        self.in_flight = self._gauge("requests_in_flight", "Requests in flight, GETs included.")
        self.in_flight_limit = self._gauge(
            "requests_in_flight_limit", "Configured limit on POSTs in flight: `max_concurrent_requests`."
        )
        self.tokens_in_flight = self._gauge("tokens_in_flight", "Tokens of the requests in flight.")
        self.tokens_limit = self._gauge(
            "tokens_in_flight_limit", "Configured limit on tokens in flight: `max_tokens_in_flight`."
        )
        self.cache_bytes = self._gauge("cache_bytes", "Memory used by cached vectors, at most `cache_mb`.")
        self.cache_texts = self._gauge("cache_texts", "Texts whose vectors are cached.")
        self.reloads = self._counter("reloads", "Reloads of the models. A failed reload changed nothing.", "outcome")
        for outcome in get_args(Outcome):
            self.reloads.labels(outcome)

    def _define_models(self) -> None:
        self.info = self._gauge("model_info", "Always 1. The labels describe the model.", "model", *FACTS)
        self.loaded = self._gauge("model_loaded", "1 for each served model.", "model")
        self.load_seconds = self._gauge(
            "model_load_seconds", "Seconds spent loading and warming up the model.", "model"
        )
        self.texts = self._counter("texts", "Texts embedded.", "model")
        self.cache_hits = self._counter("cache_hits", "Texts whose vector came from the cache.", "model")
        self.tokens = self._counter("tokens", "Tokens embedded, those of the template included.", "model")
        self.truncations = self._counter("truncations", "Texts that were truncated.", "model")
        self.tokenize_seconds = self._histogram(
            "tokenize_seconds", "Seconds to tokenise a request, waiting for a thread included.", "model"
        )
        self.queue_age = self._gauge("queue_age_seconds", "Seconds that the oldest text has waited.", "model")
        self.queue_texts = self._gauge("queue_texts", "Texts that wait for a batch.", "model")
        self.queue_tokens = self._gauge("queue_tokens", "Tokens that wait for a batch.", "model")
        self.queue_seconds = self._histogram("queue_seconds", "Seconds that a text waited for its batch.", "model")
        self.inference_seconds = self._histogram("inference_seconds", "Seconds that a batch ran in the graph.", "model")
        self.inference_failures = self._counter(
            "inference_failures", "Batches that failed, each half that was tried again included.", "model"
        )
        self.batch_texts = self._histogram("batch_texts", "Distinct texts in a batch.", "model", buckets=TEXTS)
        self.batch_tokens = self._histogram(
            "batch_tokens", "Tokens in a batch, padding included.", "model", buckets=TOKENS
        )
        self.padding = self._counter("padding_tokens", "Padding tokens run through the graph.", "model")

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return self._note(Counter(f"cloze_{name}", meaning, labels, registry=self.registry), labels)

    def _gauge(self, name: str, meaning: str, *labels: str) -> Gauge:
        return self._note(Gauge(f"cloze_{name}", meaning, labels, registry=self.registry), labels)

    def _histogram(self, name: str, meaning: str, *labels: str, buckets: Sequence[float] = SECONDS) -> Histogram:
        made = Histogram(f"cloze_{name}", meaning, labels, buckets=buckets, registry=self.registry)
        return self._note(made, labels)

    def _note(self, made: Metric, labels: tuple[str, ...]) -> Metric:
        if "model" in labels:
            self._per_model.append(made)
        return made


class _Drift(Collector):
    """The drift samples of the served models, measured at each scrape.

    A sample without a shape yet has no series: a zero would be wrong, and one NaN would make a day's average NaN.
    `cloze_space_texts` exists from the start.
    """

    def __init__(self) -> None:
        self.by_model: dict[str, DriftSample] = {}

    def describe(self) -> list[GaugeMetricFamily]:
        return [
            GaugeMetricFamily(name, meaning, labels=["model"])
            for name, meaning in (
                ("cloze_space_texts", "Distinct texts in the sample of recent traffic that the next three describe."),
                ("cloze_space_mean_cosine", "Mean cosine of all pairs in the sample. Near 1, all texts look alike."),
                ("cloze_space_mean_norm", "Mean length of the vectors in the sample, before normalisation."),
                ("cloze_space_truncated_ratio", "Share of the texts in the sample that were truncated."),
            )
        ]

    def collect(self) -> Iterable[GaugeMetricFamily]:
        texts, *measures = families = self.describe()
        for model, sample in self.by_model.items():
            texts.add_metric([model], len(sample))
            for family, value in zip(measures, sample.shape() or (), strict=False):
                family.add_metric([model], value)
        return families
