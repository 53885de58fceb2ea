"""The command line of fit and pretrain: a recipe, its keys as options, and what to do with the run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, create_model
from pydantic_settings import CliVariadicArg

from encoding.options import Command, flag
from training.errors import RecipeError
from training.loop.dry_run import dry_run
from training.loop.processes import console, processes, restarts_itself
from training.loop.run_folder import Run
from training.loop.seeds import SeedRuns, parse_seeds
from training.loop.training_run import fit, prepare
from training.methods.objective import Objective
from training.recipes.files import FORMER, PRESETS, choose_preset, read_toml, to_toml, validate
from training.recipes.keys import Recipe

__all__ = ["FitOptions", "Methods", "load_recipe", "recipe_of", "resume", "train"]

Methods = Mapping[str, type[Objective]]
"""The training methods by the name that a recipe gives."""


class FitOptions(Command):
    """The options that are the same for every recipe."""

    preset: str | None = Field(None, description="use a preset of the recipe, such as that of another backbone")
    out: Path | None = Field(None, description="the run folder to write (default: runs/RECIPE)")
    resume: Path | None = Field(None, description="continue this run, which was stopped, by its own recipe")
    seeds: CliVariadicArg[list[str]] = Field(
        [],
        description="one run per seed (0 1 2, or 0-4), each in OUT/seed-N, and their mean; the same command again "
        "continues",
    )
    dry_run: bool = Field(False, description="only show two steps, an example of each view, memory and speed")


def load_recipe(
    methods: Methods, source: str, overrides: Mapping[str, object] | None = None, preset: str | None = None
) -> Recipe:
    """A shipped recipe or a TOML file; a preset replaces its keys, and `overrides` replace both. Raises RecipeError."""
    keys = choose_preset(read_toml(source), preset, source) | dict(overrides or {})
    return validate(_method(methods, keys, source).Recipe, keys, source)


def recipe_of(methods: Methods, source: str, words: Sequence[str], program: str) -> tuple[Recipe, FitOptions]:
    """The recipe `source` with the keys that the command line sets, and the other options. Raises ClozeError."""
    for former, name in FORMER.items():
        if any(word.partition("=")[0] == flag(former) for word in words):
            raise RecipeError(f"{flag(former)} is now part of {flag(name)}; write its values there")
    options = _options(methods, source, _word_after("--preset", words)).read(words, program)
    overrides = options.model_dump(include=options.model_fields_set - FitOptions.model_fields.keys())
    return load_recipe(methods, source, overrides, options.preset), options


def train(methods: Methods, source: str, words: Sequence[str], program: str) -> int:
    """Do what the command line asks with the recipe `source`; return the exit code. Raises ClozeError."""
    recipe, options = recipe_of(methods, source, words, program)
    method, out = methods[recipe.method], options.out or Path("runs", Path(source).stem)
    console.quiet = not processes().is_main_process
    if options.dry_run:
        console.print(to_toml(recipe), markup=False)
        corpus, _, objective = prepare(method, recipe)
        dry_run(recipe, corpus, objective)
        code = 0
    elif options.seeds:
        code = _fit_seeds(method, recipe, SeedRuns(recipe, parse_seeds(options.seeds), out))
    else:
        run = Run.same(out, recipe) if restarts_itself() else Run.fresh(out)
        code = _fit(method, recipe, run, resume=run.recipe_file.is_file())
    processes().destroy_process_group()
    return code


def resume(methods: Methods, words: Sequence[str]) -> int:
    """Continue the run that `--resume` names; return the exit code. Raises ClozeError."""
    path = _word_after("--resume", words)
    if path is None or len(words) > (1 if words[0].startswith("--resume=") else 2):
        raise RecipeError("--resume continues a run where it stopped, by its own recipe; omit RECIPE and its keys")
    run = Run.open(Path(path))
    console.quiet = not processes().is_main_process
    recipe = load_recipe(methods, str(run.recipe_file))
    code = _fit(methods[recipe.method], recipe, run, resume=True)
    processes().destroy_process_group()
    return code


def _fit(method: type[Objective], recipe: Recipe, run: Run, resume: bool = False) -> int:
    if run.finished:
        console.print(f"{run.path} is finished; nothing to do")
        return 0
    if not fit(method, recipe, run, resume):
        console.print(f"stopped; continue with: python -m training.fit --resume {run.path}")
        return 130
    console.print(f"finished: {run.model}{_chosen(run)}; next: python -m training.export {run.path} models/NAME")
    return 0


def _chosen(run: Run) -> str:
    """Which step's weights were chosen, by which figure, and what that was before training."""
    found = run.provenance()
    if found["chosen_by"] is None:
        return ""
    score = found["held_out_loss"] if found["dev_score"] is None else found["dev_score"]
    return (
        f" (step {found['best_step']} of {found['steps']}, {found['chosen_by']} {score:.4g}; before training "
        f"{found['before_training']:.4g})"
    )


def _fit_seeds(method: type[Objective], recipe: Recipe, seeds: SeedRuns) -> int:
    """Train each seed that is not finished, then write and show their scores."""
    seeds.check()
    for seed, run in seeds.runs.items():
        if run.finished:
            console.print(f"{run.path} is finished")
            continue
        console.print(f"{run.path}:")
        if not fit(method, seeds.recipe(seed), run, resume=run.recipe_file.is_file()):
            console.print("stopped; continue with the same command")
            return 130
    if processes().is_main_process:
        console.print(seeds.write_summary())
    console.print(f"finished: {seeds.folder}")
    return 0


def _method(methods: Methods, keys: Mapping[str, object], source: str) -> type[Objective]:
    name = keys.get("method")
    if not isinstance(name, str) or name not in methods:
        raise RecipeError(f"recipe {source}: method is {name!r}; write one of {', '.join(methods)}")
    return methods[name]


def _options(methods: Methods, source: str, preset: str | None) -> type[FitOptions]:
    """FitOptions and every key of the recipe; the defaults are the recipe's values."""
    whole = read_toml(source)
    keys = choose_preset(whole, preset, source)
    fields: dict[str, Any] = {}
    variadic: Any = CliVariadicArg  # applied to types that only the running recipe knows
    for name, field in _method(methods, keys, source).Recipe.model_fields.items():
        if name == "method":  # another method is another recipe
            continue
        several = "tuple" in str(field.annotation)
        unset = None if field.is_required() else field.default
        needed = " (required)" if field.is_required() and name not in keys else ""
        default = Field(keys.get(name, unset), description=f"{field.description}{needed}")
        kind: Any = field.annotation
        fields[name] = (variadic[kind] if several else kind, default)
    lines = [f"Train a sentence encoder by the recipe {source}."]
    for name, own in whole.get(PRESETS, {}).items():
        values = (f"{flag(key)} {value}" for key, value in own.items())
        lines.append(f"  --preset {name:22} {', '.join(values)}")
    return create_model("RecipeOptions", __base__=FitOptions, __doc__="\n".join(lines), **fields)


def _word_after(option: str, words: Sequence[str]) -> str | None:
    """The value of an option that is needed before the others can be read."""
    for place, word in enumerate(words):
        if word == option and place + 1 < len(words):
            return words[place + 1]
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return None
