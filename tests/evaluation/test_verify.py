"""cloze verify: servers that give a model's vectors, and servers that pool, truncate or prompt in another way."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import live
import numpy as np
import pytest
from harness import LIMITS, NO_ROADS
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding
from tiny_bundle import write_bundle
from torch import nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, set_seed

from cloze.command import run
from cloze.encoding.bundle import Bundle
from cloze.encoding.text import TextEncoder
from cloze.service.app import create_app
from cloze.service.settings import Settings
from cloze.training.errors import ServerError
from cloze.training.evaluation.verify import Check, Reference, Server, checks, main, reference_of
from cloze.training.model.graph_encoder import GraphEncoder

SMALL: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 130, "initializer_range": 0.2,
}  # fmt: skip
BUNDLE = Path(__file__).parents[1] / "fixtures" / "bundle"
KEY = "a-key-of-a-test-0123"


@contextmanager
def served(bundle: Path, **settings: Any) -> Iterator[str]:
    with live.served(create_app(Settings(bundle=bundle, provider="cpu", threads=1, **LIMITS, **settings))) as url:
        yield url


def found(url: str, model: Path, least: float = 0.999) -> dict[str, Check]:
    with httpx.Client(base_url=url) as client:
        return {check.name: check for check in checks(Server(client, "tei", "/embed", ""), reference_of(model), least)}


def test_a_server_of_the_same_bundle_agrees_in_every_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = write_bundle(tmp_path / "tiny")
    (tmp_path / "key").write_text(KEY)
    with served(bundle, api_keys=KEY) as url:
        assert run(lambda: main([url, str(bundle), "--key-file", str(tmp_path / "key")])) == 0
        out = capsys.readouterr().out
        for api in ("tei", "openai", "cohere"):
            assert out.count(f" {api} ") == 7
        assert "differs" not in out
        assert run(lambda: main([f"{url}/v1", str(bundle), "--key-file", str(tmp_path / "key")])) == 0
        assert " tei " not in capsys.readouterr().out
        assert run(lambda: main([f"{url}/embeddings", str(bundle), "--key-file", str(tmp_path / "key")])) == 0
        assert " tei " not in capsys.readouterr().out
        for address, words in ((f"{url}/v2/embed", []), (f"{url}/v1/embeddings", ["--api", "cohere"])):
            assert run(lambda: main([address, str(bundle), *words, "--key-file", str(tmp_path / "key")])) == 0  # noqa: B023
            out = capsys.readouterr().out
            assert out.count("dimensions") == 1  # of one format
            assert "differs" not in out
        assert run(lambda: main([url, str(bundle)])) == 2
        assert "answered 401" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("serves", "expects", "instead"),
    [
        ({"template": "[X]"}, {"template": "so [X] is"}, "the model without its template"),
        (
            {"template": "a [X]"},
            {"template": "[X]", "templates": {"query": "a [X]"}},
            "the model with its template query",
        ),
        ({"template": "[X]", "final_period": True}, {"template": "[X]"}, "the model with a final period"),
        ({"template": "[X]"}, {"template": "[X]", "final_period": True}, "the model without a final period"),
        ({"template": "[X]", "seed": 3}, {"template": "[X]"}, "no known variant of the model"),
    ],
)
def test_another_template_is_named(
    serves: dict[str, Any], expects: dict[str, Any], instead: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = write_bundle(tmp_path / "served", pooling="cls", **serves)
    model = write_bundle(tmp_path / "model", pooling="cls", **expects)
    with served(bundle) as url:
        rows = found(url, model)
        assert run(lambda: main([url, str(model), "--api", "openai"])) == 1
    assert rows["vectors"].agrees is False
    assert rows["what it gives instead"].result.startswith(instead)
    assert instead in " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_another_dimension_ends_the_comparison(tmp_path: Path) -> None:
    with served(write_bundle(tmp_path / "narrow", dimension=8)) as url:
        assert found(url, write_bundle(tmp_path / "model")) == {
            "dimensions": Check("dimensions", False, "8, but the model has 16")
        }


@pytest.fixture(scope="module")
def model(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of sentence-transformers: mean pooling, a Dense, a prompt, at most 128 tokens."""
    folder = tmp_path_factory.mktemp("model")
    set_seed(0)
    words = AutoTokenizer.from_pretrained(tiny_bert)
    config = AutoConfig.for_model("bert", vocab_size=len(words), pad_token_id=words.pad_token_id, **SMALL)
    AutoModel.from_config(config).save_pretrained(folder / "bert")
    words.save_pretrained(folder / "bert")
    modules: list[nn.Module] = [
        Transformer(str(folder / "bert"), max_seq_length=128), Pooling(32, "mean"), Dense(32, 32), Normalize(),
    ]  # fmt: skip
    SentenceTransformer(modules=modules, device="cpu", prompts={"query": "find: "}).save(
        str(folder / "own"), create_model_card=False
    )
    return folder / "own"


@contextmanager
def library_served(model: Path, *, pooling: str = "mean", dense: bool = True, tokens: int = 128) -> Iterator[str]:
    """A server around sentence-transformers itself, with what servers change about a model."""
    transformer, _, layer, normalize = SentenceTransformer(str(model), device="cpu")
    made = SentenceTransformer(
        modules=[transformer, Pooling(32, pooling), *([layer] if dense else []), normalize], device="cpu"
    )
    made.max_seq_length = tokens

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if self.path == "/embed":
                self._answer(made.encode(body["inputs"], show_progress_bar=False).tolist())
            elif self.path == "/embeddings" and body["model"] == "own":  # without /v1, as infinity has it
                vectors = made.encode(body["input"], show_progress_bar=False).tolist()
                self._answer({"data": [{"index": n, "embedding": vector} for n, vector in enumerate(vectors)]})
            else:
                self._answer({}, 404)

        def do_GET(self) -> None:
            self._answer({"data": [{"id": "own"}]}, 200 if self.path == "/models" else 404)

        def _answer(self, answer: object, status: int = 200) -> None:
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("changes", "instead"),
    [
        ({}, ""),
        ({"pooling": "cls"}, "the model with cls pooling"),
        ({"pooling": "max"}, "the model with max pooling"),
        ({"dense": False}, "the model without its Dense"),
        ({"pooling": "cls", "dense": False}, "the model with cls pooling, without its Dense"),
    ],
)
def test_another_pooling_and_missing_layers_are_named(changes: dict[str, Any], instead: str, model: Path) -> None:
    with library_served(model, **changes) as url:
        rows = found(url, model)
    assert rows["vectors"].agrees is not bool(instead)
    assert rows["length 1"].agrees
    if instead:
        assert rows["what it gives instead"].result.startswith(instead)
    else:
        assert all(row.agrees is not False for row in rows.values()), rows


def test_a_server_that_quantises_is_not_another_model(tmp_path: Path) -> None:
    """Its vectors are near the model's own, and nearer to no variant."""
    bundle = write_bundle(tmp_path / "tiny", template="[X]", pooling="mean")
    reference = reference_of(bundle)

    def answer(request: httpx.Request) -> httpx.Response:
        vectors = reference.embed(httpx.Response(200, content=request.content).json()["inputs"])
        step = np.abs(vectors).max(axis=1, keepdims=True) / 7
        return httpx.Response(200, json=(np.rint(vectors / step) * step).tolist())

    with httpx.Client(base_url="http://server", transport=httpx.MockTransport(answer)) as client:
        rows = {check.name: check for check in checks(Server(client, "tei", "/embed", ""), reference, 0.999)}
    assert rows["vectors"].agrees is False
    assert rows["what it gives instead"].result == (
        "the model itself with less precision, as from quantised weights: pass --least-cosine 0.98"
    )


def test_openais_format_is_found_without_its_version(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with library_served(model) as url:
        assert run(lambda: main([url, str(model)])) == 0
        out = capsys.readouterr().out
        assert " openai " in out
        assert " tei " in out


def test_a_limit_that_the_server_has_instead_is_found(model: Path) -> None:
    with library_served(model, tokens=64) as url:
        rows = found(url, model)
    assert rows["vectors"].agrees
    assert rows["a long text"].agrees is False
    assert rows["a long text"].result.startswith("is truncated to 64 tokens")


def test_vectors_that_depend_on_their_batch_and_are_not_normalised_are_seen(tmp_path: Path) -> None:
    """A server that puts the mean of the batch into each vector, as a wrong mask of the padding would."""
    bundle = write_bundle(tmp_path / "tiny", template="[X]", pooling="cls")
    reference = reference_of(bundle)

    def answer(request: httpx.Request) -> httpx.Response:
        texts = httpx.Response(200, content=request.content).json()["inputs"]
        vectors = reference.embed(texts)
        return httpx.Response(200, json=(3 * vectors + len(texts) * np.roll(vectors, 1, axis=1) * 1e-3).tolist())

    with httpx.Client(base_url="http://server", transport=httpx.MockTransport(answer)) as client:
        rows = {check.name: check for check in checks(Server(client, "tei", "/embed", ""), reference, 0.99)}
    assert rows["vectors"].agrees
    assert rows["length 1"].agrees is None
    assert "normalise them, or compare by cosine" in rows["length 1"].result
    assert "largest difference of a component" in rows["the same in any batch"].result


class Asked:
    """A server of one route, whose answers are what a function makes of the texts."""

    def __init__(self, answer: Callable[[list[str]], Any]) -> None:
        self._answer = answer

    def __call__(self, request: httpx.Request) -> httpx.Response:
        found = self._answer(json.loads(request.content)["inputs"])
        return found if isinstance(found, httpx.Response) else httpx.Response(200, json=found)

    def checked(self, reference: Reference) -> dict[str, Check]:
        with httpx.Client(base_url="http://server", transport=httpx.MockTransport(self)) as client:
            return {check.name: check for check in checks(Server(client, "tei", "/embed", ""), reference, 0.999)}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"error": "no model"}, "did not return vectors; choose another --api"),
        ([[0.6, 0.8]], r"returned an array of shape \(1, 2\) for 2 texts"),
        ([[0.6, None], [1, 0]], "did not return vectors|array of shape"),
        ([1, 0], r"returned an array of shape \(2,\) for 2 texts"),
    ],
)
def test_an_answer_without_a_vector_for_each_text_is_an_error(answer: object, message: str) -> None:
    transport = httpx.MockTransport(Asked(lambda _: answer))
    with (
        httpx.Client(base_url="http://server", transport=transport) as client,
        pytest.raises(ServerError, match=message),
    ):
        Server(client, "tei", "/embed", "").embed(["a man", "two dogs"])


def test_texts_that_a_server_refuses_or_alters_are_named() -> None:
    """It refuses an emoji and a special token, leaves capitals out, and reads only the end of a long text."""
    reference = reference_of(BUNDLE)

    def answer(texts: list[str]) -> object:
        if refused := [text for text in texts if "🎸" in text or "[MASK]" in text]:
            return httpx.Response(422, text=f"not taken: {refused[0][:12]}")
        return reference.embed(
            ["" if text.isupper() else text[-40:] if len(text) > 1000 else text for text in texts]
        ).tolist()

    rows = Asked(answer).checked(reference)
    assert rows["vectors"].agrees
    assert rows["unusual texts"].agrees is False
    assert re.fullmatch(
        r"capitals: cosine -?0\.\d+; an emoji: http://server/embed answered 422: not taken: A guitar 🎸 f",
        rows["unusual texts"].result,
    )
    assert rows["[MASK] in a text"].agrees is False
    assert rows["[MASK] in a text"].result.startswith("is refused: ")
    assert rows["a long text"].agrees is False
    assert rows["a long text"].result.endswith("it is truncated elsewhere")


@pytest.mark.parametrize(
    ("tokens", "agrees", "found"),
    [(32, False, "is truncated to 32 tokens"), (64, True, "is truncated where the model")],
)
def test_the_limit_of_tokens_that_a_server_has_for_a_bundle_is_found(tokens: int, agrees: bool, found: str) -> None:
    """The bundle has 64."""
    bundle = Bundle.load(BUNDLE)
    truncating = TextEncoder.load(BUNDLE, bundle.text_encoder.template, tokens)
    whole = GraphEncoder.of(bundle, "fp32")
    truncated = whole.within(truncating)
    rows = Asked(
        lambda texts: [(truncated if len(text) > 1000 else whole).embed([text])[0].tolist() for text in texts]
    ).checked(reference_of(BUNDLE))
    assert rows["vectors"].agrees
    assert rows["a long text"].agrees is agrees
    assert rows["a long text"].result.startswith(found)


def test_a_special_token_may_be_read_in_another_way() -> None:
    reference = reference_of(BUNDLE)
    rows = Asked(lambda texts: reference.embed([text.replace("[MASK]", "") for text in texts]).tolist()).checked(
        reference
    )
    assert rows["[MASK] in a text"].agrees is None
    assert "is read differently, as words or as the token" in rows["[MASK] in a text"].result


def test_vectors_that_the_model_would_normalise_are_seen(model: Path) -> None:
    reference = reference_of(model)
    rows = Asked(lambda texts: (2 * reference.embed(texts)).tolist()).checked(reference)
    assert rows["vectors"].agrees
    assert rows["length 1"] == Check("length 1", False, "lengths of 2 to 2, but the model normalises")


def test_a_default_prompt_and_a_dense_of_another_width_are_variants(model: Path, tmp_path: Path) -> None:
    """Without its Dense the model has another dimension than the server, so this variant is passed over."""
    transformer, pooling, _, normalize = SentenceTransformer(str(model), device="cpu")
    set_seed(1)
    prompted = SentenceTransformer(
        modules=[transformer, pooling, Dense(32, 16), normalize], device="cpu", prompts={"query": "find: "},
        default_prompt_name="query",
    )  # fmt: skip
    prompted.save(str(tmp_path / "own"), create_model_card=False)
    rows = Asked(lambda texts: prompted.encode(texts, prompt="", show_progress_bar=False).tolist()).checked(
        reference_of(tmp_path / "own")
    )
    assert rows["what it gives instead"].result.startswith("the model without its prompt (least cosine 1.0")
    rows = Asked(lambda texts: np.ones((len(texts), 16)).tolist()).checked(reference_of(tmp_path / "own"))
    assert rows["what it gives instead"].result.startswith("no known variant of the model")


def test_a_static_model_has_no_pooling_and_no_limit(tiny_bert: Path, tmp_path: Path) -> None:
    static = StaticEmbedding(AutoTokenizer.from_pretrained(tiny_bert).backend_tokenizer, embedding_dim=16)
    model = SentenceTransformer(modules=[static, Normalize()], device="cpu", prompts={"query": "find: "})
    model.save(str(tmp_path / "own"), create_model_card=False)
    reference = reference_of(tmp_path / "own")
    rows = Asked(lambda texts: model.encode(texts, show_progress_bar=False).tolist()).checked(reference)
    assert rows["vectors"].agrees
    rows = Asked(lambda texts: model.encode(texts, prompt_name="query", show_progress_bar=False).tolist()).checked(
        reference
    )
    assert rows["what it gives instead"].result.startswith("the model with the prompt query (least cosine 1.0")


def test_what_a_server_says_is_not_read_as_markup(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A refusal of a long text that looks like markup of the table."""
    bundle = write_bundle(tmp_path / "tiny", template="[X]", pooling="cls")
    vectors = reference_of(bundle).embed

    class Refusing(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            texts = json.loads(self.rfile.read(int(self.headers["content-length"])))["inputs"]
            long = any(len(text) > 1000 for text in texts)
            content = b"[/red] too long" if long else json.dumps(vectors(texts).tolist()).encode()
            self.send_response(422 if long else 200)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        code = run(lambda: main([f"http://127.0.0.1:{server.server_port}", str(bundle), "--api", "tei"]))
        server.shutdown()
        thread.join()
    assert code == 1
    assert "[/red] too long" in " ".join(capsys.readouterr().out.replace("│", " ").split())


@pytest.mark.parametrize(("name", "value"), NO_ROADS[:1])
def test_this_machine_is_asked_without_the_environments_proxy(
    name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    assert run(lambda: main(["http://127.0.0.1:9", str(write_bundle(tmp_path / "tiny"))])) == 2
    assert "cannot be reached" in capsys.readouterr().err


def test_a_proxy_that_refuses_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("HTTP_PROXY", raising=False)
    assert run(lambda: main(["http://example.invalid", str(write_bundle(tmp_path / "tiny"))])) == 2
    error = capsys.readouterr().err
    assert "start the server first, or correct http_proxy=http://127.0.0.1:9" in error
    assert error.count("cannot be reached") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["http://127.0.0.1:9", "{tiny}"], "cannot be reached"),
        (["nowhere", "{tiny}"], "nowhere is not an address"),
        (["http://server:port", "{tiny}"], "is not an address"),
        (["http://127.0.0.1:9", "{empty}"], "is neither a bundle nor a sentence-transformers model"),
        (["http://127.0.0.1:9", "{tiny}", "--key-file", "{empty}/key"], "cannot be read"),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    write_bundle(tmp_path / "tiny")
    words = [word.format(tiny=tmp_path / "tiny", empty=tmp_path / "empty") for word in words]
    assert run(lambda: main(words)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_code_of_a_model_is_not_run(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "own"
    shutil.copytree(model, folder)
    text = (folder / "modules.json").read_text()
    (folder / "modules.json").write_text(
        text.replace("sentence_transformers.base.modules.normalize.Normalize", "own_code.Layer")
    )
    (folder / "own_code.py").write_text("raise SystemExit('was run')\n")
    assert run(lambda: main(["http://127.0.0.1:9", str(folder)])) == 2
    assert "needs custom code to be loaded, which Cloze does not run" in capsys.readouterr().err
