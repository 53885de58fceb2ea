"""--dry-run: what a recipe would do, in two steps and without a trace."""

import math
import resource
import tempfile
import time
from pathlib import Path

import torch

from training.loop import console, prepare
from training.recipe import Recipe, to_toml
from training.run import Run
from training.trainer import ObjectiveTrainer, training_arguments

__all__ = ["dry_run"]


def dry_run(recipe: Recipe, steps: int = 2) -> None:
    """Print the recipe, one decoded example a view, the loss of two steps, memory and speed; keep nothing."""
    console.print(to_toml(recipe), markup=False)
    corpus, _, objective = prepare(recipe)
    for name, view in objective.views(corpus.rows[: recipe.batch_size]).items():
        length = int(view["attention_mask"][0].sum())
        text = objective.encoder.tokenizer.decode(view["input_ids"][0, :length])
        console.print(f"view {name}: {tuple(view['input_ids'].shape)} tokens, such as: {text}", markup=False)
    with tempfile.TemporaryDirectory() as folder:
        update = {"max_steps": steps, "log_steps": 1, "eval_steps": steps + 1}
        short = recipe.model_copy(update=update)
        arguments = training_arguments(short, Run(Path(folder)), dev=False)
        began = time.monotonic()
        ObjectiveTrainer(objective, None, args=arguments, train_dataset=corpus).train()
        seconds = (time.monotonic() - began) / steps
    total = recipe.max_steps or math.ceil(recipe.epochs * (len(corpus) // recipe.batch_size))
    console.print(f"memory: {_peak_memory():.2f} GB")
    console.print(
        f"speed: {recipe.batch_size / seconds:.0f} sentences a second; "
        f"{total} steps would take {total * seconds / 60:.0f} minutes"
    )


def _peak_memory() -> float:
    """Gigabytes: of the accelerator where there is one, else of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
