"""POST /embed with `chunk`: a vector for each chunk with its place, or their mean; nothing is truncated in silence."""

from typing import Any

import httpx
import numpy as np
import pytest
from harness import MakeBundle, MakeClient
from tiny_bundle import DIMENSION, MAX_TOKENS, sequence, vector

pytestmark = pytest.mark.anyio

ROOM = MAX_TOKENS - len(sequence(""))
LONG = "a man plays the guitar. two dogs run. " * 8
TEXTS = [LONG, "two dogs", "", "the man " * 40]


async def ask(http: httpx.AsyncClient, **body: Any) -> Any:
    response = await http.post("/embed", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["x-truncated-texts"] == "0"
    return response.json()


async def test_each_chunk_has_its_place_and_the_vector_of_its_text(both: httpx.AsyncClient) -> None:
    found = await ask(both, inputs=TEXTS, chunk={})
    assert [len(each) > 1 for each in found] == [True, False, False, True]
    for text, chunks in zip(TEXTS, found, strict=True):
        parts = [text[chunk["start"] : chunk["stop"]] for chunk in chunks]
        assert " ".join(parts).split() == text.split()
        assert all(len(sequence(part.replace(".", " ."))) <= MAX_TOKENS for part in parts)
        alone = await ask(both, inputs=parts)
        np.testing.assert_allclose([chunk["embedding"] for chunk in chunks], alone, atol=1e-6)


async def test_the_mean_is_of_vectors_of_length_1_weighted_by_characters(both: httpx.AsyncClient) -> None:
    chunks = await ask(both, inputs=TEXTS, chunk={"tokens": 10, "overlap": 3})
    means = await ask(both, inputs=TEXTS, chunk={"tokens": 10, "overlap": 3, "mean": True})
    for row, each in zip(means, chunks, strict=True):
        lengths = [chunk["stop"] - chunk["start"] for chunk in each]
        mean = np.average([chunk["embedding"] for chunk in each], axis=0, weights=lengths if any(lengths) else None)
        np.testing.assert_allclose(row, mean / np.linalg.norm(mean), atol=1e-6)
    short = await ask(both, inputs="two dogs", chunk={"mean": True}, dimensions=4, normalize=False)
    expected = vector(sequence("two dogs"))
    np.testing.assert_allclose(short[0], (expected / np.linalg.norm(expected))[:4], atol=1e-6)


async def test_formats_are_those_of_embed(both: httpx.AsyncClient) -> None:
    for name in ("base64", "int8", "ubinary"):
        chunks = await ask(both, inputs=LONG, chunk={}, encoding_format=name)
        parts = [LONG[chunk["start"] : chunk["stop"]] for chunk in chunks[0]]
        assert [chunk["embedding"] for chunk in chunks[0]] == await ask(both, inputs=parts, encoding_format=name)


async def test_a_truncated_text_is_counted_in_the_answer(both: httpx.AsyncClient) -> None:
    response = await both.post("/embed", json={"inputs": [LONG, "a", LONG]})
    assert response.headers["x-truncated-texts"] == "2"


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"inputs": LONG, "chunk": {"tokens": ROOM + 1}}, 422, f"chunk.tokens is {ROOM + 1}; at most {ROOM} fit"),
        ({"inputs": LONG, "chunk": {"tokens": 10, "overlap": 6}}, 422, "chunk.overlap is 6; at most half of the 10"),
        ({"inputs": [], "chunk": {}}, 400, "empty list"),
    ],
)
async def test_what_cannot_be_is_refused(
    both: httpx.AsyncClient, body: dict[str, Any], status: int, words: str
) -> None:
    response = await both.post("/embed", json=body)
    assert response.status_code == status, response.text
    assert words in response.json()["error"]


async def test_a_chunk_has_room_for_the_period_that_the_bundle_adds(
    client: MakeClient, make_bundle: MakeBundle
) -> None:
    body = {"inputs": "a man plays the guitar", "truncate": False}
    async with client(bundle=make_bundle(final_period=True)) as http:
        refused = await http.post("/embed", json=body | {"chunk": {"tokens": 1}})
        assert refused.status_code == 422
        assert "chunk.tokens is 1; at least 2 are needed, a final period included" in refused.text
        (chunks,) = (await http.post("/embed", json=body | {"chunk": {"tokens": 2}})).json()
        assert len(chunks) == 5


async def test_more_chunks_than_texts_are_allowed_is_refused(client: MakeClient) -> None:
    async with client(max_client_batch_size=5) as http:
        response = await http.post("/embed", json={"inputs": LONG, "chunk": {"tokens": 5}})
        assert response.status_code == 422
        assert "the texts make more than 5 chunks, the limit of a request; send fewer" in response.json()["error"]
        response = await http.post("/embed", json={"inputs": ["a man"] * 5, "chunk": {"tokens": 5}})
        assert [len(each) for each in response.json()] == [1] * 5


async def test_a_mean_may_be_bytes(both: httpx.AsyncClient) -> None:
    body = {"inputs": TEXTS, "chunk": {"mean": True}}
    response = await both.post("/embed", json=body, headers={"accept": "application/octet-stream"})
    assert response.headers["x-embedding-shape"] == f"{len(TEXTS)},{DIMENSION}"
    rows = np.frombuffer(response.content, "<f4").reshape(len(TEXTS), -1)
    np.testing.assert_allclose(rows, await ask(both, **body), atol=1e-6)


async def test_a_long_run_of_blanks_takes_no_time(client: MakeClient) -> None:
    """A search for the ends of sentences that looks at each blank anew would take most of an hour."""
    async with client() as http:
        found = await ask(http, inputs="two" + " " * 990_000 + "dogs", chunk={})
        assert [(chunk["start"], chunk["stop"]) for chunk in found[0]] == [(0, 990_007)]


async def test_token_ids_have_no_chunks(client: MakeClient) -> None:
    async with client(token_ids=True) as http:
        response = await http.post("/embed", json={"inputs": [[7, 8]], "chunk": {}})
        assert response.status_code == 422
        assert "send texts" in response.json()["error"]
