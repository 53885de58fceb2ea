"""From the command line of fit and pretrain to a recipe: its keys are options; their defaults are its values."""

import shlex
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

from pydantic import Field, create_model
from pydantic_settings import CliVariadicArg

from cloze.encoding.bundle import DEFAULT
from cloze.options import Options, flag
from cloze.training.encoder_source import CONFIG_FIELDS, learnt_sentences, own_config
from cloze.training.errors import RecipeError
from cloze.training.recipes.methods import RECIPES
from cloze.training.recipes.recipe import FORMER, PRESETS, Recipe, choose_preset, read_toml, shipped_recipes, validate

GROUPS: Final[dict[str, tuple[str, ...]]] = {  # titles in the help
    "data": (
        *("corpus", "columns", "weights", "sentences", "min_words", "max_words"),
        *("dev", "dev_choice", "held_out"),
    ),
    "encoder": ("encoder", "template", "pooling", "final_period", "max_tokens"),
    "method": (),  # the keys that only this method has
    "schedule": ("batch_size", "epochs", "max_steps", "learning_rate", "eval_steps", "patience", "seed"),
    "expert": (
        *("group_by_length", "warmup_steps", "weight_decay", "adam_beta2"),
        *("lora_rank", "lora_alpha", "frozen_layers", "frozen_share", "precision", "compile", "mini_batch_size"),
        *("accumulation_steps", "dimensions", "save_steps", "workers", "log_steps", "report_to"),
    ),
}
READING: Final = ("template", "pooling")


class FitOptions(Options):
    """The options that are the same for every recipe."""

    preset: str | None = Field(None, description="preset of the recipe to use, such as one for another backbone")
    out: Path | None = Field(None, description="run folder to write (default: runs/RECIPE)")
    resume: Path | None = Field(None, description="resume this interrupted run, with its own recipe")
    seeds: CliVariadicArg[list[str]] = Field(
        [],
        description="train one run per seed (0 1 2, or 0-4), each in OUT/seed-N, and report the mean; repeat the "
        "same command to resume",
    )
    dry_run: bool = Field(
        False, description="run only two steps, and show an example of each view, the memory and the speed"
    )


def load_recipe(source: str, overrides: Mapping[str, object] | None = None, preset: str | None = None) -> Recipe:
    """A shipped recipe or a TOML file; a preset replaces its keys, and `overrides` replace both.

    If none of these sets a template or a pooling, the encoder's own configuration is used, if it has one. Raises
    RecipeError, RunError, BundleError.
    """
    written, overrides = read_toml(source), dict(overrides or {})
    keys = choose_preset(written, preset, source) | overrides
    recipe_class = _keys(keys, source)
    if source in shipped_recipes():  # its own encoder, or a preset's, keeps the paper's template and pooling, if any
        chosen = written.get(PRESETS, {}).get(preset, {}) | overrides
        encoder = (keys if written.keys().isdisjoint(READING) else overrides).get("encoder")
    else:
        chosen, encoder = keys, keys.get("encoder", DEFAULT)
    own = _own(encoder, keys) if chosen.keys().isdisjoint(READING) else {}
    return validate(recipe_class, keys | own | {key: chosen[key] for key in CONFIG_FIELDS if key in chosen}, source)


def _own(encoder: object, keys: Mapping[str, object]) -> dict[str, object]:
    """The encoder's own template, pooling and final period.

    Empty if the recipe's own are kept: those of a recipe with mask pooling if the encoder has another pooling, and
    those of every recipe for a run of `pretrain`, whose vectors are not trained yet. Raises RunError, BundleError.
    """
    if not isinstance(encoder, str) or not learnt_sentences(encoder):
        return {}
    own = own_config(encoder) or {}
    return {} if keys.get("pooling") == "mask" != own.get("pooling") else own


def recipe_of(source: str, words: Sequence[str], program: str) -> tuple[Recipe, FitOptions]:
    """The recipe `source` with the keys set on the command line, and the other options. Raises ClozeError."""
    for former, name in FORMER.items():
        if any(word.partition("=")[0] == flag(former) for word in words):
            raise RecipeError(f"{flag(former)} is now part of {flag(name)}; write its values there")
    options = _options(source, _word_after("--preset", words)).parse(words, program)
    overrides = options.model_dump(include=options.model_fields_set - FitOptions.model_fields.keys())
    return load_recipe(source, overrides, options.preset), options


def resumed(words: Sequence[str]) -> Path | None:
    """The run folder that `--resume` names; None without that option. Raises RecipeError if there are other words."""
    if not any(word == "--resume" or word.startswith("--resume=") for word in words):
        return None
    path = _word_after("--resume", words)
    if path is None or len(words) > (1 if words[0].startswith("--resume=") else 2):
        raise RecipeError("--resume continues a run where it stopped, by its own recipe; omit RECIPE and its keys")
    return Path(path)


def _keys(keys: Mapping[str, object], source: str) -> type[Recipe]:
    name = keys.get("method")
    if not isinstance(name, str) or name not in RECIPES:
        raise RecipeError(f"recipe {source}: method is {name!r}; write one of {', '.join(RECIPES)}")
    return RECIPES[name]


def _options(source: str, preset: str | None) -> type[FitOptions]:
    """FitOptions and every key of the recipe; the defaults are the recipe's values."""
    written = read_toml(source)
    keys = choose_preset(written, preset, source)
    fields: dict[str, Any] = {}
    variadic: Any = CliVariadicArg  # applied to types that are known only at run time
    for name, field in _keys(keys, source).model_fields.items():
        if name == "method":  # another method is another recipe
            continue
        several = "tuple" in str(field.annotation)
        unset = None if field.is_required() else field.default
        needed = " (required)" if field.is_required() and name not in keys else ""
        default = Field(keys.get(name, unset), description=f"{field.description}{needed}")
        annotation: Any = field.annotation
        fields[name] = (variadic[annotation] if several else annotation, default)
    lines = [f"Train a sentence encoder with the recipe {source}."]
    for name, own in written.get(PRESETS, {}).items():
        lines.append(f"  --preset {name:22} {' '.join(chain.from_iterable(map(_words, own, own.values())))}")
    grouped = {name for names in GROUPS.values() for name in names}
    groups = {title: names or [name for name in fields if name not in grouped] for title, names in GROUPS.items()}
    ordered = {name: fields[name] for names in groups.values() for name in names if name in fields}
    options = create_model("RecipeOptions", __base__=FitOptions, __doc__="\n".join(lines), **ordered)
    options.groups = groups
    return options


def _words(key: str, value: object) -> list[str]:
    """A key and its value, quoted for a shell."""
    if isinstance(value, bool):
        return [flag(key if value else f"no_{key}")]
    return [flag(key), *(_quoted(str(item)) for item in (value if isinstance(value, list) else [value]))]


def _quoted(word: str) -> str:
    return f'"{word}"' if "'" in word and not set(word) & set('"$`\\!') else shlex.quote(word)


def _word_after(option: str, words: Sequence[str]) -> str | None:
    """The value of an option that is needed before the others can be read."""
    for place, word in enumerate(words):
        if word == option and place + 1 < len(words):
            return words[place + 1]
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return None
