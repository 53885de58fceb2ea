"""A bundle as a sentence-transformers model: its ids, files, prompts and training, and the road back."""

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from numpy.typing import NDArray
from onnx import ModelProto
from recipes import load_recipe
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer import losses
from test_imports import without
from tiny_graphs import traced
from tokenizers import Tokenizer
from tokenizers.models import Unigram
from tokenizers.pre_tokenizers import Metaspace
from torch import nn
from transformers import (
    AutoTokenizer,
    DistilBertConfig,
    DistilBertModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    set_seed,
)

from cloze.encoding.bundle import Bundle, changing
from cloze.encoding.calibration import CALIBRATION_FILE
from cloze.encoding.template import PoolingMode, Template
from cloze.encoding.text import SpecialTokens, TextEncoder
from cloze.training.convert import convert
from cloze.training.errors import EncoderError, ExportError, RunError
from cloze.training.export import __main__ as export
from cloze.training.export import bundle as exporting
from cloze.training.export.layers import Form
from cloze.training.hub.prompted_transformer import PromptedTransformer
from cloze.training.hub.sentence_transformer import saved_settings, write
from cloze.training.methods import objective_of
from cloze.training.model.continuous_template import ContinuousTemplate
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.graph_encoder import GraphEncoder
from cloze.training.model.heads import ProjectionHead
from cloze.training.model.token_weights import TokenWeights

pytestmark = pytest.mark.usefixtures("custom_code")

QUOTED = 'This sentence of "[X]" means [MASK].'
CODE = "prompted_transformer.py"
TEXTS = [
    "",
    " \t\n",
    "a",
    "  two dogs run \n",
    "Two dogs run.",
    'She said "no"',
    "[MASK]",
    "The [MASK] says [SEP] and [CLS] to a <mask> in </s> town [X] <s><pad>[PAD][UNK].",
    "Zwölf Boxkämpfer – 日本語 🙂 \u200b naïve",
    "rain over the old city " * 40,
]
AT_MASK = {"template": QUOTED, "pooling": "mask"}
BEFORE = {"template": "It means [MASK]: [X]!", "pooling": "mask"}


def unigram(pre_tokenizer: Metaspace | None) -> PreTrainedTokenizerBase:
    """Special tokens with the best score of all pieces, as in XLM-R's vocabulary."""
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    pieces = [(piece, -3.0) for piece in ("▁", " ", "▁rain", " rain", "rain", "s", "mask", *"</>.")]
    tokenizer = Tokenizer(Unigram([*((each, 0.0) for each in special), *pieces], unk_id=3))
    if pre_tokenizer:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.add_special_tokens(special)
    names = dict(zip(("cls_token", "pad_token", "sep_token", "unk_token", "mask_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


@pytest.fixture(params=["tiny_bert", "tiny_roberta", "unigram", "unigram with spaces"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    if request.param.startswith("tiny"):
        return AutoTokenizer.from_pretrained(request.getfixturevalue(request.param))
    return unigram(Metaspace() if "spaces" in request.param else None)


TEMPLATES: list[tuple[str, PoolingMode]] = [
    (QUOTED, "mask"),
    ("rain ' [X] ' means [MASK] .", "mask"),
    ("Also called [MASK]: [X]", "mask"),
    (" [X] [MASK]", "mask"),
    ("[X]", "cls"),
    ("query: [X]", "mean"),
]


def test_its_ids_are_those_of_cloze(tokenizer: PreTrainedTokenizerBase, subtests: pytest.Subtests) -> None:
    special = SpecialTokens(
        tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id, tokenizer.mask_token_id
    )
    for (source, pooling), period in product(TEMPLATES, (False, True)):
        with subtests.test(source, final_period=period):
            own = TextEncoder(tokenizer.backend_tokenizer, special, Template.parse(source, pooling), 40, period)
            config = {"template": source, "pooling": pooling, "max_tokens": 40, "final_period": period}
            module = PromptedTransformer(nn.Identity(), tokenizer, config, nn.Sequential())
            for texts in (TEXTS, *([text] for text in TEXTS)):
                found, expected = module.preprocess(texts), own.batch(texts)
                np.testing.assert_array_equal(found["input_ids"], expected.input_ids)
                np.testing.assert_array_equal(found["attention_mask"], expected.attention_mask)
                lengths = expected.attention_mask.sum(1)
                index = own.mask_index or 0
                assert found["place"].tolist() == [index if index >= 0 else length + index for length in lengths]


def test_a_limit_that_leaves_no_room_is_refused(tiny_bert: Path) -> None:
    config = {**AT_MASK, "max_tokens": 5, "final_period": False}
    module = PromptedTransformer(nn.Identity(), AutoTokenizer.from_pretrained(tiny_bert), config, nn.Sequential())
    with pytest.raises(ValueError, match="leaves no room for a text in 5 tokens"):
        module.preprocess(["a"])


def units(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def encoder(folder: Path, head: str | None = None, weights: float = 0, **settings: Any) -> SentenceEncoder:
    """Token ids below the share `weights` of the vocabulary weigh half of what the others weigh."""
    made = SentenceEncoder.load(str(folder), **settings)
    if weights:
        vocabulary = made.word_embeddings.num_embeddings
        table = np.where(np.arange(vocabulary) < weights * vocabulary, 0.5, 1)
        made.token_weights = TokenWeights(table[:, None])
    if head:
        made.head = ProjectionHead(head, made.backbone.config)  # type: ignore[arg-type]
    return made


def written(made: SentenceEncoder, folder: Path, texts: Sequence[str] = TEXTS) -> SentenceTransformer:
    folder.mkdir()
    write(made, folder, texts)
    return opened(folder)


def opened(folder: Path) -> SentenceTransformer:
    return SentenceTransformer(str(folder), device="cpu", trust_remote_code=(folder / CODE).exists())


CASES: dict[str, tuple[str, dict[str, Any], bool]] = {  # parent, settings, with custom code
    "cls": ("tiny_bert", {"template": "[X]", "pooling": "cls"}, False),
    "mean of roberta": ("tiny_roberta", {"template": "[X]", "pooling": "mean"}, True),  # it keeps the blanks of a text
    "mean with a prefix": ("tiny_bert", {"template": "query: [X]", "pooling": "mean", "max_tokens": 20}, True),
    "mean with weights": ("tiny_bert", {"template": "[X]", "pooling": "mean", "weights": 0.5}, False),
    "mean with a prefix and weights": (
        "tiny_bert",
        {"template": "query: [X]", "pooling": "mean", "weights": 0.5},
        True,
    ),
    **{
        f"{pooling} with a prefix": ("tiny_bert", {"template": "query: [X]", "pooling": pooling}, True)
        for pooling in ("max", "lasttoken", "weightedmean", "mean_sqrt_len_tokens")
    },
    "max of roberta": ("tiny_roberta", {"template": "[X]", "pooling": "max"}, True),
    "tanh": ("tiny_bert", {"template": "[X]", "pooling": "cls", "head": "tanh"}, True),
    "mask": ("tiny_bert", {**AT_MASK, "final_period": True}, True),
    "mask with a head": ("tiny_roberta", {**AT_MASK, "head": "transform"}, True),
    "denoised": ("tiny_roberta", {**AT_MASK, "denoising": True, "final_period": True}, True),
    "denoised, transform": ("tiny_bert", {**AT_MASK, "denoising": True, "head": "transform"}, True),
    "denoised, tanh": ("tiny_bert", {**BEFORE, "denoising": True, "head": "tanh"}, True),
}


@pytest.mark.parametrize("name", CASES)
def test_vectors_are_those_of_torch_and_stay_so_when_saved_again(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    parent, settings, custom = CASES[name]
    made = encoder(request.getfixturevalue(parent), **settings)
    model = written(made, tmp_path / "model")
    assert (tmp_path / "model" / CODE).exists() is custom
    texts = [text for text in TEXTS if text.strip() or not made.config.denoising]  # an empty one has no direction then
    expected = units(made.embed(texts))
    np.testing.assert_allclose(model.encode(texts), expected, atol=1e-5, rtol=0)
    assert model.max_seq_length == made.config.max_tokens
    assert model.get_embedding_dimension() == 32
    assert model.similarity_fn_name == "cosine"
    model.save(str(tmp_path / "again"))
    again = tmp_path / "again"
    np.testing.assert_allclose(opened(again).encode(texts), expected, atol=1e-5, rtol=0)
    back = SentenceEncoder.load(str(again), **saved_settings(again))
    assert back.config == made.config
    np.testing.assert_allclose(units(back.embed(texts)), expected, atol=1e-6, rtol=0)


def test_named_templates_are_prompts(tiny_bert: Path, tmp_path: Path) -> None:
    prefixes = {"query": "query: [X]", "document": "passage: [X]"}
    quoted = {"query": 'The question "[X]" means [MASK].', "document": 'The text "[X]" means [MASK].'}
    cases = ({"template": "[X]", "pooling": "mean"}, prefixes, False), (AT_MASK, quoted, True)
    for number, (settings, named, custom) in enumerate(cases):
        made = encoder(tiny_bert, **settings, templates=named)
        folder = tmp_path / str(number)
        model = written(made, folder)
        assert (folder / CODE).exists() is custom
        texts = ["two dogs", "", "[MASK] of the rain", "rain " * 100]
        for name, encode in (("query", model.encode_query), ("document", model.encode_document)):
            expected = units(SentenceEncoder.load(str(tiny_bert), **settings | {"template": named[name]}).embed(texts))
            np.testing.assert_allclose(encode(texts), expected, atol=1e-5, rtol=0)
        np.testing.assert_allclose(model.encode(texts), units(made.embed(texts)), atol=1e-5, rtol=0)
        similarity = model.similarity(model.encode_query(texts[:1]), model.encode_document(texts))
        assert similarity.shape == (1, 4)
        model.save(str(folder / "again"))
        assert saved_settings(folder / "again")["templates"] == named


def test_a_prompt_without_a_place_for_the_text_goes_before_it(tiny_bert: Path, tmp_path: Path) -> None:
    model = written(encoder(tiny_bert, **AT_MASK), tmp_path / "model")
    expected = encoder(tiny_bert, **AT_MASK | {"template": QUOTED.replace("[X]", "old: [X]")})
    np.testing.assert_allclose(
        model.encode(["city"], prompt="old: "), units(expected.embed(["city"])), atol=1e-5, rtol=0
    )


def test_another_template_is_refused_where_a_bias_is_subtracted(tiny_bert: Path, tmp_path: Path) -> None:
    model = written(encoder(tiny_bert, **AT_MASK, denoising=True), tmp_path / "model")
    with pytest.raises(
        ValueError, match="subtracts the vector of its own template, so a prompt cannot be another template"
    ):
        model.encode(["city"], prompt="the old [X] means [MASK].")
    np.testing.assert_array_equal(model.encode(["city"], prompt=AT_MASK["template"]), model.encode(["city"]))


@pytest.mark.long
def test_it_runs_where_cloze_is_not_installed(tiny_bert: Path, tmp_path: Path) -> None:
    written(encoder(tiny_bert, **AT_MASK), tmp_path / "model")
    script = """
import os
os.chdir(sys.argv[1])
from sentence_transformers import SentenceTransformer
print(SentenceTransformer(".", device="cpu", trust_remote_code=True).encode(["rain"]).shape)
"""
    assert without({"cloze"}, script, str(tmp_path / "model")) == "(1, 32)\n"


def test_others_can_read_the_weights(tiny_bert: Path, tmp_path: Path) -> None:
    written(encoder(tiny_bert, head="tanh", **AT_MASK), tmp_path / "model")
    files = list((tmp_path / "model").glob("*.safetensors"))
    assert files
    for path in files:
        assert path.stat().st_mode & 0o044 == 0o044


def test_a_continuous_template_is_refused(tiny_bert: Path, tmp_path: Path) -> None:
    made = encoder(tiny_bert, **AT_MASK)
    made.continuous = ContinuousTemplate(made.text_encoder, made.word_embeddings)
    with pytest.raises(ExportError, match="a continuous template cannot become a sentence-transformers model"):
        write(made, tmp_path, TEXTS)


def test_other_vectors_are_refused(tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = encoder(tiny_bert, **AT_MASK)
    monkeypatch.setattr(made, "embed", lambda texts: np.ones((len(texts), 32), dtype=np.float32))
    with pytest.raises(ExportError, match=r"vectors differ from torch's by .*the limit is 1e-05"):
        write(made, tmp_path, TEXTS)


def test_other_models_of_the_library_are_not_read(tmp_path: Path) -> None:
    types = [f"sentence_transformers.models.{name}" for name in ("Transformer", "Pooling", "Dense")]
    (tmp_path / "modules.json").write_text(json.dumps([{"type": each} for each in types]))
    (tmp_path / "config_sentence_transformers.json").write_text("{}")
    with pytest.raises(EncoderError, match=r"modules Transformer, Pooling, Dense, .* `cloze adopt`"):
        saved_settings(tmp_path)
    types = [f"sentence_transformers.models.{name}" for name in ("Transformer", "Pooling", "Normalize")]
    (tmp_path / "modules.json").write_text(json.dumps([{"type": each} for each in types]))
    (tmp_path / "1_Pooling").mkdir()
    for prompt, pooling, message in (
        ({"default_prompt_name": "query"}, {}, "a default prompt or shorter vectors"),
        ({"truncate_dim": 8}, {}, "a default prompt or shorter vectors"),
        ({}, {"include_prompt": False}, "excludes the prompt's tokens from its pooling"),
    ):
        (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompt))
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"} | pooling))
        with pytest.raises(EncoderError, match=rf"{message}.*cloze adopt"):
            saved_settings(tmp_path)
    (tmp_path / "modules.json").write_text(
        json.dumps([{"type": "prompted_transformer.PromptedTransformer"}, {"type": types[-1]}])
    )
    (tmp_path / "embedding_config.json").write_text(json.dumps({"template": "[X] means [MASK].", "pooling": "mask"}))
    (tmp_path / "config_sentence_transformers.json").write_text('{"truncate_dim": 8}')
    with pytest.raises(EncoderError, match="a default prompt or shorter vectors"):
        saved_settings(tmp_path)
    (tmp_path / "modules.json").write_text("[1]")
    with pytest.raises(EncoderError, match=r"has no settings that Cloze wrote .*cloze adopt"):
        saved_settings(tmp_path)


# Bundles


@pytest.fixture
def run(tmp_path: Path, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run with a [MASK] model. Its graph is traced once."""

    def remembered(made: SentenceEncoder, form: Form) -> ModelProto:
        return traced(made, tiny_bert, form)

    monkeypatch.setattr(exporting, "trace", remembered)
    folder = tmp_path / "run"
    encoder(tiny_bert, **AT_MASK).save(folder / "model")
    recipe = {"method": "simcse", "encoder": "tiny", "corpus": ["rain.txt"]}
    content = {"parent": "tiny", "recipe": recipe, "data": [], "commit": None, "seeds": [42]}
    (folder / "run.json").write_text(json.dumps(content))
    return folder


@pytest.mark.long
def test_a_converted_bundle_keeps_its_graphs_and_its_space(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, out = tmp_path / "plain", tmp_path / "converted"
    export.main([str(run), str(plain), "--precision", "fp32"])
    convert(plain, out, run)
    with changing(Bundle.load(out)) as folder:
        (folder / CALIBRATION_FILE).write_text("{}", encoding="utf-8")
    convert(plain, out, run)
    assert f"{out}: its heads and its calibration do not fit the new model" in capsys.readouterr().err
    before, after = Bundle.load(plain), Bundle.load(out)
    assert after.spec.space == before.spec.space
    assert after.spec.files["onnx/model.onnx"] == before.spec.files["onnx/model.onnx"]
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "library_name: sentence-transformers" in card
    assert f"`SentenceTransformer(FOLDER, trust_remote_code=True)` runs `{CODE}`" in card
    expected = units(GraphEncoder.of(before, "fp32").embed(TEXTS))
    np.testing.assert_allclose(opened(out).encode(TEXTS), expected, atol=1e-5, rtol=0)
    with pytest.raises(RunError, match=r"can already load .*converted; there is nothing to convert"):
        convert(out, tmp_path / "twice", run)


def test_weights_of_another_run_are_refused(run: Path, tmp_path: Path) -> None:
    export.main([str(run), str(tmp_path / "plain"), "--precision", "fp32"])
    other = SentenceEncoder.load(str(run / "model"))
    other.backbone.get_input_embeddings().weight.data[7, 7] += 1e-3
    other.save(run / "model")
    with pytest.raises(RunError, match=r"is not the run that .*plain was exported from"):
        convert(tmp_path / "plain", tmp_path / "out", run)


def test_a_bundle_with_cls_pooling_needs_no_code_of_its_own(run: Path, tmp_path: Path) -> None:
    encoder(run / "model", template="[X]", pooling="cls").save(run / "model")
    export.main([str(run), str(tmp_path / "bundle"), "--sentence-transformers"])
    card = (tmp_path / "bundle" / "README.md").read_text(encoding="utf-8")
    assert "`SentenceTransformer(FOLDER)` gives the same vectors" in card
    expected = units(GraphEncoder.of(Bundle.load(tmp_path / "bundle"), "fp32").embed(TEXTS))
    found = SentenceTransformer(str(tmp_path / "bundle"), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)


def test_it_teaches_with_its_own_template_and_pooling(run: Path, tmp_path: Path, tiny_bert: Path) -> None:
    encoder(run / "model", template="[X]", pooling="cls").save(run / "model")
    export.main([str(run), str(tmp_path / "bundle"), "--sentence-transformers"])
    keys = {"encoder": [str(tiny_bert)], "corpus": ["unused.txt"], "batch_size": ["4"], "max_tokens": ["64"]}
    recipe = load_recipe("distill", keys | {"teacher": [str(tmp_path / "bundle")]})
    student = SentenceEncoder.load(str(tiny_bert), template="[X]", pooling="mean")
    objective = objective_of("distill")(student, recipe)
    expected = units(opened(tmp_path / "bundle").encode(["Two dogs run."]))
    found = objective.views([("Two dogs run.",)])["student"]["target"]
    np.testing.assert_allclose(found, expected, atol=1e-3, rtol=0)


@pytest.mark.long
def test_its_trainer_goes_on_and_export_takes_the_result(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export.main([str(run), str(tmp_path / "bundle"), "--sentence-transformers", "--max-tokens", "40"])
    model = opened(tmp_path / "bundle")
    before = model.encode(TEXTS)
    rows = {
        "anchor": ["two dogs", "rain", "a man", "the city"],
        "positive": ["dogs run", "old rain", "a friend", "field"],
    }
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path / "trained"),
        max_steps=2,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    loss = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2)
    SentenceTransformerTrainer(model, arguments, train_dataset=Dataset.from_dict(rows), loss=loss).train()
    after = model.eval().encode(TEXTS)
    assert np.abs(after - before).max() > 1e-3
    model.save(str(tmp_path / "trained"))
    monkeypatch.undo()  # trace it anew: other weights
    export.main([str(tmp_path / "trained"), str(tmp_path / "back"), "--sentence-transformers"])
    bundle = Bundle.load(tmp_path / "back")
    assert (bundle.spec.pooling, bundle.spec.max_tokens, bundle.spec.provenance.parent) == ("mask", 40, "trained")
    np.testing.assert_allclose(units(GraphEncoder.of(bundle, "fp32").embed(TEXTS)), after, atol=1e-5, rtol=0)
    np.testing.assert_allclose(opened(tmp_path / "back").encode(TEXTS), after, atol=1e-5, rtol=0)
    card = (tmp_path / "back" / "README.md").read_text(encoding="utf-8")
    assert "Trained by sentence-transformers" in card
    assert "cloze.training.fit" not in card
    assert "`SentenceTransformer(FOLDER, trust_remote_code=True)` runs" in card


def test_a_bundle_without_a_digest_of_its_weights_is_not_converted(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting.Canaries, "write", lambda *_: None)  # as in format 2
    export.main([str(run), str(tmp_path / "plain"), "--precision", "fp32"])
    with pytest.raises(RunError, match="by an earlier Cloze, which stored no digest"):
        convert(tmp_path / "plain", tmp_path / "out", run)


def test_a_kept_head_of_distilbert_whose_configuration_has_other_keys(tiny_bert: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    set_seed(0)
    config = DistilBertConfig(
        vocab_size=len(tokenizer), dim=32, n_layers=2, n_heads=4, hidden_dim=64, max_position_embeddings=64
    )
    DistilBertModel(config).save_pretrained(tmp_path / "distilbert")
    tokenizer.save_pretrained(tmp_path / "distilbert")
    for head in ("tanh", "transform"):
        made = encoder(tmp_path / "distilbert", head, template="[X]", pooling="cls")
        model = written(made, tmp_path / head)
        np.testing.assert_allclose(model.encode(TEXTS), units(made.embed(TEXTS)), atol=1e-5, rtol=0)
