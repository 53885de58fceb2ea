"""The papers' hyper-parameters: every shipped recipe of theirs, with every preset, has the numbers that they print."""

from typing import Any

import pytest
from recipes import load_recipe

from cloze.training.recipes.recipe import PRESETS, read_toml, shipped_recipes

BACKBONES = {
    None: "google-bert/bert-base-uncased",
    "bert-large": "google-bert/bert-large-uncased",
    "sbert-base": "sentence-transformers/bert-base-nli-mean-tokens",
    "sbert-large": "sentence-transformers/bert-large-nli-mean-tokens",
    "roberta-base": "FacebookAI/roberta-base",
    "roberta-large": "FacebookAI/roberta-large",
    "bert-base-transfer": "google-bert/bert-base-uncased",
    "roberta-base-transfer": "FacebookAI/roberta-base",
}
# PromptBERT's Table 13; the quotes are those of its code
TEMPLATES = {
    None: ('This sentence of "[X]" means [MASK].', 'This sentence : "[X]" means [MASK].'),
    "roberta-base": ("This sentence : ' [X] ' means [MASK].", "The sentence : ' [X] ' means [MASK]."),
}

KEYS = ("batch_size", "learning_rate", "epochs", "eval_steps", "max_tokens", "temperature")
ALL_SG = (None, "bert-large", "sbert-base", "sbert-large", "roberta-base", "roberta-large")
TABLE = {
    # PromptBERT, Table 14: sentences of 32 tokens, and the template's 10
    ("promptbert", None): (256, 1e-5, 1, 125, 42, 0.05),
    ("promptbert", "roberta-base"): (256, 1e-5, 1, 125, 42, 0.05),
    ("promptbert-different", None): (256, 1e-5, 1, 125, 42, 0.05),
    ("promptbert-different", "roberta-base"): (256, 1e-5, 1, 125, 42, 0.05),
    ("promptbert-same", None): (256, 1e-5, 1, 125, 42, 0.05),
    ("promptbert-same", "roberta-base"): (256, 1e-5, 1, 125, 42, 0.05),
    ("promptbert-supervised", None): (512, 5e-5, 3, 125, 42, 0.05),
    ("promptbert-supervised", "roberta-base"): (512, 5e-5, 3, 125, 42, 0.05),
    # PromptBERT, appendix B
    ("optiprompt", None): (256, 3e-5, 5, 1000, 42, 0.05),
    # SimCSE, appendix A; S-SimCSE says: as SimCSE
    ("simcse", None): (64, 3e-5, 1, 125, 32, 0.05),
    ("simcse", "bert-large"): (64, 1e-5, 1, 125, 32, 0.05),
    ("simcse", "roberta-base"): (512, 1e-5, 1, 125, 32, 0.05),
    ("simcse", "roberta-large"): (512, 3e-5, 1, 125, 32, 0.05),
    ("simcse-supervised", None): (512, 5e-5, 3, 125, 32, 0.05),
    ("simcse-supervised", "bert-large"): (512, 1e-5, 3, 125, 32, 0.05),
    ("simcse-supervised", "roberta-base"): (512, 5e-5, 3, 125, 32, 0.05),
    ("simcse-supervised", "roberta-large"): (512, 1e-5, 3, 125, 32, 0.05),
    **{
        (name, preset): (size, rate, 1, 125, 32, 0.05)
        for name in ("ssimcse", "ssimcse-sentence")
        for preset, size, rate in (
            (None, 64, 3e-5),
            ("bert-large", 64, 1e-5),
            ("roberta-base", 512, 1e-5),
            ("roberta-large", 512, 3e-5),
        )
    },
    # DiffCSE, Tables 12 and 13
    ("diffcse", None): (64, 7e-6, 2, 125, 32, 0.05),
    ("diffcse", "roberta-base"): (64, 1e-5, 2, 125, 32, 0.05),
    ("diffcse", "bert-base-transfer"): (64, 2e-6, 2, 125, 32, 0.05),
    ("diffcse", "roberta-base-transfer"): (128, 3e-6, 2, 125, 32, 0.05),
    ("diffcse-insert", None): (64, 7e-6, 2, 125, 32, 0.05),
    ("diffcse-delete", None): (64, 7e-6, 2, 125, 32, 0.05),
    ("diffcse-combined", None): (64, 7e-6, 2, 125, 32, 0.05),
    # SG, Table 8: chosen with BERT-base and used for all
    **{
        (name, preset): (16, 5e-5, 1, 50, 128, 0.01)
        for name in ("sg", "sg-opt", "sg-bt", "sg-opt-bt")
        for preset in ALL_SG
    },
}
SG = [pair for pair in TABLE if pair[0].startswith("sg")]
PROMPTBERT = [pair for pair in TABLE if pair[0].startswith("promptbert")]


def test_no_recipe_and_no_preset_is_left_out() -> None:
    of_papers = [name for name in shipped_recipes() if name not in ("distill", "mask", "mlm", "ranking", "scored")]
    shipped = {(name, preset) for name in of_papers for preset in (None, *read_toml(name).get(PRESETS, ()))}
    assert shipped == TABLE.keys()


def recipe_of(name: str, preset: str | None) -> Any:
    return load_recipe(name, {"corpus": ["unused.txt"]}, preset)


def test_the_papers_numbers() -> None:
    for (name, preset), numbers in TABLE.items():
        recipe = recipe_of(name, preset)
        assert (recipe.encoder, *(getattr(recipe, key) for key in KEYS)) == (BACKBONES[preset], *numbers), name
        assert recipe.pooling == ("mask" if "prompt" in name else "cls"), name


def test_adamw_is_plain_and_without_warm_up_but_for_sgs() -> None:
    for pair in TABLE:
        recipe, expected = recipe_of(*pair), (0.9, 0.1, 0.01) if pair in SG else (0.999, 0, 0)
        found = recipe.adam_beta2, recipe.warmup_steps, recipe.weight_decay
        assert found == expected, pair  # a tenth of the steps: 108 on STS-B


def test_sg_is_table_8_for_every_backbone() -> None:
    for name, preset in SG:
        recipe = recipe_of(name, preset)
        assert (recipe.drift_weight, recipe.head_width, recipe.guide_pooling) == (0.1, 4096, "max")
        assert recipe.first_layer == 0  # all layers
        assert (recipe.variant == "opt3") == ("opt" in name), name
        assert recipe.positives == ("translation" if name == "sg-bt" else "layers"), name


def test_promptberts_templates_are_table_13() -> None:
    for name, preset in PROMPTBERT:
        recipe, (first, second) = recipe_of(name, preset), TEMPLATES[preset]
        found = recipe.template, recipe.second_template
        assert found == (first, second if recipe.mode in ("different", "denoised") else None), (name, preset)


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        (None, (0.3, 0.005)),
        ("roberta-base", (0.2, 0.005)),
        ("bert-base-transfer", (0.15, 0.05)),
        ("roberta-base-transfer", (0.15, 0.05)),
    ],
)
def test_diffcses_own_keys_are_tables_12_and_13(preset: str | None, expected: tuple[float, float]) -> None:
    recipe = recipe_of("diffcse", preset)
    assert (recipe.masked_share, recipe.detection_weight) == expected
    assert ("roberta" in recipe.encoder) == ("roberta" in recipe.generator)


def test_optiprompt_begins_as_the_template_of_the_untuned_encoder() -> None:
    assert recipe_of("optiprompt", None).template == TEMPLATES[None][1]
