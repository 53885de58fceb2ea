"""The words of `python -m training.fit`: options, `--key value` of any recipe, and what help says."""

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from training.errors import RecipeError
from training.objective import Objective
from training.objectives import OBJECTIVES
from training.recipe import PRESETS, choose_preset, read_toml, shipped_recipes

__all__ = ["method", "overview", "parse"]


def parse(arguments: Sequence[str], command: str) -> tuple[argparse.Namespace, dict[str, list[str]]]:
    """Options, and key -> words of every other `--key word ...`. Ends the process after --help."""
    parser = _parser(command)
    known, rest = parser.parse_known_args(arguments)
    if known.help:
        print(parser.format_help() + "\n" + (_key_help(known.recipe, known.preset) if known.recipe else overview()))
        sys.exit(0)
    if rest and known.recipe and not known.resume and arguments.index(rest[0]) < arguments.index(known.recipe):
        raise RecipeError(f"RECIPE comes before its keys: python -m {command} RECIPE {rest[0]} ...")
    overrides: dict[str, list[str]] = {}
    key = None
    for word in rest:
        if word.startswith("--"):
            key, _, value = word[2:].partition("=")
            key = key.replace("-", "_")
            overrides[key] = [value] if value else []
        elif key is None:
            raise RecipeError(f"unexpected {word!r}; write --key value")
        else:
            overrides[key].append(word)
    return known, overrides


def method(keys: Mapping[str, object], source: str) -> type[Objective]:
    """The objective that a recipe's keys name. Raises RecipeError."""
    name = keys.get("method")
    if not isinstance(name, str) or name not in OBJECTIVES:
        raise RecipeError(f"recipe {source}: method is {name!r}; write one of {', '.join(OBJECTIVES)}")
    return OBJECTIVES[name]


def overview() -> str:
    """The shipped recipes, each with the comment it begins with, and an example."""
    lines = ["The recipes that come with Cloze (a path to a TOML file works as well):", ""]
    for name, text in shipped_recipes().items():
        lines.append(f"  {name:24} {text.splitlines()[0].lstrip('# ')}")
    lines += ["", "Example:", "", "  python -m training.fit promptbert --corpus my-sentences.txt --out runs/mine"]
    lines += ["", "Keys and presets of a recipe:  python -m training.fit promptbert --help"]
    return "\n".join(lines)


def _key_help(source: str, preset: str | None) -> str:
    """The presets, then a line a key: its value in this recipe and what it means."""
    whole = read_toml(source)
    keys = choose_preset(whole, preset, source)
    model = method(keys, source).Recipe
    lines = []
    if whole.get(PRESETS):
        lines += [f"Presets of the recipe {source}:"]
        for name, own in whole[PRESETS].items():
            lines.append(f"  --preset {name:20} {', '.join(f'{key} {_spelt(value)}' for key, value in own.items())}")
        lines += [""]
    lines += [f"Keys of the recipe {source}, each a --key of the command line too:"]
    for name, field in model.model_fields.items():
        if name != "method":  # another method is another recipe
            value = keys.get(name, None if field.is_required() else field.default)
            lines.append(f"  --{name} {_spelt(value)}".rstrip() + f"\n        {field.description}")
    return "\n".join(lines)


def _spelt(value: object) -> str:
    """A key's value as the command line takes it; nothing where it is unset."""
    if value is None:
        return ""
    if isinstance(value, list | tuple):
        return " ".join(map(_spelt, value))
    return shlex.quote(value) if isinstance(value, str) else str(value).lower()


def _parser(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {command}",
        description="Train a sentence encoder by a recipe.",
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("recipe", nargs="?", help="a shipped recipe's name or a TOML file")
    parser.add_argument(
        "--preset", metavar="NAME", help="lay a preset of the recipe, such as a backbone's, over its keys"
    )
    parser.add_argument("--out", type=Path, help="the run folder to make (default: runs/RECIPE)")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="continue a run that was stopped")
    parser.add_argument(
        "--seeds",
        nargs="+",
        metavar="N",
        help="a run a seed (0 1 2, or 0-4), each in OUT/seed-N, and their mean; the same command again continues",
    )
    parser.add_argument("--dry-run", action="store_true", help="two steps, an example a view, memory and speed")
    parser.add_argument("-h", "--help", action="store_true", help="this help; with RECIPE: its keys and presets")
    return parser
