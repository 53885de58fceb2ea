"""Weights read back from a bundle's graph: the same vectors, a bundle that can be trained, and what is refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from made_once import made_once
from onnx import ModelProto
from tiny_graphs import traced

from cloze.encoding.bundle import GRAPHS, Bundle, Precision, Provenance, seal, staging
from cloze.encoding.canaries import CANARY_TEXTS, Canaries
from cloze.encoding.text import TOKENIZER_FILES
from cloze.training.convert import convert
from cloze.training.errors import EncoderError
from cloze.training.export.__main__ import main as export
from cloze.training.export.graph import fuse, trace
from cloze.training.export.layers import one_row
from cloze.training.export.parity import probes
from cloze.training.export.quantise import WEIGHT_LEVELS, quantise, vocabulary_feeds
from cloze.training.fit import main as fit
from cloze.training.model.encoder import SentenceEncoder, positions
from cloze.training.model.graph_encoder import GraphEncoder
from cloze.training.model.graph_weights import KEY, VALUE

MASK = {"template": '"[X]" means [MASK].', "pooling": "mask"}
MEAN = {"template": "[X]", "pooling": "mean"}
UNREAD = {f"{part}.bias" for part in (KEY, VALUE)}  # no vector depends on them, or others have them in theirs


def random_encoder(folder: Path, **config: str) -> SentenceEncoder:
    """With biases, which a new encoder has as zeros."""
    encoder = SentenceEncoder.load(str(folder), **config, max_tokens=48)
    torch.manual_seed(0)
    for name, parameter in encoder.backbone.named_parameters():
        torch.nn.init.normal_(parameter, mean=float(name.endswith("LayerNorm.weight")), std=0.1)
    return encoder


def write(encoder: SentenceEncoder, parent: Path, out: Path, graphs: dict[Precision, ModelProto]) -> Path:
    with staging(out) as folder:
        (folder / "onnx").mkdir()
        for name in ("config.json", *TOKENIZER_FILES):
            shutil.copyfile(parent / name, folder / name)
        (folder / "README.md").write_text("---\nlicense: mit\n---\n# tiny\n")
        vectors = {}
        for precision, model in graphs.items():
            onnx.save(model, folder / GRAPHS[precision])
            runner = GraphEncoder(folder / GRAPHS[precision], encoder.text_encoder)
            vectors[precision] = runner.embed(CANARY_TEXTS)
        Canaries.write(folder, vectors)
        provenance = Provenance(parent="none", recipe={}, data=[], commit=None, seeds=[0], scores={}, parity={})
        seal(folder, encoder.config, encoder.dimension, "0" * 64, provenance)
    return out


@pytest.fixture(scope="session")
def int8_bundle(shared: Path, tiny_bert: Path) -> Path:
    def make(out: Path) -> None:
        encoder = random_encoder(tiny_bert, **MASK)
        feeds = vocabulary_feeds(encoder.text_encoder)
        write(encoder, tiny_bert, out, {"int8": quantise(trace(encoder, "exact"), feeds, one_row(encoder))})

    return made_once(shared / "readable-int8", make)


def cosines(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return (one * other).sum(1) / np.linalg.norm(one, axis=1) / np.linalg.norm(other, axis=1)


@pytest.mark.parametrize(("family", "config"), [("tiny_bert", MEAN), ("tiny_roberta", MASK)])
def test_an_fp32_graph_has_all_weights(
    family: str, config: dict[str, str], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    parent = request.getfixturevalue(family)
    encoder = random_encoder(parent, **config)
    bundle = write(encoder, parent, tmp_path / "bundle", {"fp32": trace(encoder, "rows")})
    found, texts = SentenceEncoder.load(str(bundle), max_tokens=48), probes(48)
    assert found.config == encoder.config
    own = SentenceEncoder.load(str(bundle)).config.max_tokens  # not the service's limit
    assert own == positions(encoder.backbone, "") > 48
    expected = encoder.embed(texts)
    np.testing.assert_allclose(found.embed(texts), expected, atol=1e-5 * np.abs(expected).max())
    state = found.state_dict()
    for name, weight in encoder.state_dict().items():
        if not name.endswith((*UNREAD, "attention.output.dense.bias")):
            torch.testing.assert_close(state[name], weight, rtol=0, atol=0)


@pytest.mark.long
def test_a_bundle_is_exported_in_another_precision(int8_bundle: Path, tmp_path: Path) -> None:
    """As the model that comes with Cloze is for a GPU: its one graph is int8, which gives the weights."""
    export([str(int8_bundle), str(tmp_path / "half"), "--precision", "fp16"])
    first, half = Bundle.load(int8_bundle), Bundle.load(tmp_path / "half")
    assert half.precisions == ("fp16",)
    assert half.spec.space != first.spec.space  # its vectors are others, if only in the last digits
    same = ("template", "pooling", "max_tokens", "dimension", "templates")
    assert [getattr(half.spec, name) for name in same] == [getattr(first.spec, name) for name in same]
    assert half.spec.provenance.parent == first.spec.provenance.parent
    texts = probes(48)
    assert cosines(GraphEncoder.of(half, "fp16").embed(texts), GraphEncoder.of(first, "int8").embed(texts)).min() > 0.99


def test_an_int8_graph_has_the_weights_to_seven_bits(int8_bundle: Path, tiny_bert: Path) -> None:
    encoder, found = random_encoder(tiny_bert, **MASK), SentenceEncoder.load(str(int8_bundle), max_tokens=48)
    assert found.config == encoder.config
    texts = probes(48)
    graph = GraphEncoder.of(Bundle.load(int8_bundle), "int8").embed(texts)
    assert cosines(found.embed(texts), graph).min() > 0.99
    assert cosines(found.embed(texts), encoder.embed(texts)).min() > 0.99
    state = found.state_dict()
    rounded = 0
    for name, weight in encoder.state_dict().items():
        if name.endswith(("dense.weight", "query.weight", "key.weight", "value.weight")):
            error = torch.linalg.norm(state[name] - weight) / torch.linalg.norm(weight)
            rounded += int(error > 0)
            assert error < 4 / WEIGHT_LEVELS
        elif name.endswith("query.bias"):
            torch.testing.assert_close(state[name], weight, rtol=0, atol=2**-8)  # attention rounds it
    assert rounded == 8  # six products of the first layer, keys and values of the last


def test_a_bundle_is_trained_and_is_its_runs_parent(int8_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(f"two dogs run {number}" for number in range(40)) + "\n")
    keys = ["--encoder", str(int8_bundle), "--corpus", str(tmp_path / "texts.txt"), "--batch-size", "8"]
    keys += ["--max-steps", "2", "--held-out", "0", "--pooling", "mask", "--template", MASK["template"]]
    assert fit(["simcse", *keys, "--precision", "fp32", "--out", str(tmp_path / "run"), "--report-to", "none"]) == 0
    assert json.loads((tmp_path / "run" / "run.json").read_text())["parent"] == int8_bundle.name
    trained = SentenceEncoder.load(str(tmp_path / "run" / "model"))
    start = SentenceEncoder.load(str(int8_bundle))
    assert trained.config.template == start.config.template
    assert not torch.equal(trained.word_embeddings.weight, start.word_embeddings.weight)


def test_a_bundle_is_converted_without_its_run(int8_bundle: Path, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    convert(int8_bundle, tmp_path / "converted", None)
    bundle = Bundle.load(tmp_path / "converted")
    assert bundle.spec.space == Bundle.load(int8_bundle).spec.space
    texts = ["Two dogs run.", "Rain.", "A man plays the guitar."]
    found = SentenceTransformer(str(tmp_path / "converted"), trust_remote_code=True).encode(texts)
    assert cosines(found, GraphEncoder.of(bundle, "int8").embed(texts)).min() > 0.99


def test_a_graph_that_cannot_be_read_is_named(tiny_bert: Path, int8_bundle: Path, tmp_path: Path) -> None:
    encoder = SentenceEncoder.load(str(tiny_bert), **MEAN)
    model = fuse(traced(encoder, tiny_bert, "fusible"), encoder)
    fused = write(encoder, tiny_bert, tmp_path / "fused", {"fp32": model})
    with pytest.raises(
        EncoderError,
        match="fused has no graph from which weights can be read; only fp32 and",
    ):
        SentenceEncoder.load(str(fused))
    other = tmp_path / "other"
    shutil.copytree(int8_bundle, other)
    canaries = json.loads((other / "canaries.json").read_text())
    canaries["vectors"]["int8"] = np.negative(canaries["vectors"]["int8"]).tolist()
    (other / "canaries.json").write_text(json.dumps(canaries))
    spec = Bundle.load(int8_bundle).spec
    seal(other, encoder.config.model_copy(update=MASK), spec.dimension, spec.weights, spec.provenance)
    with pytest.raises(EncoderError, match="the weights of its int8 graph do not give the graph's vectors"):
        SentenceEncoder.load(str(other))


def test_a_denoised_bundle_is_read_back(tiny_bert: Path, tmp_path: Path) -> None:
    """The vector of its empty canary text is almost 0, so its direction is noise."""
    encoder = random_encoder(tiny_bert, **MASK)
    encoder.reconfigure(encoder.config.model_copy(update={"denoising": True}))
    bundle = write(encoder, tiny_bert, tmp_path / "bundle", {"fp32": trace(encoder, "rows")})
    texts = ["two dogs", "rain"]
    np.testing.assert_allclose(SentenceEncoder.load(str(bundle)).embed(texts), encoder.embed(texts), atol=1e-5)


def test_a_converted_bundle_keeps_its_configuration_as_an_encoder(tiny_bert: Path, tmp_path: Path) -> None:
    encoder = random_encoder(tiny_bert, **MEAN)
    encoder.reconfigure(encoder.config.model_copy(update={"templates": {"query": "two [X]"}}))
    bundle = write(encoder, tiny_bert, tmp_path / "bundle", {"fp32": trace(encoder, "rows")})
    convert(bundle, tmp_path / "both", None)
    found = SentenceEncoder.load(str(tmp_path / "both")).config
    assert (found.template, found.pooling, found.templates) == ("[X]", "mean", {"query": "two [X]"})


@pytest.mark.parametrize("gap", ["##s", "rain"])
def test_a_vocabulary_may_have_a_gap(gap: str, tiny_bert: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_bert, tmp_path / "gap")
    content = json.loads((tmp_path / "gap" / "tokenizer.json").read_text(encoding="utf-8"))
    del content["model"]["vocab"][gap]
    (tmp_path / "gap" / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    text_encoder = SentenceEncoder.load(str(tmp_path / "gap"), **MEAN, max_tokens=48).text_encoder
    assert len(text_encoder.id_range) == 1 + max(content["model"]["vocab"].values()) == text_encoder.vocabulary_size + 1
    assert len(vocabulary_feeds(text_encoder)) == 64
