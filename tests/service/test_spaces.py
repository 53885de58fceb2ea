"""Vector spaces: the digest in every answer, what a client expects, and the canary texts."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import pytest
from harness import MakeBundle, MakeClient
from onnx import numpy_helper
from tiny_bundle import OTHER, write_bundle

from cloze.encoding.bundle import GRAPHS, SPEC_FILE, Bundle
from cloze.encoding.canaries import CANARY_FILE, CANARY_TEXTS
from cloze.encoding.errors import BundleError
from cloze.service.app import create_app
from cloze.service.errors import SessionError
from cloze.service.http.errors import ErrorBody
from cloze.service.inference.session import Session
from cloze.service.settings import Settings

pytestmark = pytest.mark.anyio

REQUESTS: dict[str, dict[str, Any]] = {
    "/embed": {"inputs": "a man"},
    "/similarity": {"inputs": {"source_sentence": "a", "sentences": ["man"]}},
    "/search": {"query": "a", "texts": ["man"]},
    "/explain": {"inputs": ["a", "man"]},
    "/predict": {"inputs": "a man"},
    "/v1/embeddings": {"input": "a man"},
    "/v2/embed": {"texts": ["a man"]},
    "/models/other/embed": {"inputs": "a man"},
}


async def test_every_answer_tells_the_space_and_another_is_refused(
    both: httpx.AsyncClient, subtests: pytest.Subtests
) -> None:
    cards = {card["id"]: card["embedding_space"] for card in (await both.get("/v1/models")).json()["data"]}
    assert len(set(cards.values())) == 2
    for path, body in REQUESTS.items():
        with subtests.test(path):
            name = "other" if "other" in path else "tiny"
            space = (await both.get(f"/models/{name}/info")).json()["embedding_space"]
            answer = await both.post(path, json=body)
            assert answer.headers["x-embedding-space"] == cards[name] == space
            for header in ("if-match", "x-embedding-space"):
                refused = await both.post(path, json=body, headers={header: '"0123456789abcdef"'})
                assert refused.status_code == 412
                assert refused.headers["x-embedding-space"] == space
                for words in (space, "0123456789abcdef", "embed the stored texts again"):
                    assert words in refused.text
                assert ("error_type" in refused.json()) == ("/v" not in path)


@pytest.mark.parametrize("header", ["if-match", "x-embedding-space"])
async def test_the_space_is_accepted_in_each_form_of_an_etag(both: httpx.AsyncClient, header: str) -> None:
    body = REQUESTS["/embed"]
    space = (await both.post("/embed", json=body)).headers["x-embedding-space"]
    for accepted in (space, f'"{space}"', f'W/"{space}"', f'"0000", "{space}"', "*", ""):
        assert (await both.post("/embed", json=body, headers={header: accepted})).status_code == 200, accepted


async def test_a_list_may_be_sent_as_several_lines_and_both_headers_have_to_agree(both: httpx.AsyncClient) -> None:
    space = (await both.post("/embed", json=REQUESTS["/embed"])).headers["x-embedding-space"]
    for lines, status in [
        ([("if-match", '"0000"'), ("if-match", f'"{space}"')], 200),
        ([("if-match", '"0000"'), ("if-match", '"1111"')], 412),
        ([("if-match", f'"{space}"'), ("x-embedding-space", "0000")], 412),
        ([("if-match", f'"{space}"'), ("x-embedding-space", space)], 200),
    ]:
        assert (await both.post("/embed", json=REQUESTS["/embed"], headers=lines)).status_code == status, lines
    accept = [("accept", "application/json;q=0.1"), ("accept", "application/octet-stream")]
    answer = await both.post("/embed", json={"inputs": "a man"}, headers=accept)
    assert answer.headers["content-type"] == "application/octet-stream"


async def test_what_has_no_vectors_is_of_every_space(both: httpx.AsyncClient) -> None:
    """A client that sends the header with each request asks the health too, and which models there are."""
    headers = {"x-embedding-space": "0000"}
    for path in ("/health", "/info", "/models/other/info", "/v1/models", "/v1/models/tiny"):
        assert (await both.get(path, headers=headers)).status_code == 200, path
    assert (await both.post("/tokenize", json={"inputs": "a man"}, headers=headers)).status_code == 200


async def test_an_alias_may_be_a_name_of_the_hub(tmp_path: Path, client: MakeClient) -> None:
    write_bundle(tmp_path / "tiny")
    async with client(bundle=tmp_path / "tiny", alias="BAAI/bge-small=tiny") as http:
        answer = await http.post("/v1/embeddings", json={"input": "a man", "model": "BAAI/bge-small"})
        assert answer.status_code == 200
        for name in ("BAAI/bge-small", "BAAI%2Fbge-small"):
            info = await http.get(f"/models/{name}/info")
            assert info.json()["embedding_space"] == answer.headers["x-embedding-space"]
            under = await http.post(f"/models/{name}/v1/embeddings", json={"input": "a man"})
            assert under.json()["data"] == answer.json()["data"]
        for path in ("/v1/models/BAAI/bge-small", "/v1/models/BAAI%2Fbge-small"):
            card = (await http.get(path)).json()
            assert (card["id"], card["root"]) == ("BAAI/bge-small", "tiny")
        assert "cloze_requests_total{route=/v1/models/{model},status=200} 2.0" in (
            (await http.get("/metrics")).text.replace('"', "").replace("\\", "")
        )


async def test_a_text_is_never_in_the_refusal(both: httpx.AsyncClient) -> None:
    refused = await both.post("/embed", json={"inputs": "a secret"}, headers={"if-match": "x" * 5000})
    assert ErrorBody.model_validate_json(refused.content).error_type == "OtherSpace"
    assert "secret" not in refused.text
    assert len(refused.text) < 1000


async def test_one_character_of_the_template_changes_the_space(make_bundle: MakeBundle) -> None:
    first, second = (Bundle.load(make_bundle(template=f'This sentence of "[X]" means [MASK]{end}')) for end in ".!")
    assert first.spec.space != second.spec.space
    assert Bundle.load(make_bundle(precisions=("fp32", "int8"))).spec.space == first.spec.space


def forge(bundle: Path, edit: Callable[[Path], object], *names: str) -> None:
    """Edit a bundle and write the digests of the edited files, as one would who hides the change."""
    edit(bundle)
    spec = json.loads((bundle / SPEC_FILE).read_text(encoding="utf-8"))
    spec["files"] |= {name: hashlib.sha256((bundle / name).read_bytes()).hexdigest() for name in names}
    (bundle / SPEC_FILE).write_text(json.dumps(spec), encoding="utf-8")


def alter_one_weight(bundle: Path) -> None:
    path = bundle / GRAPHS["fp32"]
    model = onnx.load(path)
    (matrix,) = (each for each in model.graph.initializer if each.name == "matrix")
    values = numpy_helper.to_array(matrix).copy()
    values[3, 5] += 0.5
    matrix.CopyFrom(numpy_helper.from_array(values, "matrix"))
    onnx.save(model, path)


def test_canaries_catch_one_altered_weight_with_a_forged_digest(make_bundle: MakeBundle) -> None:
    bundle = make_bundle()
    Session.load(Bundle.load(bundle), provider="cpu")
    forge(bundle, alter_one_weight, GRAPHS["fp32"])
    words = r"no longer gives the vectors that it was exported with.*at most 1e-03.*restore the bundle"
    with pytest.raises(SessionError, match=words):
        create_app(Settings(bundle=bundle, provider="cpu"))


async def test_a_reload_refuses_what_the_canaries_refuse(make_bundle: MakeBundle, client: MakeClient) -> None:
    bundle = make_bundle()
    async with client(bundle=bundle, admin_keys="admin-0123456789abcdef") as http:
        before = (await http.post("/embed", json={"inputs": "a man"})).json()
        forge(bundle, alter_one_weight, GRAPHS["fp32"])
        reload = await http.post("/admin/reload", headers={"authorization": "Bearer admin-0123456789abcdef"})
        assert reload.status_code == 409
        assert "no longer gives the vectors" in reload.text
        assert (await http.post("/embed", json={"inputs": "a man"})).json() == before


def test_a_machine_of_another_kind_is_within_the_tolerance(make_bundle: MakeBundle) -> None:
    bundle = Bundle.load(make_bundle())
    assert bundle.canaries is not None
    vectors = np.array(bundle.canaries.vectors["fp32"], dtype=np.float32)
    assert bundle.canaries.difference("fp32", vectors) == (0.0, CANARY_TEXTS[0])
    longest = np.linalg.norm(vectors, axis=1).max()
    vectors[4, 2] += 5e-4 * longest
    difference, text = bundle.canaries.difference("fp32", vectors)
    assert difference == pytest.approx(5e-4, rel=1e-3)
    assert text == CANARY_TEXTS[4]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "canaries.json cannot be read"),
        ('{"texts": [], "vectors": {}}', "canaries.json cannot be read"),
        ('{"texts": ["a"], "vectors": {"fp32": [[1.0]]}}', "has vectors of shape"),
    ],
)
def test_canaries_that_cannot_be_used_are_refused(make_bundle: MakeBundle, content: str, message: str) -> None:
    bundle = make_bundle()
    forge(bundle, lambda folder: (folder / CANARY_FILE).write_text(content), CANARY_FILE)
    with pytest.raises(BundleError, match=message):
        Session.load(Bundle.load(bundle), provider="cpu")


def test_a_bundle_of_before_has_none_and_says_so(make_bundle: MakeBundle, caplog: pytest.LogCaptureFixture) -> None:
    bundle = make_bundle()

    def drop(folder: Path) -> None:
        spec = json.loads((folder / SPEC_FILE).read_text(encoding="utf-8"))
        spec["format_version"] = 2
        del spec["files"][CANARY_FILE], spec["weights"], spec["templates"]
        (folder / SPEC_FILE).write_text(json.dumps(spec), encoding="utf-8")

    forge(bundle, drop)
    loaded = Bundle.load(bundle)
    assert Session.load(loaded, provider="cpu").precision == "fp32"
    assert "without canary texts; export it again" in caplog.text
    assert len(loaded.spec.space) == 16


# Aliases


async def test_an_alias_answers_as_the_model(client: MakeClient, two_bundles: Path) -> None:
    alias = "text-embedding-3-small = other, ada=tiny"
    async with client(bundle=two_bundles, model="tiny", alias=alias) as http:
        same = {"x-request-id": "same"}
        plain = await http.post("/v1/embeddings", json={"input": "a man", "model": "other"}, headers=same)
        body = {"input": "a man", "model": "text-embedding-3-small"}
        named = await http.post("/v1/embeddings", json=body, headers=same)
        assert named.json() == plain.json()
        assert named.json()["model"] == "other"
        below = await http.post("/models/text-embedding-3-small/embed", json={"inputs": "a", "model": "other"})
        assert below.status_code == 200
        assert len(below.json()[0]) == OTHER["dimension"]
        cards = (await http.get("/v1/models")).json()["data"]
        assert [(card["id"], card["root"]) for card in cards] == [
            *(("other", "other"), ("tiny", "tiny")),
            *(("text-embedding-3-small", "other"), ("ada", "tiny")),
        ]
        assert (await http.get("/v1/models/ada")).json()["root"] == "tiny"
        assert (await http.get("/info")).json()["aliases"] == {"text-embedding-3-small": "other", "ada": "tiny"}
        unknown = await http.post("/v1/embeddings", json={"input": "a", "model": "gpt"})
        assert unknown.status_code == 404
        assert (
            "no model 'gpt' is served; the served models are other, tiny, text-embedding-3-small, ada" in unknown.text
        )
        metrics = (await http.get("/metrics")).text
        assert 'model="text-embedding-3-small"' not in metrics


async def test_an_alias_may_choose_a_named_template(client: MakeClient, tmp_path: Path) -> None:
    """So a client that cannot send `prompt_name`, as OpenAI's, embeds queries and documents by two names."""
    named = {"query": "query [X] means [MASK].", "document": "Of [X] means [MASK]."}
    write_bundle(tmp_path / "tiny", templates=named)
    async with client(bundle=tmp_path / "tiny", alias="ask=tiny:query, store = tiny:document") as http:

        async def embedded(**body: str) -> list[float]:
            found = await http.post("/v1/embeddings", json={"input": "a man", **body})
            vector: list[float] = found.json()["data"][0]["embedding"]
            return vector

        for alias, template in (("ask", "query"), ("store", "document")):
            expected = await embedded(model="tiny", prompt_name=template)
            assert await embedded(model=alias) == expected != await embedded(model="tiny")
            below = await http.post(f"/models/{alias}/embed", json={"inputs": "a man"})
            assert below.json()[0] == expected
            compared = {"texts": ["a man"], "input_type": "classification", "model": alias}
            assert (await http.post("/v2/embed", json=compared)).json()["embeddings"]["float"][0] == expected
        assert await embedded(model="ask", prompt_name="document") == await embedded(model="store")
        cards = {card["id"]: card for card in (await http.get("/v1/models")).json()["data"]}
        assert {name: card["template"] for name, card in cards.items()} == {
            "tiny": 'This sentence of "[X]" means [MASK].',
            "ask": named["query"],
            "store": named["document"],
        }
        assert all(card["templates"] == named for card in cards.values())
        assert (await http.get("/v1/models/store")).json() == cards["store"]
        found = (await http.get("/models/ask/info")).json()["template"]
        assert found["text"] == named["query"]
        assert found["text_tokens"] + found["template_tokens"] == (await http.get("/info")).json()["max_input_length"]
        both = await http.post("/models/ask/v1/embeddings", json={"input": "a man", "model": "store"})
        assert both.status_code == 400
        assert "two templates are named, 'query' and 'document'; name one of them" in both.text
        tokens = (await http.post("/tokenize", json={"inputs": "a man", "model": "ask"})).json()[0]
        assert [token["text"] for token in tokens if token["template"]][1] == "q"
        labels = await http.post("/predict", json={"inputs": "a man", "model": "ask"})
        assert labels.status_code == 422
        assert "name the model itself" in labels.text


def test_an_alias_that_cannot_be_is_refused(two_bundles: Path, subtests: pytest.Subtests) -> None:
    for alias, message in [
        ("small", "'small' is not NAME=MODEL"),
        ("/a=tiny", "is not NAME=MODEL"),
        ("small=large", "alias is small=large, but .* has other, tiny"),
        ("other=tiny", "has a model other; choose another name"),
        ("ask=tiny:query", "alias is ask=tiny:query; the named templates of model tiny are: none"),
        ("ask=large:query", "alias is ask=large:query, but .* has other, tiny"),
        ("small=tiny, small = other", "small is an alias for two models; give it one"),
    ]:
        with subtests.test(alias=alias), pytest.raises(Exception, match=message):
            create_app(Settings(bundle=two_bundles, model="tiny", alias=alias, provider="cpu"))
