import json
from pathlib import Path

import pytest
from recipes import load_recipe

from cloze.encoding.errors import ClozeError, OptionError
from cloze.training.encoder_source import own_config
from cloze.training.errors import RecipeError
from cloze.training.recipes.command import recipe_of
from cloze.training.recipes.recipe import PRESETS, RETIRED, read_toml, shipped_recipes, to_toml

CORPUS = {"corpus": ["text.txt"]}


def test_shipped_recipes_and_presets_are_whole_but_for_the_corpus_and_a_teacher() -> None:
    for name in shipped_recipes():
        teacher = {"teacher": ["t"]} if name == "distill" else {}
        recipe = load_recipe(name, CORPUS | teacher)
        assert recipe.corpus == ("text.txt",)
        with pytest.raises(RecipeError, match="corpus is not set; write corpus: text files"):
            load_recipe(name, teacher)
        for preset in read_toml(name).get(PRESETS, {}):
            assert load_recipe(name, CORPUS | teacher, preset) != recipe, (name, preset)


def test_a_recipe_that_names_no_template_uses_its_encoders() -> None:
    own = own_config("cloze-mini")
    for encoder in ({}, {"encoder": "cloze-mini"}):
        recipe = load_recipe("ranking", {"corpus": ["pairs.csv"]} | encoder)
        assert recipe.model_dump(include=set(own or ())) == own
    assert load_recipe("ranking", {"corpus": ["pairs.csv"], "pooling": "mean"}).template == "[X]"


def test_a_key_of_an_earlier_version_may_have_the_only_value_left(tmp_path: Path) -> None:
    path = tmp_path / "former.toml"
    for key, value in RETIRED.items():
        former = f'method = "simcse"\ncorpus = ["text.txt"]\n{key} = '
        path.write_text(former + json.dumps(value), encoding="utf-8")
        assert key not in to_toml(load_recipe(str(path)))
        path.write_text(f"{former}0.625", encoding="utf-8")
        with pytest.raises(RecipeError, match=f"{key} is always {json.dumps(value)} now; leave it out"):
            load_recipe(str(path))


def test_a_column_is_named_once() -> None:
    with pytest.raises(RecipeError, match="columns names a twice; name each column once"):
        load_recipe("simcse", CORPUS | {"columns": ["a", "b", "a"]})


def test_a_preset_lies_over_the_recipe_and_words_over_both(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'method = "simcse"\nencoder = "a"\ncorpus = ["text.txt"]\nlearning_rate = 3e-5\nbatch_size = 64\n'
        '[presets.large]\nencoder = "b"\nlearning_rate = 1e-5\n[presets.odd]\nlerning_rate = 1\n',
        encoding="utf-8",
    )
    top, large = load_recipe(str(path)), load_recipe(str(path), preset="large")
    assert (top.encoder, top.learning_rate, top.batch_size) == ("a", 3e-5, 64)
    assert (large.encoder, large.learning_rate, large.batch_size) == ("b", 1e-5, 64)
    mine = load_recipe(str(path), {"learning_rate": ["2e-5"]}, "large")
    assert (mine.encoder, mine.learning_rate) == ("b", 2e-5)
    assert "presets" not in to_toml(large)
    with pytest.raises(RecipeError, match=r"no preset 'larg'; its presets are large, odd"):
        load_recipe(str(path), preset="larg")
    with pytest.raises(RecipeError, match=r"unknown key 'lerning_rate'; did you mean learning_rate\?"):
        load_recipe(str(path), preset="odd")
    with pytest.raises(OptionError, match="unrecognized arguments: --presets large"):
        load_recipe(str(path), {"presets": ["large"]})
    path.write_text('method = "simcse"\npresets = 3', encoding="utf-8")
    with pytest.raises(RecipeError, match=r"presets is not a table of tables; write \[presets.NAME\]"):
        load_recipe(str(path))


def test_a_recipe_without_presets_says_so() -> None:
    with pytest.raises(RecipeError, match="no preset 'large'; it has none"):
        load_recipe("optiprompt", CORPUS, "large")


def test_a_resolved_recipe_reads_back_the_same(tmp_path: Path) -> None:
    recipe = load_recipe("promptbert", {**CORPUS, "dev": ['a "quoted" name.csv'], "max_steps": ["7"]})
    path = tmp_path / "recipe.toml"
    path.write_text(to_toml(recipe), encoding="utf-8")
    assert load_recipe(str(path)) == recipe


def test_words_of_the_command_line_become_values() -> None:
    words = {
        "corpus": ["a.txt", "b c.csv"],
        "columns": ["text"],
        "learning_rate": ["1e-4"],
        "batch_size": ["16"],
        "final_period": ["true"],
        "template": ['A "[X]" means [MASK].'],
    }
    recipe = load_recipe("promptbert", words)
    assert recipe.corpus == ("a.txt", "b c.csv")
    assert recipe.columns == ("text",)
    assert (recipe.learning_rate, recipe.batch_size, recipe.final_period) == (1e-4, 16, True)
    assert recipe.template == 'A "[X]" means [MASK].'


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        (
            "simcse",
            {"learning_rat": ["1"]},
            r"unrecognized .*: --learning-rat 1; did you mean --learning-rate\?",
        ),
        ("simcse", {"zzz": ["1"]}, "unrecognized arguments: --zzz 1; --help lists the options"),
        ("simcse", {"batch_size": ["many"]}, "--batch-size is 'many': .*integer"),
        ("simcse", {"batch_size": ["1"]}, "batch_size is 1: .*greater than 1.*sentences per step"),
        ("simcse", {"batch_size": ["2.5"]}, r"--batch-size is '2\.5'"),
        ("simcse", {"pooling": ["pooler"]}, "--pooling is 'pooler': .*'mask', 'cls', 'mean', 'max'"),
        ("simcse", {"template": ["no place"]}, r"has \[X\] 0 times"),
        ("simcse", {"pooling": ["mask"]}, r"has \[MASK\] 0 times"),
        ("simcse", {"min_words": ["9"], "max_words": ["3"]}, "max_words is 3, but min_words is 9"),
        ("simcse", {"learning_rate": ["inf"]}, "learning_rate is inf: write a finite number"),
    ],
)
def test_a_bad_key_is_named_with_what_to_write(name: str, words: dict[str, list[str]], message: str) -> None:
    with pytest.raises(ClozeError, match=message):
        load_recipe(name, {**CORPUS, **words})


def test_a_bad_recipe_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"no recipe 'simcsee'; give a TOML file, or one of .*simcse"):
        load_recipe("simcsee")
    path = tmp_path / "bad.toml"
    path.write_text("method = ", encoding="utf-8")
    with pytest.raises(RecipeError, match="not TOML"):
        load_recipe(str(path))
    path.write_bytes(b"# caf\xe9")
    with pytest.raises(RecipeError, match="cannot be read as UTF-8 text"):
        load_recipe(str(path))
    path.write_text('method = "simcse"\nencoder = "a"\ncorpus = "text.txt"', encoding="utf-8")
    with pytest.raises(RecipeError, match=r"corpus is 'text\.txt': write a list"):
        load_recipe(str(path))
    path.write_text('method = "simcse"\nencoder = "a"\ncorpus = ["text.txt"]\nepochs = 2026-01-01', encoding="utf-8")
    with pytest.raises(RecipeError, match=r"epochs is .*valid number"):
        load_recipe(str(path))
    path.write_text('method = "magic"', encoding="utf-8")
    with pytest.raises(RecipeError, match=r"method is 'magic'; write one of .*distill"):
        load_recipe(str(path))


def test_a_key_in_the_spelling_of_a_file_says_that_of_the_command_line() -> None:
    for word in ("--batch_size", "--batch_size=4"):
        with pytest.raises(OptionError, match=r"^unrecognized .*: --batch_size.4.*; did you mean --batch-size\?$"):
            recipe_of("simcse", [word, "4"], "cloze fit")
