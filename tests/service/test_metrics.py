"""What the service reports to Prometheus: label sets, counts, models that come and go, and the table."""

from itertools import product

import httpx
import numpy as np
import pytest
from harness import MakeClient, samples_of
from prometheus_client.parser import text_string_to_metric_families
from reference.tables import documented, metrics_table

from cloze.service.client import STRIDES
from cloze.service.errors import ERROR_TYPES
from cloze.service.inference.model import Cache
from cloze.service.monitoring.metrics import REASONS, Metrics, ModelMetrics
from cloze.service.routes import LABELS, MODEL_ROUTES, OTHER, label

FACTS = {
    "provider": "cpu",
    "precision": "fp32",
    "version": "1",
    "pooling": "mask",
    "dimension": "2",
    "sha256": "0" * 64,
    "space": "0" * 16,
}


def begin(metrics: Metrics, name: str = "tiny", **changes: str) -> ModelMetrics:
    return metrics.serve(name, 1.5, {**FACTS, **changes})


def count(measured: ModelMetrics, texts: int = 1) -> None:
    """Count something in every series of a model."""
    for counter in (
        measured.texts,
        measured.cache_hits,
        measured.tokens,
        measured.truncations,
        measured.padding_tokens,
    ):
        counter.inc(texts)
    measured.inference_failures.inc()
    for histogram in (measured.tokenize_seconds, measured.queue_seconds, measured.inference_seconds):
        histogram.observe(0.5)
    for histogram in (measured.batch_texts, measured.batch_tokens):
        histogram.observe(texts)


def samples(metrics: Metrics) -> dict[str, float]:
    return samples_of(metrics.text().decode())


def series(metrics: Metrics) -> set[str]:
    return set(samples(metrics))


def test_every_label_set_is_there_from_the_start() -> None:
    found = samples(Metrics())
    assert all(found[f"cloze_requests_total{{route={route},status=200}}"] == 0 for route in LABELS)
    assert all(found[f"cloze_requests_total{{route={route},status=429}}"] == 0 for route in MODEL_ROUTES)
    for route, priority in product(MODEL_ROUTES, STRIDES):
        assert found[f"cloze_request_seconds_count{{priority={priority},route={route}}}"] == 0
    assert all(found[f"cloze_failures_total{{reason={reason}}}"] == 0 for reason in REASONS)
    assert set(ERROR_TYPES) < set(REASONS)
    assert len(set(REASONS)) == len(REASONS)
    assert all(found[f"cloze_reloads_total{{outcome={word}}}"] == 0 for word in ("swapped", "unchanged", "failed"))
    assert found["cloze_ready"] == 0


def test_every_label_set_of_a_model_is_there_before_its_first_text() -> None:
    metrics = Metrics()
    before = series(metrics)
    begin(metrics)
    ready = series(metrics)
    count(begin(metrics))
    assert series(metrics) == ready > before


def test_the_label_of_a_path(subtests: pytest.Subtests) -> None:
    for method, path, route in [
        ("POST", "/embed", "/embed"),
        ("GET", "/v1/models/tiny", "/v1/models/{model}"),
        ("GET", "/v1/models/", OTHER),
        ("POST", "/models/a/b/embed", OTHER),
        ("POST", "/admin/reload", "/admin/reload"),
        ("GET", "/docs/swagger-ui.css", "/docs/{name}"),
        ("GET", "/", "GET /"),
        ("HEAD", "/", "GET /"),
        ("POST", "/", "/"),
        ("PUT", "/", OTHER),
        ("GET", "/embed", OTHER),  # texts come by POST
        ("GET", "/other", OTHER),
    ]:
        with subtests.test(method=method):
            assert label(method, path) == route


@pytest.mark.anyio
async def test_answers_are_counted_by_route_whatever_the_model_is_called(both: httpx.AsyncClient) -> None:
    async def counts() -> dict[str, float]:
        return samples_of((await both.get("/metrics")).text)

    before = await counts()
    for path in ("/embed", "/models/tiny/embed", "/models/other/embed", "/models/tiny/secret"):
        await both.post(path, json={"inputs": "a"})
    await both.post("/embed", json={})
    after = await counts()
    changed = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert changed["cloze_requests_total{route=/embed,status=200}"] == 3
    assert changed["cloze_requests_total{route=/embed,status=422}"] == 1
    assert changed["cloze_requests_total{route=other,status=404}"] == 1
    assert changed["cloze_failures_total{reason=NotFound}"] == changed["cloze_failures_total{reason=Validation}"] == 1
    assert changed["cloze_request_seconds_count{priority=interactive,route=/embed}"] == 3  # successes only
    assert set(after) == set(before)


@pytest.mark.anyio
async def test_every_path_of_the_service_has_a_label(client: MakeClient) -> None:
    async with client() as http:
        document = (await http.get("/openapi.json")).json()
        before = samples_of((await http.get("/metrics")).text)
        for path, methods in document["paths"].items():
            for method in methods:
                await http.request(method, path.replace("{model}", "tiny"), json={"inputs": "a"})
        for path in ("/", "/docs", "/docs/swagger-ui.css", "/playground/index.html", "/models/tiny/none"):
            await http.get(path)
        after = samples_of((await http.get("/metrics")).text)
    assert len(document["paths"]) > 14
    assert set(after) == set(before)
    counted = {name for name in after if "route=other" in name and after[name]}
    assert counted == {"cloze_requests_total{route=other,status=404}"}


def test_gauges_are_read_at_each_scrape() -> None:
    metrics = Metrics()
    ready, at_work = False, 1
    cache = Cache(10_000)
    metrics.ready.set_function(lambda: float(ready))
    metrics.requests_in_flight.set_function(lambda: at_work)
    metrics.requests_in_flight_limit.set(10)
    metrics.tokens_in_flight.set_function(lambda: 7)
    metrics.tokens_in_flight_limit.set(100)
    metrics.cache_bytes.set_function(lambda: cache.currsize)
    metrics.cache_texts.set_function(lambda: len(cache))
    found = samples(metrics)
    assert (found["cloze_ready"], found["cloze_requests_in_flight"]) == (0, 1)
    assert (found["cloze_requests_in_flight_limit"], found["cloze_tokens_in_flight_limit"]) == (10, 100)
    assert found["cloze_tokens_in_flight"] == 7
    assert (found["cloze_cache_bytes"], found["cloze_cache_texts"]) == (0, 0)
    ready, at_work = True, 2
    cache.add(b"key", np.zeros(4, dtype=np.float32))
    found = samples(metrics)
    assert (found["cloze_cache_bytes"], found["cloze_cache_texts"]) == (cache.currsize, 1)
    assert (found["cloze_ready"], found["cloze_requests_in_flight"]) == (1, 2)


def test_a_models_queue_is_read_at_each_scrape() -> None:
    metrics = Metrics()
    series = begin(metrics)
    series.queue_age_seconds.set_function(lambda: 0.25)
    series.queue_texts.set_function(lambda: 3)
    series.queue_tokens.set_function(lambda: 30)
    found = samples(metrics)
    assert found["cloze_queue_age_seconds{model=tiny}"] == 0.25
    assert (found["cloze_queue_texts{model=tiny}"], found["cloze_queue_tokens{model=tiny}"]) == (3, 30)
    assert found["cloze_model_load_seconds{model=tiny}"] == 1.5


def test_a_model_that_is_swapped_keeps_its_counts_and_changes_its_facts() -> None:
    metrics = Metrics()
    count(begin(metrics), 3)
    count(begin(metrics, sha256="1" * 64))
    found = samples(metrics)
    assert found["cloze_texts_total{model=tiny}"] == 4
    info = [name for name in found if name.startswith("cloze_model_info")]
    assert len(info) == 1
    assert (
        f"model=tiny,pooling=mask,precision=fp32,provider=cpu,sha256={'1' * 64},space={'0' * 16},version=1" in info[0]
    )


def test_a_model_that_was_swapped_starts_with_an_empty_space() -> None:
    metrics = Metrics()
    begin(metrics).drift.observe(np.eye(2, dtype=np.float32), [[1], [2]], [0, 0])
    assert samples(metrics)["cloze_space_texts{model=tiny}"] == 2
    begin(metrics)
    assert samples(metrics)["cloze_space_texts{model=tiny}"] == 0


def test_a_model_that_is_forgotten_leaves_nothing_and_does_not_come_back() -> None:
    metrics = Metrics()
    begin(metrics)
    before = series(metrics)
    gone = begin(metrics, "gone")
    metrics.forget("gone")
    count(gone)  # the last answers of a model that drains
    gone.drift.observe(np.eye(2, dtype=np.float32), [[1], [2]], [0, 0])
    assert series(metrics) == before
    metrics.forget("never served")


def test_a_space_is_told_once_it_has_a_shape() -> None:
    metrics = Metrics()
    space = begin(metrics).drift
    assert {name for name in series(metrics) if name.startswith("cloze_space")} == {"cloze_space_texts{model=tiny}"}
    space.observe(np.array([[3, 4], [0, 1]], dtype=np.float32), [[1], [2]], [0, 9])
    found = samples(metrics)
    assert found["cloze_space_texts{model=tiny}"] == 2
    assert found["cloze_space_mean_cosine{model=tiny}"] == pytest.approx(0.8)
    assert found["cloze_space_mean_norm{model=tiny}"] == pytest.approx(3)
    assert found["cloze_space_truncated_ratio{model=tiny}"] == 0.5


def test_two_registries_count_for_themselves() -> None:
    one, other = Metrics(), Metrics()
    count(begin(one))
    begin(other)
    assert samples(other)["cloze_texts_total{model=tiny}"] == 0


def test_the_table_has_every_metric_with_its_type_labels_and_meaning() -> None:
    metrics = Metrics()
    begin(metrics).drift.observe(np.eye(2, dtype=np.float32), [[1], [2]], [0, 0])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in metrics_table().splitlines()[2:]]
    listed = {
        name.strip("`"): (kind, set(labels.replace("`", "").split(", ")), why) for name, kind, labels, why in rows
    }
    found = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        if family.name.startswith("cloze_"):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = {label for sample in family.samples for label in sample.labels if label != "le"} or {""}
            found[name] = (family.type, labels, family.documentation)
    assert len(found) > 25
    assert found == {name: row for name, row in listed.items() if name.startswith("cloze_")}
    assert "process_*" in listed


def test_the_documented_metrics_are_the_code() -> None:
    assert documented("metrics") == metrics_table(), "run `make reference`"
