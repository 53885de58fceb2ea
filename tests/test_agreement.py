"""Same text, same bundle, same vector: in torch, in ONNX Runtime and over HTTP.

Tiny random encoders walk the whole road: train two steps, export, serve. Vectors are compared normalised, so that
1e-4 means the same for each.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
from harness import Process
from numpy.typing import NDArray

from encoding.bundle import Bundle
from training.encoder import SentenceEncoder
from training.export import main as export
from training.fit import main as fit
from training.runner import GraphEncoder

LONG = " ".join(["the old city", "two dogs run", "a letter to her friend", "rain over the green field"] * 143)
TEXTS = [
    "A man is playing the guitar.",
    "",
    "   ",
    "[MASK]",
    "The [MASK] says [SEP] and [CLS] to a <mask> in </s> town [X].",
    "Zwölf Boxkämpfer – 日本語 🙂",
    LONG,
    *(" ".join(LONG.split()[:words]) for words in (1, 2, 3, 5, 8, 13, 21, 34, 55, 89)),
]
TOLERANCE = 1e-4

QUOTED = 'This sentence of "[X]" means [MASK].'
SPACED = "This sentence : ' [X] ' means [MASK]."
CASES = {
    "bert mask": ("bert", QUOTED, "mask", False, False),
    "bert mask denoised": ("bert", QUOTED, "mask", True, False),
    "bert mask before the text": ("bert", "Also called [MASK]. [X]", "mask", False, True),
    "bert cls": ("bert", "[X]", "cls", False, False),
    "bert mean": ("bert", "[X]", "mean", False, False),
    "roberta mask": ("roberta", SPACED, "mask", False, True),
    "roberta mask denoised": ("roberta", SPACED, "mask", True, False),
    "roberta cls": ("roberta", "[X]", "cls", False, False),
}


@dataclass
class Road:
    """One model in its three places."""

    torch: SentenceEncoder
    graph: GraphEncoder
    server: Process

    def http(self, texts: list[str]) -> NDArray[np.float64]:
        answer = httpx.post(f"{self.server.url}/embed", json={"inputs": texts, "normalize": False}, timeout=60)
        assert answer.status_code == 200, answer.text
        return np.array(answer.json())


@pytest.fixture(scope="module", params=CASES)
def road(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path, tiny_roberta: Path
) -> Iterator[Road]:
    family, template, read_out, denoising, period = CASES[request.param]
    folder = tmp_path_factory.mktemp("road")
    corpus = folder / "corpus.txt"
    corpus.write_text("Two dogs run.\nRain over the city.\nA letter.\nThe old friend.\n" * 2, encoding="utf-8")
    parent = str({"bert": tiny_bert, "roberta": tiny_roberta}[family])
    words = {"encoder": parent, "corpus": str(corpus), "batch_size": "4", "max_steps": "2", "learning_rate": "0.01"}
    words |= {"template": template, "read_out": read_out, "final_period": str(period).lower()}
    fit(
        [
            "simcse",
            "--out",
            str(folder / "run"),
            *(word for key, value in words.items() for word in (f"--{key}", value)),
        ]
    )
    export([str(folder / "run"), str(folder / "bundle"), *(["--denoise"] if denoising else [])])
    bundle = Bundle.load(folder / "bundle")
    server = Process("--bundle", str(folder / "bundle"), "--threads", "1")
    torch = SentenceEncoder.load(str(folder / "run" / "model"), denoising=denoising)
    yield Road(torch, GraphEncoder.of(bundle, "fp32"), server)
    server.close()


def units(vectors: NDArray[np.floating]) -> NDArray[np.floating]:
    """Rows of length 1; a row that denoising left (all but) empty stays as it is."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(lengths > 1e-3, lengths, 1)


def test_texts_have_one_vector_wherever_they_are_embedded(road: Road) -> None:
    expected = units(np.concatenate([road.torch.embed([text]) for text in TEXTS]))
    assert len({row.tobytes() for row in expected}) > len(TEXTS) / 2, "the encoder hardly tells texts apart"
    found = {
        "torch, batched": road.torch.embed(TEXTS),
        "torch, padded to the longest": road.torch.embed(TEXTS, batch_tokens=10**9),
        "ONNX, one by one": np.concatenate([road.graph.embed([text]) for text in TEXTS]),
        "ONNX, batched": road.graph.embed(TEXTS),
        "ONNX, padded to the longest": road.graph.embed(TEXTS, batch_tokens=10**9),
        "HTTP, one by one": np.concatenate([road.http([text]) for text in TEXTS]),
        "HTTP, batched": road.http(TEXTS),
        "HTTP, batched in another order": road.http(TEXTS[::-1])[::-1],
    }
    for place, vectors in found.items():
        np.testing.assert_allclose(units(vectors), expected, atol=TOLERANCE, rtol=0, err_msg=place)


def test_similarity_is_the_cosine_of_these_vectors(road: Road) -> None:
    body = {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS[4:8]}}
    answer = httpx.post(f"{road.server.url}/similarity", json=body, timeout=60)
    vectors = units(road.torch.embed([TEXTS[0], *TEXTS[4:8]]))
    np.testing.assert_allclose(answer.json(), vectors[1:] @ vectors[0], atol=TOLERANCE)
