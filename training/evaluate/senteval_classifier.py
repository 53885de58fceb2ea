"""SentEval's linear classifier and its three protocols (facebookresearch/SentEval, its settings of the papers' tables).

Softmax regression by Adam in batches of 64. After every `ROUND` epochs the accuracy on held-out rows is measured;
training stops after `PATIENCE` + 1 rounds in all that were not better than the best so far, and the best weights are
kept. The L2 penalty is chosen from `PENALTIES`, each of which SentEval trains apart from the same seed. They are
trained side by side here: the seed gives them the same first weights and the same order of rows, so the result is the
same up to rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.model_selection import StratifiedKFold  # type: ignore[import-untyped]
from torch import Tensor, nn

__all__ = ["Rows", "fit", "fold_protocol", "nested_protocol", "split_protocol"]

PENALTIES: Final = (1e-5, 1e-4, 1e-3, 1e-2)
BATCH: Final = 64
ROUND: Final = 4  # epochs
PATIENCE: Final = 5
MOST_EPOCHS: Final = 200
FOLDS: Final = 10
HELD_OUT: Final = 0.05  # of the rows, for the last fit
SEED: Final = 1111


@dataclass(frozen=True)
class Rows:
    """Features (n, d) float32 and classes (n)."""

    features: Tensor
    classes: Tensor

    @classmethod
    def of(cls, features: NDArray[np.floating], classes: Sequence[int]) -> "Rows":
        return cls(torch.tensor(features, dtype=torch.float32), torch.tensor(classes))

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, rows: NDArray[np.intp] | Tensor) -> "Rows":
        index = torch.as_tensor(rows)
        return Rows(self.features[index], self.classes[index])


@dataclass(frozen=True)
class Linear:
    """Several classifiers of the same rows: weights (r, d, c) and biases (r, 1, c)."""

    weight: Tensor
    bias: Tensor

    def right(self, rows: Rows) -> Tensor:
        """Which rows each classifier gets right, (r, n)."""
        return (rows.features @ self.weight + self.bias).argmax(-1) == rows.classes

    def accuracy(self, rows: Rows) -> Tensor:
        return self.right(rows).double().mean(1)


def nested_protocol(rows: Rows) -> NDArray[np.bool_]:
    """Which rows are right, each by a classifier of the other outer folds: MR, CR, SUBJ and MPQA.

    SentEval rounds the accuracy of each outer fold and averages them; the mean over rows differs by less than 0.01.
    """
    right = np.zeros(len(rows), dtype=bool)
    classes = int(rows.classes.max()) + 1
    for train, test in _folds(rows):
        penalty = _best_penalty(rows[train], classes)
        right[test] = _last_fit(rows[train], classes, penalty).right(rows[test])[0].numpy()
    return right


def fold_protocol(train: Rows, test: Rows) -> NDArray[np.bool_]:
    """Which test rows are right; folds of the training rows choose the penalty: TREC and MRPC."""
    classes = int(train.classes.max()) + 1
    model = _last_fit(train, classes, _best_penalty(train, classes))
    right: NDArray[np.bool_] = model.right(test)[0].numpy()
    return right


def split_protocol(train: Rows, dev: Rows, test: Rows) -> NDArray[np.bool_]:
    """Which test rows are right; the development rows choose the penalty and when to stop: SST-2."""
    classes = int(train.classes.max()) + 1
    penalty = _choose(fit(train, dev, classes, PENALTIES).accuracy(dev))
    right: NDArray[np.bool_] = fit(train, dev, classes, [penalty]).right(test)[0].numpy()
    return right


def fit(
    train: Rows, dev: Rows, classes: int, penalties: Sequence[float], random: np.random.RandomState | None = None
) -> Linear:
    """One classifier per penalty, each with the weights that were best on the development rows."""
    random = random or np.random.RandomState(SEED)
    first = _first_layer(train.features.shape[1], classes)
    weight = first.weight.detach().T.repeat(len(penalties), 1, 1).requires_grad_()  # (r, d, c)
    bias = first.bias.detach().repeat(len(penalties), 1, 1).requires_grad_()  # (r, 1, c)
    optimizer = torch.optim.Adam([weight, bias], lr=1e-3)
    decay = torch.tensor(penalties).view(-1, 1, 1)
    best = Linear(weight.detach().clone(), bias.detach().clone())
    highest = torch.full((len(penalties),), -1.0, dtype=torch.float64)
    misses = torch.zeros(len(penalties), dtype=torch.int64)
    epochs = 0
    while epochs <= MOST_EPOCHS and bool((misses <= PATIENCE).any()):
        for _ in range(ROUND):
            _epoch(train, weight, bias, decay, optimizer, random)
        epochs += ROUND
        accuracy = Linear(weight.detach(), bias.detach()).accuracy(dev)
        better = (accuracy > highest) & (misses <= PATIENCE)
        highest = torch.where(better, accuracy, highest)
        misses += ~better
        best.weight[better], best.bias[better] = weight.detach()[better], bias.detach()[better]
    return best


def _epoch(
    train: Rows,
    weight: Tensor,
    bias: Tensor,
    decay: Tensor,
    optimizer: torch.optim.Optimizer,
    random: np.random.RandomState,
) -> None:
    shuffled = train[random.permutation(len(train))]
    batches = zip(shuffled.features.split(BATCH), shuffled.classes.split(BATCH), strict=True)
    for features, classes in batches:
        logits = features @ weight + bias  # (r, n, c)
        # The sum over penalties of each one's mean loss; half the decay times the square is Adam's weight_decay.
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), classes.repeat(len(weight)), reduction="sum")
        loss = loss / len(classes) + (decay / 2 * weight.square()).sum() + (decay / 2 * bias.square()).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _first_layer(width: int, classes: int) -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return nn.Linear(width, classes)


def _best_penalty(rows: Rows, classes: int) -> float:
    """By the mean accuracy of the folds, which also decide when to stop."""
    accuracies = [fit(rows[train], rows[test], classes, PENALTIES).accuracy(rows[test]) for train, test in _folds(rows)]
    return _choose(torch.stack(accuracies).mean(0))


def _choose(accuracy: Tensor) -> float:
    """The smallest penalty with the highest accuracy in two decimals."""
    return PENALTIES[int(np.argmax(np.round(100 * accuracy.numpy(), 2)))]


def _last_fit(rows: Rows, classes: int, penalty: float) -> Linear:
    """On all rows but the held-out share."""
    random = np.random.RandomState(SEED)
    order = random.permutation(len(rows))
    held_out = int(HELD_OUT * len(rows))
    return fit(rows[order[held_out:]], rows[order[:held_out]], classes, [penalty], random)


def _folds(rows: Rows) -> list[tuple[NDArray[np.intp], NDArray[np.intp]]]:
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=SEED)
    return list(folds.split(np.zeros(len(rows)), rows.classes.numpy()))
