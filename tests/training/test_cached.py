"""GradCache against the pass that keeps every activation, and its place in the training loop."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from training.cached import backward_in_chunks, chunks
from training.contrastive import Contrastive
from training.encoder import SentenceEncoder
from training.errors import RecipeError
from training.fit import load_recipe
from training.objective import View
from training.objectives import OBJECTIVES

TEXTS = ["Two dogs run.", "A man is playing the guitar.", "Rain.", "She wrote a letter to the city.", "A stage."]
ROWS = [(text,) for text in TEXTS]
TRIPLES = [(text, TEXTS[place - 1], TEXTS[place - 2]) for place, text in enumerate(TEXTS)]
PAIRS = [row[:2] for row in TRIPLES]
SG = {"head_width": ["16"], "max_tokens": ["32"]}
METHODS: dict[str, tuple[str, list[tuple[str, ...]], dict[str, list[str]]]] = {
    "simcse": ("simcse", ROWS, {}),
    "triplets": ("simcse", TRIPLES, {"columns": ["a", "b", "c"], "negative_weight": ["1.0"]}),
    "masked words": ("simcse", ROWS, {"mlm_weight": ["0.1"], "masked_share": ["0.5"]}),
    "nested": ("simcse", ROWS, {"dimensions": ["8", "32"]}),
    "promptbert": ("promptbert", ROWS, {}),
    "promptbert, triplets": ("promptbert-supervised", TRIPLES, {"kept_head": ["tanh"]}),
    "ssimcse": ("ssimcse", ROWS, {}),
    "ssimcse, an operation": ("ssimcse", ROWS, {"scope": ["sentence-op"]}),
    "sg-opt": ("sg-opt", ROWS, SG),
    "sg": ("sg", ROWS, SG),
    "back-translation": ("sg", PAIRS, {**SG, "columns": ["a", "b"], "positives": ["translation"]}),
}


def build(name: str, folder: Path, dropout: bool = True, **words: Any) -> Contrastive:
    fixed = {"encoder": [str(folder)], "corpus": ["unused.txt"], "batch_size": ["5"]}
    recipe = load_recipe(name, fixed | words)
    torch.manual_seed(0)
    encoder = SentenceEncoder.load(recipe.encoder, template=recipe.template, read_out=recipe.read_out)
    objective = OBJECTIVES[recipe.method](encoder, recipe)
    assert isinstance(objective, Contrastive)
    return objective.train(dropout)


def gradients(objective: Contrastive) -> dict[str, Tensor]:
    return {key: weight.grad.clone() for key, weight in objective.named_parameters() if weight.grad is not None}


def plain(objective: Contrastive, views: dict[str, View], size: int) -> Tensor:
    """The same passes in the same order, every activation kept."""
    views = objective.draw(views)
    vectors = {
        name: torch.cat([objective.encode(name, chunk) for chunk in chunks(view, size)]) for name, view in views.items()
    }
    loss = objective.loss(vectors, views)["loss"]
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("size", [1, 2, 5, 64])
@pytest.mark.parametrize("case", METHODS)
def test_cached_gradients_are_those_of_one_pass(case: str, size: int, tiny_bert: Path) -> None:
    name, rows, words = METHODS[case]
    objective = build(name, tiny_bert, **words)
    torch.manual_seed(1)
    loss = plain(objective, objective.views(rows), size)
    expected, after = gradients(objective), torch.get_rng_state()
    objective.zero_grad()
    torch.manual_seed(1)
    outputs = backward_in_chunks(objective, objective.views(rows), size)
    torch.testing.assert_close(outputs["loss"], loss)
    assert not any(value.requires_grad for value in outputs.values())
    torch.testing.assert_close(gradients(objective), expected, atol=1e-5, rtol=1e-5)
    assert any(gradient.abs().max() > 1e-3 for gradient in expected.values())
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("case", ["simcse", "triplets", "nested", "promptbert", "sg-opt"])
def test_without_dropout_cached_gradients_are_those_of_forward(case: str, tiny_bert: Path) -> None:
    name, rows, words = METHODS[case]
    objective = build(name, tiny_bert, dropout=False, **words)
    objective(**objective.views(rows))["loss"].backward()
    expected = gradients(objective)
    objective.zero_grad()
    backward_in_chunks(objective, objective.views(rows), 2)
    torch.testing.assert_close(gradients(objective), expected, atol=1e-5, rtol=1e-5)


def test_without_its_random_state_the_second_pass_would_be_another(
    tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from contextlib import nullcontext

    objective = build("simcse", tiny_bert)
    torch.manual_seed(1)
    plain(objective, objective.views(ROWS), 2)
    expected = gradients(objective)
    objective.zero_grad()
    monkeypatch.setattr("training.cached._RandomState.restored", lambda _: nullcontext())
    torch.manual_seed(1)
    backward_in_chunks(objective, objective.views(ROWS), 2)
    found = gradients(objective)
    assert any(not torch.allclose(found[key], value, atol=1e-3) for key, value in expected.items())


def test_the_bias_of_a_template_is_computed_once_a_step(tiny_bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objective = build("promptbert", tiny_bert)
    calls = []
    bias = SentenceEncoder.template_bias
    monkeypatch.setattr(SentenceEncoder, "template_bias", lambda *words: calls.append(1) or bias(*words))
    backward_in_chunks(objective, objective.views(ROWS), 1)
    assert len(calls) == 2  # one for each template


def test_under_autocast_the_second_pass_still_reaches_the_weights(tiny_bert: Path) -> None:
    def autocast() -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16)

    objective = build("simcse", tiny_bert, dropout=False)
    with autocast():
        loss = objective(**objective.views(ROWS))["loss"]
    loss.backward()
    expected = gradients(objective)
    objective.zero_grad()
    backward_in_chunks(objective, objective.views(ROWS), 2, autocast)
    found = gradients(objective)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.cosine_similarity(found[key].flatten(), value.flatten(), dim=0) > 0.99 or value.abs().max() < 1e-3


def test_batch_norm_refuses_chunks(tiny_bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OBJECTIVES["simcse"], "rowwise", False)
    with pytest.raises(RecipeError, match="mini_batch_size is 2, and method 'simcse' has BatchNorm"):
        build("simcse", tiny_bert, mini_batch_size=["2"])
