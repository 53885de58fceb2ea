"""What the service reports to Prometheus. One registry per app; every label set exists from the start.

The service counts; docker/monitoring/rules.yml derives rates and shares from the counts. A rate computed here would
have a fixed window, and would miss what happens between two scrapes.
"""

from collections.abc import Mapping
from itertools import product
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args, get_origin, get_type_hints

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from cloze.service.client import STRIDES
from cloze.service.errors import ERROR_TYPES, STATUSES
from cloze.service.monitoring.drift import DriftSample
from cloze.service.routes import LABELS, MODEL_ROUTES, OTHER, POST_ROUTES

Outcome = Literal["swapped", "unchanged", "failed"]
Task = Literal["watch", "probe", "retire", "reload", "flush", "publish"]

FACTS: Final = ("provider", "precision", "version", "pooling", "dimension", "sha256", "space")  # of cloze_model_info

CLIENT_GONE: Final = 499  # the client disconnected before the response, so nobody reads it
DROPPED: Final = "Dropped"
REASONS: Final = (*ERROR_TYPES, DROPPED)

SECONDS: Final = tuple(0.0005 * 2**power for power in range(18))  # 0.5 ms to 66 s
TEXTS: Final = tuple(float(2**power) for power in range(13))  # 1 to 4096
TOKENS: Final = tuple(float(2**power) for power in range(4, 18))  # 16 to 131 072

SPACE: Final = {
    "texts": "Distinct texts in the drift sample, which is taken from recent traffic.",
    "mean_cosine": "Mean cosine of all pairs in the drift sample. Near 1: all texts look alike.",
    "mean_norm": "Mean length of the vectors in the drift sample, before normalisation.",
    "truncated_ratio": "Fraction of the texts in the drift sample that were truncated.",
}

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each metric, which nothing reads


class ModelMetrics(NamedTuple):
    """The series of one served model: a field `name` is a metric `cloze_name`.

    A model holds its series, so that they do not come back after it was removed.
    """

    drift: DriftSample
    model_loaded: Annotated[Gauge, "1 for each served model."]
    model_load_seconds: Annotated[Gauge, "Seconds spent loading and warming up the model."]
    texts: Annotated[Counter, "Texts embedded."]
    cache_hits: Annotated[
        Counter, "Texts not computed, because they were cached or equal to another text of the request."
    ]
    tokens: Annotated[Counter, "Tokens embedded, including those of the template."]
    truncations: Annotated[Counter, "Texts that were truncated."]
    tokenize_seconds: Annotated[Histogram, "Seconds to tokenise a request, including the wait for a thread.", SECONDS]
    queue_age_seconds: Annotated[Gauge, "Seconds that the oldest text in the queue has waited."]
    queue_texts: Annotated[Gauge, "Texts waiting for a batch."]
    queue_tokens: Annotated[Gauge, "Tokens waiting for a batch."]
    queue_seconds: Annotated[Histogram, "Mean seconds that the texts of a request waited for a batch.", SECONDS]
    inference_seconds: Annotated[Histogram, "Seconds to run a batch through the graph.", SECONDS]
    inference_failures: Annotated[Counter, "Batches that failed, including each half that was retried."]
    batch_texts: Annotated[Histogram, "Texts in a batch.", TEXTS]
    batch_tokens: Annotated[Histogram, "Tokens in a batch, including padding.", TOKENS]
    padding_tokens: Annotated[Counter, "Padding tokens run through the graph."]


class Metrics:
    """The service's metrics: a field `name` is a metric `cloze_name`, with its meaning, labels and buckets."""

    requests: Annotated[
        Counter, "Requests answered. Status 499: the client disconnected before the response.", "route", "status"
    ]
    failures: Annotated[
        Counter, "Requests that failed, by error type. Dropped: the client disconnected first.", "reason"
    ]
    request_seconds: Annotated[
        Histogram,
        "Seconds from a request's headers to the end of its response. Successful requests to model routes only.",
        "route",
        "priority",
        SECONDS,
    ]
    ready: Annotated[Gauge, "1 while the service is ready, 0 otherwise."]
    requests_in_flight: Annotated[Gauge, "Requests in flight, including GETs."]
    requests_in_flight_limit: Annotated[Gauge, "Configured limit on POSTs in flight: `max_concurrent_requests`."]
    tokens_in_flight: Annotated[Gauge, "Tokens of the requests in flight."]
    tokens_in_flight_limit: Annotated[Gauge, "Configured limit on tokens in flight: `max_tokens_in_flight`."]
    bytes_in_flight: Annotated[
        Gauge, "Bytes in flight: bodies of requests, and responses that the client has not read yet."
    ]
    bytes_in_flight_limit: Annotated[Gauge, "Configured limit on bytes in flight: `max_bytes_in_flight`."]
    cache_bytes: Annotated[Gauge, "Bytes used by cached vectors, at most `cache_mb` MiB."]
    cache_texts: Annotated[Gauge, "Texts whose vectors are cached."]
    reloads: Annotated[Counter, "Reloads of the models, by outcome. A failed reload changes nothing.", "outcome"]
    background_errors: Annotated[Counter, "Errors in background tasks, which continue afterwards.", "task"]
    log_records_dropped: Annotated[Counter, "Log records dropped because stderr was not read."]
    model_info: Annotated[Gauge, "Always 1. The labels describe the model.", "model", *FACTS]

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        vars(self).update(self._make(Metrics))
        self._per_model = self._make(ModelMetrics, "model")
        self._space = [
            Gauge(f"cloze_space_{name}", meaning, ["model"], registry=self.registry) for name, meaning in SPACE.items()
        ]
        self._samples: dict[str, DriftSample] = {}
        for route in LABELS:
            for status in (*STATUSES, CLIENT_GONE if route in (*POST_ROUTES, OTHER) else 304):
                self.requests.labels(route, str(status))
        for route, priority in product(MODEL_ROUTES, STRIDES):
            self.request_seconds.labels(route, priority)
        for metric, words in (
            (self.failures, REASONS),
            (self.reloads, get_args(Outcome)),
            (self.background_errors, get_args(Task)),
        ):
            for word in words:
                metric.labels(word)

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format. The drift samples are measured now.

        A sample that does not have a shape yet has only the series for the number of its texts: a zero would be wrong,
        and one NaN would make a day's average NaN.
        """
        for model, sample in self._samples.items():
            for gauge, value in zip(self._space, (len(sample), *(sample.shape() or ())), strict=False):
                gauge.labels(model).set(value)
        return generate_latest(self.registry)

    def serve(self, name: str, load_seconds: float, facts: Mapping[str, str]) -> ModelMetrics:
        """Begin to count for a model that is about to serve; `facts` are the labels of `cloze_model_info`.

        If a model of that name was served before, the counters continue; the facts and the drift sample are the new
        model's.
        """
        for metric in (self.model_info, *self._space):
            metric.remove_by_labels({"model": name})
        self.model_info.labels(name, *(facts[fact] for fact in FACTS)).set(1)
        self._samples[name] = drift = DriftSample()
        series = ModelMetrics(drift, **{field: metric.labels(name) for field, metric in self._per_model.items()})
        series.model_loaded.set(1)
        series.model_load_seconds.set(load_seconds)
        return series

    def forget(self, name: str) -> None:
        """Remove the series of a model that is no longer served; its last requests are not counted."""
        for metric in (self.model_info, *self._space, *self._per_model.values()):
            metric.remove_by_labels({"model": name})
        self._samples.pop(name, None)

    def _make(self, fields: type, *labels: str) -> dict[str, Any]:
        """Make the metrics that a class declares, with these labels and its own."""
        metrics = {}
        for name, hint in get_type_hints(fields, include_extras=True).items():
            if get_origin(hint) is Annotated:
                metric_class, meaning, *words = get_args(hint)
                options = {"buckets": words.pop()} if metric_class is Histogram else {}
                metrics[name] = metric_class(
                    f"cloze_{name}", meaning, [*labels, *words], registry=self.registry, **options
                )
        return metrics
