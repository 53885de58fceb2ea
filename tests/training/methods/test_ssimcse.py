import math
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import load_recipe
from safetensors.torch import load_file
from torch import Tensor, nn

from cloze.command import run as run_command
from cloze.encoding.errors import ClozeError
from cloze.training.fit import main
from cloze.training.methods import objective_of
from cloze.training.methods.simcse import SimCSE
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.recipes.methods import SSimCSERecipe

ROWS = [("Two dogs run.",), ("A man is playing the guitar.",), ("Rain.",), ("She wrote a letter to the city.",)]


@pytest.fixture(params=["bert", "roberta"])
def folder(request: pytest.FixtureRequest, tiny_bert: Path, tiny_roberta: Path) -> Path:
    return {"bert": tiny_bert, "roberta": tiny_roberta}[request.param]


def build(folder: Path, name: str = "ssimcse", **words: Any) -> SimCSE:
    """A rate for each pass or sentence, of attention probabilities too, unless the words say otherwise."""
    keys: dict[str, Any] = {"encoder": [str(folder)], "corpus": ["unused.txt"], "batch_size": ["4"]}
    if name.startswith("ssimcse"):
        keys |= {"attention_dropout": "true", "scope": ["sentence" if "sentence" in name else "pass"]}
    recipe = load_recipe(name, keys | words)
    torch.manual_seed(0)
    encoder = SentenceEncoder.load(recipe.encoder, template=recipe.template, pooling=recipe.pooling)
    return objective_of(recipe.method)(encoder, recipe).train()


def fixed(rate: float) -> dict[str, list[str]]:
    return {"distribution": ["fixed"], "rates": [str(rate)]}


@pytest.mark.parametrize(
    ("scope", "rows", "operations"), [("pass", 1, 1), ("op", 1, 7), ("sentence", 4, 1), ("sentence-op", 4, 7)]
)
def test_a_scope_says_what_has_a_rate_of_its_own(scope: str, rows: int, operations: int, tiny_bert: Path) -> None:
    objective = build(tiny_bert, scope=[scope])
    views = objective.draw(objective.views(ROWS))
    first, second = views["first"]["rates"], views["second"]["rates"]
    assert first.shape == second.shape == (4, 7)
    assert len(first.unique(dim=0)) == rows
    assert len(first.unique(dim=1).T) == operations
    assert len(torch.cat([first, second]).unique()) == 2 * rows * operations  # a draw a pass
    again = objective.draw(objective.views(ROWS))["first"]["rates"]
    assert not torch.equal(again, first)


def test_the_rates_are_uniform_up_to_twice_simcses_unless_a_recipe_says_otherwise(tiny_bert: Path) -> None:
    objective = build(tiny_bert, scope=["sentence-op"])
    rates = torch.stack([objective.draw(objective.views(ROWS))["first"]["rates"] for _ in range(500)])
    assert rates.mean().item() == pytest.approx(0.1, abs=4 * 0.0577 / math.sqrt(rates.numel()))
    assert rates.std().item() == pytest.approx(0.0577, rel=0.02)


def test_a_fixed_rate_of_a_tenth_drops_what_simcse_drops(folder: Path) -> None:
    """Every operation: the same share of zeros, the same scale. (SimCSE's attention drops inside a fused kernel.)"""
    for objective, operations in ((build(folder, "simcse"), 5), (build(folder, **fixed(0.1)), 7)):
        seen = watch(objective.encoder.backbone)
        torch.manual_seed(0)
        with torch.no_grad():
            for _ in range(60):
                objective(**objective.views(ROWS))
        assert len(seen) == operations
        for zeros, live in seen.values():
            assert zeros / live == pytest.approx(0.1, abs=4 * math.sqrt(0.1 * 0.9 / live))


def test_vectors_at_a_fixed_rate_of_a_tenth_are_spread_as_simcses(folder: Path) -> None:
    """Mean and deviation of one text's vector over 6000 masks: those of SimCSE, and not those of another rate."""
    simcse, sampled = (
        spread(build(folder, name, **words)) for name, words in (("simcse", {}), ("ssimcse", fixed(0.1)))
    )
    error = (simcse[1] ** 2 + sampled[1] ** 2).sqrt() / math.sqrt(6000)
    assert ((simcse[0] - sampled[0]).abs() < 4.5 * error).all()
    assert (sampled[1] / simcse[1]).mean().item() == pytest.approx(1, abs=0.02)
    without = spread(build(folder, attention_dropout=["false"], **fixed(0.1)), attention=0.0)
    assert (without[1] / simcse[1]).mean() < 0.98


def spread(objective: SimCSE, attention: float | None = None) -> tuple[Tensor, Tensor]:
    for name, module in objective.encoder.backbone.named_modules():
        if attention is not None and name.endswith("self.dropout"):
            module.p = attention
    views = objective.draw(objective.views([("Two dogs run over the field.",)] * 6000))
    torch.manual_seed(0)
    with torch.no_grad():
        vectors = objective.encode("first", views["first"])
    return vectors.mean(0), vectors.std(0)


def watch(backbone: nn.Module) -> dict[str, list[int]]:
    """Name -> zeros and live values of each dropout module that is called; what is left is scaled by 1 / 0.9."""
    seen: dict[str, list[int]] = {}

    def count(name: str, given: Tensor, dropped: Tensor) -> None:
        live = given != 0
        zeros, values = seen.setdefault(name, [0, 0])
        seen[name] = [zeros + int(((dropped == 0) & live).sum()), values + int(live.sum())]
        torch.testing.assert_close(dropped, torch.where(dropped == 0, 0, given / 0.9))

    for name, module in backbone.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda _, given, dropped, name=name: count(name, given[0], dropped))
    return seen


def test_without_dropout_both_views_are_the_plain_encoders_vectors(folder: Path) -> None:
    objective = build(folder, **fixed(0.0))
    views = objective.draw(objective.views(ROWS))
    first, second = (objective.encode(name, view) for name, view in views.items())
    assert torch.equal(first, second)
    plain = build(folder, "simcse").eval()
    expected = plain.encode("first", plain.views(ROWS)["first"])
    torch.testing.assert_close(first, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        objective(**objective.views(ROWS))["loss"], plain(**plain.views(ROWS))["loss"], atol=1e-4, rtol=1e-4
    )


def test_attention_keeps_the_encoders_own_rate_where_it_is_left_out(folder: Path) -> None:
    """With a rate of 0 elsewhere, what still drops is attention."""
    objective = build(folder, attention_dropout=["false"], **fixed(0.0))
    view = objective.draw(objective.views(ROWS))["first"]
    assert view["rates"].shape == (4, 5)
    assert not torch.allclose(objective.encode("first", view), objective.encode("first", view))
    for module in objective.encoder.backbone.modules():
        if type(module) is nn.Dropout:  # those of attention
            module.p = 0.0
    assert torch.equal(objective.encode("first", view), objective.encode("first", view))


def test_one_random_state_and_one_draw_give_one_pass_whole_or_row_by_row(folder: Path) -> None:
    """What GradCache needs: a chunk takes its rows' rates with it."""
    objective = build(folder, scope=["sentence-op"])
    view = objective.draw(objective.views(ROWS))["first"]
    state = torch.get_rng_state()
    whole, other = objective.encode("first", view), objective.encode("first", view)
    torch.set_rng_state(state)
    assert torch.equal(objective.encode("first", view), whole)
    assert not torch.allclose(other, whole)
    still = view | {"rates": torch.where(torch.arange(4).unsqueeze(1) < 2, 0.0, view["rates"])}
    chunk = {key: value[:2] for key, value in still.items()}
    expected = objective.eval().encode("first", chunk)
    objective.train()
    for vectors in (objective.encode("first", still)[:2], objective.encode("first", chunk)):
        torch.testing.assert_close(vectors, expected, atol=1e-5, rtol=1e-5)


def test_in_evaluation_nothing_is_dropped(folder: Path) -> None:
    objective = build(folder, **fixed(0.9)).eval()
    view = objective.draw(objective.views(ROWS))["first"]
    assert torch.equal(objective.encode("first", view), objective.encode("second", view))


def test_it_takes_hard_negatives_and_masked_words_as_simcse_does(tiny_bert: Path) -> None:
    objective = build(tiny_bert, columns=["a", "b", "c"], mlm_weight=["0.1"], scope=["sentence"])
    views = objective.views([("Rain.", "It rains.", "Two dogs run.")] * 4)
    assert all(view["rates"].shape == (4, 7) for view in objective.draw(views).values())
    outputs = objective(**views)
    outputs["loss"].backward()
    assert outputs.keys() == {"loss", "contrast", "guessing"}
    assert all(weight.grad is not None for weight in objective.parameters())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"rates": ["0.2", "0.1"]}, r"rates is \[0.2, 0.1\]; distribution 'uniform' takes the lowest and the highest"),
        ({"distribution": ["fixed"]}, r"distribution 'fixed' takes one rate below 1, such as \[0.1\]"),
        ({"distribution": ["beta"]}, "its two parameters, above 0"),
        ({"distribution": ["truncnormal"]}, "mean, standard deviation, lowest and highest rate"),
        ({"distribution": ["choice"], "rates": ["0.1", "1.5"]}, "the rates to choose from"),
    ],
)
def test_rates_that_cannot_be_are_refused(words: dict[str, list[str]], message: str, tiny_bert: Path) -> None:
    with pytest.raises(ClozeError, match=message):
        build(tiny_bert, **words)


@pytest.mark.parametrize("recipe", ["ssimcse", "ssimcse-sentence"])
def test_it_trains_and_leaves_a_plain_encoder(recipe: str, folder: Path, tmp_path: Path) -> None:
    corpus, run = tmp_path / "corpus.txt", tmp_path / "run"
    corpus.write_text("".join(f"The dog runs {number} times.\n" for number in range(8)), encoding="utf-8")
    words = ["--encoder", str(folder), "--corpus", str(corpus), "--batch-size", "4", "--max-steps", "2"]
    assert run_command(lambda: main([recipe, *words, "--eval-steps", "1", "--out", str(run)])) == 0
    weights = load_file(run / "model" / "model.safetensors")
    parent = load_file(folder / "model.safetensors")
    assert weights.keys() == parent.keys()
    assert any(not torch.equal(weights[key], parent[key]) for key in weights)
    (checkpoint,) = run.glob("checkpoint-2/model.safetensors")
    assert load_file(checkpoint).keys() == build(folder, "simcse").state_dict().keys()


@pytest.mark.parametrize(("name", "scope"), [("ssimcse", "op"), ("ssimcse-sentence", "sentence-op")])
def test_the_recipes_are_the_papers_section_1(name: str, scope: str) -> None:
    """A rate for each operation, and none drawn for attention (section 3.2)."""
    recipe = load_recipe(name, {"corpus": ["unused.txt"]})
    assert isinstance(recipe, SSimCSERecipe)
    assert (recipe.scope, recipe.attention_dropout) == (scope, False)
