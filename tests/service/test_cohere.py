"""Cohere's route over HTTP: what its client sends, what it reads, and errors in its shape."""

import base64

import httpx
import numpy as np
import pytest
from harness import MakeClient
from tiny_bundle import MAX_TOKENS, sequence, vector

pytestmark = pytest.mark.anyio

TEXTS = ["a man plays the guitar", "", "two dogs run"]


async def test_the_answer_is_coheres(both: httpx.AsyncClient) -> None:
    kinds = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    body = {"model": "tiny", "texts": TEXTS, "input_type": "search_document", "embedding_types": kinds}
    response = await both.post("/v2/embed", json=body)
    found = response.json()
    assert list(found) == ["response_type", "id", "embeddings", "texts", "meta"]
    assert found["id"] == response.headers["x-request-id"]
    assert found["response_type"] == "embeddings_by_type"
    assert found["texts"] == TEXTS
    tokens = sum(len(sequence(text)) for text in TEXTS)
    assert found["meta"] == {"api_version": {"version": "2"}, "billed_units": {"input_tokens": tokens}}
    rows = np.stack([vector(sequence(text)) for text in TEXTS]).astype(np.float64)
    units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    vectors = found["embeddings"]
    assert list(vectors) == kinds
    np.testing.assert_allclose(vectors["float"], units, atol=1e-6)
    whole = np.rint(units * 127 / np.abs(units).max(1, keepdims=True))
    np.testing.assert_allclose(vectors["int8"], whole, atol=1)
    assert np.array_equal(vectors["uint8"], np.array(vectors["int8"]) + 128)
    assert np.array_equal(vectors["ubinary"], np.packbits(units > 0, axis=1))
    assert np.array_equal(vectors["binary"], np.packbits(units > 0, axis=1).astype(int) - 128)
    read = [np.frombuffer(base64.b64decode(row), "<f4") for row in vectors["base64"]]
    np.testing.assert_allclose(read, units, atol=1e-6)


async def test_without_types_the_rows_are_floats(both: httpx.AsyncClient) -> None:
    for body in ({}, {"embedding_types": None, "truncate": None}):
        found = (await both.post("/v2/embed", json={"texts": ["a man"]} | body)).json()
        assert list(found["embeddings"]) == ["float"]
    other = (await both.post("/models/other/v2/embed", json={"texts": ["a man"], "output_dimension": 4})).json()
    assert np.linalg.norm(other["embeddings"]["float"][0]) == pytest.approx(1, abs=1e-6)
    assert len(other["embeddings"]["float"][0]) == 4


async def test_inputs_in_parts_are_texts(both: httpx.AsyncClient) -> None:
    inputs = [{"content": [{"type": "text", "text": "a man"}, {"type": "text", "text": "plays"}]}]
    parts = (await both.post("/v2/embed", json={"inputs": inputs})).json()
    whole = (await both.post("/v2/embed", json={"texts": ["a man plays"]})).json()
    assert parts["embeddings"] == whole["embeddings"]


async def test_without_truncate_the_setting_decides(client: MakeClient) -> None:
    long = {"texts": ["man " * MAX_TOKENS]}
    async with client(auto_truncate=False) as http:
        assert (await http.post("/v2/embed", json=long)).status_code == 422
        assert (await http.post("/v2/embed", json=long | {"truncate": "END"})).status_code == 200


async def test_as_many_inputs_as_texts_are_read(both: httpx.AsyncClient) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "man"}]
    body = {"inputs": [{"content": parts}] * 16_384, "embedding_types": ["binary"], "output_dimension": 8}
    assert (await both.post("/v2/embed", json=body)).status_code == 200


async def test_truncate_is_none_start_or_end(both: httpx.AsyncClient) -> None:
    room = MAX_TOKENS - len(sequence(""))
    text = "man " * room + "dogs " * room
    rows = {}
    for side, words in (("START", "dogs " * room), ("END", "man " * room)):
        cut = (await both.post("/v2/embed", json={"texts": [text], "truncate": side})).json()
        rows[side] = cut["embeddings"]["float"]
        expected = vector(sequence(words.strip()))
        np.testing.assert_allclose(rows[side][0], expected / np.linalg.norm(expected), atol=1e-6)
        body = {"texts": [text], "truncate": side, "max_tokens": room // 2, "embedding_types": ["float"]}
        cut = (await both.post("/v2/embed", json=body)).json()
        assert cut["meta"]["billed_units"] == {"input_tokens": room // 2 + len(sequence(""))}
        expected = vector(sequence(" ".join(words.split()[: room // 2])))
        np.testing.assert_allclose(cut["embeddings"]["float"][0], expected / np.linalg.norm(expected), atol=1e-6)
    same = {"texts": [text], "max_tokens": 10**6}
    assert (await both.post("/v2/embed", json=same)).json()["embeddings"]["float"] == rows["END"]
    refused = await both.post("/v2/embed", json={"texts": ["a", "b c"], "truncate": "NONE", "max_tokens": 1})
    assert refused.status_code == 422
    assert refused.json()["message"].startswith("texts[1] has 2 tokens; at most 1 are allowed by the request")
    assert (await both.post("/v2/embed", json={"texts": ["a"], "max_tokens": 0})).status_code == 422
    refused = await both.post("/v2/embed", json={"texts": ["a", text], "truncate": "NONE"})
    assert refused.status_code == 422
    assert refused.json() == {"message": refused.json()["message"]}
    assert refused.json()["message"].startswith("texts[1] has")


async def test_errors_have_coheres_shape(both: httpx.AsyncClient, subtests: pytest.Subtests) -> None:
    for body, status, words in [
        ({}, 400, "texts is missing or empty"),
        ({"texts": ["a", 1]}, 422, "texts[1]"),
        ({"texts": ["a"], "inputs": [{"content": [{"type": "text", "text": "a"}]}]}, 422, "both given"),
        ({"images": ["data:image/png;base64,AA"]}, 422, "images cannot be embedded"),
        ({"texts": ["a"], "input_type": "image"}, 422, "images cannot be embedded"),
        ({"inputs": [{"content": [{"type": "image_url"}]}]}, 422, "inputs[0] has content that is not text"),
        ({"texts": ["a"], "embedding_types": ["float64"]}, 422, "embedding_types[0]"),
        ({"texts": ["a"], "output_dimension": 17}, 422, "output_dimension is 17; the model has 16"),
        ({"inputs": [{"content": [0, 1]}]}, 422, "inputs[0].content[0]"),
        ({"texts": ["a"], "model": "embed-v4.0"}, 404, "no model 'embed-v4.0' is served"),
    ]:
        with subtests.test(body=body):
            response = await both.post("/v2/embed", json=body)
            assert response.status_code == status, response.text
            assert list(response.json()) == ["message"]
            assert words in response.json()["message"]
