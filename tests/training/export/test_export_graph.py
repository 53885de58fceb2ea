"""Graphs against torch: the same vectors for every text, in any batch, for both families and all poolings."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from onnx import ModelProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from tiny_graphs import traced as traced_once
from transformers import AutoTokenizer, BertConfig, BertModel, DistilBertConfig, DistilBertModel

from cloze.encoding.bundle import INPUTS, OUTPUT
from cloze.encoding.template import PoolingMode
from cloze.training.errors import ExportError
from cloze.training.export.graph import fuse, halve, trace
from cloze.training.export.layers import BITS, Form, WrittenOut, coarse, one_row
from cloze.training.export.parity import difference, probes
from cloze.training.export.quantise import (
    BLOCK,
    DAMPING,
    GELU_LEAST,
    GELU_ZERO,
    TINY,
    WEIGHT_LEVELS,
    ZERO,
    channel_steps,
    codes,
    fitted_codes,
    observe,
    quantise,
    vocabulary_feeds,
)
from cloze.training.model.continuous_template import ContinuousTemplate
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.graph_encoder import GraphEncoder
from cloze.training.model.heads import ProjectionHead
from cloze.training.model.pretrained import BERTS

CASES = {
    "mask": ('This sentence of "[X]" means [MASK].', "mask", False),
    "denoised": ('This sentence of "[X]" means [MASK].', "mask", True),
    "prefix-mask": ("[MASK] is what [X] says", "mask", False),
    "cls": ("[X]", "cls", False),
    "mean": ("[X]", "mean", False),
    "weightedmean": ("[X]", "weightedmean", False),
    "mean-denoised": ("say [X] !", "mean", True),
}


def load(folder: Path, case: str = "mask") -> SentenceEncoder:
    template, pooling, denoising = CASES[case]
    return SentenceEncoder.load(str(folder), template=template, pooling=pooling, denoising=denoising).eval()


@cache
def traced(folder: Path, case: str = "mask", form: Form = "rows") -> tuple[SentenceEncoder, ModelProto]:
    """An encoder and its graph."""
    encoder = load(folder, case)
    return encoder, traced_once(encoder, folder, form)


def int8(encoder: SentenceEncoder, model: ModelProto) -> ModelProto:
    return quantise(model, vocabulary_feeds(encoder.text_encoder), one_row(encoder))


def runner(model: ModelProto, encoder: SentenceEncoder, folder: Path) -> GraphEncoder:
    onnx.save(model, folder / "model.onnx")
    return GraphEncoder(folder / "model.onnx", encoder.text_encoder)


@pytest.mark.parametrize("kind", BERTS)
def test_the_layers_written_out_equal_the_encoders_own(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    """In torch, where no graph has to be traced, and with biases, which a new encoder has as zeros."""
    shutil.copytree(request.getfixturevalue("tiny_bert" if kind == "bert" else "tiny_roberta"), tmp_path / kind)
    config = json.loads((tmp_path / kind / "config.json").read_text(encoding="utf-8"))
    (tmp_path / kind / "config.json").write_text(json.dumps(config | {"model_type": kind}), encoding="utf-8")
    for case in CASES:
        encoder = load(tmp_path / kind, case)
        assert encoder.backbone.config.model_type == kind
        torch.manual_seed(0)
        for parameter in encoder.backbone.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        texts = probes(encoder.config.max_tokens)
        batch = [torch.from_numpy(each) for each in encoder.text_encoder.batch(texts)]
        with subtests.test(case), torch.no_grad():
            expected = encoder.pooled(*batch, encoder.text_encoder)
            for form, tolerance in (("rows", 1e-5), ("fusible", 1e-5), ("exact", 5e-3)):
                found = WrittenOut(encoder, form)(*batch)
                assert (found - expected).abs().max() < tolerance * expected.norm(dim=1).max()


@pytest.mark.parametrize(
    ("family", "case", "forms"),
    [
        ("tiny_bert", "mask", ("rows", "fusible", "exact")),
        *(("tiny_bert", case, ("rows",)) for case in ("mean-denoised", "cls", "mean")),
        ("tiny_roberta", "mask", ("rows", "exact")),
    ],
)
def test_graphs_equal_torch(
    family: str, case: str, forms: tuple[Form, ...], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    for form in forms:
        encoder, model = traced(request.getfixturevalue(family), case, form)
        tolerance = 5e-3 if form == "exact" else 1e-5  # `exact` rounds what attention multiplies
        for graph in (model, fuse(model, encoder)) if form == "fusible" else (model,):
            assert difference(encoder, runner(graph, encoder, tmp_path), probes(64)).largest < tolerance


def test_the_difference_is_that_of_components_and_of_directions(tiny_bert: Path) -> None:
    class Turned:
        """A graph whose vectors are torch's with the first two components turned by a right angle."""

        def embed(self, texts: list[str], batch_tokens: int = 0) -> NDArray[np.float32]:
            vectors = encoder.embed(texts)
            return np.concatenate([-vectors[:, 1:2], vectors[:, :1], vectors[:, 2:]], axis=1)

    encoder, texts = load(tiny_bert), ["two dogs run", "rain"]
    own = np.concatenate([encoder.embed([text]) for text in texts]).astype(np.float64)
    lengths = np.linalg.norm(own, axis=1)
    cosines = (own[:, 2:] ** 2).sum(1) / lengths**2  # a component times its neighbour cancels out
    gaps = np.abs([own[:, 0] + own[:, 1], own[:, 1] - own[:, 0]])
    found = difference(encoder, Turned(), texts)  # type: ignore[arg-type]
    assert found == pytest.approx((gaps.max() / lengths.max(), cosines.mean(), cosines.min()), rel=1e-5)


@pytest.mark.parametrize(("case", "read"), [("mask", True), ("cls", True), ("mean", False)])
def test_the_last_layer_is_computed_for_the_row_that_is_read(case: str, read: bool, tiny_bert: Path) -> None:
    """How many rows the last layer's products have, queries, keys and values first, for two texts."""
    encoder, model = traced(tiny_bert, case)
    products = [node.output[0] for node in model.graph.node if node.op_type in ("Gemm", "MatMul")][-6:]
    shown = ModelProto()
    shown.CopyFrom(model)
    shown.graph.output.extend(helper.make_tensor_value_info(name, 1, None) for name in products)
    batch = encoder.text_encoder.batch(["a", "dogs run"])
    found = onnxruntime.InferenceSession(shown.SerializeToString()).run(products, batch._asdict())
    texts, tokens = 2, batch.input_ids.size
    rows = texts if read else tokens
    assert [len(each) for each in found] == [rows, tokens, tokens, rows, rows, rows]


def test_an_architecture_unlike_berts_keeps_its_own_layers(tmp_path: Path, tiny_bert: Path) -> None:
    config = DistilBertConfig(
        vocab_size=len(AutoTokenizer.from_pretrained(tiny_bert)),
        dim=32,
        n_layers=2,
        n_heads=4,
        hidden_dim=64,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    DistilBertModel(config).save_pretrained(tmp_path / "distilbert")
    AutoTokenizer.from_pretrained(tiny_bert).save_pretrained(tmp_path / "distilbert")
    encoder = load(tmp_path / "distilbert")
    rows, texts = trace(encoder), probes(64)
    assert difference(encoder, runner(rows, encoder, tmp_path), texts).largest < 1e-5
    assert difference(encoder, runner(int8(encoder, rows), encoder, tmp_path), texts).largest < 0.1


@pytest.mark.long
def test_graphs_hold_a_kept_head_and_a_continuous_template(tiny_roberta: Path, tmp_path: Path) -> None:
    """Tracing takes long: another head and other places of [MASK] are in tests/test_agreement.py."""
    encoder = load(tiny_roberta, "denoised").train()
    attention = encoder.backbone.config._attn_implementation
    torch.manual_seed(0)
    encoder.head = ProjectionHead("transform", encoder.backbone.config)
    encoder.continuous = ContinuousTemplate(encoder.text_encoder, encoder.backbone.get_input_embeddings())
    torch.nn.init.normal_(encoder.continuous.vectors)
    rows, texts = trace(encoder), probes(encoder.config.max_tokens)
    fused = fuse(trace(encoder, "fusible"), encoder)
    assert encoder.training  # as it was before
    assert encoder.backbone.config._attn_implementation == attention
    for model, tolerance in ((rows, 1e-5), (fused, 1e-5), (halve(fused), 5e-3), (int8(encoder, rows), 0.05)):
        assert difference(encoder, runner(model, encoder, tmp_path), texts).largest < tolerance


def test_the_probes_reach_every_length(tiny_bert: Path) -> None:
    encoder = load(tiny_bert)
    tokens = encoder.text_encoder.encode(probes(encoder.config.max_tokens))
    lengths = {len(sequence.ids) for sequence in tokens}
    assert min(lengths) == encoder.text_encoder.template_tokens
    assert max(lengths) == encoder.config.max_tokens
    assert any(sequence.cut for sequence in tokens)


def test_a_wrong_graph_is_seen(tiny_bert: Path, tmp_path: Path) -> None:
    encoder = load(tiny_bert)
    graph = runner(traced(tiny_bert, "cls")[1], encoder, tmp_path)
    assert difference(encoder, graph, probes(64)).largest > 1e-2


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
    assert str(Path(__file__).parents[3]).encode() not in traced(tiny_bert)[1].SerializeToString()


@pytest.mark.parametrize(("case", "whole"), [("mask", 1), ("mean", 2)])
def test_every_layer_is_fused(tiny_bert: Path, monkeypatch: pytest.MonkeyPatch, case: str, whole: int) -> None:
    encoder, fusible = traced(tiny_bert, case, "fusible")
    kinds = [node.op_type for node in fuse(fusible, encoder).graph.node]
    assert (kinds.count("Attention"), kinds.count("SkipLayerNormalization"), kinds.count("BiasGelu")) == (whole, 4, 2)
    monkeypatch.setattr(encoder.backbone.config, "num_hidden_layers", 3)
    with pytest.raises(ExportError, match="fusion is incomplete"):
        fuse(fusible, encoder)


def test_fp16_is_near_and_gives_float32(tiny_bert: Path, tmp_path: Path) -> None:
    encoder, fusible = traced(tiny_bert, form="fusible")
    graph = runner(halve(fuse(fusible, encoder)), encoder, tmp_path)
    assert graph.embed(["two dogs"]).dtype == np.float32
    assert graph.session.get_outputs()[0].type == "tensor(float)"
    assert 1e-7 < difference(encoder, graph, probes(64)).largest < 5e-3


class GatherElements(OpRun):
    """numpy's, because that of onnx.reference takes 64 indices at most."""

    op_domain = ""

    def _run(self, data: NDArray[Any], indices: NDArray[np.int64], axis: int = 0) -> tuple[NDArray[Any]]:
        return (np.take_along_axis(data, indices, axis),)


@pytest.mark.parametrize("pooling", ["weightedmean", "mean_sqrt_len_tokens"])  # a mean has no operator beside theirs
def test_fp16_holds_the_sums_of_a_long_text(pooling: PoolingMode, tiny_bert: Path, tmp_path: Path) -> None:
    """In arithmetic of 16 bits, which a GPU has; ONNX Runtime computes in 32 on a CPU. 1 to 400 add up to 80,200."""
    long = Path(shutil.copytree(tiny_bert, tmp_path / "long"))
    config = BertConfig.from_pretrained(tiny_bert, max_position_embeddings=512)
    BertModel(config, add_pooling_layer=False).save_pretrained(long)
    encoder = SentenceEncoder.load(str(long), template="[X]", pooling=pooling, max_tokens=400)
    batch = encoder.text_encoder.batch(["dog " * 500, "two dogs run"])
    assert batch.input_ids.shape == (2, 400)
    (found,) = ReferenceEvaluator(halve(trace(encoder, "fusible")), new_ops=[GatherElements]).run(None, batch._asdict())
    expected = encoder.embed(["dog " * 500, "two dogs run"])
    assert np.abs(found - expected).max() < 2e-2 * np.abs(expected).max()


@pytest.mark.parametrize("family", ["tiny_bert", "tiny_roberta"])
def test_int8_is_near_and_the_same_in_any_batch(family: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    encoder, exact = traced(request.getfixturevalue(family), form="exact")
    model = int8(encoder, exact)
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("MatMulIntegerToFloat") == 4 + 1  # queries, keys and values are one
    assert kinds.count("QuantizeLinear") == 4 + 1  # one for queries, keys and values
    assert kinds.count("Gemm") == 4
    whole = quantise(exact, vocabulary_feeds(encoder.text_encoder))
    assert whole.ByteSize() < exact.ByteSize() / 2  # of two layers one is kept above
    graph, texts = runner(model, encoder, tmp_path), probes(64)
    assert difference(encoder, graph, texts).largest < 0.05
    alone = np.concatenate([graph.embed([text]) for text in texts])
    np.testing.assert_allclose(graph.embed(texts, 10**9), alone, atol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "weightedmean"])
def test_an_int8_mean_has_the_same_bits_in_any_batch(pooling: PoolingMode, tiny_bert: Path, tmp_path: Path) -> None:
    """Also of long texts, whose states are weighed by 1 to L before they are added up."""
    encoder, exact = traced(tiny_bert, pooling, "exact")
    graph = runner(int8(encoder, exact), encoder, tmp_path)
    texts = ["two dogs run in the rain " * count for count in (1, 2, 4, 9)]
    np.testing.assert_array_equal(graph.embed(texts, 10**9), np.concatenate([graph.embed([text]) for text in texts]))


@pytest.mark.parametrize("hidden", ["Identity", "Gelu"])
def test_a_product_by_row_equals_numpys(hidden: str) -> None:
    """The scale of a row's shape goes beyond the text of the operator's schema, so its arithmetic is held here."""
    chance = np.random.default_rng(0)
    matrix, bias = chance.normal(size=(24, 16)).astype(np.float32), chance.normal(size=16).astype(np.float32)
    rows = chance.normal(size=(40, 24)).astype(np.float32) * np.logspace(-3, 3, 40, dtype=np.float32)[:, None]
    rows[7] = 0
    feeds = [{"x": rows}]
    model = quantise(product(hidden, matrix, bias), feeds)
    found = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds[0])[0]
    only = product(hidden, matrix, bias, hidden_only=True)
    shown = onnxruntime.InferenceSession(only.SerializeToString()).run(None, feeds[0])[0]
    zero = GELU_ZERO if hidden == "Gelu" else ZERO
    least = GELU_LEAST * (255 - zero) / zero if hidden == "Gelu" else TINY
    highest = shown.max(1) if hidden == "Gelu" else np.abs(shown).max(1)
    largest = np.maximum(highest, np.float32(least))[:, None]
    step = np.float32(1 / (255 - zero))
    integers = np.clip(np.rint(shown / largest / step) + zero, 0, 255).astype(np.int64) - zero
    wide = shown.astype(np.float64)
    weights, scales = fitted_codes(matrix, wide.T @ wide)
    expected = (integers @ weights) * (largest * step * scales) + bias
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max(1, keepdims=True).min())


def test_a_product_behind_a_layer_norm_equals_numpys() -> None:
    """One step a channel, fixed by what was seen; what is larger saturates."""
    chance = np.random.default_rng(0)
    matrix, bias = chance.normal(size=(24, 16)).astype(np.float32), chance.normal(size=16).astype(np.float32)
    gamma = np.logspace(-2, 1, 24, dtype=np.float32)
    norm = {"scale": gamma, "shift": np.zeros(24, np.float32)}
    model = product("LayerNormalization", matrix, bias, constants=norm)
    hidden = product("LayerNormalization", matrix, bias, hidden_only=True, constants=norm)
    seen, others = chance.normal(size=(2, 40, 24)).astype(np.float32)
    others[:24] = 1e6 * np.eye(24)  # in each channel what was never seen there
    found = onnxruntime.InferenceSession(quantise(model, [{"x": seen}]).SerializeToString()).run(None, {"x": others})[0]
    session = onnxruntime.InferenceSession(hidden.SerializeToString())
    [calibrated], [shown] = session.run(None, {"x": seen}), session.run(None, {"x": others})
    steps, wide = channel_steps(np.abs(calibrated).max(0), np.abs(matrix).max(1)), calibrated.astype(np.float64)
    integers = np.clip(np.rint(shown / steps) + ZERO, 0, 255).astype(np.int64) - ZERO
    assert integers.max() == 255 - ZERO
    weights, scales = fitted_codes(matrix * steps[:, None], (wide / steps).T @ (wide / steps))
    np.testing.assert_allclose(found, (integers @ weights) * scales + bias, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shown", [["sum"], ["sum", "y"], ["sum", "square"]])
def test_constants_are_added_to_a_product_whatever_else_reads_it(shown: list[str]) -> None:
    """If nothing but an addition reads the product, one operator does both; otherwise the product remains as well."""
    chance = np.random.default_rng(0)
    matrix, bias, first, second = (
        chance.normal(size=shape).astype(np.float32) for shape in ((24, 16), (16,), (16,), (16,))
    )
    norm = {"scale": np.ones(24, np.float32), "shift": np.zeros(24, np.float32)}
    rows = chance.normal(size=(40, 24)).astype(np.float32)
    alone = quantise(product("LayerNormalization", matrix, bias, constants=norm), [{"x": rows}])
    (y,) = onnxruntime.InferenceSession(alone.SerializeToString()).run(None, {"x": rows})
    model = product("LayerNormalization", matrix, bias, constants=norm)
    model.graph.node.extend(
        [
            helper.make_node("Add", ["y", "first"], ["once"]),
            helper.make_node("Add", ["once", "second"], ["sum"]),
            *([helper.make_node("Mul", ["y", "y"], ["square"])] if "square" in shown else []),
        ]
    )
    model.graph.initializer.extend([numpy_helper.from_array(first, "first"), numpy_helper.from_array(second, "second")])
    del model.graph.output[:]
    model.graph.output.extend(helper.make_tensor_value_info(name, 1, ["batch", None]) for name in shown)
    quantised = quantise(model, [{"x": rows}])
    found = onnxruntime.InferenceSession(quantised.SerializeToString()).run(shown, {"x": rows})
    expected = {"y": y, "square": y * y, "sum": y + first + second}
    for name, vectors in zip(shown, found, strict=True):
        np.testing.assert_allclose(vectors, expected[name], rtol=1e-5, atol=1e-5)
    before, after = ([node.op_type for node in each.graph.node].count("Add") for each in (alone, quantised))
    assert after - before == (0 if shown == ["sum"] else 2)


def test_steps_reach_just_beyond_the_largest_activation() -> None:
    activations, weights = np.float32([1, 10, 0.1]), np.float32([0.1, 0.1, 0.2])
    steps = channel_steps(activations, weights)
    assert (steps * (255 - ZERO) / activations).min() == pytest.approx(1.1)
    assert 1 < steps[1] / steps[0] < 10  # a channel ten times as large shares that with its weights
    for nothing in (np.zeros(3, np.float32), weights):
        assert (channel_steps(nothing, np.zeros(3, np.float32)) > 0).all()


def test_calibration_is_repeatable_and_reaches_every_length(tiny_bert: Path) -> None:
    encoder, model = traced(tiny_bert, form="exact")
    text_encoder = encoder.text_encoder
    feeds = vocabulary_feeds(text_encoder)
    for one, other in zip(feeds, vocabulary_feeds(text_encoder), strict=True):
        np.testing.assert_array_equal(one["input_ids"], other["input_ids"])
        assert len(one["input_ids"]) == 1
    lengths = {feed["input_ids"].shape[1] for feed in feeds}
    assert min(lengths) <= text_encoder.template_tokens + 4
    assert max(lengths) == encoder.config.max_tokens
    assert int8(encoder, model).SerializeToString() == int8(encoder, model).SerializeToString()


def test_channels_are_observed_over_all_feeds() -> None:
    model = product("Identity", np.ones((2, 1), np.float32), np.zeros(1, np.float32))
    feeds = [{"x": np.float32([[1, -7], [2, 0]])}, {"x": np.float32([[-3, 5]])}]
    channels = observe(model, ["shown"], feeds)["shown"]
    np.testing.assert_array_equal(channels.largest, [3, 7])
    np.testing.assert_array_equal(channels.products, [[14, -22], [-22, 74]])


def test_fitted_codes_lose_less_than_nearest_ones() -> None:
    """Of what is multiplied, where channels vary together; where they do not, they are the nearest."""
    chance = np.random.default_rng(0)
    matrix = chance.normal(size=(32, 8)).astype(np.float32)
    matrix[:, 3] = 0
    nearest, scales = codes(matrix, WEIGHT_LEVELS, axis=0)
    alone, same = fitted_codes(matrix, np.eye(32))
    np.testing.assert_array_equal(alone, nearest)
    np.testing.assert_allclose(same, scales[0], rtol=1e-6)
    rows = chance.normal(size=(500, 4)) @ chance.normal(size=(4, 32)) + 0.1 * chance.normal(size=(500, 32))
    fitted, _ = fitted_codes(matrix, rows.T @ rows)
    assert np.abs(fitted).max() <= WEIGHT_LEVELS
    lost = [np.linalg.norm(rows @ (each * scales - matrix)) for each in (fitted, nearest)]
    assert lost[0] < 0.6 * lost[1]


def test_fitted_codes_are_those_of_one_channel_after_another() -> None:
    """GPTQ's algorithm without blocks, on more channels than a block has."""
    chance = np.random.default_rng(0)
    matrix = chance.normal(size=(2 * BLOCK + 7, 5)).astype(np.float32)
    rows = chance.normal(size=(400, 20)) @ chance.normal(size=(20, len(matrix))) + chance.normal(size=(400, 1))
    products = rows.T @ rows
    order = np.argsort(-products.diagonal())
    damped = products + np.eye(len(matrix)) * DAMPING * products.diagonal().mean()
    rest, scales = matrix.astype(np.float64), np.abs(matrix).max(0) / WEIGHT_LEVELS
    expected = np.empty(matrix.shape)
    for place, channel in enumerate(order):
        left = order[place:]  # of which the first is rounded, and the others take its error
        inverse = np.linalg.inv(damped[np.ix_(left, left)])
        expected[channel] = np.clip(np.rint(rest[channel] / scales), -WEIGHT_LEVELS, WEIGHT_LEVELS)
        error = (rest[channel] - expected[channel] * scales) / inverse[0, 0]
        rest[left] -= np.outer(inverse[:, 0], error)
    found, _ = fitted_codes(matrix, products)
    np.testing.assert_array_equal(found, expected)


def product(
    hidden: str,
    matrix: NDArray[np.float32],
    bias: NDArray[np.float32],
    hidden_only: bool = False,
    constants: dict[str, NDArray[np.float32]] | None = None,
) -> ModelProto:
    """hidden(x, constants) @ matrix + bias, as torch exports a linear layer."""
    constants = constants or {}
    nodes = [helper.make_node(hidden, ["x", *constants], ["shown"])]
    if not hidden_only:
        nodes.append(helper.make_node("Gemm", ["shown", "matrix", "bias"], ["y"], transB=1))
    graph = helper.make_graph(
        nodes,
        "product",
        [helper.make_tensor_value_info("x", 1, ["batch", matrix.shape[0]])],
        [helper.make_tensor_value_info("shown" if hidden_only else "y", 1, ["batch", None])],
        [
            numpy_helper.from_array(matrix.T.copy(), "matrix"),
            numpy_helper.from_array(bias, "bias"),
            *(numpy_helper.from_array(array, name) for name, array in constants.items()),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@pytest.mark.parametrize("seed", range(5))
def test_sums_of_coarse_numbers_do_not_depend_on_their_order(seed: int) -> None:
    """Not in fp32, which adds them by the CPU's vector width: exact is what equals float64's sum."""
    query, key = torch.from_numpy(np.random.default_rng(seed).normal(size=(2, 64, 64)).astype(np.float32) * 1.5)
    fine = query @ key.T
    assert not torch.equal(fine, (query.double() @ key.T.double()).float())
    query, key = coarse(query, BITS["factor"]), coarse(key, BITS["factor"])
    assert torch.equal((query * 2 ** BITS["factor"]).round(), query * 2 ** BITS["factor"])
    assert torch.equal((query @ key.T).double(), query.double() @ key.T.double())


def test_every_weight_of_attention_is_far_from_the_edge_of_its_rounding() -> None:
    """So an exp that is wrong in its last bits gives the same weight; its arguments are few enough to try them all."""
    scores = -np.arange(1, 20 * 2 ** BITS["score"]) / 2 ** BITS["score"]
    weights = np.exp(scores) * 2 ** BITS["weight"]
    distance = np.abs(weights - np.floor(weights) - 0.5)
    assert (distance > 10 * np.finfo(np.float32).eps * weights).all()


def test_codes_lose_at_most_half_a_step() -> None:
    matrix = np.random.default_rng(0).normal(size=(70, 5)).astype(np.float32)
    matrix[:, 2] = 0
    integers, scales = codes(matrix, WEIGHT_LEVELS, axis=0)
    assert (integers.shape, scales.shape) == ((70, 5), (1, 5))
    assert np.abs(integers).max() == WEIGHT_LEVELS
    assert (np.abs(integers * scales - matrix) <= scales / 2 + 1e-7).all()
    assert not integers[:, 2].any()
