"""Named templates: by `prompt_name`, by Cohere's `input_type`, and by /search itself."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from harness import MakeBundle, MakeClient
from numpy.typing import NDArray
from tiny_bundle import TEMPLATE, sequence, vector

pytestmark = pytest.mark.anyio

QUERY, DOCUMENT = 'The dogs "[X]" means [MASK].', 'A man of "[X]" means [MASK].'
TEXTS = ["a man plays the guitar", "", "two dogs run"]


@pytest.fixture(scope="module")
def named(make_bundle: MakeBundle) -> Path:
    return make_bundle(templates={"query": QUERY, "document": DOCUMENT})


def units(texts: list[str], template: str = TEMPLATE) -> NDArray[np.float64]:
    rows = np.stack([vector(sequence(text, template)) for text in texts]).astype(np.float64)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


async def ask(http: httpx.AsyncClient, path: str, **body: Any) -> Any:
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(("name", "template"), [(None, TEMPLATE), ("query", QUERY), ("document", DOCUMENT)])
async def test_a_request_names_its_template(client: MakeClient, named: Path, name: str | None, template: str) -> None:
    kind = {"query": "search_query", "document": "search_document"}.get(name or "", "classification")
    async with client(bundle=named) as http:
        assert (await http.get("/info")).json()["templates"] == {"query": QUERY, "document": DOCUMENT}
        native = await ask(http, "/embed", inputs=TEXTS, prompt_name=name)
        openai = await ask(http, "/v1/embeddings", input=TEXTS, prompt_name=name)
        cohere = await ask(http, "/v2/embed", texts=TEXTS, input_type=kind)
        for rows in (native, [row["embedding"] for row in openai["data"]], cohere["embeddings"]["float"]):
            np.testing.assert_allclose(rows, units(TEXTS, template), atol=1e-6)
        tokens = await ask(http, "/tokenize", inputs="two dogs", prompt_name=name)
        assert [token["id"] for token in tokens[0]] == sequence("two dogs", template)
        lists = {"source_sentences": TEXTS, "sentences": TEXTS}
        cosines = await ask(http, "/similarity", inputs=lists, parameters={"prompt_name": name})
        np.testing.assert_allclose(cosines, units(TEXTS, template) @ units(TEXTS, template).T, atol=1e-6)


async def test_search_uses_both_templates_by_itself(client: MakeClient, named: Path) -> None:
    async with client(bundle=named) as http:
        found = await ask(http, "/search", query="a guitar", texts=TEXTS)
        scores = {each["index"]: each["score"] for each in found}
        expected = units(TEXTS, DOCUMENT) @ units(["a guitar"], QUERY)[0]
        np.testing.assert_allclose([scores[place] for place in range(3)], expected, atol=1e-6)
    async with client(bundle=named, alias="store=tiny:document") as http:
        assert await ask(http, "/search", model="store", query="a guitar", texts=TEXTS) == found
        wrong = await http.post("/search", json={"query": "a", "texts": ["b", "a " * 100], "truncate": False})
        assert wrong.status_code == 422
        assert "texts[1] has" in wrong.text


async def test_the_same_text_in_two_templates_has_two_vectors_in_the_cache(client: MakeClient, named: Path) -> None:
    async with client(bundle=named, cache_mb=1) as http:
        for _ in range(2):
            for name, template in (("query", QUERY), ("document", DOCUMENT), (None, TEMPLATE)):
                rows = await ask(http, "/embed", inputs=TEXTS, prompt_name=name)
                np.testing.assert_allclose(rows, units(TEXTS, template), atol=1e-6)


async def test_an_unknown_name_is_refused_with_those_there_are(client: MakeClient, named: Path) -> None:
    pair = {"source_sentence": "a", "sentences": ["b"]}
    async with client(bundle=named) as http:
        for path, status, body in [
            ("/embed", 422, {"inputs": "a", "prompt_name": "other"}),
            ("/tokenize", 422, {"inputs": "a", "prompt_name": "other"}),
            ("/v1/embeddings", 400, {"input": "a", "prompt_name": "other"}),
            ("/similarity", 422, {"inputs": pair, "parameters": {"prompt_name": "other"}}),
            ("/search", 422, {"query": "a", "texts": ["b"], "prompt_name": "other"}),
            ("/search", 422, {"query": "a", "texts": ["b"], "prompt_name": ""}),
        ]:
            refused = await http.post(path, json=body)
            assert refused.status_code == status, path
            assert "; the named templates of model tiny are: query, document" in refused.text


async def test_without_named_templates_search_uses_the_models_own(both: httpx.AsyncClient) -> None:
    found = await ask(both, "/search", query="a guitar", texts=TEXTS)
    scores = {each["index"]: each["score"] for each in found}
    expected = units(TEXTS) @ units(["a guitar"])[0]
    np.testing.assert_allclose([scores[place] for place in range(3)], expected, atol=1e-6)
    query = await ask(both, "/v2/embed", texts=TEXTS, input_type="search_query")
    np.testing.assert_allclose(query["embeddings"]["float"], units(TEXTS), atol=1e-6)
