"""Recipes as TOML: those that come with Cloze, their presets, and errors that name the key and what to write."""

import difflib
import json
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from training.errors import RecipeError
from training.recipes.keys import Recipe

__all__ = ["FORMER", "PRESETS", "choose_preset", "read_toml", "shipped_recipes", "to_toml", "validate"]

PRESETS = "presets"
FORMER: Final = {"dev_retrieval": "dev"}  # keys of earlier versions -> those that replace them


def shipped_recipes() -> dict[str, str]:
    """Name -> TOML text of the recipes that come with Cloze."""
    folder = files("training") / "recipes"
    found = {
        Path(entry.name).stem: entry.read_text(encoding="utf-8")
        for entry in folder.iterdir()
        if entry.name.endswith(".toml")
    }
    return dict(sorted(found.items()))


def read_toml(source: str) -> dict[str, Any]:
    """The keys of a shipped recipe or a TOML file. Raises RecipeError."""
    shipped = shipped_recipes()
    path = Path(source)
    if source in shipped:
        text = shipped[source]
    elif path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"recipe {source}: cannot be read as UTF-8 text ({error})") from error
    else:
        raise RecipeError(f"no recipe {source!r}: neither a file nor one of {', '.join(shipped)}")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"recipe {source}: not TOML: {error}") from error


def choose_preset(keys: Mapping[str, Any], name: str | None, source: str) -> dict[str, Any]:
    """The top keys, replaced by those of preset `name`, without the table of presets. Raises RecipeError."""
    presets = keys.get(PRESETS, {})
    if not (isinstance(presets, dict) and all(isinstance(preset, dict) for preset in presets.values())):
        raise RecipeError(f"recipe {source}: presets is not a table of tables; write [presets.NAME] and its keys below")
    if name is not None and name not in presets:
        known = f"its presets are {', '.join(presets)}" if presets else "it has none"
        raise RecipeError(f"recipe {source}: no preset {name!r}; {known}")
    top = {key: value for key, value in keys.items() if key != PRESETS}
    return top | (presets[name] if name else {})


def validate(recipe: type[Recipe], keys: Mapping[str, object], source: str) -> Recipe:
    """Check every key. Raises RecipeError, which names the first bad key, what was found and what to write."""
    try:
        return recipe.model_validate_json(json.dumps(keys, default=str))  # TOML has dates, which no key takes
    except ValidationError as error:
        raise RecipeError(_explain(recipe, keys, source, error.errors()[0])) from error


def _explain(recipe: type[Recipe], keys: Mapping[str, object], source: str, first: ErrorDetails) -> str:
    """The message for one error of validation."""
    key = str(first["loc"][0]) if first["loc"] else ""
    if first["type"] == "extra_forbidden":
        return f"recipe {source}: {_unknown_key(recipe, key)}"
    if first["type"] == "missing":
        return f"recipe {source}: {key} is not set; write {key}: {recipe.model_fields[key].description}"
    problem = _PROBLEMS.get(first["type"], first["msg"].removeprefix("Value error, "))
    if not key:
        return f"recipe {source}: {problem}"
    return f"recipe {source}: {key} is {keys[key]!r}: {problem}; {key} is: {recipe.model_fields[key].description}"


def _unknown_key(recipe: type[Recipe], key: str) -> str:
    """The message for a key that the method does not have."""
    if key in FORMER:
        return f"{key} is now part of {FORMER[key]}; write its values there"
    close = difflib.get_close_matches(key, recipe.model_fields, 1)
    hint = f"did you mean {close[0]}?" if close else f"the keys are {', '.join(recipe.model_fields)}"
    return f"unknown key {key!r}; {hint}"


def to_toml(recipe: Recipe) -> str:
    """The recipe as TOML with every key that is set."""
    values = recipe.model_dump(mode="json", exclude_none=True)
    # a JSON string, number, boolean or list of these is a TOML value
    return "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items())


_PROBLEMS = {
    "bool_type": "write true or false",
    "tuple_type": 'write a list, such as ["one", "two"]',
    "finite_number": "write a finite number",
}
