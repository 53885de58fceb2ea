"""Recipes as the command line makes them."""

from collections.abc import Mapping, Sequence

from cloze.training.recipes.command import recipe_of
from cloze.training.recipes.recipe import Recipe


def arguments(keys: Mapping[str, object]) -> list[str]:
    """`{"batch_size": 4, "columns": ["a", "b"], "compile": True}` -> `--batch-size 4 --columns a b --compile`"""
    words: list[str] = []
    for key, value in keys.items():
        flag = key.replace("_", "-")
        if value is True or value in ("true", ["true"]):
            words.append(f"--{flag}")
        elif value is False or value in ("false", ["false"]):
            words.append(f"--no-{flag}")
        else:
            words += [f"--{flag}", *map(str, value if isinstance(value, list | tuple) else [value])]
    return words


def load_recipe(source: str, words: Mapping[str, Sequence[str]] | None = None, preset: str | None = None) -> Recipe:
    """The recipe `source` with the words of each key."""
    given = [*(["--preset", preset] if preset else []), *arguments(words or {})]
    return recipe_of(source, given, "cloze fit")[0]
