"""Means of tokens' vectors: by hand, over HTTP, what the fit gains, and what is refused."""

import json
from pathlib import Path

import httpx
import numpy as np
import pytest
from harness import services
from live import served
from numpy.typing import NDArray
from tiny_graphs import export_graphs_of

from cloze.command import run as run_command
from cloze.encoding.bundle import Bundle
from cloze.service.app import create_app
from cloze.service.settings import Settings
from cloze.training.distil_static import main
from cloze.training.errors import EncoderError
from cloze.training.evaluation.measures import units
from cloze.training.export.__main__ import main as export
from cloze.training.export.static import Rows, fit, graph, measured, quantised, vocabulary_vectors
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.graph_encoder import GraphEncoder, session

WORDS = [
    "a",
    "man",
    "is",
    "playing",
    "the",
    "guitar",
    "on",
    "stage",
    "two",
    "dogs",
    "run",
    "over",
    "green",
    "field",
    "she",
    "wrote",
    "letter",
    "rain",
    "grows",
    "here",
]
TEXTS = ["", "a man", "Two dogs run over the green field.", "rain " * 100, "[MASK] 日本 naïve"]


@pytest.fixture(scope="module")
def bundle(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("static")
    template = 'This sentence of "[X]" means [MASK].'
    encoder = SentenceEncoder.load(str(tiny_bert), template=template, pooling="mask", max_tokens=32)
    encoder.save(folder / "run" / "model")
    provenance = {"parent": "tiny", "recipe": {"method": "simcse", "encoder": "tiny"}, "data": [], "commit": None}
    content = provenance | {"seeds": [0], "rows": 1, "versions": {}}
    (folder / "run" / "run.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        export_graphs_of(tiny_bert, patch)  # the same weights
        export([str(folder / "run"), str(folder / "bundle")])
    return folder / "bundle"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 sentences of random words."""
    chance = np.random.default_rng(0)
    lines = [" ".join(chance.choice(WORDS, chance.integers(3, 9))) for _ in range(400)]
    path = tmp_path_factory.mktemp("corpus") / "sentences.txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def static(bundle: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "static"
    main([str(bundle), str(out), "--corpus", str(corpus)])
    return out


def stored(path: Path) -> NDArray[np.float32]:
    """The vectors of the tokens, (v, d), as a graph holds them."""
    import onnx
    from onnx import numpy_helper

    arrays = {each.name: numpy_helper.to_array(each) for each in onnx.load(path).graph.initializer}
    return arrays["codes"] * arrays["scale"]  # type: ignore[no-any-return]


def test_the_graph_is_the_mean_by_hand() -> None:
    rows = Rows(np.array([[9, 9], [1, 2], [3, -4]], np.int16), np.float32(0.5))
    runner = session(graph(rows).SerializeToString())
    ids, mask = np.array([[1, 2, 0], [2, 1, 1]]), np.array([[1, 1, 0], [1, 1, 1]])
    (found,) = runner.run(None, {"input_ids": ids, "attention_mask": mask})
    np.testing.assert_allclose(
        found, [[0.5 * (1 + 3) / 2, 0.5 * (2 - 4) / 2], [0.5 * (3 + 1 + 1) / 3, 0.5 * (-4 + 2 + 2) / 3]], rtol=1e-6
    )


@pytest.mark.parametrize("max_tokens", [32, 512, 4096])
def test_whole_numbers_are_near_and_their_sums_exact(max_tokens: int) -> None:
    vectors = np.random.default_rng(0).normal(size=(50, 16)).astype(np.float32)
    vectors[3] = 0
    rows = quantised(vectors, max_tokens)
    largest = int(np.abs(rows.codes).max())
    np.testing.assert_allclose(rows.codes * rows.scale, vectors, atol=float(np.abs(vectors).max()) / largest * 0.51)
    assert not rows.codes[3].any()
    assert largest == min(32767, 2**24 // max_tokens)
    assert largest * max_tokens <= 2**24


def test_the_bundle_gives_means_of_its_rows_alone_and_in_a_batch(static: Path) -> None:
    bundle = Bundle.load(static)
    encoder = GraphEncoder.of(bundle, "fp32")
    rows = stored(bundle.graph("fp32"))
    expected = np.stack([rows[tokens.ids].mean(0) for tokens in bundle.text_encoder.encode(TEXTS)])
    found = encoder.embed(TEXTS)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    alone = np.concatenate([encoder.embed([text]) for text in TEXTS])
    np.testing.assert_array_equal(encoder.embed(TEXTS, 10**9), alone)  # whatever a text's batch is


def test_http_gives_the_same(static: Path) -> None:
    expected = units(GraphEncoder.of(Bundle.load(static), "fp32").embed(TEXTS))
    app = create_app(Settings(bundle=static, threads=1))
    assert [model.session.precision for model in services(app).models] == ["fp32"]
    with served(app) as url:
        found = httpx.post(f"{url}/embed", json={"inputs": TEXTS}).json()
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_it_has_a_space_of_its_own(static: Path, bundle: Path) -> None:
    found, parent = Bundle.load(static).spec, Bundle.load(bundle).spec
    assert (found.template, found.pooling, found.dimension) == ("[X]", "mean", parent.dimension)
    assert found.space != parent.space
    assert found.provenance.recipe["space"] == parent.space
    assert found.provenance.parity["fp32"] < 1e-4
    assert "NOT of the vector space of bundle" in (static / "README.md").read_text(encoding="utf-8")


def test_the_same_command_gives_the_same_bundle(static: Path, bundle: Path, corpus: Path, tmp_path: Path) -> None:
    main([str(bundle), str(tmp_path / "static"), "--corpus", str(corpus)])
    assert Bundle.load(tmp_path / "static").spec == Bundle.load(static).spec


def test_it_is_no_encoder(static: Path) -> None:
    with pytest.raises(
        EncoderError, match="has a vector for each token but no encoder; give the encoder that it was made from"
    ):
        SentenceEncoder.load(str(static))


def test_a_token_is_encoded_in_the_template(bundle: Path) -> None:
    encoder = GraphEncoder.of(Bundle.load(bundle), "fp32")
    found = vocabulary_vectors(encoder)
    token = encoder.text_encoder.encode(["guitar"])[0].ids
    (place,) = set(token) - {*encoder.text_encoder.prefix_ids, *encoder.text_encoder.suffix_ids}
    np.testing.assert_allclose(found[place], units(encoder.embed(["guitar"]))[0], atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-5)


def test_the_fit_raises_the_cosine() -> None:
    """Targets that are means of hidden vectors can be reached; a token that no sentence has stays as it was."""
    chance = np.random.default_rng(0)
    hidden, started = chance.normal(size=(2, 40, 8)).astype(np.float32) / 50
    sequences = [chance.integers(0, 39, size=chance.integers(2, 6)).tolist() for _ in range(3000)]
    targets = units(np.stack([hidden[ids].mean(0) for ids in sequences])).astype(np.float32)

    def cosine(vectors: NDArray[np.float32]) -> float:
        means = units(np.stack([vectors[ids].mean(0) for ids in sequences]))
        return float((means * targets).sum(1).mean())

    found = fit(started, sequences, targets)
    assert cosine(found) > cosine(started) + 0.3
    np.testing.assert_array_equal(found[39], started[39])


def test_what_is_measured_by_hand() -> None:
    angles = np.linspace(0, 3, 12)
    targets = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    assert measured(targets, targets) == pytest.approx((1.0, 1.0))
    turned = -targets  # its 10 nearest are all but the farthest of 11, and for -x all but the nearest
    found = measured(turned, targets)
    assert found.cosine == pytest.approx(-1)
    assert found.recall == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none"], "none is not a folder"),
        ([], "no file"),
        (["few"], "few.txt has 3 different sentences"),
        (["itself"], "is the encoder's own folder, which would be overwritten; name another folder"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], message: str, bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = tmp_path / "few.txt"
    few.write_text("one sentence here\nanother sentence here\na third sentence here\n")
    source = str(tmp_path / "none") if words == ["none"] else str(bundle)
    file = few if words == ["few"] else tmp_path / "absent.txt"
    out = bundle.parent / "." / bundle.name if words == ["itself"] else tmp_path / "out"
    assert run_command(lambda: main([source, str(out), "--corpus", str(file)])) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()
