"""What operators ask: /health, /info, /metrics, and the pages about them."""

import asyncio
import re
from pathlib import Path
from time import monotonic

import httpx
import numpy as np
import pytest
from harness import PATIENCE, Hold, MakeApp, MakeClient, default_model, open_client, samples_of, services, until
from numpy.typing import NDArray
from tiny_bundle import DIMENSION, MAX_TOKENS, OTHER, TEMPLATE, sequence, vocabulary

from cloze.encoding.bundle import Bundle
from cloze.encoding.text import Batch
from cloze.service.errors import BackendFailed
from cloze.service.inference.session import Session
from cloze.service.monitoring.metrics import REASONS
from cloze.service.routes import LABELS, MODEL_ROUTES
from cloze.service.settings import Settings

pytestmark = pytest.mark.anyio


PROBES = ("/health", "/health/ready", "/health/live", "/health/startup")


async def test_health_is_empty(both: httpx.AsyncClient, subtests: pytest.Subtests) -> None:
    for path in PROBES:
        for method in ["GET", "HEAD"]:
            with subtests.test(path=path, method=method):
                response = await both.request(method, path)
                assert (response.status_code, response.content) == (200, b"")


async def test_what_is_read_has_a_head(both: httpx.AsyncClient, subtests: pytest.Subtests) -> None:
    """RFC 9110, section 9.1; the server leaves out the body."""
    for path in (
        "/",
        "/docs",
        "/openapi.json",
        "/info",
        "/models/other/info",
        "/metrics",
        "/v1/models",
        "/v1/models/tiny",
    ):
        with subtests.test(path=path):
            assert (await both.head(path)).status_code == 200


async def test_ready_says_why_it_is_not_and_is_again(
    client: MakeClient, two_bundles: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that fails on everything is not ready; the process lives, and the other model answers."""
    run = Session._infer

    def lost(self: Session, batch: Batch) -> NDArray[np.float32]:
        if self.dimension == DIMENSION:
            raise BackendFailed("device lost")
        return run(self, batch)

    async with client(bundle=two_bundles, model="tiny") as http:
        with monkeypatch.context() as patch:
            patch.setattr(Session, "_infer", lost)
            assert (await http.get("/health/ready")).status_code == 200  # nothing has failed yet
            assert (await http.post("/embed", json={"inputs": "a"})).status_code == 424
            for path in ("/health", "/health/ready", "/models/tiny/health"):
                response = await http.get(path)
                assert response.status_code == 503
                assert response.json()["error_type"] == "Unhealthy"
                assert re.search("model tiny: .* failed.* device lost", response.json()["error"])
                assert int(response.headers["retry-after"]) >= 1
            for path in ("/health/live", "/health/startup", "/models/other/health"):
                assert (await http.get(path)).status_code == 200
            assert (await http.post("/models/other/embed", json={"inputs": "a"})).status_code == 200
            assert samples_of((await http.get("/metrics")).text)["cloze_ready"] == 0
        assert (await http.get("/health/ready")).status_code == 200
        assert samples_of((await http.get("/metrics")).text)["cloze_ready"] == 1


async def test_busy_is_ready_and_hung_is_not(make_app: MakeApp, hold: Hold, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that the test moves on, less than three times the limit: that would end this process."""
    app, passed = make_app(stall_seconds=PATIENCE), 0.0
    monkeypatch.setattr("cloze.service.inference.threads.monotonic", lambda: monotonic() + passed)
    async with open_client(app) as http:
        with hold():
            work = asyncio.create_task(http.post("/embed", json={"inputs": "a"}))
            await until(lambda: services(app).executors.busy_for)
            for passed in (PATIENCE / 2, PATIENCE * 2):
                status = 200 if passed < PATIENCE else 503
                for path in ("/health/ready", "/models/tiny/health"):
                    response = await http.get(path)
                    assert response.status_code == status
                    assert "a batch has run for" in response.text or status == 200
                assert (await http.get("/health/live")).status_code == 200
        assert (await work).status_code == 200
        assert (await http.get("/health/ready")).status_code == 200


async def test_info_is_true(client: MakeClient, settings: Settings) -> None:
    loaded = Bundle.load(settings.bundle)
    async with client(
        max_client_batch_size=11,
        max_concurrent_requests=12,
        auto_truncate=False,
        max_batch_tokens=99,
        payload_limit=1500,
    ) as http:
        info = (await http.get("/info")).json()
    assert info == {
        "model_id": "tiny",
        "model_sha": loaded.spec.files["onnx/model.onnx"],
        "bridge_sha": None,
        "model_dtype": "float32",
        "served_model_name": "tiny",
        "model_type": {"embedding": {"pooling": "mask"}},
        "max_concurrent_requests": 12,
        "max_input_length": MAX_TOKENS,
        "max_batch_tokens": 99,
        "max_batch_requests": None,
        "max_client_batch_size": 11,
        "auto_truncate": False,
        "tokenization_workers": 2,
        "version": info["version"],
        "sha": None,
        "docker_label": None,
        "dimension": DIMENSION,
        "provider": "cpu",
        "threads": 1,
        "threads_per_batch": 1,
        "token_ids": False,
        "vocabulary_size": len(vocabulary()),
        "max_tokens_in_flight": settings.max_tokens_in_flight,
        "max_bytes_in_flight": settings.max_bytes_in_flight,
        "max_text_characters": 1_000_000,
        "max_body_bytes": 1500,
        "max_similarities": 4_194_304,
        "max_explained_words": 9,
        "max_predictions": 262_144,
        "max_tokenize_characters": 262_144,
        "max_decode_ids": 262_144,
        "models": ["tiny"],
        "default_model": "tiny",
        "aliases": {},
        "templates": {},
        "calibration": None,
        "heads": {
            "topic": {
                "labels": ["music", "animals", "none"],
                "several": False,
                "threshold": 0.625,
                "texts": 300,
                "source": "topics.csv",
                "figures": {"accuracy": 0.75},
            },
        },
        "embedding_space": loaded.spec.space,
        "template": {
            "text": TEMPLATE,
            "pooling": "mask",
            "template_tokens": len(sequence("")),
            "text_tokens": MAX_TOKENS - len(sequence("")),
            "final_period": False,
            "denoising": False,
        },
    }


async def test_every_model_has_its_own_info(both: httpx.AsyncClient) -> None:
    tiny, other = [(await both.get(f"/models/{name}/info")).json() for name in ("tiny", "other")]
    assert tiny == (await both.get("/info")).json()
    assert {key: other[key] for key in ("model_id", "dimension", "max_input_length", "model_type")} == {
        "model_id": "other",
        "dimension": OTHER["dimension"],
        "max_input_length": OTHER["max_tokens"],
        "model_type": {"embedding": {"pooling": "cls"}},
    }
    assert other["template"] == {
        "text": "[X]",
        "pooling": "cls",
        "template_tokens": 2,
        "text_tokens": OTHER["max_tokens"] - 2,
        "final_period": False,
        "denoising": False,
    }
    for info in (tiny, other):
        assert (info["models"], info["default_model"]) == (["other", "tiny"], "tiny")
    for path in ("/models/neither/info", "/models/neither/health"):
        missing = await both.get(path)
        assert missing.status_code == 404
        assert missing.json() == {
            "error": "no model 'neither' is served; the served models are other, tiny", "error_type": "ModelNotFound"
        }  # fmt: skip


async def test_every_label_set_is_there_from_the_start(client: MakeClient, two_bundles: Path) -> None:
    async with client(bundle=two_bundles, model="tiny") as http:
        before = samples_of((await http.get("/metrics")).text)
        bodies = {
            "/embed": {"inputs": ["a", "dogs", "a " * 100]},
            "/similarity": {"inputs": {"pairs": [["a", "dogs"]]}},
            "/search": {"query": "a", "texts": ["dogs", "man"]},
            "/explain": {"inputs": ["two dogs", "a man"]},
            "/predict": {"inputs": "two dogs"},
        }
        for path, body in bodies.items():
            assert (await http.post(path, json=body)).status_code == 200
            assert (await http.post(f"/models/other{path}", json=body)).status_code == 200
        for path in ("/embed", "/v1/embeddings", "/models/other", "/models/other/v1/embeddings"):
            field = "input" if "v1" in path else "inputs"
            assert (await http.post(path, json={field: "poison"})).status_code in (424, 500)
            assert (await http.post(path, json={field: []})).status_code == 400
            assert (await http.post(path, content="a")).status_code == 415
        openai = ("/v1/models", "/v1/models/tiny", "/models", "/models/other/v1/models")
        for path in (*openai, "/info", "/health", "/models/other/info", "/nothing"):
            await http.get(path)
        assert (await http.get("/", headers={"if-none-match": "*"})).status_code == 304
        after = samples_of((await http.get("/metrics")).text)
    assert all(before[f"cloze_requests_total{{route={route},status=200}}"] == 0 for route in LABELS)
    counts = [before[f"cloze_request_seconds_count{{priority=interactive,route={route}}}"] for route in MODEL_ROUTES]
    assert not any(counts)
    assert all(before[f"cloze_failures_total{{reason={reason}}}"] == 0 for reason in REASONS)
    shapes = ("cloze_space_mean_cosine", "cloze_space_mean_norm", "cloze_space_truncated_ratio")  # of no text is none
    assert {name for name in after if not name.startswith(shapes)} == set(before)


async def test_requests_and_batches_are_counted_once(client: MakeClient) -> None:
    async with client() as http:
        await http.post("/embed", json={"inputs": ["a", "a man plays", "a " * 100]})
        await http.post("/models/tiny/embed", json={"inputs": []})
        await http.post("/v1/embeddings", json={"input": ["poison"]})
        await http.get("/no/such/path")
        found = samples_of((await http.get("/metrics")).text)
    short, longer = len(sequence("a")), len(sequence("a man plays"))
    tokens = short + longer + MAX_TOKENS
    assert found["cloze_requests_total{route=/embed,status=200}"] == 1
    assert found["cloze_requests_total{route=/embed,status=400}"] == 1
    assert found["cloze_requests_total{route=/v1/embeddings,status=500}"] == 1
    assert found["cloze_requests_total{route=other,status=404}"] == 1
    assert found["cloze_failures_total{reason=Empty}"] == found["cloze_failures_total{reason=Backend}"] == 1
    assert found["cloze_texts_total{model=tiny}"] == 3
    assert found["cloze_tokens_total{model=tiny}"] == tokens
    assert found["cloze_truncations_total{model=tiny}"] == 1
    assert found["cloze_batch_texts_count{model=tiny}"] == 2  # the long one alone
    assert found["cloze_batch_texts_sum{model=tiny}"] == 3
    assert found["cloze_queue_seconds_count{model=tiny}"] == 1  # a request's mean
    assert found["cloze_batch_tokens_sum{model=tiny}"] == 2 * longer + MAX_TOKENS
    assert found["cloze_padding_tokens_total{model=tiny}"] == longer - short
    assert found["cloze_inference_seconds_count{model=tiny}"] == 2
    assert found["cloze_tokenize_seconds_count{model=tiny}"] == 1
    assert found["cloze_inference_failures_total{model=tiny}"] == 1
    assert found["cloze_requests_in_flight"] == 1  # the scrape


async def test_what_is_at_work_is_seen(make_app: MakeApp, hold: Hold) -> None:
    app = make_app(max_tokens_in_flight=500, max_concurrent_requests=7)
    async with open_client(app) as http:
        with hold():
            first = asyncio.create_task(http.post("/embed", json={"inputs": "a"}))
            await until(lambda: services(app).executors.busy_for)
            second = asyncio.create_task(http.post("/embed", json={"inputs": ["two", "a man"]}))
            await until(lambda: default_model(app).batcher.waiting_items)
            found = samples_of((await http.get("/metrics")).text)
        await asyncio.gather(first, second)
        after = samples_of((await http.get("/metrics")).text)
    waiting = len(sequence("two")) + len(sequence("a man"))
    assert found["cloze_queue_texts{model=tiny}"] == 2
    assert found["cloze_queue_tokens{model=tiny}"] == waiting
    assert found["cloze_queue_age_seconds{model=tiny}"] > 0
    assert found["cloze_tokens_in_flight"] == waiting + len(sequence("a"))
    assert (found["cloze_tokens_in_flight_limit"], found["cloze_requests_in_flight_limit"]) == (500, 7)
    assert found["cloze_requests_in_flight"] == 3
    empty = ("cloze_queue_texts", "cloze_queue_tokens", "cloze_queue_age_seconds")
    assert all(after[f"{name}{{model=tiny}}"] == 0 for name in empty)
    assert after["cloze_tokens_in_flight"] == 0


async def test_two_apps_count_for_themselves(client: MakeClient) -> None:
    async with client() as one, client() as other:
        await one.post("/embed", json={"inputs": "a"})
        assert samples_of((await one.get("/metrics")).text)["cloze_texts_total{model=tiny}"] == 1
        assert samples_of((await other.get("/metrics")).text)["cloze_texts_total{model=tiny}"] == 0


async def test_the_document_has_the_shapes_of_requests_answers_and_errors(both: httpx.AsyncClient) -> None:
    document = (await both.get("/openapi.json")).json()
    page = await both.get("/docs")
    assert page.status_code == 200
    assert "swagger" in page.text
    for path, error in (
        ("/embed", "/ErrorBody"),
        ("/v1/embeddings", "/OpenAIErrorBody"),
        ("/v2/embed", "/CohereErrorBody"),
    ):
        post = document["paths"][path]["post"]
        names = {"/embed": "EmbedRequest", "/v1/embeddings": "EmbeddingsRequest", "/v2/embed": "CohereRequest"}
        body = post["requestBody"]["content"]["application/json"]["schema"]
        assert body == {"$ref": f"#/components/schemas/{names[path]}"}
        assert ("422" in post["responses"]) == (path != "/v1/embeddings")  # whose clients look for 400
        failed = "424" if path == "/embed" else "500"
        for status in ("400", "401", "404", "408", "412", "413", "415", failed, "429", "503", "504"):
            assert post["responses"][status]["content"]["application/json"]["schema"]["$ref"].endswith(error)
    assert document["components"]["schemas"]["EmbedRequest"]["properties"]["inputs"]["oneOf"][0]["type"] == "string"
    native = ("/embed", "/similarity", "/search", "/explain", "/predict", "/tokenize", "/decode")
    assert set(document["paths"]) == {
        *native,
        *("/", "/info", "/v1/embeddings", "/v1/models", "/v1/models/{model}", "/v2/embed"),
        *("/health", "/health/ready", "/health/live", "/health/startup", "/metrics", "/admin/reload"),
    }
