"""Several seeds in one command: one run per seed, and the spread of their dev scores.

OUT/seed-N/     the run of seed N
OUT/seeds.json  each seed's dev score, their mean, sample standard deviation, minimum and maximum; for more than three
                seeds also the mean of the best three, as in S-SimCSE's tables
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from cloze.training.errors import RecipeError, RunError
from cloze.training.recipes.recipe import LARGEST_SEED, Recipe
from cloze.training.run_folder import Run

SUMMARY = "seeds.json"


def parse_seeds(words: Sequence[str]) -> list[int]:
    """`0 1 2`, `0-4` or both. Raises RecipeError."""
    seeds: list[int] = []
    for word in words:
        first, dash, last = word.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise RecipeError(f"--seeds {word}: write whole numbers, 0 1 2, or a range, 0-4")
        if int(last or first) > LARGEST_SEED:
            raise RecipeError(f"--seeds {word}: a seed is at most {LARGEST_SEED}; write smaller ones")
        seeds += range(int(first), int(last or first) + 1)
    if len(seeds) != len(set(seeds)):
        raise RecipeError(f"--seeds {' '.join(words)} has a seed twice; write each once")
    return seeds


class SeedRuns:
    """A folder with one run per seed, all with the same recipe."""

    def __init__(self, recipe: Recipe, seeds: Sequence[int], folder: Path) -> None:
        if not recipe.dev:
            raise RecipeError("--seeds compares dev scores, but dev is not set; write --dev FILE")
        self.folder = folder
        self.runs = {seed: Run(folder / f"seed-{seed}") for seed in seeds}
        self._recipe = recipe

    def recipe(self, seed: int) -> Recipe:
        return self._recipe.model_copy(update={"seed": seed})

    def check(self) -> None:
        """Raises RunError if the folder holds anything other than this recipe's runs."""
        others = [path for path in self.folder.glob("*") if path.name != SUMMARY and not path.name.startswith("seed-")]
        if others or self.folder.is_file():
            raise RunError(f"{self.folder} holds files other than runs of seeds; choose another --out")
        for seed, run in self.runs.items():
            Run.same(run.path, self.recipe(seed))
        self._compare([run for run in self.runs.values() if run.finished])

    def write_summary(self) -> Table:
        """Write seeds.json when all runs are finished; return it as a table.

        Raises RunError if not all of them read the same text, models and dev data.
        """
        self._compare(list(self.runs.values()))
        figures = summary({seed: run.provenance()["dev_score"] for seed, run in self.runs.items()})
        (self.folder / SUMMARY).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        return _table(figures)

    def _compare(self, runs: Sequence[Run]) -> None:
        for run in runs[1:]:
            if changed := runs[0].differences(run):
                raise RunError(
                    f"{runs[0].path} and {run.path} did not read the same {', '.join(changed)}; remove the older "
                    "of the two, and train again"
                )


def summary(scores: Mapping[int, float]) -> dict[str, Any]:
    """The content of seeds.json, given each seed's score. A single seed has no standard deviation."""
    values = list(scores.values())
    return {
        "dev_score": {str(seed): score for seed, score in scores.items()},
        "mean": statistics.mean(values),
        "sd": statistics.stdev(values) if len(values) > 1 else None,
        "min": min(values),
        "max": max(values),
        "mean_of_best_3": statistics.mean(sorted(values)[-3:]) if len(values) > 3 else None,
    }


def _table(figures: Mapping[str, Any]) -> Table:
    table = Table()
    table.add_column("seed")
    table.add_column("dev score", justify="right")
    for seed, score in figures["dev_score"].items():
        table.add_row(seed, f"{score:.2f}")
    table.add_section()
    spread = "" if figures["sd"] is None else f" ± {figures['sd']:.2f}"
    table.add_row("mean ± SD (min, max)", f"{figures['mean']:.2f}{spread} ({figures['min']:.2f}, {figures['max']:.2f})")
    if figures["mean_of_best_3"] is not None:
        table.add_row("mean of the best 3", f"{figures['mean_of_best_3']:.2f}")
    return table
