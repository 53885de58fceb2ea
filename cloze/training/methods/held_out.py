"""Rows of the corpus that are held out: without dev data, the method's loss on them chooses the checkpoint.

Dropout is on, as in training, because the two views of a single text differ only by dropout. Every evaluation draws the
same dropout, masked words and edits. It leaves the random state and BatchNorm's statistics as they were.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from cloze.training.bar import bar
from cloze.training.data.stored_rows import Row
from cloze.training.evaluation.measures import alignment, uniformity
from cloze.training.methods.gather import rank_and_count
from cloze.training.methods.objective import Objective

SPREAD_ROWS: Final = 1000  # at most, for alignment and uniformity: uniformity compares every pair of rows


@dataclass(frozen=True)
class HeldOut:
    """The held-out rows, and the seed for what an evaluation draws."""

    rows: Sequence[Row]
    seed: int

    @torch.no_grad()
    def figures(self, objective: Objective) -> dict[str, float]:
        """`loss`: the mean over equal batches of the method's contrastive loss, or of its whole loss if it has none.

        For a contrastive method also `alignment` and `uniformity` of the served vectors, for other methods the parts of
        the loss. Under torchrun all processes must call this, and the loss is computed on their joined batches.
        """
        rank, _ = rank_and_count()
        with _undisturbed(objective):
            torch.manual_seed(self.seed + (rank << 16))
            batches = bar(list(self._batches(objective)), desc="rows held out", unit=" batches")
            losses = [_losses(objective, batch) for batch in batches]
            figures = {name: float(np.mean([batch_losses[name] for batch_losses in losses])) for name in losses[0]}
            if objective.contrastive:
                figures = {"loss": figures.get("contrast", figures["loss"])} | self._spread(objective)
        return figures

    def _batches(self, objective: Objective) -> Iterator[Sequence[Row]]:
        """This process's rows of each batch. Batches are as large as in training, if there are enough rows."""
        (rank, count), recipe = rank_and_count(), objective.recipe
        own = min(recipe.batch_size // recipe.parts, len(self.rows)) // count
        size = own * count
        for start in range(rank * own, len(self.rows) // size * size, size):
            yield self.rows[start : start + own]

    def _spread(self, objective: Objective) -> dict[str, float]:
        """Positives are the first two of the recipe's columns, or a text without and with dropout.

        With two columns, the first is embedded with the template of queries, the second with that of documents.
        """
        encoder, columns = objective.encoder, list(zip(*self.rows[:SPREAD_ROWS], strict=True))
        if len(objective.recipe.columns) > 1:
            vectors = encoder.named("query").embed(columns[0])
            positives = encoder.named("document").embed(columns[1])
        else:
            vectors = encoder.embed(columns[0])
            positives = encoder.embed(columns[0], dropout=True)
        return {"alignment": float(alignment(vectors, positives).mean()), "uniformity": uniformity(vectors)}


def _losses(objective: Objective, rows: Sequence[Row]) -> dict[str, float]:
    """The loss and its parts."""
    device = objective.encoder.device
    views = {
        name: {key: tensor.to(device) for key, tensor in view.items()} for name, view in objective.views(rows).items()
    }
    return {name: float(part) for name, part in objective(**views).items()}


@contextmanager
def _undisturbed(objective: Objective) -> Iterator[None]:
    """Training mode within the context. Afterwards the mode, the buffers and the random states are restored."""
    device, was_training = objective.encoder.device, objective.training
    buffers = {name: buffer.clone() for name, buffer in objective.named_buffers()}  # such as BatchNorm's statistics
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        objective.train()
        yield
    objective.train(was_training)
    for name, buffer in objective.named_buffers():
        buffer.copy_(buffers[name])
