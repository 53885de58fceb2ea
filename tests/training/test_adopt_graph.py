"""A bundle of a repository's own ONNX graph, without torch: the vectors of sentence-transformers, and refusals."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from repository_graph import write_repository_graph
from safetensors.numpy import save_file
from saved_models import edit, own_vectors, saved, unit
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.sentence_transformer.modules import LayerNorm
from torch import nn

from cloze.adoption.bundle import write
from cloze.adoption.modules import AdoptionError, limit_of
from cloze.encoding.bundle import Bundle
from cloze.encoding.errors import ClozeError
from cloze.training.hub.adoption import load_sentence_transformer
from cloze.training.model.graph_encoder import GraphEncoder

TEXTS = [
    "",
    "a",
    "Two dogs run.",
    "The [MASK] says [SEP] to a town.",
    "Zwölf naïve 日本語 🙂",
    "rain over the city " * 40,
]
FEW = TEXTS[2:4]
# Pooling, modules behind it, and the opset of the graph: the axes of reductions are attributes, inputs of sums, inputs.
MODELS: dict[str, tuple[str, list[nn.Module], int]] = {
    "mean": ("mean", [], 11),
    "cls": ("cls", [Dense(32, 24)], 14),
    "max": ("max", [Dense(32, 24, bias=False, activation_function=nn.GELU())], 17),
    "max of opset 18": ("max", [Dense(32, 24, activation_function=nn.ReLU())], 18),
    "lasttoken": ("lasttoken", [Dense(32, 32, activation_function=nn.Sigmoid(), use_residual=True)], 13),
    "weightedmean": (
        "weightedmean",
        [Normalize(), Dense(32, 16, activation_function=nn.Identity(), use_residual=True)],
        12,
    ),
    "mean_sqrt_len_tokens": ("mean_sqrt_len_tokens", [LayerNorm(32), Dense(32, 8)], 14),
    "LayerNorm of opset 18": ("mean", [LayerNorm(32)], 18),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> Path:
    """A tiny BERT with a Dense and its graph."""
    folder = saved(tmp_path_factory.mktemp("model"), tiny_bert, "bert", {}, "mean", [Dense(32, 24)])
    write_repository_graph(folder)
    return folder


@pytest.fixture
def copied(model: Path, tmp_path: Path) -> Path:
    return shutil.copytree(model, tmp_path / "copied")


@pytest.mark.parametrize("case", MODELS)
def test_the_vectors_are_those_of_sentence_transformers(case: str, tmp_path: Path, tiny_bert: Path) -> None:
    pooling, behind, opset = MODELS[case]
    model = saved(tmp_path, tiny_bert, "bert", {}, pooling, behind)
    write_repository_graph(model, opset=opset)
    write(str(model), model, tmp_path / "bundle")
    bundle = Bundle.load(tmp_path / "bundle")
    graph = GraphEncoder.of(bundle, "fp32")
    np.testing.assert_allclose(unit(graph.embed(TEXTS)), own_vectors(model, TEXTS), atol=1e-5)
    queries = unit(graph.within(bundle.named["query"]).embed(FEW))
    np.testing.assert_allclose(queries, own_vectors(model, FEW, prompt_name="query"), atol=1e-5)
    assert bundle.spec.provenance.parity["fp32"] < 1e-5


@pytest.mark.parametrize(
    ("name", "tokenizer", "keys"),
    [
        ("xlm-roberta", "tiny_roberta", {}),
        ("distilbert", "tiny_bert", {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}),
    ],
)
def test_the_configuration_is_that_of_the_road_of_torch(
    name: str, tokenizer: str, keys: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Here with models whose graphs have no token types, and of which one counts positions from behind the padding."""
    model = saved(tmp_path, request.getfixturevalue(tokenizer), name, keys, "mean", [])
    edit(model / "config_sentence_transformers.json", default_prompt_name="query")
    write_repository_graph(model, types=False)
    for limit in (48, None):
        edit(model / "sentence_bert_config.json", max_seq_length=limit)
        if limit is None:
            edit(model / "tokenizer_config.json", model_max_length=512)
        write(str(model), model, tmp_path / "bundle")
        spec = Bundle.load(tmp_path / "bundle").spec
        encoder = load_sentence_transformer(str(model), FEW)
        assert {key: getattr(spec, key) for key in type(encoder.config).model_fields} == encoder.config.model_dump()


def test_a_graph_that_pools_already_is_read_at_its_tokens(copied: Path, tmp_path: Path) -> None:
    """As sentence-transformers' own exporter writes it: two outputs, `token_embeddings` and `sentence_embedding`."""
    path = copied / "onnx" / "model.onnx"
    graph = onnx.load(path)
    old = graph.graph.output[0].name
    graph.graph.node.append(onnx.helper.make_node("Identity", [old], ["token_embeddings"]))
    graph.graph.node.append(onnx.helper.make_node("ReduceMax", [old], ["sentence_embedding"], axes=[1], keepdims=0))
    del graph.graph.output[:]
    for name, shape in (("token_embeddings", ["n", "L", 32]), ("sentence_embedding", ["n", 32])):
        graph.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape))
    onnx.save(graph, path)
    write(str(copied), copied, tmp_path / "bundle")
    found = GraphEncoder.of(Bundle.load(tmp_path / "bundle"), "fp32").embed(FEW)
    np.testing.assert_allclose(unit(found), own_vectors(copied, FEW), atol=1e-5)


@pytest.mark.parametrize("linked", [False, True])
def test_weights_in_a_file_beside_the_graph_are_read(linked: bool, copied: Path, tmp_path: Path) -> None:
    graph = onnx.load(copied / "onnx" / "model.onnx")
    onnx.save(
        graph, copied / "onnx" / "model.onnx", save_as_external_data=True, location="model.onnx_data", size_threshold=0
    )
    if linked:  # as in the cache of the hub's files
        data = (copied / "onnx" / "model.onnx_data").rename(tmp_path / "blob")
        (copied / "onnx" / "model.onnx_data").symlink_to(data)
    write(str(copied), copied, tmp_path / "bundle")
    assert not list((tmp_path / "bundle").rglob("*_data"))
    found = GraphEncoder.of(Bundle.load(tmp_path / "bundle"), "fp32").embed(FEW)
    np.testing.assert_allclose(unit(found), own_vectors(copied, FEW), atol=1e-5)


def test_special_tokens_of_the_separate_file_are_known(copied: Path, tmp_path: Path) -> None:
    config = json.loads((copied / "tokenizer_config.json").read_text())
    named = {role: config.pop(role) for role in ("cls_token", "sep_token", "pad_token", "mask_token")}
    (copied / "tokenizer_config.json").write_text(json.dumps(config))
    (copied / "special_tokens_map.json").write_text(json.dumps(named))
    write(str(copied), copied, tmp_path / "bundle")
    assert Bundle.load(tmp_path / "bundle").text_encoder.special.mask is not None


def regraph(model: Path, **names: str) -> None:
    """Rename inputs and outputs of the graph."""
    path = model / "onnx" / "model.onnx"
    graph = onnx.load(path)
    for value in (*graph.graph.input, *graph.graph.output):
        value.name = names.get(value.name, value.name)
    for node in graph.graph.node:
        for each in (node.input, node.output):
            each[:] = [names.get(name, name) for name in each]
    onnx.save(graph, path)


BROKEN = {
    "no graph": (
        lambda model: shutil.rmtree(model / "onnx"),
        r"has no onnx/model\.onnx, .*pip install '\.\[train\]'",
    ),
    "another file": (
        lambda model: (model / "onnx" / "model.onnx").write_bytes(b"version https://git-lfs"),
        "cannot be read as a graph",
    ),
    "other inputs": (
        lambda model: regraph(model, token_type_ids="position_ids"),
        r"has the inputs input_ids, attention_mask, position_ids; .*'\.\[train\]'",
    ),
    "other outputs": (
        lambda model: regraph(model, last_hidden_state="logits"),
        r"has the outputs logits; Cloze expects last_hidden_state or token_embeddings; .*'\.\[train\]'",
    ),
    "weights of torch": (
        lambda model: (model / "2_Dense" / "model.safetensors").rename(model / "2_Dense" / "pytorch_model.bin"),
        r"has no 2_Dense/model\.safetensors, which Cloze needs to read the module without torch; .*'\.\[train\]'",
    ),
    "another activation": (
        lambda model: edit(model / "2_Dense" / "config.json", activation_function="torch.nn.modules.activation.Mish"),
        r"has the activation function Mish in 2_Dense; without torch, Cloze supports only Identity, .*'\.\[train\]'",
    ),
    "another module": (
        lambda model: edit_modules(model, 2, type="sentence_transformers.models.Dropout"),
        "has the modules Transformer, Pooling, Dropout, Normalize; Cloze serves",
    ),
    "a module of its own": (
        lambda model: edit_modules(model, 2, type="modeling.Dense"),
        r"has the module modeling\.Dense, which is custom code, and Cloze does not run custom code",
    ),
    "a module elsewhere": (
        lambda model: edit_modules(model, 2, path="../2_Dense"),
        r"modules\.json names \.\./2_Dense, which is outside the model's folder",
    ),
    "another prompt's tokens": (
        lambda model: edit(model / "1_Pooling" / "config.json", include_prompt=False),
        "has include_prompt: false",
    ),
    "more tokens than positions": (
        lambda model: (
            edit(model / "config.json", max_position_embeddings=512),
            edit(model / "sentence_bert_config.json", max_seq_length=100),
        ),
        r"has a graph that fails on inputs of up to 100 tokens \(.*\); give a lower --max-tokens than 100",
    ),
    "no limit": (
        lambda model: (
            edit(model / "config.json", max_position_embeddings=None),
            edit(model / "sentence_bert_config.json", max_seq_length=None),
            edit(model / "tokenizer_config.json", model_max_length=10**30),
        ),
        "does not say how many tokens it reads; give --max-tokens",
    ),
    "no tokenizer": (lambda model: (model / "tokenizer.json").unlink(), r"has no fast tokenizer \(tokenizer\.json\)"),
    "no configuration": (lambda model: (model / "config.json").unlink(), r"has no config\.json; get the model again"),
    "weights cut short": (
        lambda model: (model / "2_Dense" / "model.safetensors").write_bytes(b"\x00"),
        r"2_Dense/model\.safetensors cannot be read \(.*\); get the model again",
    ),
    "weights of other names": (
        lambda model: save_file({"weight": np.zeros((24, 32), np.float32)}, model / "2_Dense" / "model.safetensors"),
        r"2_Dense/model\.safetensors has no linear\.weight; get the model again",
    ),
    "a list of prompts": (
        lambda model: edit(model / "config_sentence_transformers.json", prompts=["query: "]),
        r"the prompts in config_sentence_transformers\.json are not an object of names and texts",
    ),
    "a bundle": (
        lambda model: (model / "modules.json").rename(model / "embedding.json"),
        "is a bundle already; serve it",
    ),
    "a broken file": (lambda model: (model / "modules.json").write_text("["), r"modules\.json cannot be read as JSON"),
}


def edit_modules(model: Path, at: int, **keys: str) -> None:
    rows = json.loads((model / "modules.json").read_text())
    rows[at] |= keys
    (model / "modules.json").write_text(json.dumps(rows))


@pytest.mark.parametrize("case", BROKEN)
def test_what_cannot_be_held_is_refused_by_name(case: str, copied: Path, tmp_path: Path) -> None:
    breaks, message = BROKEN[case]
    breaks(copied)
    with pytest.raises(ClozeError, match=message):
        write(str(copied), copied, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_a_graph_that_reads_its_padding_is_refused(copied: Path, tmp_path: Path) -> None:
    """Here one whose states are those of the whole sequence, so that a longer neighbour changes them."""
    path = copied / "onnx" / "model.onnx"
    graph = onnx.load(path)
    regraph(copied, last_hidden_state="before")
    graph = onnx.load(path)
    del graph.graph.output[:]
    graph.graph.node.append(onnx.helper.make_node("ReduceMax", ["before"], ["largest"], axes=[1], keepdims=1))
    graph.graph.node.append(onnx.helper.make_node("Add", ["before", "largest"], ["last_hidden_state"]))
    graph.graph.output.append(
        onnx.helper.make_tensor_value_info("last_hidden_state", onnx.TensorProto.FLOAT, ["n", "L", 32])
    )
    onnx.save(graph, path)
    with pytest.raises(
        ClozeError, match=r"the vector of a text changes by .* in a batch with longer texts, .*the padding"
    ):
        write(str(copied), copied, tmp_path / "bundle")


def test_max_tokens_may_be_lower(model: Path, tmp_path: Path) -> None:
    write(str(model), model, tmp_path / "bundle", 16)
    assert Bundle.load(tmp_path / "bundle").spec.max_tokens == 16
    with pytest.raises(ClozeError, match=r"max_tokens is 67; .* has positions for 66: lower it"):
        write(str(model), model, tmp_path / "other", 67)


def test_heads_that_are_replaced_are_said(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(str(model), model, tmp_path / "bundle", 16)
    (tmp_path / "bundle" / "heads").mkdir()
    capsys.readouterr()
    write(str(model), model, tmp_path / "bundle", 16)
    assert "bundle: its heads and its calibration do not fit the new model; learn them again" in capsys.readouterr().err
    assert not (tmp_path / "bundle" / "heads").exists()


def test_a_model_that_lowers_its_text_itself_is_lowered_in_the_bundle(tmp_path: Path, tiny_roberta: Path) -> None:
    """Its tokenizer tells cases apart."""
    model = saved(tmp_path, tiny_roberta, "roberta", {}, "mean", [])
    edit(model / "sentence_bert_config.json", do_lower_case=True)
    write_repository_graph(model, types=False)
    write(str(model), model, tmp_path / "bundle")
    texts = ["Two DOGS run over the Green field.", *TEXTS]
    found = GraphEncoder.of(Bundle.load(tmp_path / "bundle"), "fp32").embed(texts)
    np.testing.assert_allclose(unit(found), own_vectors(model, texts), atol=1e-5)
    np.testing.assert_allclose(unit(found[:1]), own_vectors(model, [texts[0].lower()]), atol=1e-5)


@pytest.mark.parametrize("rows", [{"a": 1}, ["x"], [{"type": "sentence_transformers.models.Transformer"}]])
def test_modules_that_are_no_list_of_modules_are_refused(rows: Any, copied: Path, tmp_path: Path) -> None:
    (copied / "modules.json").write_text(json.dumps(rows), encoding="utf-8")
    with pytest.raises(AdoptionError, match="does not give a type and a path for each module; get the model again"):
        write(str(copied), copied, tmp_path / "bundle")


def test_a_padding_id_that_is_null_is_the_usual_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "roberta", "pad_token_id": None, "max_position_embeddings": 514}), encoding="utf-8"
    )
    assert limit_of(tmp_path) == (512, 512)
