"""Several seeds in one command: a run each, and the spread of their dev scores.

OUT/seed-N/     the run of seed N
OUT/seeds.json  each seed's dev score, their mean, sample standard deviation, least and greatest
"""

import json
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from training.errors import RecipeError, RunError
from training.loop import console, fit, processes
from training.recipe import LARGEST_SEED, Recipe, to_toml
from training.run import Run

__all__ = ["fit_seeds", "parse_seeds", "summary"]

SUMMARY = "seeds.json"


def parse_seeds(words: Sequence[str]) -> list[int]:
    """`0 1 2`, `0-4` or both. Raises RecipeError."""
    seeds: list[int] = []
    for word in words:
        first, dash, last = word.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise RecipeError(f"--seeds {word}: write whole numbers, 0 1 2, or a range, 0-4")
        if int(last or first) > LARGEST_SEED:
            raise RecipeError(f"--seeds {word}: a seed is at most {LARGEST_SEED}")
        seeds += range(int(first), int(last or first) + 1)
    if len(seeds) != len(set(seeds)):
        raise RecipeError(f"--seeds {' '.join(words)} has a seed twice; write each once")
    return seeds


def fit_seeds(recipe: Recipe, seeds: Sequence[int], folder: Path) -> bool:
    """Train each seed that is not finished, then show and write the scores; False where Ctrl-C stopped it.

    Raises ClozeError, also where `folder` holds anything but such runs by this recipe.
    """
    if recipe.dev is None:
        raise RecipeError("--seeds compares dev scores, and dev is not set; write --dev FILE")
    runs = {seed: Run(folder / f"seed-{seed}") for seed in seeds}
    recipes = {seed: recipe.model_copy(update={"seed": seed}) for seed in seeds}
    _check_folder(folder)
    for seed, run in runs.items():
        _check_run(run, recipes[seed])
    for seed, run in runs.items():
        if run.finished:
            console.print(f"{run.path} is finished")
            continue
        console.print(f"{run.path}:")
        if not fit(recipes[seed], run, resume=run.recipe_file.is_file()):
            return False
    if processes().is_main_process:
        figures = summary({seed: run.provenance()["dev_score"] for seed, run in runs.items()})
        (folder / SUMMARY).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        console.print(_table(figures))
    return True


def summary(scores: Mapping[int, float]) -> dict[str, Any]:
    """Seed -> score to the content of seeds.json; one seed has no standard deviation."""
    values = list(scores.values())
    return {
        "dev_score": {str(seed): score for seed, score in scores.items()},
        "mean": statistics.mean(values),
        "sd": statistics.stdev(values) if len(values) > 1 else None,
        "min": min(values),
        "max": max(values),
    }


def _check_folder(folder: Path) -> None:
    others = [path for path in folder.glob("*") if path.name != SUMMARY and not path.name.startswith("seed-")]
    if others or folder.is_file():
        raise RunError(f"{folder} holds other things than runs of seeds; choose another --out")


def _check_run(run: Run, recipe: Recipe) -> None:
    if not run.recipe_file.is_file():
        Run.fresh(run.path)
        return
    before, now = tomllib.loads(run.recipe_file.read_text(encoding="utf-8")), tomllib.loads(to_toml(recipe))
    changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    if changed:
        raise RunError(f"{run.path} was trained with another {', '.join(changed)}; choose another --out")


def _table(figures: Mapping[str, Any]) -> Table:
    table = Table()
    table.add_column("seed")
    table.add_column("dev Spearman", justify="right")
    for seed, score in figures["dev_score"].items():
        table.add_row(seed, f"{score:.2f}")
    table.add_section()
    spread = "" if figures["sd"] is None else f" ± {figures['sd']:.2f}"
    table.add_row("mean ± SD (min, max)", f"{figures['mean']:.2f}{spread} ({figures['min']:.2f}, {figures['max']:.2f})")
    return table
