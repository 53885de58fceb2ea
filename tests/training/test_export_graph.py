"""Graphs against torch: the same vectors for every text, in any batch, for both families and all read-outs."""

from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto

from encoding.bundle import INPUTS, OUTPUT
from training.continuous import ContinuousTemplate
from training.encoder import SentenceEncoder
from training.errors import ExportError
from training.graph import fuse, halve, trace
from training.heads import Head, HeadKind
from training.parity import difference, probes
from training.quantise import codes, quantise
from training.runner import GraphEncoder

CASES = {
    "mask": ('This sentence of "[X]" means [MASK].', "mask", False),
    "denoised": ('This sentence of "[X]" means [MASK].', "mask", True),
    "prefix-mask": ("[MASK] is what [X] says", "mask", False),
    "cls": ("[X]", "cls", False),
    "mean": ("[X]", "mean", False),
    "mean-denoised": ("say [X] !", "mean", True),
}


def load(folder: Path, case: str = "mask") -> SentenceEncoder:
    template, read_out, denoising = CASES[case]
    return SentenceEncoder.load(str(folder), template=template, read_out=read_out, denoising=denoising).eval()


@cache
def traced(folder: Path, case: str = "mask") -> tuple[SentenceEncoder, ModelProto]:
    """An encoder and its plain graph: tracing takes seconds, and many tests start from the same."""
    encoder = load(folder, case)
    return encoder, trace(encoder)


def runner(model: ModelProto, encoder: SentenceEncoder, folder: Path) -> GraphEncoder:
    onnx.save(model, folder / "model.onnx")
    return GraphEncoder(folder / "model.onnx", encoder.prompt.text_encoder)


@pytest.mark.parametrize(
    ("family", "case"),
    [*(("tiny_bert", case) for case in CASES), ("tiny_roberta", "mask"), ("tiny_roberta", "denoised")],
)
def test_graphs_equal_torch(family: str, case: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    encoder, plain = traced(request.getfixturevalue(family), case)
    texts = probes(encoder.reading.max_tokens)
    for model in (plain, fuse(plain, encoder), fuse(plain, encoder, separate=True)):
        assert difference(encoder, runner(model, encoder, tmp_path), texts) < 1e-5


@pytest.mark.parametrize(
    ("family", "case", "kind"), [("tiny_bert", "denoised", "transform"), ("tiny_roberta", "prefix-mask", "tanh")]
)
def test_graphs_hold_a_kept_head_and_a_continuous_template(
    family: str, case: str, kind: HeadKind, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    encoder = load(request.getfixturevalue(family), case)
    torch.manual_seed(0)
    encoder.head = Head(kind, encoder.backbone.config)
    encoder.continuous = ContinuousTemplate(encoder.prompt.text_encoder, encoder.backbone.get_input_embeddings())
    torch.nn.init.normal_(encoder.continuous.vectors)
    plain, texts = trace(encoder), probes(encoder.reading.max_tokens)
    fused = fuse(plain, encoder)
    for model, tolerance in ((plain, 1e-5), (fused, 1e-5), (halve(fused), 5e-3), (quantise(plain), 0.05)):
        assert difference(encoder, runner(model, encoder, tmp_path), texts) < tolerance


def test_the_probes_reach_every_length(tiny_bert: Path) -> None:
    encoder = load(tiny_bert)
    tokens = encoder.prompt.text_encoder.encode(probes(encoder.reading.max_tokens))
    lengths = {len(sequence.ids) for sequence in tokens}
    assert min(lengths) == encoder.prompt.text_encoder.template_tokens
    assert max(lengths) == encoder.reading.max_tokens
    assert any(sequence.cut for sequence in tokens)


def test_a_wrong_graph_is_seen(tiny_bert: Path, tmp_path: Path) -> None:
    encoder = load(tiny_bert)
    graph = runner(traced(tiny_bert, "cls")[1], encoder, tmp_path)
    assert difference(encoder, graph, probes(64)) > 1e-2


def test_signature(tiny_bert: Path) -> None:
    _, model = traced(tiny_bert)
    [output] = model.graph.output
    assert tuple(item.name for item in model.graph.input) == INPUTS
    assert all(item.type.tensor_type.elem_type == onnx.TensorProto.INT64 for item in model.graph.input)
    assert output.name == OUTPUT
    assert output.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    axes = [
        [axis.dim_param or axis.dim_value for axis in item.type.tensor_type.shape.dim] for item in model.graph.input
    ]
    assert axes == [["batch", "length"]] * 2
    assert [axis.dim_param or axis.dim_value for axis in output.type.tensor_type.shape.dim] == ["batch", 32]


def test_no_path_of_this_machine_is_in_a_graph(tiny_bert: Path) -> None:
    assert str(Path(__file__).parents[2]).encode() not in traced(tiny_bert)[1].SerializeToString()


def test_tracing_leaves_the_encoder_as_it_was(tiny_bert: Path) -> None:
    encoder = load(tiny_bert).train()
    before = encoder.embed(["two dogs"])
    attention = encoder.backbone.config._attn_implementation
    trace(encoder)
    assert encoder.training
    assert encoder.backbone.config._attn_implementation == attention
    np.testing.assert_array_equal(encoder.embed(["two dogs"]), before)


def test_every_layer_is_fused(tiny_bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, plain = traced(tiny_bert)
    kinds = [node.op_type for node in fuse(plain, encoder).graph.node]
    assert (kinds.count("Attention"), kinds.count("SkipLayerNormalization"), kinds.count("BiasGelu")) == (2, 4, 2)
    monkeypatch.setattr(encoder.backbone.config, "num_hidden_layers", 3)
    with pytest.raises(ExportError, match="fusion is incomplete"):
        fuse(plain, encoder)


def test_fp16_is_near_and_gives_float32(tiny_bert: Path, tmp_path: Path) -> None:
    encoder, plain = traced(tiny_bert)
    graph = runner(halve(fuse(plain, encoder)), encoder, tmp_path)
    assert graph.embed(["two dogs"]).dtype == np.float32
    assert graph.session.get_outputs()[0].type == "tensor(float)"
    assert 1e-7 < difference(encoder, graph, probes(64)) < 5e-3


@pytest.mark.parametrize("family", ["tiny_bert", "tiny_roberta"])
def test_int8_is_near_and_the_same_in_any_batch(family: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    encoder, plain = traced(request.getfixturevalue(family))
    model = quantise(plain)
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("MatMulNBits") == 2 * 6
    assert model.ByteSize() < plain.ByteSize() / 2
    graph, texts = runner(model, encoder, tmp_path), probes(64)
    assert difference(encoder, graph, texts) < 0.05
    alone = np.concatenate([graph.embed([text]) for text in texts])
    np.testing.assert_allclose(graph.embed(texts, 10**9), alone, atol=1e-5)


def test_codes_lose_at_most_half_a_step() -> None:
    rows = np.random.default_rng(0).normal(size=(5, 70)).astype(np.float32)
    rows[2] = 0
    integers, scales = codes(rows, 32)
    assert (integers.shape, scales.shape) == ((5, 3, 32), (5, 3))
    restored = (integers * scales[..., None]).reshape(5, 96)
    assert (np.abs(restored[:, :70] - rows) <= scales.repeat(32, axis=1)[:, :70] / 2 + 1e-7).all()
    assert not restored[:, 70:].any()
    assert not restored[2].any()
