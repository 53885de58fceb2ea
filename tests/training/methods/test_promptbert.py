"""PromptBERT's recipes and supervised mode; unsupervised ones are in test_objectives, the bias in test_encoder."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recipes import load_recipe

from cloze.encoding.errors import ClozeError
from cloze.training.errors import EncoderError, RecipeError
from cloze.training.loop.prepare import prepare
from cloze.training.methods.losses import info_nce
from cloze.training.methods.promptbert import PromptBERT
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.heads import HEAD_FILE, ProjectionHead
from cloze.training.model.views import View
from cloze.training.recipes.recipe import shipped_recipes

ROWS = [
    ("Two dogs run.", "Dogs are running.", "The dogs sleep."),
    ("A man is playing the guitar.", "Music.", "A man fell."),
    ("Rain.", "A little rain in the city", "Nothing grows here."),
    ("She wrote a letter to the city.", "A letter was written.", "She wrote nothing."),
]
ROBERTA = "This sentence : ' [X] ' means [MASK]."


def build(folder: Path, name: str = "promptbert-supervised", **words: Any) -> PromptBERT:
    given = {"encoder": [str(folder)], "corpus": ["unused.csv"], "batch_size": ["4"]} | words
    recipe = load_recipe(name, given, "roberta-base" if "roberta" in str(folder) else None)
    torch.manual_seed(0)
    encoder = SentenceEncoder.load(recipe.encoder, template=recipe.template, pooling=recipe.pooling)
    return PromptBERT(encoder, recipe)


def loop(objective: PromptBERT, text: str) -> torch.Tensor:
    """One text, written out: [MASK] vector and bias, each from a sequence without padding, then head and difference."""
    encoder = objective.encoder
    text_encoder = objective.text_encoder
    [sequence] = text_encoder.encode([text])
    prefix, suffix, first = len(text_encoder.prefix_ids), len(text_encoder.suffix_ids), encoder.config.template
    start = 2 if first == ROBERTA else 0
    place = sequence.ids.index(text_encoder.special.mask)
    positions = torch.arange(len(sequence.ids)) + start
    vector = encoder.backbone(torch.tensor([sequence.ids]), position_ids=positions[None]).last_hidden_state[0, place]
    kept = torch.cat([positions[:prefix], positions[-suffix:]])
    ids = torch.tensor([text_encoder.prefix_ids + text_encoder.suffix_ids])
    place = ids[0].tolist().index(text_encoder.special.mask)
    bias = encoder.backbone(ids, position_ids=kept[None]).last_hidden_state[0, place]
    if encoder.head is None:
        return objective.head(vector - bias)
    layers = torch.nn.Sequential(*encoder.head)
    return layers(vector - bias) if encoder.head.kind == "tanh" else layers(vector) - layers(bias)


@pytest.mark.parametrize(
    ("family", "head", "columns"),
    [
        *(("bert", "tanh", 2), ("bert", "transform", 3), ("bert", None, 3)),
        *(("roberta", "tanh", 3), ("roberta", "transform", 2), ("roberta", None, 2)),
    ],
)
def test_supervised_loss_is_equation_5_of_denoised_vectors(
    family: str, head: str | None, columns: int, masked_bert: Path, masked_roberta: Path
) -> None:
    folder = {"bert": masked_bert, "roberta": masked_roberta}[family]
    words: dict[str, Any] = {"columns": ["sent0", "sent1", "hard_neg"][:columns]}
    if columns == 3:
        words["negative_weight"] = ["0.5"]
    objective = build(folder, **words, **({"kept_head": [head]} if head else {})).eval()
    if head is None:
        objective = without_kept_head(objective)
    rows = [row[:columns] for row in ROWS]
    vectors = [torch.stack([loop(objective, text) for text in column]) for column in zip(*rows, strict=True)]
    cosines = [torch.cosine_similarity(vectors[0][:, None], other[None], dim=2) / 0.05 for other in vectors[1:]]
    if columns == 3:
        cosines[1] = cosines[1] + 0.5 * torch.eye(len(rows))
    logits = torch.cat(cosines, dim=1)
    expected = (logits.logsumexp(1) - logits.diagonal()).mean()
    torch.testing.assert_close(objective(**objective.views(rows))["loss"], expected, atol=1e-4, rtol=1e-4)


def without_kept_head(objective: PromptBERT) -> PromptBERT:
    recipe = objective.recipe.model_copy(update={"kept_head": None})
    objective.encoder.head = None
    return PromptBERT(objective.encoder, recipe).eval()


def test_all_views_are_in_one_template(masked_bert: Path) -> None:
    objective = build(masked_bert)
    views = objective.views(ROWS[:1])
    assert list(views) == ["first", "second", "negative1"]
    decode = objective.encoder.tokenizer.decode
    for text, view in zip(ROWS[0], views.values(), strict=True):
        expected = f'[CLS] this sentence of " {decode(objective.encoder.tokenizer(text).input_ids[1:-1])} " means'
        assert decode(view["input_ids"][0]).startswith(expected)


@pytest.mark.parametrize("head", ["tanh", "transform"])
def test_what_was_trained_is_what_is_served(head: str, masked_bert: Path, tmp_path: Path) -> None:
    objective = build(masked_bert, kept_head=[head]).eval()
    texts = [row[0] for row in ROWS]
    expected = torch.stack([loop(objective, text) for text in texts]).detach().numpy()
    objective.save(tmp_path)
    served = SentenceEncoder.load(str(tmp_path))
    assert served.config.denoising
    assert served.head is not None
    assert served.head.kind == head
    np.testing.assert_allclose(served.embed(texts), expected, atol=1e-5)
    np.testing.assert_allclose(objective.encoder.embed(texts), expected, atol=1e-5)


def test_the_empty_text_is_zero_behind_a_transform(masked_bert: Path, masked_roberta: Path) -> None:
    for folder in (masked_bert, masked_roberta):
        encoder = build(folder, kept_head=["transform"]).encoder
        assert not encoder.embed([""]).any()
        assert encoder.embed(["rain"]).any()


def test_without_kept_head_the_mask_is_served_denoised(masked_bert: Path, tmp_path: Path) -> None:
    objective = without_kept_head(build(masked_bert))
    objective.save(tmp_path)
    served = SentenceEncoder.load(str(tmp_path))
    assert served.head is None
    assert served.config.denoising
    assert not served.embed([""]).any()


def test_unsupervised_serves_the_mask_as_it_is(tiny_bert: Path, tmp_path: Path) -> None:
    objective = build(tiny_bert, "promptbert").eval()
    objective.save(tmp_path)
    served = SentenceEncoder.load(str(tmp_path))
    assert not served.config.denoising
    assert not (tmp_path / HEAD_FILE).exists()
    hidden = objective.encoder.pooled(**objective.views([ROWS[0][:1]])["first"], text_encoder=objective.text_encoder)
    np.testing.assert_allclose(served.embed(ROWS[0][:1]), hidden.detach().numpy(), atol=1e-5)


@pytest.mark.parametrize("head", ["tanh", "transform"])
def test_every_weight_learns(head: str, masked_bert: Path) -> None:
    objective = build(masked_bert, kept_head=[head]).train()
    objective(**objective.views(ROWS))["loss"].backward()
    assert not [key for key, weight in objective.named_parameters() if weight.grad is None]


@pytest.mark.parametrize("name", [name for name in shipped_recipes() if name.startswith("promptbert")])
@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_a_text_of_40_tokens_is_cut_to_32_and_the_template_stays(
    family: str, name: str, masked_bert: Path, masked_roberta: Path
) -> None:
    objective = build({"bert": masked_bert, "roberta": masked_roberta}[family], name)
    text = " ".join(["dogs", "man", "city", "letter"] * 10 if family == "bert" else ["a"] * 40)
    views = objective.views([(text,) * (len(objective.recipe.columns) or 1)])
    for (view_name, text_encoder), view in zip(objective.text_encoders.items(), views.values(), strict=True):
        [[*ids]], prefix, suffix = view["input_ids"].tolist(), text_encoder.prefix_ids, text_encoder.suffix_ids
        assert len(prefix) + len(suffix) == 10, view_name
        assert len(ids) == 42
        assert ids[: len(prefix)] == prefix
        assert ids[-len(suffix) :] == suffix
        [whole] = objective.encoder.make_text_encoder(str(text_encoder.template), 64).encode([text])
        assert len(whole.ids) == 40 + 10
        assert ids[len(prefix) : -len(suffix)] == whole.ids[len(prefix) :][:32]
        assert ids.count(text_encoder.special.mask) == 1


def denoised(objective: PromptBERT, views: dict[str, View]) -> list[torch.Tensor]:
    """The vectors of each view, (n, d), as the head is given them."""
    seen: list[torch.Tensor] = []
    hook = objective.head.register_forward_hook(lambda _module, given, _output: seen.append(given[0]))
    objective(**views)
    hook.remove()
    return seen


@pytest.mark.parametrize("name", [name for name in shipped_recipes() if name.startswith("promptbert")])
def test_the_order_of_a_batch_is_irrelevant(name: str, masked_bert: Path) -> None:
    """Texts of several lengths, so that padding and biases differ from row to row."""
    objective = build(masked_bert, name).eval()
    rows = [row[: len(objective.recipe.columns) or 1] for row in ROWS]
    order = [2, 0, 3, 1]
    views, permuted = objective.views(rows), objective.views([rows[row] for row in order])
    for vectors, again in zip(denoised(objective, views), denoised(objective, permuted), strict=True):
        assert not torch.allclose(again, vectors, atol=1e-2)
        torch.testing.assert_close(again, vectors[order], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(objective(**permuted)["loss"], objective(**views)["loss"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["promptbert", "promptbert-different", "promptbert-same"])
def test_equal_rows_cost_log_n(name: str, tiny_bert: Path) -> None:
    objective = build(tiny_bert, name).eval()
    loss = objective(**objective.views([ROWS[0][:1]] * 4))["loss"]
    assert loss.item() == pytest.approx(math.log(4), abs=1e-5)


def test_equal_triplets_cost_log_2n(masked_bert: Path) -> None:
    """With equal hard negatives of logarithmic weight w: log(2N - 1 + e^w)."""
    rows = [("Two dogs run.",) * 3] * 4
    for weight in (0.0, 1.0):
        objective = build(masked_bert, negative_weight=[str(weight)]).eval()
        expected = math.log(2 * len(rows) - 1 + math.exp(weight))
        assert objective(**objective.views(rows))["loss"].item() == pytest.approx(expected, abs=1e-4)


def test_matryoshka_cuts_the_vectors_that_are_served(masked_bert: Path) -> None:
    objective = build(masked_bert, dimensions=["8", "32"]).eval()
    columns = [torch.from_numpy(objective.encoder.embed(column)) for column in zip(*ROWS, strict=True)]
    losses = [
        info_nce(first[:, :n], second[:, :n], 0.05, other[:, :n]) for n in (8, 32) for first, second, other in [columns]
    ]
    expected = torch.stack(losses).mean()
    torch.testing.assert_close(objective(**objective.views(ROWS))["loss"], expected, atol=1e-4, rtol=1e-4)


def bias_of(objective: PromptBERT, name: str, view: View) -> torch.Tensor:
    text_encoder = objective.text_encoders[name]
    lengths = view["attention_mask"].sum(1) - text_encoder.template_tokens
    return objective.encoder.template_bias(lengths, text_encoder)


def test_the_bias_carries_gradient_and_dropout_of_its_own(tiny_bert: Path) -> None:
    objective = build(tiny_bert, "promptbert").train()
    view = objective.views([(row[0],) for row in ROWS])["first"]
    bias, again = (bias_of(objective, "first", view) for _ in range(2))
    assert not torch.allclose(bias, again)
    bias[0, 0].backward()
    assert objective.encoder.backbone.encoder.layer[0].output.dense.weight.grad.abs().sum() > 0


def test_columns_in_one_template_share_the_dropout_of_its_bias(masked_bert: Path) -> None:
    objective = build(masked_bert).train()
    biases = objective._biases(objective.views([("Two dogs run.",) * 3, ("A man is playing.",) * 3]))
    anchor, *others = biases.values()
    assert len(others) == 2
    for other in others:
        torch.testing.assert_close(other, anchor, rtol=0, atol=0)
    assert not torch.equal(anchor, objective._biases(objective.views([("Two dogs run.",) * 3] * 2))["first"])


def test_one_dropout_makes_denoised_views_of_one_template_equal(tiny_bert: Path) -> None:
    objective = build(tiny_bert, "promptbert-same").train()
    objective.denoised = True
    vectors = []
    for name, view in objective.views([row[:1] for row in ROWS]).items():
        torch.manual_seed(3)
        vectors.append(objective.encoder.finish(objective.encode(name, view), bias_of(objective, name, view)))
    assert vectors[0].abs().min() > 0
    torch.testing.assert_close(torch.cosine_similarity(*vectors), torch.ones(len(ROWS)))


def test_training_from_a_denoising_parent_serves_what_it_trained(masked_bert: Path, tmp_path: Path) -> None:
    build(masked_bert, kept_head=["tanh"]).save(tmp_path / "parent")
    assert SentenceEncoder.load(str(tmp_path / "parent")).config.denoising
    texts = [row[0] for row in ROWS]
    (tmp_path / "corpus.txt").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    keys = {"encoder": tmp_path / "parent", "corpus": tmp_path / "corpus.txt", "batch_size": 4, "max_steps": 1}
    keys |= {"template": 'This sentence of "[X]" means [MASK].', "pooling": "mask", "kept_head": "tanh"}
    recipe = load_recipe("simcse", {key: [str(value)] for key, value in keys.items()})
    _, _, objective = prepare(recipe)
    trained = objective.eval().encode("first", objective.views([(text,) for text in texts])["first"])
    objective.save(tmp_path / "model")
    served = SentenceEncoder.load(str(tmp_path / "model"))
    assert not served.config.denoising
    np.testing.assert_allclose(served.embed(texts), trained.detach().numpy(), atol=1e-5)
    denoised = SentenceEncoder.load(str(tmp_path / "model"), denoising=True).embed(texts)
    assert not np.allclose(denoised, trained.detach().numpy(), atol=1e-2)


@pytest.mark.parametrize("name", ["promptbert", "promptbert-supervised"])
def test_an_empty_text_does_no_harm(name: str, masked_bert: Path) -> None:
    """Its denoised vector is exactly 0, of which a cosine has no direction."""
    objective = build(masked_bert, name).eval()
    rows = [("",) * max(1, len(objective.recipe.columns)), *(row[: len(objective.recipe.columns) or 1] for row in ROWS)]
    loss = objective(**objective.views(rows))["loss"]
    loss.backward()
    assert loss.isfinite()
    assert all(weight.grad.isfinite().all() for weight in objective.parameters())


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("promptbert-same", {"mode": ["different"]}, "needs two templates; write a second_template"),
        ("promptbert", {"second_template": ['This sentence of "[X]" means [MASK].']}, "needs two templates"),
        ("promptbert", {"second_template": ["[X] says"]}, r"second_template: .*\[MASK\] 0 times"),
        ("promptbert", {"mode": ["same"]}, "mode 'same' has one template; remove second_template"),
        ("promptbert", {"columns": ["a", "b"]}, "views of one text, but columns names 2; name one"),
        ("promptbert", {"kept_head": ["tanh"]}, "mode 'denoised' does not serve a head; remove kept_head"),
        ("promptbert-supervised", {"columns": ["a"]}, "mode 'supervised' needs pairs; name two columns, and one"),
        ("promptbert-supervised", {"columns": ["a", "b"], "negative_weight": ["1.0"]}, "name three or more, or write"),
        ("promptbert-supervised", {"second_template": ["[X] is [MASK]"]}, "'supervised' has one template"),
        ("promptbert-supervised", {"pooling": ["cls"]}, "pooling is 'cls'"),
    ],
)
def test_impossible_recipes_are_refused(name: str, words: dict[str, list[str]], message: str) -> None:
    with pytest.raises(ClozeError, match=message):
        load_recipe(name, {"corpus": ["unused.txt"]} | words)


def test_a_transform_needs_a_masked_word_head(tiny_bert: Path) -> None:
    with pytest.raises(EncoderError, match=r"has no masked-word head.*cloze pretrain"):
        build(tiny_bert)


def test_a_head_of_another_kind_is_refused(masked_bert: Path, tmp_path: Path) -> None:
    build(masked_bert, kept_head=["tanh"]).save(tmp_path)
    with pytest.raises(
        RecipeError, match=r"kept_head is 'transform', but the kept head of .* is 'tanh'; write kept_head = 'tanh'"
    ):
        build(tmp_path)
    assert torch.equal(
        build(tmp_path, kept_head=["tanh"]).encoder.head[0].weight,
        ProjectionHead.load(tmp_path, SentenceEncoder.load(str(tmp_path)).backbone.config)[0].weight,
    )


def test_a_broken_head_is_refused(masked_bert: Path, tmp_path: Path) -> None:
    build(masked_bert).save(tmp_path)
    (tmp_path / HEAD_FILE).write_bytes(b"torn")
    with pytest.raises(EncoderError, match=r"head\.safetensors does not fit this encoder.*restore"):
        SentenceEncoder.load(str(tmp_path))
