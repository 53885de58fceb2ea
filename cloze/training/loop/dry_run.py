"""--dry-run: two steps of a recipe, of which nothing is kept."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers.trainer_utils import SaveStrategy

from cloze.machine import peak_memory
from cloze.training.data.corpus import Corpus
from cloze.training.loop.callbacks import Progress
from cloze.training.loop.processes import console
from cloze.training.loop.trainer import ObjectiveTrainer, training_arguments
from cloze.training.methods.contrastive import Contrastive
from cloze.training.methods.objective import Objective
from cloze.training.model.views import View
from cloze.training.recipes.recipe import Recipe

__all__ = ["dry_run"]


def dry_run(recipe: Recipe, corpus: Corpus, objective: Objective, steps: int = 2) -> None:
    """Print one decoded example of each view, the loss of two steps, memory and speed; keep nothing."""
    views = objective.views(corpus.rows[: recipe.batch_size])
    for name, view in views.items():
        _show(objective, f"view {name}", view["input_ids"], view["attention_mask"])
    for name, ids, mask in _drawn(objective, views):
        _show(objective, f"drawn {name}", ids, mask)
    with tempfile.TemporaryDirectory() as folder:
        update: dict[str, object] = {"max_steps": steps, "log_steps": 1, "eval_steps": steps + 1}
        update |= {"workers": 0, "report_to": ("none",)}
        short = recipe.model_copy(update=update)
        arguments = training_arguments(short, Path(folder), chooser=None)
        arguments.save_strategy = SaveStrategy.NO
        trainer = ObjectiveTrainer(objective, corpus, arguments)
        trainer.add_callback(Progress())
        result = trainer.train()
        seconds = result.metrics["train_runtime"] / steps
    total = recipe.steps(len(corpus))
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else peak_memory()
    console.print(f"memory: {'unknown' if peak is None else f'{peak / 1e9:.2f} GB'}")
    console.print(
        f"speed: {recipe.batch_size / seconds:.0f} sentences a second; "
        f"{total} steps would take {total * seconds / 60:.0f} minutes"
    )


def _show(objective: Objective, what: str, ids: Tensor, mask: Tensor) -> None:
    """The first row of token ids (n, L), decoded."""
    text = objective.encoder.tokenizer.decode(ids[0, : int(mask[0].sum())])
    console.print(f"{what}: {tuple(ids.shape)} tokens, such as: {text}", markup=False)


def _drawn(objective: Objective, views: dict[str, View]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, token ids (n, L) and attention mask of what a step draws in addition: masked words, edits."""
    if not isinstance(objective, Contrastive):
        return
    for name, view in objective.draw(views).items():
        if "masked_ids" in view:
            yield f"{name}, masked", view["masked_ids"], view["attention_mask"]
        if "edited_ids" in view:
            yield f"{name}, edited", view["edited_ids"], view["edited_mask"]
