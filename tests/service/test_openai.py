"""OpenAI's routes over HTTP: what its clients send, what they read, and errors in their shape."""

import asyncio
import json
from base64 import b64decode
from typing import Any

import httpx
import numpy as np
import pytest
from harness import Hold, MakeApp, MakeClient, open_client, services, until
from numpy.typing import NDArray
from tiny_bundle import DIMENSION, MAX_TOKENS, OTHER, sequence, vector, vocabulary

pytestmark = pytest.mark.anyio

ROUTE = "/v1/embeddings"
TEXTS = ["a man plays the guitar", "", "dogs", "two dogs run"]


def units(*texts: str) -> NDArray[np.float64]:
    """What the default model gives, computed by hand, at length 1."""
    rows = np.stack([vector(sequence(text)) for text in texts]).astype(np.float64)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


async def ask(http: httpx.AsyncClient, **body: Any) -> Any:
    response = await http.post(ROUTE, json=body)
    assert response.status_code == 200, response.text
    found = response.json()
    assert found.pop("id") == response.headers["x-request-id"]
    return found


def refused(response: httpx.Response, status: int, kind: str, code: str | None, *words: str) -> None:
    """The answer is this error in OpenAI's shape, and says these words."""
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    found = response.status_code, body["error"]["type"], body["error"]["code"]
    assert found == (status, kind, code), response.text
    assert all(word in body["error"]["message"] for word in words), body


async def test_the_answer_is_openais(both: httpx.AsyncClient) -> None:
    found = await ask(both, input=TEXTS, model="tiny", user="someone")
    rows = found.pop("data")
    tokens = sum(len(sequence(text)) for text in TEXTS)
    assert found == {
        "object": "list",
        "model": "tiny",
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    assert [(row["object"], row["index"]) for row in rows] == [("embedding", place) for place in range(4)]
    np.testing.assert_allclose([row["embedding"] for row in rows], units(*TEXTS), atol=1e-6)
    short = await both.post("/embeddings", json={"input": TEXTS, "model": "tiny"})
    assert short.json()["data"] == rows


async def test_nulls_are_the_defaults(both: httpx.AsyncClient, subtests: pytest.Subtests) -> None:
    for given in [{}, {"model": None}, {"model": ""}, {"encoding_format": None, "dimensions": None}]:
        with subtests.test(given=given):
            found = await ask(both, input="a man", **given)
            assert found["model"] == "tiny"
            np.testing.assert_allclose([found["data"][0]["embedding"]], units("a man"), atol=1e-6)


async def test_base64_is_the_float_rows(both: httpx.AsyncClient) -> None:
    plain, packed = [await ask(both, input=TEXTS, encoding_format=name) for name in ("float", "base64")]
    rows = np.array([row["embedding"] for row in plain["data"]], dtype=np.float32)
    assert np.array_equal([np.frombuffer(b64decode(row["embedding"]), "<f4") for row in packed["data"]], rows)
    assert packed["usage"] == plain["usage"]


async def test_the_other_formats_are_those_of_embed(both: httpx.AsyncClient, subtests: pytest.Subtests) -> None:
    for name in ["float16", "int8", "binary", "ubinary"]:
        with subtests.test(name=name):
            found = await ask(both, input=TEXTS, encoding_format=name)
            native = await both.post("/embed", json={"inputs": TEXTS, "encoding_format": name})
            assert [row["embedding"] for row in found["data"]] == native.json()


async def test_dimensions_are_cut_and_then_normalised(both: httpx.AsyncClient) -> None:
    rows = [row["embedding"] for row in (await ask(both, input=TEXTS, dimensions=4))["data"]]
    expected = units(*TEXTS)[:, :4]
    np.testing.assert_allclose(rows, expected / np.linalg.norm(expected, axis=1, keepdims=True), atol=1e-6)
    more = await both.post(ROUTE, json={"input": "a", "dimensions": DIMENSION + 1})
    refused(more, 400, "invalid_request_error", None, "dimensions is 17; the model has 16")


async def test_truncation_goes_by_the_extra_body(both: httpx.AsyncClient) -> None:
    long = "man " + "a " * MAX_TOKENS
    body = {"input": long, "truncate": False}
    refused(await both.post(ROUTE, json=body), 400, "invalid_request_error", "context_length_exceeded", "text 0 has")
    found = await ask(both, input=long, truncation_direction="left")
    kept = "a " * (MAX_TOKENS - len(sequence("")))
    np.testing.assert_allclose(found["data"][0]["embedding"], units(kept)[0], atol=1e-6)


async def test_usage_is_what_was_run(both: httpx.AsyncClient) -> None:
    response = await both.post(ROUTE, json={"input": ["a " * 500, "a"]})
    tokens = MAX_TOKENS + len(sequence("a"))
    assert response.json()["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert response.headers["x-compute-tokens"] == str(tokens)


async def test_token_arrays_of_the_models_own_vocabulary(both: httpx.AsyncClient) -> None:
    ids = [sequence(text, "[X]")[1:-1] for text in TEXTS]
    assert await ask(both, input=ids) == await ask(both, input=TEXTS)
    assert await ask(both, input=ids[0]) == await ask(both, input=TEXTS[0])
    outside = await both.post(ROUTE, json={"input": [[5], [99_999]]})
    words = "text 1, place 0: id 99999 is outside the vocabulary", "check_embedding_ctx_length=False"
    refused(outside, 400, "invalid_request_error", None, *words)
    special = await both.post(ROUTE, json={"input": [vocabulary()["[SEP]"]]})
    refused(special, 400, "invalid_request_error", None, "special token [SEP]")


async def test_foreign_ids_name_the_clients_switch(client: MakeClient) -> None:
    async with client() as http:
        for given in ([5, 6], [[5], [6]]):
            response = await http.post(ROUTE, json={"input": given})
            refused(response, 400, "invalid_request_error", None, "OpenAIEmbeddings(check_embedding_ctx_length=False)")


async def test_models_are_listed_and_chosen(both: httpx.AsyncClient) -> None:
    for prefix in ("/v1", ""):
        listed = (await both.get(f"{prefix}/models")).json()
        assert listed["object"] == "list"
        assert [card["id"] for card in listed["data"]] == ["other", "tiny"]
        for card in listed["data"]:
            assert card == {**card, "object": "model", "owned_by": "cloze"}
            assert isinstance(card["created"], int)
            assert (await both.get(f"{prefix}/models/{card['id']}")).json() == card
        missing = await both.get(f"{prefix}/models/neither")
        refused(missing, 404, "invalid_request_error", "model_not_found", "'neither'", "other, tiny")
    found = await ask(both, input="dogs", model="other")
    expected = vector(sequence("dogs", "[X]"), OTHER["dimension"], OTHER["seed"])
    np.testing.assert_allclose(found["data"][0]["embedding"], expected / np.linalg.norm(expected), atol=1e-6)
    assert (found["model"], found["usage"]["total_tokens"]) == ("other", 3)
    unknown = await both.post(ROUTE, json={"input": "a", "model": "text-embedding-3-small"})
    refused(unknown, 404, "invalid_request_error", "model_not_found", "'text-embedding-3-small'", "other, tiny")


async def test_a_models_address_may_stand_before_the_route(both: httpx.AsyncClient) -> None:
    """For a client that takes no more than a URL, and sends no `model`: Dify's, of text-embeddings-inference."""
    route = "/models/other/v1/embeddings"
    given: list[dict[str, Any]] = [{}, {"model": "other"}, {"model": None}]
    for fields in given:
        answer = await both.post(route, json={"input": TEXTS, **fields})
        found = await ask(both, input=TEXTS, model="other")
        assert answer.json() == found | {"id": answer.headers["x-request-id"]}
    [card] = (await both.get("/models/other/v1/models")).json()["data"]
    assert card == (await both.get("/v1/models/other")).json()
    for path in ("/models/other/v1/models/other", "/models/tiny/v1/models/other"):  # below an address it is one of all
        assert (await both.get(path)).json() == card
    assert (await both.post("/models/other/embeddings", json={"input": TEXTS})).status_code == 200
    assert (await both.get("/v1/models/")).status_code == 404
    assert (await both.post("/embed%0A", json={"inputs": TEXTS})).status_code == 404
    wrong = "invalid_request_error"
    two = await both.post(route, json={"input": "a", "model": "tiny"})
    refused(two, 400, wrong, None, "two models are named, 'other' and 'tiny'")
    refused(await both.post("/models/neither/v1/embeddings", json={"input": "a"}), 404, wrong, "model_not_found")
    refused(await both.get("/models/neither/v1/models"), 404, wrong, "model_not_found", "'neither'")
    refused(await both.post(route, json={}), 400, wrong, None, "input: Field required")
    refused(await both.get(route), 405, wrong, None, "GET /models/other/v1/embeddings")
    refused(await both.post(route, json={"input": "poison"}), 500, "server_error", None, "text 0: the model gave")


async def test_a_wrong_value_is_named(both: httpx.AsyncClient, subtests: pytest.Subtests) -> None:
    for body, words in [
        ({"input": []}, "the input is an empty list"),
        ({}, "input: Field required"),
        ({"input": None}, "input: should be a text or a list of texts (or of token ids)"),
        ({"input": ["a", None]}, "input[1]: Input should be a valid string"),
        ([], "body: should be a JSON object"),
    ]:
        for route in [ROUTE, "/embeddings"]:
            with subtests.test(body=body, route=route):
                refused(await both.post(route, json=body), 400, "invalid_request_error", None, words)


async def test_the_field_that_is_wrong_is_the_param(both: httpx.AsyncClient, subtests: pytest.Subtests) -> None:
    for body, param in [
        ({"input": []}, "input"),
        ({"input": ["a"] * 16_385}, "input"),
        ({"input": "a " * 100, "truncate": False}, "input"),
        ({"input": "a", "dimensions": 17}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "prompt_name": "no such"}, "prompt_name"),
        ({"input": "a", "model": "no such"}, "model"),
        ([], None),
    ]:
        with subtests.test(body=body):
            assert (await both.post(ROUTE, json=body)).json()["error"]["param"] == param


async def test_what_is_no_request_of_this_route(both: httpx.AsyncClient) -> None:
    wrong = "invalid_request_error"
    json_type = {"content-type": "application/json"}
    refused(await both.post(ROUTE, content=b"{", headers=json_type), 400, wrong, None, "not JSON")
    refused(await both.post(ROUTE, content=b"{}"), 415, wrong, None, "content-type is not set")
    refused(await both.get(ROUTE), 405, wrong, None, "GET /v1/embeddings")
    refused(await both.post("/v1/chat/completions", json={}), 404, wrong, None, "POST /v1/chat/completions")


async def test_too_much_is_refused(client: MakeClient) -> None:
    async with client(payload_limit=100, max_client_batch_size=2, auto_truncate=False) as http:
        large = json.dumps({"input": "a" * 100}).encode()
        response = await http.post(ROUTE, content=large, headers={"content-type": "application/json"})
        refused(response, 413, "invalid_request_error", None, "at most 100 are allowed")
        many = await http.post(ROUTE, json={"input": ["a"] * 3})
        refused(many, 400, "invalid_request_error", None, "3 texts in one request; at most 2")
        long = await http.post(ROUTE, json={"input": "a " * 30})
        refused(long, 400, "invalid_request_error", "context_length_exceeded", "text 0 has 30 tokens")
    async with client() as http:
        long = await http.post(ROUTE, json={"input": "a" * 1_000_001})
        refused(long, 400, "invalid_request_error", "context_length_exceeded", "text 0 has 1000001 characters")


async def test_what_may_be_sent_again_says_so(make_app: MakeApp, hold: Hold) -> None:
    """OpenAI's client repeats 408, 409, 429 and 5xx after Retry-After."""
    app = make_app(max_tokens_in_flight=20)
    async with open_client(app) as http:
        with hold():
            first = asyncio.create_task(http.post(ROUTE, json={"input": "a"}))
            await until(lambda: services(app).executors.busy_for)
            full = await http.post(ROUTE, json={"input": "a"})
            refused(full, 429, "rate_limit_error", "rate_limit_exceeded", "11 tokens are in flight")
            assert int(full.headers["retry-after"]) >= 1
        assert (await first).status_code == 200
        with hold():
            late = await http.post(ROUTE, json={"input": "a"}, headers={"x-request-timeout": "0.01"})
            refused(late, 504, "timeout_error", None, "not answered within 0.01 s")
            assert int(late.headers["retry-after"]) >= 1


async def test_a_model_that_fails_is_a_fault_of_the_server(both: httpx.AsyncClient) -> None:
    refused(await both.post(ROUTE, json={"input": ["a", "poison"]}), 500, "server_error", None, "not finite")


async def test_a_bug_is_a_fault_of_the_server(both: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **options: object) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr("cloze.service.http.openai.finish", broken)
    response = await both.post(ROUTE, json={"input": "a"})
    refused(response, 500, "server_error", None, "see its log")
    assert "secret" not in response.text
