"""What operators ask: /health, /info, /metrics, and the pages about them."""

import re

import pytest
from harness import ROOT, MakeClient
from prometheus_client.parser import text_string_to_metric_families
from tiny_bundle import DIMENSION, MAX_TOKENS, TEMPLATE

from encoding.bundle import Bundle
from service.errors import ERROR_TYPES, Unavailable
from service.metrics import DROPPED
from service.settings import Settings

pytestmark = pytest.mark.anyio


def samples(text: str) -> dict[str, float]:
    """`name{label="value"}` to value, without the histograms' buckets."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            if not sample.name.endswith("_bucket"):
                found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


async def test_health_is_empty(client: MakeClient) -> None:
    async with client() as http:
        response = await http.get("/health")
        assert (response.status_code, response.content) == (200, b"")


async def test_health_says_why_it_is_not(client: MakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    async def lost(self: object) -> None:
        raise Unavailable("device lost")

    monkeypatch.setattr("service.embedder.Embedder.check", lost)
    async with client() as http:
        response = await http.get("/health")
        assert response.status_code == 503
        assert response.json() == {"error": "device lost", "error_type": "Unhealthy"}


async def test_info_is_true(client: MakeClient, settings: Settings) -> None:
    loaded = Bundle.load(settings.bundle)
    async with client(max_inputs=11, max_requests=12, truncate=False, max_batch_tokens=99) as http:
        info = (await http.get("/info")).json()
    assert info == {
        "model_id": "tiny",
        "model_sha": loaded.spec.files["onnx/model.onnx"],
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
        "template": {
            "text": TEMPLATE,
            "read_out": "mask",
            "template_tokens": loaded.text_encoder.template_tokens,
            "text_tokens": MAX_TOKENS - loaded.text_encoder.template_tokens,
            "final_period": False,
            "denoising": False,
        },
    }


async def test_every_reason_is_there_before_the_first_failure(client: MakeClient) -> None:
    async with client() as http:
        found = samples((await http.get("/metrics")).text)
    assert all(found[f"cloze_failures_total{{reason={reason}}}"] == 0 for reason in (*ERROR_TYPES, DROPPED))
    assert found["cloze_requests_total{route=/embed,status=200}"] == 0
    assert found["cloze_queue_texts{}"] == found["cloze_queue_tokens{}"] == 0
    assert found["cloze_requests_in_flight{}"] == 1
    assert any(name.startswith("cloze_model_info{bundle=tiny,precision=fp32,provider=cpu") for name in found)


async def test_requests_and_batches_are_counted_once(client: MakeClient) -> None:
    async with client() as http:
        template = (await http.get("/info")).json()["template"]["template_tokens"]
        await http.post("/embed", json={"inputs": ["a", "a man plays", "a " * 100]})
        await http.post("/embed", json={"inputs": []})
        await http.post("/embed", json={"inputs": ["poison"]})
        await http.get("/no/such/path")
        found = samples((await http.get("/metrics")).text)
    assert found["cloze_requests_total{route=/embed,status=200}"] == 1
    assert found["cloze_requests_total{route=/embed,status=400}"] == 1
    assert found["cloze_requests_total{route=/embed,status=424}"] == 1
    assert found["cloze_requests_total{route=other,status=404}"] == 1
    assert found["cloze_failures_total{reason=Empty}"] == 1
    assert found["cloze_failures_total{reason=Backend}"] == 1
    assert found["cloze_texts_total{}"] == 3
    assert found["cloze_tokens_total{}"] == template + 1 + template + 3 + MAX_TOKENS
    assert found["cloze_truncations_total{}"] == 1
    assert found["cloze_batch_texts_count{}"] == 1
    assert found["cloze_batch_texts_sum{}"] == found["cloze_queue_seconds_count{}"] == 3
    assert found["cloze_batch_tokens_sum{}"] == 3 * MAX_TOKENS
    assert found["cloze_padding_tokens_total{}"] == 3 * MAX_TOKENS - found["cloze_tokens_total{}"]
    assert found["cloze_inference_seconds_count{}"] == 1
    assert found["cloze_tokenize_seconds_count{}"] == 2


async def test_two_apps_count_for_themselves(client: MakeClient) -> None:
    async with client() as one, client() as other:
        await one.post("/embed", json={"inputs": "a"})
        assert samples((await one.get("/metrics")).text)["cloze_texts_total{}"] == 1
        assert samples((await other.get("/metrics")).text)["cloze_texts_total{}"] == 0


async def test_the_document_has_the_shapes_of_requests_answers_and_errors(client: MakeClient) -> None:
    async with client() as http:
        document = (await http.get("/openapi.json")).json()
        page = await http.get("/docs")
    assert page.status_code == 200
    assert "swagger" in page.text
    post = document["paths"]["/embed"]["post"]
    assert post["requestBody"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/EmbedRequest"}
    numbers = post["responses"]["200"]["content"]["application/json"]["schema"]
    assert (numbers["items"]["type"], numbers["items"]["items"]["type"]) == ("array", "number")
    for status in ("400", "413", "415", "422", "424", "429", "503"):
        assert post["responses"][status]["content"]["application/json"]["schema"]["$ref"].endswith("/ErrorBody")
    assert document["components"]["schemas"]["EmbedRequest"]["properties"]["inputs"]["anyOf"][0]["type"] == "string"
    assert set(document["paths"]) == {"/embed", "/similarity", "/", "/health", "/info", "/metrics"}


async def test_every_metric_is_documented(client: MakeClient) -> None:
    page = (ROOT / "docs" / "service.md").read_text(encoding="utf-8")
    async with client() as http:
        text = (await http.get("/metrics")).text
    names = re.findall(r"^# TYPE (cloze_\w+)", text, re.MULTILINE)
    assert len(names) > 10
    assert [name for name in names if f"`{name}`" not in page] == []


def test_every_error_type_is_documented() -> None:
    page = (ROOT / "docs" / "service.md").read_text(encoding="utf-8")
    assert [name for name in ERROR_TYPES if f"`{name}`" not in page] == []
