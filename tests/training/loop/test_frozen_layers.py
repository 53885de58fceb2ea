"""Frozen layers: what does not learn, when layers are thawed, what is refused."""

from pathlib import Path

import pytest
from killed_runs import fit
from recipes import load_recipe
from safetensors.torch import load_file
from test_lora import LINEARS, backbone

from cloze.training.errors import RecipeError
from cloze.training.loop.prepare import prepare
from cloze.training.loop.trainable import first_layers, freeze_embeddings
from cloze.training.run_folder import Run

KEYS = {"batch_size": 8, "max_steps": 4, "held_out": 0, "save_steps": 2, "log_steps": 1, "learning_rate": 1e-2}


@pytest.fixture
def keys(tiny_bert: Path, tmp_path: Path) -> dict[str, list[str]]:
    things = ["dog", "man", "letter", "city", "rain", "guitar"]
    text = "".join(f"The {a} and the {b} run.\n" for a in things for b in things)
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    values = KEYS | {"encoder": tiny_bert, "corpus": tmp_path / "text.txt"}
    return {key: [str(value)] for key, value in values.items()}


def learnt(run: Path, parent: Path) -> set[str]:
    """The parts of a model whose weights have changed: embeddings, layer.0, layer.1 and so on."""
    before, after = load_file(parent / "model.safetensors"), load_file(run / "model" / "model.safetensors")
    changed = {name for name, weight in before.items() if not weight.equal(after[name])}
    return {"embeddings" if name.startswith("embeddings") else ".".join(name.split(".")[1:3]) for name in changed}


@pytest.mark.parametrize(
    ("frozen", "expected"),
    [
        ({}, {"embeddings", "layer.0", "layer.1"}),
        ({"frozen_layers": ["0"]}, {"layer.0", "layer.1"}),
        ({"frozen_layers": ["1"]}, {"layer.1"}),
        ({"frozen_layers": ["1"], "frozen_share": ["0.5"]}, {"layer.0", "layer.1"}),
        ({"frozen_layers": ["1"], "frozen_share": ["0.9"]}, {"layer.1"}),  # no step is left
    ],
)
def test_what_is_frozen_does_not_learn(
    frozen: dict[str, list[str]], expected: set[str], keys: dict[str, list[str]], tiny_bert: Path, tmp_path: Path
) -> None:
    fit(load_recipe("simcse", keys | frozen), Run(tmp_path / "run"))
    assert learnt(tmp_path / "run", tiny_bert) == expected


@pytest.mark.parametrize("family", LINEARS)
def test_the_layers_of_each_architecture_are_found(family: str) -> None:
    model = backbone(family)
    freeze_embeddings(model)
    assert not any(weight.requires_grad for weight in model.get_input_embeddings().parameters())
    layers = first_layers(model, 1)
    learning = {name for name, weight in model.named_parameters() if weight.requires_grad}
    layers.requires_grad_(False)
    still = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert learning > still
    assert not any(".0." in name for name in still)
    assert any(".1." in name for name in still)


@pytest.mark.parametrize(
    ("recipe", "words", "message"),
    [
        ("simcse", {"frozen_layers": ["0"], "frozen_share": ["0.5"]}, "frozen_share is 0.5 and frozen_layers is 0, so"),
        (
            "simcse",
            {"lora_rank": ["3"]},
            "lora_rank is 3, which freezes all layers, but frozen_layers is 1; choose one",
        ),
        ("optiprompt", {}, "frozen_layers is 1, and method 'optiprompt' keeps all layers frozen; remove it"),
        (
            "mlm",
            {"from_scratch": ["true"]},
            "frozen_layers is 1, which keeps weights, but from_scratch initialises all",
        ),
    ],
)
def test_what_has_nothing_to_freeze_refuses_it(
    recipe: str, words: dict[str, list[str]], message: str, keys: dict[str, list[str]]
) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(recipe, keys | {"frozen_layers": ["1"]} | words)


def test_one_layer_has_to_be_left(keys: dict[str, list[str]]) -> None:
    recipe = load_recipe("simcse", keys | {"frozen_layers": ["2"]})
    with pytest.raises(RecipeError, match=r"frozen_layers is 2, but the encoder has 2 layers .* write 1 at most"):
        prepare(recipe)
