"""--dry-run: two steps of a recipe, without keeping anything."""

import tempfile
from pathlib import Path
from typing import Final

import torch
from transformers.trainer_utils import SaveStrategy

from cloze.machine import peak_memory
from cloze.training.bar import console
from cloze.training.data.corpus import Corpus
from cloze.training.loop.callbacks import Progress
from cloze.training.loop.trainer import ObjectiveTrainer, training_arguments
from cloze.training.methods.objective import Objective
from cloze.training.recipes.recipe import Recipe

STEPS: Final = 2


def dry_run(recipe: Recipe, corpus: Corpus, objective: Objective) -> None:
    """Print one decoded example of each view, the loss of two steps, memory and speed; keep nothing."""
    for name, ids, mask in objective.examples(objective.views(corpus.rows[: recipe.batch_size])):
        text = objective.encoder.tokenizer.decode(ids[0, : int(mask[0].sum())])
        console.print(f"{name}: {tuple(ids.shape)} tokens, such as: {text}", markup=False)
    with tempfile.TemporaryDirectory() as folder:
        update: dict[str, object] = {"max_steps": STEPS, "log_steps": 1, "eval_steps": STEPS + 1}
        update |= {"workers": 0, "report_to": ("none",)}
        short = recipe.model_copy(update=update)
        arguments = training_arguments(short, Path(folder), chooser=None)
        arguments.save_strategy = SaveStrategy.NO
        trainer = ObjectiveTrainer(objective, corpus, arguments)
        trainer.add_callback(Progress())
        result = trainer.train()
        seconds = result.metrics["train_runtime"] / STEPS
    total = recipe.steps(len(corpus))
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else peak_memory()
    console.print(f"memory: {'unknown' if peak is None else f'{peak / 1e9:.2f} GB'}")
    console.print(
        f"speed: {recipe.batch_size / seconds:.0f} sentences per second; "
        f"{total} steps would take {total * seconds / 60:.0f} minutes"
    )
