"""What the service reports to Prometheus. One registry per app; every label set exists from the start.

The service counts; docker/monitoring/rules.yml derives rates and shares from the counts. A rate computed here would
have a fixed window, and would miss what happens between two scrapes.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from service.errors import ERROR_TYPES, STATUSES
from service.monitoring.drift import DriftSample

Made = TypeVar("Made", Counter, Gauge, Histogram)
Outcome = Literal["swapped", "unchanged", "failed"]

MODEL_ROUTES: Final = ("/", "/embed", "/similarity", "/search", "/v1/embeddings", "/v2/embed")
TOKEN_ROUTES: Final = ("/tokenize", "/decode")
STATUS_ROUTES: Final = (
    *("GET /", "/info", "/v1/models", "/v1/models/{model}", "/metrics", "/admin/reload"),
    *("/health", "/health/live", "/health/ready", "/health/startup"),
    *("/docs", "/docs/{name}", "/openapi.json", "/playground/{name}"),
)
OTHER: Final = "other"
ROUTES: Final = (*MODEL_ROUTES, *TOKEN_ROUTES, *STATUS_ROUTES, OTHER)

FACTS: Final = (
    "provider",
    "precision",
    "version",
    "pooling",
    "dimension",
    "sha256",
    "space",
)  # labels of cloze_model_info

CLIENT_GONE: Final = 499  # the client left before the answer, so nobody reads it
DROPPED: Final = "Dropped"
REASONS: Final = (*ERROR_TYPES, DROPPED)

SECONDS: Final = tuple(0.0005 * 2**power for power in range(18))  # 0.5 ms to 66 s
TEXTS: Final = tuple(float(2**power) for power in range(13))  # 1 to 4096
TOKENS: Final = tuple(float(2**power) for power in range(4, 18))  # 16 to 131 072

SPACE: Final = {
    "texts": "Distinct texts in the sample of recent traffic that the next three describe.",
    "mean_cosine": "Mean cosine of all pairs in the sample. Near 1, all texts look alike.",
    "mean_norm": "Mean length of the vectors in the sample, before normalisation.",
    "truncated_ratio": "Share of the texts in the sample that were truncated.",
}

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each, which nothing here reads


class ModelMetrics(NamedTuple):
    """The series of one served model: a field `name` is a metric `cloze_name`.

    They are held here, so that a model that was removed does not come back.
    """

    drift: DriftSample
    model_loaded: Annotated[Gauge, "1 for each served model."]
    model_load_seconds: Annotated[Gauge, "Seconds spent loading and warming up the model."]
    texts: Annotated[Counter, "Texts embedded."]
    cache_hits: Annotated[Counter, "Texts whose vector came from the cache."]
    tokens: Annotated[Counter, "Tokens embedded, those of the template included."]
    truncations: Annotated[Counter, "Texts that were truncated."]
    tokenize_seconds: Annotated[Histogram, "Seconds to tokenise a request, waiting for a thread included.", SECONDS]
    queue_age_seconds: Annotated[Gauge, "Seconds that the oldest text has waited."]
    queue_texts: Annotated[Gauge, "Texts that wait for a batch."]
    queue_tokens: Annotated[Gauge, "Tokens that wait for a batch."]
    queue_seconds: Annotated[Histogram, "Seconds that a text waited for its batch.", SECONDS]
    inference_seconds: Annotated[Histogram, "Seconds that a batch ran in the graph.", SECONDS]
    inference_failures: Annotated[Counter, "Batches that failed, each half that was tried again included."]
    batch_texts: Annotated[Histogram, "Distinct texts in a batch.", TEXTS]
    batch_tokens: Annotated[Histogram, "Tokens in a batch, padding included.", TOKENS]
    padding_tokens: Annotated[Counter, "Padding tokens run through the graph."]


class Metrics:
    """The service's metrics, all named cloze_…; durations are in seconds."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._define_requests()
        self._define_service()
        self.info = self._make(Gauge, "model_info", "Always 1. The labels describe the model.", "model", *FACTS)
        self._per_model: dict[str, Any] = {}
        for name, hint in get_type_hints(ModelMetrics, include_extras=True).items():
            if get_origin(hint) is Annotated:
                kind, meaning, *buckets = get_args(hint)
                options = {"buckets": buckets[0]} if buckets else {}
                self._per_model[name] = self._make(kind, name, meaning, "model", **options)
        self._space = [self._make(Gauge, f"space_{name}", meaning, "model") for name, meaning in SPACE.items()]
        self._samples: dict[str, DriftSample] = {}

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format. The drift samples are measured now.

        A sample without a shape yet has no series but the number of its texts: a zero would be wrong, and one NaN would
        make a day's average NaN.
        """
        for model, sample in self._samples.items():
            for gauge, value in zip(self._space, (len(sample), *(sample.shape() or ())), strict=False):
                gauge.labels(model).set(value)
        return generate_latest(self.registry)

    def serve(self, name: str, load_seconds: float, facts: Mapping[str, str]) -> ModelMetrics:
        """Begin to count for a model that is about to serve; `facts` are the labels of `cloze_model_info`.

        Where a model of that name was served before, the counters continue; the facts and the drift sample are the new
        model's.
        """
        for metric in (self.info, *self._space):
            metric.remove_by_labels({"model": name})
        self.info.labels(name, *(facts[fact] for fact in FACTS)).set(1)
        self._samples[name] = drift = DriftSample()
        series = ModelMetrics(drift, **{metric: made.labels(name) for metric, made in self._per_model.items()})
        series.model_loaded.set(1)
        series.model_load_seconds.set(load_seconds)
        return series

    def forget(self, name: str) -> None:
        """Remove the series of a model that is no longer served; what it still answers is not counted."""
        for metric in (self.info, *self._space, *self._per_model.values()):
            metric.remove_by_labels({"model": name})
        self._samples.pop(name, None)

    def _define_requests(self) -> None:
        self.requests = self._make(
            Counter, "requests", "Requests answered. Status 499: the client left before its answer.", "route", "status"
        )
        self.failures = self._make(
            Counter, "failures", "Requests that failed, by error type. Dropped: the client left first.", "reason"
        )
        self.request_seconds = self._make(
            Histogram,
            "request_seconds",
            "Seconds from the head of a request to the end of its answer. Successes on routes that run a model only.",
            "route",
            buckets=SECONDS,
        )
        for route in ROUTES:
            for status in (*STATUSES, CLIENT_GONE) if route not in STATUS_ROUTES else (*STATUSES, 304):
                self.requests.labels(route, str(status))
        for reason in REASONS:
            self.failures.labels(reason)
        for route in MODEL_ROUTES:
            self.request_seconds.labels(route)

    def _define_service(self) -> None:
        """Define what create_app sets, and the reloads."""
        self.ready = self._make(Gauge, "ready", "1 while the service is ready, 0 otherwise.")
        self.in_flight = self._make(Gauge, "requests_in_flight", "Requests in flight, GETs included.")
        self.in_flight_limit = self._make(
            Gauge, "requests_in_flight_limit", "Configured limit on POSTs in flight: `max_concurrent_requests`."
        )
        self.tokens_in_flight = self._make(Gauge, "tokens_in_flight", "Tokens of the requests in flight.")
        self.tokens_limit = self._make(
            Gauge, "tokens_in_flight_limit", "Configured limit on tokens in flight: `max_tokens_in_flight`."
        )
        self.cache_bytes = self._make(Gauge, "cache_bytes", "Memory used by cached vectors, at most `cache_mb`.")
        self.cache_texts = self._make(Gauge, "cache_texts", "Texts whose vectors are cached.")
        self.reloads = self._make(
            Counter, "reloads", "Reloads of the models. A failed reload changed nothing.", "outcome"
        )
        for outcome in get_args(Outcome):
            self.reloads.labels(outcome)

    def _make(self, kind: type[Made], name: str, meaning: str, *labels: str, **options: Any) -> Made:
        return kind(f"cloze_{name}", meaning, labels, registry=self.registry, **options)
