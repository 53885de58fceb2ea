"""The native routes over HTTP: text-embeddings-inference's wire format, and an answer to everything else."""

import asyncio
import json
from typing import Any

import httpx
import numpy as np
import pytest
from harness import MakeClient
from tiny_bundle import DIMENSION

from service.errors import ErrorBody
from service.settings import Settings

pytestmark = pytest.mark.anyio

JSON = {"content-type": "application/json"}


def refused(response: httpx.Response, status: int, error_type: str, *words: str) -> None:
    """The answer is this error, in the envelope, and says these words."""
    body = ErrorBody.model_validate_json(response.content, extra="forbid")
    assert (response.status_code, body.error_type) == (status, error_type), response.text
    assert all(word in body.error for word in words), body.error
    assert "Traceback" not in body.error


async def test_one_text_gives_a_list_of_one(client: MakeClient) -> None:
    async with client() as http:
        response = await http.post("/embed", json={"inputs": "a man"})
        assert response.status_code == 200
        assert response.headers["content-type"] == "application/json"
        assert np.array(response.json()).shape == (1, DIMENSION)
        assert np.linalg.norm(response.json()) == pytest.approx(1)


async def test_many_texts_keep_their_order(client: MakeClient) -> None:
    texts = ["a man plays the guitar", "", "dogs", "two dogs run " * 30, "a man"] * 3
    async with client(max_batch_tokens=64) as http:
        alone = [(await http.post("/embed", json={"inputs": text})).json()[0] for text in texts]
        together = (await http.post("/embed", json={"inputs": texts})).json()
        np.testing.assert_allclose(together, alone, atol=1e-6)


async def test_root_is_embed_or_similarity_by_shape(client: MakeClient) -> None:
    pair = {"source_sentence": "a man", "sentences": ["a man", "dogs"]}
    async with client() as http:
        for path, inputs in (("/embed", ["a"]), ("/similarity", pair)):
            found = [await http.post(each, json={"inputs": inputs}) for each in ("/", path)]
            assert [each.status_code for each in found] == [200, 200]
            assert found[0].content == found[1].content


async def test_options(client: MakeClient) -> None:
    async with client() as http:

        async def embed(**options: Any) -> np.ndarray:
            return np.array((await http.post("/embed", json={"inputs": ["a man"], **options})).json())

        raw, unit = await embed(normalize=False), await embed(normalize=True)
        assert not np.isclose(np.linalg.norm(raw), 1)
        np.testing.assert_allclose(unit, raw / np.linalg.norm(raw), rtol=1e-6)
        cut = await embed(dimensions=4)
        np.testing.assert_allclose(cut, raw[:, :4] / np.linalg.norm(raw[:, :4]), rtol=1e-6)
        nulls = {"truncate": None, "dimensions": None, "prompt_name": None}
        assert np.array_equal(await embed(**nulls, options={"wait_for_model": True}, encoding_format="float"), unit)


@pytest.mark.parametrize("direction", ["left", "Left", "right", "Right"])
async def test_truncation_direction(client: MakeClient, direction: str) -> None:
    text, kept = "man " + "a " * 100 + "dogs", {"l": "a " * 100 + "dogs", "r": "man " + "a " * 100}
    async with client() as http:
        found = await http.post("/embed", json={"inputs": text, "truncation_direction": direction})
        same = await http.post("/embed", json={"inputs": kept[direction[0].lower()], "truncation_direction": direction})
        np.testing.assert_allclose(found.json(), same.json(), atol=1e-6)


async def test_truncate_is_the_setting_unless_the_request_says(client: MakeClient) -> None:
    body = {"inputs": ["a", "a " * 100]}
    async with client() as http:
        assert (await http.post("/embed", json=body)).status_code == 200
        refused(await http.post("/embed", json={**body, "truncate": False}), 422, "Validation", "text 1 has 100 tokens")
    async with client(truncate=False) as http:
        refused(await http.post("/embed", json=body), 422, "Validation", "text 1 has 100 tokens")
        assert (await http.post("/embed", json={**body, "truncate": True})).status_code == 200


async def test_an_empty_text_has_the_vector_of_the_empty_template(client: MakeClient) -> None:
    async with client() as http:
        found = (await http.post("/embed", json={"inputs": ["", "  \n", "a"]})).json()
        assert found[0] == found[1] != found[2]


async def test_special_tokens_in_a_text_stay_text(client: MakeClient) -> None:
    async with client() as http:
        found = (await http.post("/embed", json={"inputs": ["[MASK]", "[SEP]", "mask"]})).json()
        assert found[0] != found[1] != found[2]


async def test_similarity(client: MakeClient) -> None:
    texts = ["a man", "a man", "dogs run", ""]
    async with client() as http:
        found = await http.post(
            "/similarity", json={"inputs": {"source_sentence": texts[0], "sentences": texts[1:]}, "parameters": {}}
        )
        units = np.array((await http.post("/embed", json={"inputs": texts})).json())
        np.testing.assert_allclose(found.json(), units[1:] @ units[0], atol=1e-6)
        assert found.json()[0] == pytest.approx(1, abs=1e-9)
        cut = {"truncate": False, "truncation_direction": "left", "prompt_name": None}
        long = {"inputs": {"source_sentence": "a", "sentences": ["a " * 100]}, "parameters": cut}
        refused(await http.post("/similarity", json=long), 422, "Validation", "text 1 has 100 tokens")


@pytest.mark.parametrize(
    ("path", "body", "status", "error_type", "words"),
    [
        ("/embed", {"inputs": []}, 400, "Empty", "inputs is an empty list"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}, 400, "Empty", "inputs.sentences"),
        ("/embed", {}, 422, "Validation", "inputs: Field required"),
        ("/embed", {"inputs": None}, 422, "Validation", "inputs: should be a text or a list of texts, not null"),
        ("/embed", {"inputs": 5}, 422, "Validation", "token ids are not taken"),
        ("/embed", {"inputs": [101, 102]}, 422, "Validation", "item 0 should be a text, not a number: token ids"),
        ("/embed", {"inputs": [[101]]}, 422, "Validation", "check_embedding_ctx_length=False"),
        ("/embed", {"inputs": ["a", None]}, 422, "Validation", "item 1 should be a text, not null"),
        ("/embed", {"inputs": ["a", True]}, 422, "Validation", "item 1 should be a text, not a truth value"),
        ("/embed", {"inputs": {"a": 1}}, 422, "Validation", "not an object"),
        ("/embed", {"inputs": [[[[[[{}]]]]]]}, 422, "Validation", "not a list"),
        ("/embed", [], 422, "Validation", "body: should be a JSON object"),
        ("/embed", "a", 422, "Validation", "body: should be a JSON object"),
        (
            "/embed",
            {"inputs": "a", "normalize": "yes"},
            422,
            "Validation",
            "normalize: Input should be a valid boolean",
        ),
        ("/embed", {"inputs": "a", "truncate": 1}, 422, "Validation", "truncate"),
        ("/embed", {"inputs": "a", "truncation_direction": "up"}, 422, "Validation", "'left', 'Left', 'right'"),
        ("/embed", {"inputs": "a", "dimensions": 0}, 422, "Validation", "greater than or equal to 1"),
        ("/embed", {"inputs": "a", "dimensions": 17}, 422, "Validation", "dimensions is 17; the model has 16"),
        ("/embed", {"inputs": "a", "dimensions": 1.5}, 422, "Validation", "dimensions"),
        ("/embed", {"inputs": "a", "prompt_name": "query"}, 422, "Validation", "no prompts; its template, see /info"),
        ("/similarity", {"inputs": "a"}, 422, "Validation", "inputs: should be a JSON object"),
        ("/similarity", {"inputs": {"sentences": ["a"]}}, 422, "Validation", "inputs.source_sentence: Field required"),
        (
            "/similarity",
            {"inputs": {"source_sentence": "a", "sentences": ["a", 1]}},
            422,
            "Validation",
            "inputs.sentences[1]",
        ),
        ("/", {"inputs": 5}, 422, "Validation", "inputs: should be a text"),
        ("/", {"inputs": {"source_sentence": "a"}}, 422, "Validation", "inputs.sentences: Field required"),
        ("/", 5, 422, "Validation", "body: should be a JSON object"),
    ],
)
async def test_a_wrong_value_is_named(
    client: MakeClient, path: str, body: Any, status: int, error_type: str, words: str
) -> None:
    async with client() as http:
        refused(await http.post(path, json=body), status, error_type, words)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"{'inputs': 'a'}",
        b'{"inputs": "\xff\xfe"}',
        b'{"inputs": "\xed\xa0\x80"}',
        b'{"inputs": "\\ud800"}',
        b'{"inputs": "a", "x": NaN}',
        b'{"inputs": "a", "x": -Infinity}',
        b'{"inputs": "a", "x": ' + b"9" * 400 + b"}",
        b'{"inputs": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        '{"inputs": "a"}'.encode("utf-16"),
    ],
)
async def test_what_is_no_json_is_malformed(client: MakeClient, content: bytes) -> None:
    async with client() as http:
        refused(await http.post("/embed", content=content, headers=JSON), 400, "Malformed", "no JSON in UTF-8")


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded", "garbage;;"])
async def test_the_content_type_is_json(client: MakeClient, content_type: str | None) -> None:
    headers = {"content-type": content_type} if content_type else {}
    async with client() as http:
        refused(
            await http.post("/embed", content=b'{"inputs": "a"}', headers=headers), 415, "UnsupportedMediaType", "send"
        )
        for good in ("application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"):
            response = await http.post("/embed", content=b'{"inputs": "a"}', headers={"content-type": good})
            assert response.status_code == 200


async def test_a_body_over_the_limit_is_refused(client: MakeClient) -> None:
    async with client(max_body_bytes=100) as http:
        body = json.dumps({"inputs": "a" * 100}).encode()
        refused(
            await http.post("/embed", content=body, headers=JSON), 413, "PayloadTooLarge", f"{len(body)} bytes", "100"
        )

        async def chunks() -> Any:
            for start in range(0, len(body), 10):
                yield body[start : start + 10]

        refused(await http.post("/embed", content=chunks(), headers=JSON), 413, "PayloadTooLarge", "more than 100")


async def test_a_megabyte_of_text_is_cut_or_refused(client: MakeClient) -> None:
    text = "a man plays the guitar " * 45_000
    async with client() as http:
        assert (await http.post("/embed", json={"inputs": text})).status_code == 200
        response = await http.post("/embed", json={"inputs": text, "truncate": False})
        refused(response, 422, "Validation", "text 0 has 225000 tokens")
        assert len(response.content) < 500
        assert (await http.post("/embed", json={"inputs": "x" * 1_000_000})).status_code == 200


async def test_ten_thousand_texts_are_answered_in_order(client: MakeClient) -> None:
    texts = [f"dogs {number}" for number in range(10_000)]
    async with client() as http:
        found = np.array((await http.post("/embed", json={"inputs": texts})).json())
        assert found.shape == (10_000, DIMENSION)
        picked = [0, 4_999, 9_999]
        alone = (await http.post("/embed", json={"inputs": [texts[index] for index in picked]})).json()
        np.testing.assert_allclose(found[picked], alone, atol=1e-6)


async def test_more_texts_than_the_limit_are_refused(client: MakeClient, settings: Settings) -> None:
    texts = ["a"] * (settings.max_inputs + 1)
    async with client() as http:
        words = (f"{len(texts)} texts", f"at most {settings.max_inputs}")
        refused(await http.post("/embed", json={"inputs": texts}), 422, "Validation", *words)
        pair = {"inputs": {"source_sentence": "a", "sentences": texts[1:]}}
        refused(await http.post("/similarity", json=pair), 422, "Validation", *words)


async def test_a_text_that_breaks_the_model_hurts_no_neighbour(client: MakeClient) -> None:
    async with client() as http:
        bodies = [{"inputs": ["a", text]} for text in ("man", "poison", "dogs", "", "two")]
        found = await asyncio.gather(*(http.post("/embed", json=body) for body in bodies))
        assert [each.status_code for each in found] == [200, 424, 200, 200, 200]
        refused(found[1], 424, "Backend", "not finite")


async def test_a_full_queue_refuses_whole_requests(client: MakeClient) -> None:
    async with client(max_waiting_tokens=20, max_batch_tokens=32) as http:
        found = await asyncio.gather(*(http.post("/embed", json={"inputs": ["a", "dogs"]}) for _ in range(30)))
        full = [each for each in found if each.status_code != 200]
        assert full
        assert len(full) < 30
        for each in full:
            refused(each, 429, "Overloaded", "at most 20 may wait")
            assert int(each.headers["retry-after"]) >= 1
        assert (await http.post("/embed", json={"inputs": "a"})).status_code == 200


async def test_too_many_requests_at_once_are_refused_and_the_status_still_answers(client: MakeClient) -> None:
    async with client(max_requests=3) as http:
        posts = [http.post("/embed", json={"inputs": "a"}) for _ in range(10)]
        health, *found = await asyncio.gather(http.get("/health"), *posts)
        assert health.status_code == 200
        assert sorted({each.status_code for each in found}) == [200, 429]
        full = next(each for each in found if each.status_code == 429)
        refused(full, 429, "Overloaded", "3 requests are at work")
        assert "retry-after" in full.headers


async def test_unknown_paths_and_methods_answer_in_the_envelope(client: MakeClient) -> None:
    async with client() as http:
        refused(await http.get("/nothing"), 404, "NotFound", "GET /nothing")
        response = await http.get("/embed")
        refused(response, 405, "MethodNotAllowed", "GET /embed")
        assert response.headers["allow"] == "POST"


async def test_a_bug_answers_500_and_tells_only_the_log(
    client: MakeClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: object, **options: object) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr("service.routes.native.to_json", broken)
    async with client() as http:
        response = await http.post("/embed", json={"inputs": "a"})
        refused(response, 500, "Internal", "its log says more")
        assert "secret" not in response.text
        assert "secret detail" in caplog.text
        assert (await http.get("/health")).status_code == 200


async def test_no_text_is_logged(client: MakeClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with client() as http:
        for text in ("guitar", "poison guitar", "guitar " * 100):
            await http.post("/embed", json={"inputs": text, "truncate": False})
        await http.post("/embed", json={"inputs": ["guitar", 1]})
    assert "guitar" not in caplog.text
