"""The same text and bundle give the same vector in torch, sentence-transformers, ONNX Runtime and over HTTP.

Each tiny random encoder is trained for two steps, exported, and served beside another model. Vectors are normalised
before they are compared, so that the tolerance means the same for each. The shipped model has an int8 graph only.
"""

from base64 import b64decode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
from harness import Process
from made_once import made_once
from numpy.typing import NDArray
from reference.vectors import MODEL
from reference.vectors import TEXTS as REFERENCE_TEXTS
from sentence_transformers import SentenceTransformer
from tiny_bundle import OTHER, sequence, vector, write_bundle

from cloze.encoding.bundle import Bundle
from cloze.service.inference.session import Session
from cloze.training.export import bundle as exporting
from cloze.training.export.__main__ import main as export
from cloze.training.fit import main as fit
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.graph_encoder import GraphEncoder

LONG = " ".join(["the old city", "two dogs run", "a letter to her friend", "rain over the green field"] * 143)
TEXTS = [
    "A man is playing the guitar.",
    "",
    "   ",
    " Rain over the city.\n",
    "[MASK]",
    "The [MASK] says [SEP] and [CLS] to a <mask> in </s> town [X].",
    "Zwölf Boxkämpfer – 日本語 🙂",
    "Rain over\nthe city.\r\n\tTwo dogs run.",
    LONG,
    *(" ".join(LONG.split()[:words]) for words in (1, 2, 3, 4, 5, 8, 11, 13, 21, 34, 55, 89, 144)),
]
TOLERANCE = 1e-4
BETWEEN_TORCH = 1e-6  # of sentence-transformers, which runs the same operators on the same batches

QUOTED = 'This sentence of "[X]" means [MASK].'
SPACED = "This sentence : ' [X] ' means [MASK]."


class Case(NamedTuple):
    """A recipe with its keys for a tiny encoder, whose folder is {parent}, and the options of export."""

    parent: str
    keys: dict[str, str]
    recipe: str = "simcse"
    flags: tuple[str, ...] = ()


AT_MASK = {"template": QUOTED, "pooling": "mask", "final_period": "false"}
SPACED_MASK = {"template": SPACED, "pooling": "mask", "final_period": "true"}
CASES = {  # no two have the same parts: each takes ten seconds; tests/training/test_adopt.py has mean pooling
    "bert mask before the text": Case("tiny_bert", SPACED_MASK | {"template": "Also called [MASK]. [X]"}),
    "bert mask denoised": Case("tiny_bert", AT_MASK, flags=("--denoise",)),
    "bert cls, diffcse": Case("masked_bert", {"generator": "{parent}"}, "diffcse"),
    "bert continuous": Case("masked_bert", AT_MASK, "optiprompt"),
    "roberta supervised": Case("masked_roberta", SPACED_MASK | {"kept_head": "tanh"}, "promptbert-supervised"),
    "roberta continuous denoised": Case("masked_roberta", SPACED_MASK, "optiprompt", ("--denoise",)),
}


WITHOUT_NEIGHBOUR = ("optiprompt",)  # recipes whose models sentence-transformers cannot load


@dataclass
class Road:
    """One model in torch, in ONNX Runtime and behind HTTP."""

    torch: SentenceEncoder
    graph: GraphEncoder
    server: Process
    neighbour: SentenceTransformer | None  # a continuous template has none

    def post(self, path: str, **body: Any) -> Any:
        return post(self.server, path, **body)

    def http(self, texts: list[str] | list[list[int]], path: str = "/embed") -> NDArray[np.float64]:
        return np.array(self.post(path, inputs=texts, normalize=False))

    def base64(self, texts: list[str]) -> NDArray[np.float32]:
        rows = self.post("/embed", inputs=texts, normalize=False, encoding_format="base64")
        return np.stack([np.frombuffer(b64decode(row), "<f4") for row in rows])

    def openai(self, texts: list[str] | list[list[int]], **fields: str) -> NDArray[np.float64]:
        rows = [row["embedding"] for row in self.post("/v1/embeddings", input=texts, **fields)["data"]]
        return np.array([np.frombuffer(b64decode(row), "<f4") if isinstance(row, str) else row for row in rows])

    def ids(self, texts: list[str]) -> list[list[int]]:
        """The token ids of each text, including those that truncation removes."""
        return [[t["id"] for t in own] for own in self.post("/tokenize", inputs=texts, add_special_tokens=False)]


@pytest.fixture(scope="module", params=CASES)
def road(request: pytest.FixtureRequest, shared: Path, custom_code: None) -> Iterator[Road]:
    case = CASES[request.param]
    parent = request.getfixturevalue(case.parent)
    made = made_once(shared / f"road-{request.param}", partial(train_and_export, case, str(parent)))
    bundle = Bundle.load(made / "models" / "road")
    server = Process("--bundle", str(made / "models"), "--model", "road", "--threads", "1", "--token-ids")
    torch = SentenceEncoder.load(str(made / "run" / "model"), denoising=bundle.spec.denoising)
    has_neighbour = case.recipe not in WITHOUT_NEIGHBOUR
    model = SentenceTransformer(str(bundle.path), device="cpu", trust_remote_code=True) if has_neighbour else None
    yield Road(torch, GraphEncoder.of(bundle, "fp32"), server, model)
    server.close()


def train_and_export(case: Case, parent: str, folder: Path) -> None:
    """Write a run, and the folder `models` with its bundle and another beside it."""
    folder.mkdir()
    keys = {"encoder": parent, "corpus": str(corpus(folder, case))}
    keys |= {"batch_size": "4", "max_steps": "2", "learning_rate": "0.01"} | case.keys
    words = [word for key, value in keys.items() for word in option(key, value.replace("{parent}", parent))]
    fit([case.recipe, "--out", str(folder / "run"), *words])
    neighbour = [] if case.recipe in WITHOUT_NEIGHBOUR else ["--sentence-transformers"]
    with pytest.MonkeyPatch.context() as patch:  # the other graph is compared with torch in tests of export
        patch.setattr(exporting, "make_graph", lambda precision, traced, *_: (traced("rows"), "rows"))
        export([str(folder / "run"), str(folder / "models" / "road"), *case.flags, *neighbour])
    write_bundle(folder / "models" / "beside", **OTHER)


def option(key: str, value: str) -> list[str]:
    name = key.replace("_", "-")
    return {"true": [f"--{name}"], "false": [f"--no-{name}"]}.get(value, [f"--{name}", value])


def corpus(folder: Path, case: Case) -> Path:
    """A file of eight sentences, or of six triplets."""
    sentences = ["Two dogs run.", "Rain over the city.", "A letter.", "The old friend."] * 2
    path = folder / ("corpus.csv" if "supervised" in case.recipe else "corpus.txt")
    rows = [",".join(sentences[row : row + 3]) for row in range(6)] if path.suffix == ".csv" else sentences
    head = ["sent0,sent1,hard_neg"] if path.suffix == ".csv" else []
    path.write_text("\n".join([*head, *rows]) + "\n", encoding="utf-8")
    return path


def units(vectors: NDArray[np.floating]) -> NDArray[np.floating]:
    """Rows scaled to length 1; a row that is almost zero after denoising is not scaled."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(lengths > 1e-3, lengths, 1)


def test_texts_have_one_vector_wherever_they_are_embedded(road: Road) -> None:
    expected = units(np.concatenate([road.torch.embed([text]) for text in TEXTS]))
    assert len({row.tobytes() for row in expected}) > len(TEXTS) / 2, "the encoder hardly distinguishes the texts"
    found = {
        "torch, batched": road.torch.embed(TEXTS),
        "torch, padded to the longest": road.torch.embed(TEXTS, batch_tokens=10**9),
        "ONNX, one by one": np.concatenate([road.graph.embed([text]) for text in TEXTS]),
        "ONNX, batched": road.graph.embed(TEXTS),
        "ONNX, padded to the longest": road.graph.embed(TEXTS, batch_tokens=10**9),
        "HTTP, one by one": np.concatenate([road.http([text]) for text in TEXTS]),
        "HTTP, batched": road.http(TEXTS),
        "HTTP, batched in another order": road.http(TEXTS[::-1])[::-1],
        "HTTP, by the model's path": road.http(TEXTS, "/models/road/embed"),
        "HTTP, base64": road.base64(TEXTS),
        "HTTP, token ids": road.http(road.ids(TEXTS)),
    }
    for place, vectors in found.items():
        np.testing.assert_allclose(units(vectors), expected, atol=TOLERANCE, rtol=0, err_msg=place)
    pointed = np.linalg.norm(expected, axis=1) > 0.5  # OpenAI's route normalises every row, also an almost zero one
    assert pointed.sum() >= len(TEXTS) - 2
    found = {
        "OpenAI's route": road.openai(TEXTS),
        "OpenAI's route, base64": road.openai(TEXTS, encoding_format="base64"),
        "OpenAI's route, token ids": road.openai(road.ids(TEXTS), model="road"),
    }
    for place, vectors in found.items():
        np.testing.assert_allclose(vectors[pointed], expected[pointed], atol=TOLERANCE, rtol=0, err_msg=place)


def test_sentence_transformers_gives_the_vectors_of_torch(road: Road) -> None:
    if road.neighbour is None:
        assert road.torch.continuous is not None  # what sentence-transformers cannot load
        return
    one_by_one = units(np.concatenate([road.torch.embed([text]) for text in TEXTS]))
    pointed = np.linalg.norm(one_by_one, axis=1) > 0.5  # it normalises an almost zero vector too
    assert pointed.sum() >= len(TEXTS) - 2
    in_one_batch = units(road.torch.embed(TEXTS, batch_tokens=10**9))  # each batch as there: padding changes the sums
    for size, expected in ((1, one_by_one), (len(TEXTS), in_one_batch)):
        found = road.neighbour.encode(TEXTS, batch_size=size)
        np.testing.assert_allclose(found[pointed], expected[pointed], atol=BETWEEN_TORCH, rtol=0)


def test_similarity_is_the_cosine_of_these_vectors(road: Road) -> None:
    body = {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS[4:8]}}
    answer = httpx.post(f"{road.server.url}/similarity", json=body)
    vectors = units(road.torch.embed([TEXTS[0], *TEXTS[4:8]]))
    np.testing.assert_allclose(answer.json(), vectors[1:] @ vectors[0], atol=TOLERANCE)


def test_two_models_that_run_at_once_keep_their_own_vectors(road: Road) -> None:
    words = ["a man", "two dogs run", "the guitar"]
    beside = [vector(sequence(text, OTHER["template"]), OTHER["dimension"], OTHER["seed"]) for text in words]
    expected = units(road.torch.embed(TEXTS[:8]))
    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(road.http, words, "/models/beside/embed") for _ in range(8)]
        found = [pool.submit(road.http, TEXTS[:8]) for _ in range(8)]
    for each in others:
        np.testing.assert_allclose(each.result(), beside, atol=1e-6)
    for each in found:
        np.testing.assert_allclose(units(each.result()), expected, atol=TOLERANCE)


def test_the_shipped_model_gives_its_vectors_in_every_place() -> None:
    """Its bundle has an int8 graph and no torch weights, so these are all the places there are.

    A result of the graph depends on its own row alone, so neither the batch nor the padding changes a bit.
    """
    bundle, texts = Bundle.load(MODEL), list(REFERENCE_TEXTS)
    assert len(texts) == 20
    session = Session.load(bundle, precision="int8", provider="cpu", threads=1)
    expected = np.concatenate([session.run(bundle.text_encoder.batch([text])) for text in texts])
    graph = GraphEncoder.of(bundle, "int8")
    server = Process("--bundle", str(MODEL), "--threads", "1")
    try:
        found = {
            "training": graph.embed(texts),
            "training, padded to the longest": graph.embed(texts, batch_tokens=10**9),
            "the service's session, one batch": session.run(bundle.text_encoder.batch(texts)),
            "HTTP": post(server, "/embed", inputs=texts, normalize=False),
            "HTTP, one by one": [post(server, "/embed", inputs=text, normalize=False)[0] for text in texts],
            "HTTP, by the model's path": post(server, "/models/cloze-mini/embed", inputs=texts, normalize=False),
        }
        for place, vectors in found.items():
            np.testing.assert_array_equal(np.array(vectors, dtype=np.float32), expected, err_msg=place)
        found = {
            "HTTP, normalised": post(server, "/embed", inputs=texts),
            "HTTP, the root": post(server, "/", inputs=texts),
            "OpenAI's route": [row["embedding"] for row in post(server, "/v1/embeddings", input=texts)["data"]],
            "Cohere's route": post(server, "/v2/embed", texts=texts, model="cloze-mini")["embeddings"]["float"],
        }
        for place, vectors in found.items():
            np.testing.assert_allclose(vectors, units(expected), atol=1e-6, rtol=0, err_msg=place)
    finally:
        server.close()


def post(server: Process, path: str, **body: object) -> Any:
    answer = httpx.post(server.url + path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()
