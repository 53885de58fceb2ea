"""Any JSON on any route: the service never fails; and in company the same vectors as alone."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from harness import LIMITS
from hypothesis import given
from hypothesis import strategies as some
from live import served
from numpy.typing import NDArray

from cloze.service.app import create_app
from cloze.service.routes import POST_ROUTES
from cloze.service.settings import Settings

CHARACTERS = some.characters(exclude_categories=["Cs"])
WORDS = some.sampled_from(["a man plays the guitar", "two dogs run", "", "dogs", "[MASK]", "é", "tiny", "query"])
TEXTS = WORDS | some.text(CHARACTERS, max_size=20)
ODD = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: some.lists(inner, max_size=4) | some.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
LISTS = some.lists(TEXTS, max_size=4)
IDS = some.lists(some.integers(-2, 40), max_size=4)
INPUTS = some.one_of(
    *(TEXTS, LISTS, IDS, some.lists(IDS, max_size=3)),
    some.fixed_dictionaries({"source_sentence": TEXTS, "sentences": LISTS}),
    some.fixed_dictionaries({"source_sentences": LISTS, "sentences": LISTS}),
    some.fixed_dictionaries({"pairs": some.lists(some.lists(TEXTS, min_size=2, max_size=2), max_size=3)}),
)
FIELDS: dict[str, some.SearchStrategy[Any]] = {
    **dict.fromkeys(["inputs", "input", "texts"], INPUTS),
    "query": TEXTS,
    "ids": IDS,
    "model": some.sampled_from(["tiny", "other", None, ""]),
    "prompt_name": some.sampled_from([None, "query"]),
    "truncate": some.sampled_from([True, False, None, "END", "NONE"]),
    "truncation_direction": some.sampled_from(["left", "Right"]),
    **dict.fromkeys(["dimensions", "output_dimension", "max_tokens", "top_k"], some.integers(-1, 20)),
    "normalize": some.booleans(),
    "encoding_format": some.sampled_from(["float", "base64", "float16", "int8", "uint8", "binary", "ubinary"]),
    "embedding_types": some.lists(some.sampled_from(["float", "int8", "uint8", "binary"]), max_size=2),
    "chunk": some.fixed_dictionaries({}, optional={"tokens": some.integers(0, 20), "mean": some.booleans()}),
    "threshold": some.floats(-1, 1),
    "raw_scores": some.booleans(),
    "calibrated": some.booleans(),
}
BODIES = some.fixed_dictionaries({}, optional={name: value | ODD for name, value in FIELDS.items()}) | ODD


@pytest.fixture(scope="module")
def http(two_bundles: Path) -> Iterator[httpx.Client]:
    settings = Settings(bundle=two_bundles, model="tiny", provider="cpu", threads=1, token_ids=True, **LIMITS)
    with served(create_app(settings)) as url, httpx.Client(base_url=url) as client:
        yield client


@pytest.mark.parametrize("route", POST_ROUTES)
@given(body=BODIES)
def test_any_body_is_answered(http: httpx.Client, route: str, body: Any) -> None:
    response = http.post(route, content=json.dumps(body), headers={"content-type": "application/json"})
    assert response.status_code in (200, 400, 404, 422), response.text
    found = response.json()
    if response.status_code != 200:
        message = found["error"]["message"] if route.startswith("/v1/") else found.get("error") or found["message"]
        assert message
        assert "\n" not in message.replace(str(body), "")


@given(texts=some.lists(TEXTS, min_size=1, max_size=20), normalize=some.booleans(), chunks=some.booleans())
def test_each_vector_is_that_of_its_text_alone(
    http: httpx.Client, texts: list[str], normalize: bool, chunks: bool
) -> None:
    chunk = {"chunk": {"tokens": 3, "mean": True}} if chunks else {}

    def rows(texts: list[str]) -> NDArray[np.float32]:
        response = http.post("/embed", json={"inputs": texts, "normalize": normalize} | chunk)
        assert response.status_code == 200, response.text
        return np.array(response.json(), dtype=np.float32)

    np.testing.assert_allclose(rows(texts), np.concatenate([rows([text]) for text in texts]), atol=2e-6, rtol=0)


@given(texts=some.lists(TEXTS, min_size=2, max_size=6))
def test_all_routes_give_the_same_vectors(http: httpx.Client, texts: list[str]) -> None:
    expected = np.array(http.post("/embed", json={"inputs": texts}).json())
    openai = http.post("/v1/embeddings", json={"input": texts}).json()["data"]
    cohere = http.post("/v2/embed", json={"texts": texts}).json()["embeddings"]["float"]
    for found in ([row["embedding"] for row in openai], cohere):
        np.testing.assert_allclose(found, expected, atol=2e-6, rtol=0)
    first, *others = texts
    body = {"inputs": {"source_sentence": first, "sentences": others}}
    cosines = http.post("/similarity", json=body).json()
    np.testing.assert_allclose(cosines, expected[1:] @ expected[0], atol=5e-6, rtol=0)
    ranked = http.post("/search", json={"query": first, "texts": others}).json()
    assert sorted(each["index"] for each in ranked) == list(range(len(others)))
    for each in ranked:
        assert each["score"] == pytest.approx(cosines[each["index"]], abs=5e-6)
