import math
from pathlib import Path
from typing import Any

import pytest
import torch
from contrastive_methods import leaves
from recipes import load_recipe
from torch.nn.functional import normalize

from cloze.training.errors import RecipeError
from cloze.training.methods import objective_of
from cloze.training.methods.losses import info_nce
from cloze.training.methods.objective import Objective
from cloze.training.model.encoder import SentenceEncoder

ROWS = [("Two dogs run.",), ("A man is playing the guitar.",), ("Rain.",), ("She wrote a letter to the city.",)]
ROBERTA = {
    "template": ["This sentence : ' [X] ' means [MASK]."],
    "second_template": ["The sentence : ' [X] ' means [MASK]."],
}


def build(name: str, folder: Path, **words: Any) -> Objective:
    overrides = {"encoder": [str(folder)], "corpus": ["unused.txt"], "batch_size": ["4"]}
    if name == "distill":
        overrides |= {"max_tokens": ["64"]} | ({} if "teacher_vectors" in words else {"teacher": [str(folder)]})
    recipe = load_recipe(name, overrides | words)
    torch.manual_seed(0)
    encoder = SentenceEncoder.load(recipe.encoder, template=recipe.template, pooling=recipe.pooling)
    return objective_of(recipe.method)(encoder, recipe)


@pytest.mark.parametrize("name", ["simcse", "promptbert", "promptbert-different", "promptbert-same", "distill"])
def test_every_objective_reaches_the_encoder_and_its_own_head(name: str, tiny_bert: Path) -> None:
    objective = build(name, tiny_bert)
    outputs = objective.train()(**objective.views(ROWS))
    outputs["loss"].backward()
    idle = [key for key, weight in objective.named_parameters() if weight.grad is None]
    assert not idle
    assert all(not value.requires_grad for key, value in outputs.items() if key != "loss")


@pytest.mark.parametrize("family", ["bert", "roberta"])
@pytest.mark.parametrize("name", ["simcse", "promptbert"])
def test_a_few_steps_lower_the_loss(name: str, family: str, tiny_bert: Path, tiny_roberta: Path) -> None:
    """Unsupervised, with dropout, though of less than 0.1, which two random layers hardly bear."""
    words = ROBERTA if (name, family) == ("promptbert", "roberta") else {}
    objective = build(name, {"bert": tiny_bert, "roberta": tiny_roberta}[family], **words).train()
    for module in objective.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.02
    backbone, losses = objective.encoder.backbone, []
    optimiser = torch.optim.AdamW(objective.parameters(), lr=3e-3)
    for _ in range(15):
        loss = objective(**objective.views(ROWS))["loss"]
        optimiser.zero_grad()
        loss.backward()
        if not losses:
            assert all(layer.attention.self.value.weight.grad.abs().sum() > 0 for layer in backbone.encoder.layer)
            assert backbone.embeddings.word_embeddings.weight.grad.abs().sum() > 0
        optimiser.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])


@pytest.mark.parametrize("name", ["simcse", "promptbert-same"])
def test_without_dropout_the_views_of_one_text_are_one_vector(name: str, tiny_bert: Path) -> None:
    objective = build(name, tiny_bert).eval()
    with torch.no_grad():
        loss = objective(**objective.views(ROWS))["loss"]
        [view, *_] = objective.views(ROWS).values()
        heads = objective.head(objective.encoder.vectors(view, objective.text_encoder))
    torch.testing.assert_close(loss, info_nce(heads, heads, 0.05))


def test_simcse_draws_a_dropout_mask_for_each_view(tiny_bert: Path) -> None:
    objective = build("simcse", tiny_bert).train()
    heads: list[torch.Tensor] = []
    objective.head.register_forward_hook(lambda _module, _given, output: heads.append(output))
    objective(**objective.views(ROWS))
    first, second = heads
    assert not torch.allclose(first, second)


def test_simcse_of_equal_texts_is_log_n(tiny_bert: Path) -> None:
    objective = build("simcse", tiny_bert).eval()
    loss = objective(**objective.views([ROWS[0]] * 4))["loss"]
    assert loss.item() == pytest.approx(math.log(4), abs=1e-5)


def test_promptbert_views_hold_one_text_in_two_templates(tiny_bert: Path) -> None:
    objective = build("promptbert", tiny_bert)
    views = objective.views(ROWS[:1])
    decode = objective.encoder.tokenizer.decode
    assert decode(views["first"]["input_ids"][0]) == '[CLS] this sentence of " two dogs run. " means [MASK]. [SEP]'
    assert decode(views["second"]["input_ids"][0]).endswith('" two dogs run. " means [MASK]. [SEP]')
    assert views["first"]["input_ids"].tolist() != views["second"]["input_ids"].tolist()


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_promptbert_denoises_before_the_head(family: str, tiny_bert: Path, tiny_roberta: Path) -> None:
    """Equation 4 written out: per view, mask vector less the bias of its own template and length."""
    folder, words = {"bert": (tiny_bert, {}), "roberta": (tiny_roberta, ROBERTA)}[family]
    objective = build("promptbert", folder, **words).eval()
    encoder, views = objective.encoder, objective.views(ROWS)
    heads = []
    for text_encoder, view in zip(objective.text_encoders.values(), views.values(), strict=True):
        mask = encoder.tokenizer.mask_token_id
        rows = []
        for ids, attention in zip(view["input_ids"], view["attention_mask"], strict=True):
            length = int(attention.sum())
            place = ids.tolist().index(mask)
            vector = encoder.hidden(ids[None, :length], attention[None, :length])[0, place]
            bias = encoder.template_bias(torch.tensor([length - text_encoder.template_tokens]), text_encoder)[0]
            rows.append(vector - bias)
        heads.append(objective.head(torch.stack(rows)))
    torch.testing.assert_close(objective(**views)["loss"], info_nce(*heads, 0.05), atol=1e-4, rtol=1e-4)


def test_promptbert_cuts_the_text_and_never_the_template(tiny_bert: Path) -> None:
    objective = build("promptbert", tiny_bert)
    views = objective.views([("dogs " * 60,)])
    assert views["first"]["input_ids"].shape == (1, 42)
    assert (views["first"]["input_ids"] == objective.encoder.tokenizer.mask_token_id).sum() == 1


def test_distilling_from_oneself_costs_nothing(tiny_bert: Path) -> None:
    objective = build("distill", tiny_bert).train()
    outputs = objective(**objective.views(ROWS))
    assert outputs["loss"].item() == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("kind", ["encoder", "configured", "asked"])
def test_a_teacher_is_read_as_it_was_trained(kind: str, tiny_bert: Path, tmp_path: Path) -> None:
    """With its own template, pooling and denoising, or as a plain mean where it has none, unless the recipe says."""
    own = {"template": 'This sentence of "[X]" means [MASK].', "pooling": "mask", "denoising": True}
    words: dict[str, Any] = {"encoder": {"template": "[X]", "pooling": "mean"}, "configured": own}
    words["asked"] = {"template": "it says: [X]", "pooling": "cls"}
    if kind == "encoder":
        teacher, keys = tiny_bert, {}
    else:
        SentenceEncoder.load(str(tiny_bert), **own).save(tmp_path)
        asked = {"teacher_template": ["it says: [X]"], "teacher_pooling": ["cls"]}
        teacher, keys = tmp_path, asked if kind == "asked" else {}
        words["asked"] |= {"denoising": True}
    expected = SentenceEncoder.load(str(tiny_bert), **words[kind]).embed([text for (text,) in ROWS])
    objective = build("distill", tiny_bert, teacher=[str(teacher)], **keys)
    found = objective.views(ROWS)["student"]["target"]
    torch.testing.assert_close(found, normalize(torch.from_numpy(expected)), atol=1e-3, rtol=1e-3)


def test_the_teacher_is_not_trained_and_in_no_checkpoint(tiny_bert: Path) -> None:
    objective = build("distill", tiny_bert)
    own = dict(objective.encoder.named_parameters(prefix="encoder"))
    assert dict(objective.named_parameters()).keys() == own.keys()
    assert set(objective.state_dict()) == {f"encoder.{key}" for key in objective.encoder.state_dict()}
    trained = leaves(objective(**objective.views(ROWS))["loss"])
    assert trained
    assert trained <= set(map(id, own.values()))


def test_a_teacher_may_have_another_width(tiny_bert: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, BertConfig, BertModel

    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    config = BertConfig.from_pretrained(tiny_bert, hidden_size=16)
    BertModel(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    objective = build("distill", tiny_bert, teacher=[str(tmp_path)])
    vectors = SentenceEncoder.load(str(tmp_path), template="[X]", pooling="mean").embed([text for (text,) in ROWS])
    views, teacher = objective.views(ROWS), normalize(torch.from_numpy(vectors))
    target = views["student"]["target"]
    assert target.shape == (len(ROWS), 32)
    torch.testing.assert_close(target @ target.T, teacher @ teacher.T, atol=1e-2, rtol=1e-2)
    assert objective(**views)["loss"].isfinite()


def test_an_encoder_that_nothing_says_how_to_read_teaches_only_as_it_is_told(tiny_bert: Path) -> None:
    with pytest.raises(
        RecipeError,
        match=r"is the teacher, but it has no template and pooling of its own; write teacher_pooling, such as",
    ):
        build("mask", tiny_bert, frozen_layers=["1"], max_tokens=["40"])
    objective = build("mask", tiny_bert, frozen_layers=["1"], max_tokens=["40"], teacher_pooling=["cls"])
    expected = SentenceEncoder.load(str(tiny_bert), template="[X]", pooling="cls").embed(["Two dogs run."])
    found = objective.views([("Two dogs run.",)])["student"]["target"]
    torch.testing.assert_close(found, normalize(torch.from_numpy(expected)), atol=1e-3, rtol=1e-3)
