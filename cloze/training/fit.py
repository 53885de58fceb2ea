"""cloze fit RECIPE [--key-name value ...]: train with a recipe and write a run folder.

Without arguments it lists the recipes. Under torchrun each process runs it, and the first one prints.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pydantic import create_model

from cloze.command import run
from cloze.training.errors import RecipeError
from cloze.training.recipes.command import FitOptions, recipe_of, resumed
from cloze.training.recipes.recipe import shipped_recipes

ADAPT: Final = "adapt"


def main(arguments: Sequence[str] | None = None) -> int:
    """Raises ClozeError."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = "cloze fit"
    if not words:
        print(overview(name))
        return 0
    if words[0] in ("-h", "--help"):
        described = f"Train a sentence encoder with a recipe.\n\n{overview(name)}"
        create_model("FitOptions", __base__=FitOptions, __doc__=described).parse(words, f"{name} RECIPE")
    if words[0] == ADAPT:  # a sequence of several runs, with its own options
        from cloze.training.adapt import main as adapt

        adapt(words[1:])
        return 0
    if path := resumed(words):
        from cloze.training.loop.run import resume

        return resume(path)
    if words[0].startswith("-"):
        reason = "comes before its keys" if set(words) & shipped_recipes().keys() else "is missing"
        raise RecipeError(f"RECIPE {reason}: {name} RECIPE {words[0]} ...")
    recipe, options = recipe_of(words[0], words[1:], f"{name} {words[0]}")

    from cloze.training.loop.run import train  # torch takes seconds to load; help and key errors need not wait

    return train(recipe, options, Path(words[0]).stem)


def overview(name: str) -> str:
    """The shipped recipes, each with its first comment, and an example command."""
    lines = ["The recipes that come with Cloze (the path of a TOML file also works):", ""]
    for recipe, text in shipped_recipes().items():
        lines.append(f"  {recipe:24} {text.splitlines()[0].lstrip('# ')}")
    lines += [
        f"  {ADAPT:24} Your own documents and queries: several runs, and a report of whether they helped (cloze adapt)"
    ]
    lines += ["", "Example:", "", f"  {name} promptbert --corpus my-sentences.txt --out runs/mine"]
    lines += ["", f"Keys and presets of a recipe:  {name} promptbert --help"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(run(main))
