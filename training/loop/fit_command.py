"""What fit and pretrain do with a recipe: train it, once or by several seeds, continue a run, or rehearse two steps."""

from pathlib import Path

from training.loop.dry_run import dry_run
from training.loop.processes import console, processes, restarts_itself
from training.loop.run_folder import Run
from training.loop.seeds import SeedRuns, parse_seeds
from training.loop.training_run import fit, prepare
from training.methods import OBJECTIVES
from training.methods.objective import Objective
from training.recipes.command import FitOptions, load_recipe
from training.recipes.files import to_toml
from training.recipes.keys import Recipe

__all__ = ["resume", "train"]


def train(recipe: Recipe, options: FitOptions, name: str) -> int:
    """Do what the command line asks with the recipe, called `name`; return the exit code. Raises ClozeError."""
    method, out = OBJECTIVES[recipe.method], options.out or Path("runs", name)
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


def resume(path: Path) -> int:
    """Continue a run; return the exit code. Raises ClozeError."""
    run = Run.open(path)
    console.quiet = not processes().is_main_process
    recipe = load_recipe(str(run.recipe_file))
    code = _fit(OBJECTIVES[recipe.method], recipe, run, resume=True)
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
