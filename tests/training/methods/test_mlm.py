"""The masked-word head and its training: transformers' own logits, the loss by hand, the command as a user runs it."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from recipes import arguments, load_recipe
from torch import nn
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    DistilBertConfig,
    DistilBertForMaskedLM,
    DistilBertModel,
    MPNetConfig,
    MPNetModel,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
)

from cloze.command import run as run_command
from cloze.training.errors import EncoderError, RecipeError, RunError
from cloze.training.methods.diffcse import DiffCSE
from cloze.training.methods.mlm import MLM
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.masked_words import MaskedHead, load_masked_lm, save_masked_lm
from cloze.training.model.pretrained import quiet
from cloze.training.pretrain import main

ROWS = [("Two dogs run over the green field.",), ("A man is playing the guitar.",), ("Rain.",), ("",)]
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
THIN = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32}
PLAIN = ["--template", "[X]", "--pooling", "cls"]
IDS = torch.arange(5, 45).view(4, 10)


def masked_lm(family: str, tied: bool, activation: str = "gelu") -> PreTrainedModel:
    """A tiny model of the family, every parameter random, biases and layer norms too."""
    words = {"vocab_size": 50, "max_position_embeddings": 20, "tie_word_embeddings": tied}
    torch.manual_seed(0)
    if family == "bert":
        model: PreTrainedModel = BertForMaskedLM(BertConfig(**SIZES, **words, hidden_act=activation))
    elif family == "roberta":
        model = RobertaForMaskedLM(RobertaConfig(**SIZES, **words, hidden_act=activation))
    else:
        model = DistilBertForMaskedLM(DistilBertConfig(**THIN, **words, activation=activation))
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.3)
    return model.eval()


def build(folder: Path, **words: str) -> MLM:
    overrides = {"encoder": [str(folder)], "corpus": ["unused.txt"], "max_tokens": ["40"]}
    recipe = load_recipe("mlm", overrides | {key: [word] for key, word in words.items()})
    torch.manual_seed(recipe.seed)
    encoder = SentenceEncoder.load(recipe.encoder, template=recipe.template, pooling=recipe.pooling)
    return MLM(encoder, recipe)


@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
@torch.no_grad()
def test_the_head_gives_the_models_own_logits_and_goes_back(
    family: str, tied: bool, activation: str, tmp_path: Path
) -> None:
    model = masked_lm(family, tied, activation)
    head = MaskedHead.of(model)
    assert (head.weight is None) == tied
    logits = model(input_ids=IDS).logits
    hidden = model.base_model(input_ids=IDS).last_hidden_state
    torch.testing.assert_close(head(hidden, model.get_input_embeddings().weight), logits)
    save_masked_lm(model.base_model, head, tmp_path)
    again = AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(input_ids=IDS).logits, logits)
    assert again.config.tie_word_embeddings == tied
    loaded = MaskedHead.load(str(tmp_path)).state_dict()
    assert loaded.keys() == head.state_dict().keys()
    assert all(torch.equal(loaded[key], weight) for key, weight in head.state_dict().items())


def test_the_head_of_another_architecture_is_refused() -> None:
    with pytest.raises(EncoderError, match="of a 'mpnet' model is not supported; use one of bert, roberta"):
        MaskedHead(MPNetConfig(**SIZES, vocab_size=50))


def test_a_checkpoint_without_a_head_says_how_to_get_one(tiny_bert: Path) -> None:
    with pytest.raises(EncoderError, match=r"has no masked-word head .* cloze pretrain --encoder"):
        load_masked_lm(str(tiny_bert))


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EncoderError, match="cannot be loaded as a masked language model"):
        load_masked_lm(str(tmp_path))


@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_the_loss_is_the_mean_cross_entropy_of_the_chosen_tokens(
    family: str, tied: str, tiny_bert: Path, tiny_roberta: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """-log p(token) of one chosen token after the other, from transformers' softmax over the vocabulary."""
    from cloze.training.methods import mlm

    drawn: list[tuple[torch.Tensor, torch.Tensor]] = []
    mask_tokens = mlm.mask_tokens
    monkeypatch.setattr(mlm, "mask_tokens", lambda *given: drawn.append(mask_tokens(*given)) or drawn[-1])
    folder = {"bert": tiny_bert, "roberta": tiny_roberta}[family]
    objective = build(folder, tied=tied, masked_share="0.4").eval()
    views = objective.views(ROWS)
    ids, attention = views["texts"]["input_ids"], views["texts"]["attention_mask"]
    outputs = objective(**views)
    masked, chosen = drawn[0]
    encoder, head = objective.encoder, objective.head
    output_words = encoder.backbone.get_input_embeddings().weight if head.weight is None else head.weight
    losses, right = [], []
    for row, place in chosen.nonzero().tolist():
        length = int(attention[row].sum())
        hidden = encoder.hidden(masked[row : row + 1, :length], attention[row : row + 1, :length])[0, place]
        shaped = head.norm(nn.functional.gelu(head.dense(hidden)))
        probabilities = (output_words @ shaped + head.bias).softmax(0)
        losses.append(-probabilities[ids[row, place]].log())
        right.append(float(probabilities.argmax() == ids[row, place]))
    assert len(losses) > 3
    torch.testing.assert_close(outputs["loss"], torch.stack(losses).mean(), atol=1e-4, rtol=1e-4)
    assert outputs["accuracy"].item() == pytest.approx(sum(right) / len(right))


def test_every_weight_learns(tiny_bert: Path) -> None:
    for tied in ("true", "false"):
        objective = build(tiny_bert, tied=tied, masked_share="0.5").train()
        outputs = objective(**objective.views(ROWS))
        outputs["loss"].backward()
        assert not [key for key, weight in objective.named_parameters() if weight.grad is None]
        assert not outputs["accuracy"].requires_grad


def test_a_batch_in_which_nothing_can_be_chosen_costs_nothing(tiny_bert: Path) -> None:
    objective = build(tiny_bert).train()
    outputs = objective(**objective.views([("",), ("  ",)]))
    outputs["loss"].backward()
    assert outputs["loss"].item() == outputs["accuracy"].item() == 0
    assert all(weight.grad is None or not weight.grad.any() for weight in objective.parameters())


def test_a_step_lowers_the_loss_of_its_own_masks(tiny_bert: Path) -> None:
    objective = build(tiny_bert, masked_share="0.4").eval()
    optimiser = torch.optim.SGD(objective.parameters(), lr=0.01)
    losses = []
    for _ in range(4):
        torch.manual_seed(1)
        loss = objective(**objective.views(ROWS))["loss"]
        losses.append(loss.item())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert losses == sorted(losses, reverse=True)


def test_from_scratch_draws_every_weight_anew_and_by_the_seed(tiny_bert: Path) -> None:
    old = SentenceEncoder.load(str(tiny_bert), template="[X]", pooling="cls").backbone.state_dict()
    first, again, other = (
        build(tiny_bert, from_scratch="true", seed=seed).encoder.backbone for seed in ("1", "1", "2")
    )
    assert first.state_dict().keys() == old.keys()
    matrices = [key for key, weight in old.items() if weight.dim() == 2]
    assert matrices
    assert not any(torch.equal(first.state_dict()[key], old[key]) for key in matrices)
    assert not any(torch.equal(first.state_dict()[key], other.state_dict()[key]) for key in matrices)
    assert all(torch.equal(weight, again.state_dict()[key]) for key, weight in first.state_dict().items())
    kept = build(tiny_bert).encoder.backbone.state_dict()
    assert all(torch.equal(kept[key], weight) for key, weight in old.items())


def test_a_distilbert_is_trained_from_scratch(tiny_bert: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 64, "pad_token_id": tokenizer.pad_token_id}
    with quiet():
        DistilBertModel(DistilBertConfig(**THIN, **sizes)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    objective = build(tmp_path, from_scratch="true")
    assert objective(**objective.views(ROWS))["loss"].isfinite()


def test_a_kept_head_is_the_checkpoints(tiny_bert: Path, tmp_path: Path) -> None:
    objective = build(tiny_bert, tied="false")
    objective.save(tmp_path)
    kept = build(tmp_path, head="kept").head
    assert kept.state_dict().keys() == objective.head.state_dict().keys()
    assert all(torch.equal(kept.state_dict()[key], weight) for key, weight in objective.head.state_dict().items())


def test_a_vocabulary_larger_than_the_tokenizers_is_no_source_of_random_words(
    tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in checkpoints whose embeddings are padded to a round number."""
    from cloze.training.methods import mlm

    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    config = BertConfig.from_pretrained(tiny_bert, vocab_size=len(tokenizer) + 7)
    with quiet():
        BertModel(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    seen: list[int] = []
    mask_tokens = mlm.mask_tokens
    monkeypatch.setattr(mlm, "mask_tokens", lambda *given: seen.append(given[4]) or mask_tokens(*given))
    objective = build(tmp_path)
    assert objective(**objective.views(ROWS))["loss"].isfinite()
    assert seen == [len(tokenizer)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            {"from_scratch": "true", "head": "kept"},
            "from_scratch initialises all weights, but head = 'kept'",
        ),
        ({"tied": "false", "head": "kept"}, "tied = false needs head = 'fresh'"),
    ],
)
def test_impossible_recipes_are_refused(words: dict[str, str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe("mlm", {"corpus": ["unused.txt"]} | {key: [word] for key, word in words.items()})


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "sentences.txt"
    things = ["dog", "man", "letter", "city", "rain", "guitar"]
    lines = [f"The {a} and the {b} run {c} times." for a in things for b in things for c in range(4)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def words(tiny_bert: Path, text: Path) -> list[str]:
    options = {"encoder": tiny_bert, "corpus": text, "batch_size": 8, "max_steps": 6, "eval_steps": 3, "save_steps": 3}
    options |= {"log_steps": 1, "max_tokens": 40, "warmup_steps": 0}
    return arguments(options)


def logged(run: Path) -> Iterator[dict[str, float]]:
    for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines():
        yield json.loads(line)


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
@torch.no_grad()
def test_the_first_layers_are_the_encoders_own(
    family: str, tiny_bert: Path, tiny_roberta: Path, tmp_path: Path
) -> None:
    """A model of one of two layers gives what the encoder has after its first layer."""
    folder = {"bert": tiny_bert, "roberta": tiny_roberta, "distilbert": tmp_path / "distilbert"}[family]
    if family == "distilbert":
        tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
        tokenizer.save_pretrained(folder)
        with quiet():
            DistilBertModel(DistilBertConfig(**THIN | {"n_layers": 2}, vocab_size=len(tokenizer))).save_pretrained(
                folder
            )
    objective = build(folder, layers="1").eval()
    texts = objective.views(ROWS)["texts"]
    whole = SentenceEncoder.load(str(folder), template="[X]", pooling="cls").backbone.eval()
    states = whole(**texts, output_hidden_states=True).hidden_states
    assert len(states) == 3
    hidden = objective.encoder.hidden(**texts)
    attended = texts["attention_mask"].bool()
    torch.testing.assert_close(hidden[attended], states[1][attended])
    assert objective.encoder.backbone.config.num_hidden_layers == 1
    assert all(
        torch.equal(whole.state_dict()[key], value) for key, value in objective.encoder.backbone.state_dict().items()
    )


def test_more_layers_than_the_encoder_has_are_refused(tiny_bert: Path) -> None:
    with pytest.raises(RecipeError, match="layers is 3; the encoder has 2: lower it"):
        build(tiny_bert, layers="3")


def test_a_smaller_model_edits_for_the_encoder_it_is_made_of(tmp_path: Path, words: list[str], tiny_bert: Path) -> None:
    """DiffCSE's generator: the same vocabulary, fewer layers."""
    run = tmp_path / "run"
    assert main([*words, "--layers", "1", "--out", str(run)]) == 0
    recipe = load_recipe(
        "diffcse", {"encoder": [str(tiny_bert)], "corpus": ["unused.txt"], "generator": [str(run / "model")]}
    )
    objective = DiffCSE(SentenceEncoder.load(str(tiny_bert), template="[X]", pooling="cls"), recipe)
    assert objective.editor.generator.config.num_hidden_layers == 1
    assert objective.discriminator.backbone.config.num_hidden_layers == 2
    assert objective(**objective.views(ROWS))["loss"].isfinite()


@pytest.mark.parametrize("keys", [[], ["--no-tied"], ["--from-scratch"], ["--from-scratch", "--layers", "1"]], ids=str)
def test_a_run_gives_a_masked_language_model_that_is_an_encoder_too(
    tmp_path: Path, words: list[str], keys: list[str]
) -> None:
    run = tmp_path / "run"
    assert main([*words, *keys, "--out", str(run)]) == 0
    assert sum("accuracy" in entry for entry in logged(run)) == 6
    source = str(run / "model")
    encoder = SentenceEncoder.load(source).eval()
    assert encoder.config.template == 'This sentence of "[X]" means [MASK].'
    model = load_masked_lm(source).eval()
    assert model.config.tie_word_embeddings == ("--no-tied" not in keys)
    ids = torch.tensor([encoder.text_encoder.encode(["Two dogs run."])[0].ids])
    with torch.no_grad():
        hidden = encoder.hidden(ids, torch.ones_like(ids))
        theirs = model(input_ids=ids, output_hidden_states=True)
        torch.testing.assert_close(hidden, theirs.hidden_states[-1])
        scores = MaskedHead.load(source)(hidden, encoder.backbone.get_input_embeddings().weight)
        torch.testing.assert_close(scores, theirs.logits)


@pytest.fixture
def folders(tmp_path: Path, tiny_bert: Path, text: Path) -> dict[str, Path]:
    """What bad commands name: an architecture without a known head, a vocabulary without a mask token."""
    mpnet, maskless = tmp_path / "mpnet", tmp_path / "maskless"
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    tokenizer.save_pretrained(mpnet)
    with quiet():
        MPNetModel(MPNetConfig(**SIZES, vocab_size=len(tokenizer))).save_pretrained(mpnet)
    shutil.copytree(tiny_bert, maskless)
    names = json.loads((maskless / "tokenizer_config.json").read_text(encoding="utf-8"))
    del names["mask_token"]
    names["tokenizer_class"] = "PreTrainedTokenizerFast"
    (maskless / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
    return {"bert": tiny_bert, "text": text, "mpnet": mpnet, "maskless": maskless}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["--corpus", "{text}", "--encoder", "{bert}", "--head", "kept"], "has no masked-word head"),
        (["--corpus", "{text}", "--encoder", "{mpnet}"], "the masked-word head of a 'mpnet' model is not supported"),
        (["--corpus", "{text}", "--encoder", "{maskless}"], "the tokenizer has no mask token"),
        ([*PLAIN, "--corpus", "{text}", "--encoder", "{maskless}"], "its tokenizer has no mask token"),
    ],
)
def test_bad_input_is_one_line_and_leaves_no_run(
    tmp_path: Path, folders: dict[str, Path], keys: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert run_command(lambda: main([*(word.format(**folders) for word in keys), "--out", str(out)])) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last
    assert not out.exists()


def test_the_command_resumes_a_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not a run folder"):
        main([f"--resume={tmp_path}"])
