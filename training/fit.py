"""python -m training.fit RECIPE [--preset NAME] [--key value ...]: a recipe becomes a run folder.

Without arguments: the recipes and an example. Under torchrun each process runs it; the first one speaks.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from training.cli import run as run_command
from training.errors import RecipeError
from training.loop import console, fit, processes
from training.recipe import Recipe, choose_preset, parse_value, read_toml, unknown_key, validate
from training.rehearsal import dry_run
from training.run import Run
from training.seeds import fit_seeds, parse_seeds
from training.usage import method, overview, parse

__all__ = ["load_recipe", "main"]

_NOT_TO_RESUME = ("--preset", "--out", "--seeds", "--dry-run")


def load_recipe(source: str, overrides: dict[str, list[str]] | None = None, preset: str | None = None) -> Recipe:
    """A shipped recipe or a TOML file, a preset over its keys and command-line words over both. Raises RecipeError."""
    keys = choose_preset(read_toml(source), preset, source)
    model = method(keys, source).Recipe
    for key, words in (overrides or {}).items():
        if key not in model.model_fields:
            raise RecipeError(f"recipe {source}: {unknown_key(model, key)}")
        keys[key] = parse_value(model, key, words)
    return validate(model, keys, source)


def main(arguments: Sequence[str] | None = None, command: str = "training.fit") -> int:
    """Raises ClozeError; usage errors end the process with 2."""
    words = sys.argv[1:] if arguments is None else arguments
    options, overrides = parse(words, command)
    if options.resume and (options.recipe or overrides or any(word.startswith(_NOT_TO_RESUME) for word in words)):
        raise RecipeError("--resume continues a run where it is, by its own recipe; leave RECIPE and keys away")
    if not words:
        print(overview())
        return 0
    if not options.resume and not options.recipe:
        raise RecipeError(f"RECIPE is missing: python -m {command} RECIPE {words[0]} ...")
    console.quiet = not processes().is_main_process
    if options.resume:
        code = _resume(Run.open(options.resume))
    else:
        recipe = load_recipe(options.recipe, overrides, options.preset)
        out = options.out or Path("runs", Path(options.recipe).stem)
        if options.dry_run:
            code = dry_run(recipe)
        elif options.seeds:
            code = _fit_seeds(recipe, parse_seeds(options.seeds), out)
        else:
            code = _fit(recipe, Run.fresh(out))
    processes().destroy_process_group()
    return code or 0


def _fit(recipe: Recipe, run: Run, resume: bool = False) -> int:
    if not fit(recipe, run, resume):
        console.print(f"stopped; continue with: python -m training.fit --resume {run.path}")
        return 130
    console.print(f"finished: {run.model}; next: python -m training.export {run.path} models/NAME")
    return 0


def _resume(run: Run) -> int:
    if run.finished:
        console.print(f"{run.path} is finished; nothing to do")
        return 0
    return _fit(load_recipe(str(run.recipe_file)), run, resume=True)


def _fit_seeds(recipe: Recipe, seeds: Sequence[int], out: Path) -> int:
    if not fit_seeds(recipe, seeds, out):
        console.print("stopped; continue with the same command")
        return 130
    console.print(f"finished: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
