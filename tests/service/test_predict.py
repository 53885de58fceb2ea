"""POST /predict: a loop over the vectors of /embed, text-embeddings-inference's shapes, several heads, abstention."""

import math
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness import MakeClient
from tiny_bundle import head, write_bundle

from cloze.encoding.heads import ClassifierHead

pytestmark = pytest.mark.anyio

TEXTS = ["a man plays the guitar", "two dogs run", "", "guitar " * 100]
ADMIN = "an-admin-key-of-a-test"
HEADS = {"topic": head(), "tags": head(several=True)}


@pytest.fixture
async def http(client: MakeClient, tmp_path: Path) -> Any:
    async with client(bundle=write_bundle(tmp_path / "tiny", heads=HEADS)) as made:
        yield made


async def post(http: httpx.AsyncClient, path: str, **body: Any) -> Any:
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def expected(made: ClassifierHead, vector: list[float], *, raw: bool = False) -> list[tuple[str, float]]:
    """Labels, the best first: one number at a time."""
    scores = [
        bias + sum(weight * each for weight, each in zip(row, vector, strict=True))
        for row, bias in zip(made.weights, made.biases, strict=True)
    ]
    total = sum(math.exp(score) for score in scores)
    values = [1 / (1 + math.exp(-score)) if made.several else math.exp(score) / total for score in scores]
    return sorted(zip(made.labels, scores if raw else values, strict=True), key=lambda each: -each[1])


def check(found: list[dict[str, Any]], labels: list[tuple[str, float]]) -> None:
    assert [each["label"] for each in found] == [label for label, _ in labels]
    assert [each["score"] for each in found] == pytest.approx([value for _, value in labels], abs=1e-5)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("raw", [False, True])
async def test_the_labels_are_those_of_a_loop_over_the_vector(http: httpx.AsyncClient, name: str, raw: bool) -> None:
    vectors = await post(http, "/embed", inputs=TEXTS)
    found = await post(http, "/predict", inputs=[[text] for text in TEXTS], head=name, raw_scores=raw)
    assert len(found) == len(TEXTS)
    for each, vector in zip(found, vectors, strict=True):
        check(each, expected(HEADS[name], vector, raw=raw))


async def test_the_shape_of_the_answer_is_that_of_the_input(http: httpx.AsyncClient) -> None:
    one = await post(http, "/predict", inputs=TEXTS[0], head="topic")
    assert isinstance(one[0], dict)
    assert await post(http, "/predict", inputs=TEXTS[:1], head="topic") == one
    assert await post(http, "/predict", inputs=[TEXTS[:1]], head="topic") == [one]
    many = await post(http, "/predict", inputs=TEXTS[0], head=["tags", "topic"])
    assert list(many) == ["tags", "topic"]
    assert many["topic"] == one
    assert many["tags"] == await post(http, "/predict", inputs=TEXTS[0], head="tags")
    lists = await post(http, "/predict", inputs=[[text] for text in TEXTS], head=["topic"])
    assert lists["topic"] == await post(http, "/predict", inputs=[[text] for text in TEXTS], head="topic")


async def test_several_heads_cost_one_pass_of_the_encoder(http: httpx.AsyncClient) -> None:
    response = await http.post("/predict", json={"inputs": [["a man"], ["two dogs"]], "head": list(HEADS)})
    one = await http.post("/predict", json={"inputs": [["a man"], ["two dogs"]], "head": "tags"})
    for name in ("x-compute-tokens", "x-compute-characters"):
        assert response.headers[name] == one.headers[name]
    samples = (await http.get("/metrics")).text
    assert 'cloze_texts_total{model="tiny"} 4.0' in samples


async def test_a_head_abstains_below_its_threshold(http: httpx.AsyncClient) -> None:
    inputs = [[text] for text in (*TEXTS, "a", "man", "plays the", "dogs of means")]
    full = {name: await post(http, "/predict", inputs=inputs, head=name) for name in HEADS}
    kept = {name: await post(http, "/predict", inputs=inputs, head=name, abstain=True) for name in HEADS}
    sure = [each[0]["score"] >= 0.625 for each in full["topic"]]
    assert len(set(sure)) == 2
    assert kept["topic"] == [each if known else [] for each, known in zip(full["topic"], sure, strict=True)]
    assert kept["tags"] == [[label for label in each if label["score"] >= 0.625] for each in full["tags"]]


async def test_a_head_without_a_threshold_always_abstains(client: MakeClient, tmp_path: Path) -> None:
    made = head().model_copy(update={"threshold": None})
    async with client(bundle=write_bundle(tmp_path / "tiny", heads={"topic": made})) as http:
        assert await post(http, "/predict", inputs="a man", abstain=True) == []
        assert len(await post(http, "/predict", inputs="a man")) == 3


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "head is not given; the heads of model tiny are: tags, topic"),
        ({"head": "mood"}, "head is 'mood'; the heads of model tiny are: tags, topic"),
        ({"head": ["topic", "mood"]}, "head is 'mood'; the heads of model tiny are: tags, topic"),
        ({"head": "topic", "prompt_name": "query"}, "the model's own template: omit prompt_name"),
        ({"head": "topic", "truncate": False, "inputs": [["a"], ["a " * 100]]}, "inputs[1] has 100 tokens"),
        ({"head": "topic", "truncate": False, "inputs": "a " * 100}, "inputs has 100 tokens"),
    ],
)
async def test_what_it_cannot_answer_is_one_line(http: httpx.AsyncClient, body: dict[str, Any], message: str) -> None:
    response = await http.post("/predict", json={"inputs": "a man"} | body)
    assert response.status_code == 422
    assert message in response.json()["error"]


async def test_an_answer_has_a_limit(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloze.service.http.predict.MAX_PREDICTIONS", 6)
    assert len(await post(http, "/predict", inputs=[["a"]] * 2, head="topic")) == 2
    response = await http.post("/predict", json={"inputs": [["a"]] * 3, "head": "topic"})
    assert response.status_code == 422
    assert "3 texts and 3 labels make 9 predictions; at most 6 are allowed" in response.json()["error"]


async def test_no_text_is_empty(http: httpx.AsyncClient) -> None:
    response = await http.post("/predict", json={"inputs": [], "head": "topic"})
    assert (response.status_code, response.json()["error_type"]) == (400, "Empty")


async def test_without_heads_it_says_how_to_add_one(client: MakeClient, tmp_path: Path) -> None:
    async with client(bundle=write_bundle(tmp_path / "tiny", heads={})) as http:
        response = await http.post("/predict", json={"inputs": "a man"})
        assert response.status_code == 422
        assert "the heads of model tiny are: none; add one to the bundle with `cloze head`" in response.json()["error"]
        assert (await http.get("/info")).json()["heads"] == {}


async def test_an_alias_of_another_template_has_no_heads(client: MakeClient, tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "tiny", heads=HEADS, templates={"query": "a [X] means [MASK]."})
    async with client(bundle=bundle, alias="q=tiny:query,t=tiny") as http:
        assert (await http.get("/models/q/info")).json()["heads"] == {}
        assert (await http.get("/models/t/info")).json()["heads"].keys() == HEADS.keys()
        assert (await http.post("/models/q/predict", json={"inputs": "a man", "head": "topic"})).status_code == 422


async def test_a_reload_takes_a_new_head(client: MakeClient, tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "tiny")
    async with client(bundle=folder, admin_keys=ADMIN) as http:
        [before] = await post(http, "/embed", inputs="a man")
        write_bundle(folder, heads={"topic": head(), "mood": head(several=True)})
        assert list((await http.get("/info")).json()["heads"]) == ["topic"]
        response = await http.post("/admin/reload", headers={"authorization": f"Bearer {ADMIN}"})
        assert response.json()["changed"] == ["tiny"]
        assert list((await http.get("/info")).json()["heads"]) == ["mood", "topic"]
        check(await post(http, "/predict", inputs="a man", head="mood"), expected(head(several=True), before))
        assert await post(http, "/embed", inputs="a man") == [before]
