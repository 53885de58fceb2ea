"""What Prometheus is told: the label sets, the counts, models that come and go, and the table."""

import numpy as np
import pytest
from harness import MakeClient, samples_of
from prometheus_client.parser import text_string_to_metric_families

from service.cache import Cache
from service.errors import ERROR_TYPES
from service.metrics import MODEL_ROUTES, REASONS, ROUTES, Metrics, ModelMetrics, table

FACTS = {"provider": "cpu", "precision": "fp32", "version": "1", "pooling": "mask", "sha256": "0" * 64}


class Line:
    """A queue with something in it."""

    waiting = 30
    waiting_items = 3
    age = 0.25


def begin(metrics: Metrics, name: str = "tiny", **changes: str) -> ModelMetrics:
    return metrics.model(name, Line(), **{**FACTS, **changes}, dimension=2, load_seconds=1.5)


def samples(metrics: Metrics) -> dict[str, float]:
    return samples_of(metrics.text().decode())


def series(metrics: Metrics) -> set[str]:
    return set(samples(metrics))


def test_every_label_set_is_there_from_the_start() -> None:
    found = samples(Metrics())
    assert all(found[f"cloze_requests_total{{route={route},status=200}}"] == 0 for route in ROUTES)
    assert all(found[f"cloze_requests_total{{route={route},status=429}}"] == 0 for route in MODEL_ROUTES)
    assert all(found[f"cloze_request_seconds_count{{route={route}}}"] == 0 for route in MODEL_ROUTES)
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
    counted = begin(metrics)
    counted.tokenized(0.1)
    counted.batch([0.1], 2, 2, 0.1)
    counted.failed()
    counted.embedded(1, 2, 1, 0)
    assert series(metrics) == ready > before


def test_answers_are_counted_by_route_whatever_the_model_is_called() -> None:
    metrics = Metrics()
    before = series(metrics)
    metrics.answered("POST", "/embed", 200, 0.5, None)
    metrics.answered("POST", "/models/{model}/embed", 200, 0.5, None)
    metrics.answered("POST", "/models/tiny/embed", 429, 0.5, "Overloaded")  # at the door, where no route is known yet
    metrics.answered("GET", "/v1/models/{model_id:path}", 404, 0.5, "ModelNotFound")
    metrics.answered("POST", "/models/tiny/secret", 404, 0.5, "NotFound")
    metrics.answered("POST", "/models/a/b/embed", 404, 0.5, "NotFound")
    metrics.answered("POST", "/admin/reload", 429, 0.5, "Overloaded")  # at the door as well
    found = samples(metrics)
    assert found["cloze_requests_total{route=/embed,status=200}"] == 1
    assert found["cloze_requests_total{route=/models/{model}/embed,status=200}"] == 1
    assert found["cloze_requests_total{route=/models/{model}/embed,status=429}"] == 1
    assert found["cloze_requests_total{route=/v1/models/{model},status=404}"] == 1
    assert found["cloze_requests_total{route=other,status=404}"] == 2
    assert found["cloze_requests_total{route=/admin/reload,status=429}"] == 1
    assert found["cloze_failures_total{reason=ModelNotFound}"] == 1
    assert found["cloze_failures_total{reason=Overloaded}"] == 2
    assert set(found) == before


def test_who_brings_no_texts_is_not_counted_among_those_who_do() -> None:
    metrics = Metrics()
    before = series(metrics)
    metrics.answered("GET", "/", 200, 0.5, None)
    metrics.answered("GET", "/", 304, 0.5, None)
    metrics.answered("HEAD", "/", 200, 0.5, None)
    metrics.answered("GET", "/models/tiny", 200, 0.5, None)
    metrics.answered("GET", "/embed", 405, 0.5, "MethodNotAllowed")
    metrics.answered("PUT", "/", 405, 0.5, "MethodNotAllowed")
    found = samples(metrics)
    assert found["cloze_requests_total{route=GET /,status=200}"] == 2
    assert found["cloze_requests_total{route=GET /,status=304}"] == 1
    assert found["cloze_requests_total{route=GET /models/{model},status=200}"] == 1
    assert found["cloze_requests_total{route=other,status=405}"] == 2
    assert sum(found[name] for name in found if name.startswith("cloze_requests_total")) == 6
    assert set(found) == before


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
    assert len(document["paths"]) > 15
    assert set(after) == set(before)
    counted = {name for name in after if "route=other" in name and after[name]}
    assert counted == {"cloze_requests_total{route=other,status=404}"}


def test_only_vectors_count_as_latency() -> None:
    metrics = Metrics()
    metrics.answered("POST", "/embed", 200, 0.5, None)
    metrics.answered("POST", "/embed", 429, 0.001, "Overloaded")
    metrics.answered("GET", "/health", 200, 0.001, None)
    metrics.answered("GET", "/", 200, 0.001, None)  # a page
    found = samples(metrics)
    assert found["cloze_request_seconds_sum{route=/embed}"] == 0.5
    assert sum(value for name, value in found.items() if name.startswith("cloze_request_seconds_count")) == 1


@pytest.mark.parametrize(("status", "reason"), [(400, "BadRequest"), (408, "Slow"), (431, "HeadersTooLarge")])
def test_what_was_refused_before_a_route_is_counted(status: int, reason: str) -> None:
    metrics = Metrics()
    before = series(metrics)
    metrics.refused(reason)
    found = samples(metrics)
    assert found[f"cloze_requests_total{{route=other,status={status}}}"] == 1
    assert found[f"cloze_failures_total{{reason={reason}}}"] == 1
    assert set(found) == before


def test_a_client_that_went_and_a_reload_are_counted() -> None:
    metrics = Metrics()
    metrics.dropped()
    metrics.reloaded("failed")
    found = samples(metrics)
    assert found["cloze_failures_total{reason=Dropped}"] == 1
    assert found["cloze_reloads_total{outcome=failed}"] == 1


def test_gauges_are_read_at_each_scrape() -> None:
    metrics = Metrics()
    ready, at_work = False, 1
    cache = Cache(10_000)
    metrics.watch(
        requests=lambda: at_work,
        requests_limit=10,
        tokens=lambda: 7,
        tokens_limit=100,
        ready=lambda: ready,
        cache=cache,
    )
    found = samples(metrics)
    assert (found["cloze_ready"], found["cloze_requests_in_flight"]) == (0, 1)
    assert (found["cloze_requests_in_flight_limit"], found["cloze_tokens_in_flight_limit"]) == (10, 100)
    assert found["cloze_tokens_in_flight"] == 7
    assert (found["cloze_cache_bytes"], found["cloze_cache_texts"]) == (0, 0)
    ready, at_work = True, 2
    cache.add(b"key", np.zeros(4, dtype=np.float32))
    found = samples(metrics)
    assert (found["cloze_cache_bytes"], found["cloze_cache_texts"]) == (cache.size, 1)
    assert (found["cloze_ready"], found["cloze_requests_in_flight"]) == (1, 2)


def test_a_model_counts_its_batches_and_texts() -> None:
    metrics = Metrics()
    tiny, other = begin(metrics), begin(metrics, "other")
    tiny.tokenized(0.5)
    tiny.batch([0.25, 0.5, 0.75], 20, 30, 2.0)
    tiny.failed()
    tiny.embedded(3, 20, 1, 2)
    other.embedded(1, 5, 0, 0)
    found = samples(metrics)
    assert found["cloze_tokenize_seconds_sum{model=tiny}"] == 0.5
    assert (found["cloze_queue_seconds_sum{model=tiny}"], found["cloze_queue_seconds_count{model=tiny}"]) == (1.5, 3)
    assert (found["cloze_batch_texts_sum{model=tiny}"], found["cloze_batch_texts_count{model=tiny}"]) == (3, 1)
    assert found["cloze_batch_tokens_sum{model=tiny}"] == 30
    assert found["cloze_padding_tokens_total{model=tiny}"] == 10
    assert found["cloze_inference_seconds_sum{model=tiny}"] == 2
    assert found["cloze_inference_failures_total{model=tiny}"] == 1
    assert (found["cloze_texts_total{model=tiny}"], found["cloze_texts_total{model=other}"]) == (3, 1)
    assert (found["cloze_tokens_total{model=tiny}"], found["cloze_tokens_total{model=other}"]) == (20, 5)
    assert (found["cloze_truncations_total{model=tiny}"], found["cloze_truncations_total{model=other}"]) == (1, 0)
    assert found["cloze_queue_age_seconds{model=tiny}"] == 0.25
    assert (found["cloze_queue_texts{model=tiny}"], found["cloze_queue_tokens{model=tiny}"]) == (3, 30)
    assert found["cloze_model_load_seconds{model=tiny}"] == 1.5


def test_a_model_that_is_swapped_keeps_its_counts_and_changes_its_facts() -> None:
    metrics = Metrics()
    begin(metrics).embedded(3, 20, 1, 2)
    begin(metrics, sha256="1" * 64).embedded(1, 5, 0, 0)
    found = samples(metrics)
    assert found["cloze_texts_total{model=tiny}"] == 4
    info = [name for name in found if name.startswith("cloze_model_info")]
    assert len(info) == 1
    assert f"model=tiny,pooling=mask,precision=fp32,provider=cpu,sha256={'1' * 64},version=1" in info[0]


def test_a_model_that_was_swapped_starts_with_an_empty_space() -> None:
    metrics = Metrics()
    begin(metrics).space.observe(np.eye(2, dtype=np.float32), [[1], [2]], [0, 0])
    assert samples(metrics)["cloze_space_texts{model=tiny}"] == 2
    begin(metrics)
    assert samples(metrics)["cloze_space_texts{model=tiny}"] == 0


def test_a_model_that_is_forgotten_leaves_nothing_and_does_not_come_back() -> None:
    metrics = Metrics()
    begin(metrics)
    before = series(metrics)
    gone = begin(metrics, "gone")
    metrics.forget("gone")
    gone.embedded(1, 1, 1, 1)  # the last answers of a model that drains
    gone.batch([1.0], 1, 1, 1.0)
    gone.space.observe(np.eye(2, dtype=np.float32), [[1], [2]], [0, 0])
    assert series(metrics) == before
    metrics.forget("never served")


def test_a_space_is_told_once_it_has_a_shape() -> None:
    metrics = Metrics()
    space = begin(metrics).space
    assert {name for name in series(metrics) if "space" in name} == {"cloze_space_texts{model=tiny}"}
    space.observe(np.array([[3, 4], [0, 1]], dtype=np.float32), [[1], [2]], [0, 9])
    found = samples(metrics)
    assert found["cloze_space_texts{model=tiny}"] == 2
    assert found["cloze_space_mean_cosine{model=tiny}"] == pytest.approx(0.8)
    assert found["cloze_space_mean_norm{model=tiny}"] == pytest.approx(3)
    assert found["cloze_space_truncated_ratio{model=tiny}"] == 0.5


def test_two_registries_count_for_themselves() -> None:
    one, other = Metrics(), Metrics()
    begin(one).embedded(1, 1, 0, 0)
    begin(other)
    assert samples(other)["cloze_texts_total{model=tiny}"] == 0


def test_the_table_has_every_metric_with_its_type_labels_and_meaning() -> None:
    metrics = Metrics()
    begin(metrics).space.observe(np.eye(2, dtype=np.float32), [[1], [2]], [0, 0])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table().splitlines()[2:]]
    told = {name.strip("`"): (kind, set(labels.replace("`", "").split(", ")), why) for name, kind, labels, why in rows}
    found = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        if family.name.startswith("cloze_"):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = {label for sample in family.samples for label in sample.labels if label != "le"} or {""}
            found[name] = (family.type, labels, family.documentation)
    assert len(found) > 25
    assert found == {name: row for name, row in told.items() if name.startswith("cloze_")}
    assert "process_*" in told
