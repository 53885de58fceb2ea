"""SentEval's linear classifier and its three protocols (facebookresearch/SentEval, with the settings of the papers).

The classifier is a softmax regression, trained by Adam in batches of 64. After every `ROUND` epochs the accuracy on
held-out rows is measured. Training stops after a total of `PATIENCE` + 1 rounds that were not better than the best so
far, and the best weights are kept. The L2 penalty is chosen from `PENALTIES`.

A set with nested folds needs 410 classifiers, which SentEval trains one after the other. Here many are trained at once,
each on its own rows, with its own penalty and its own last round. All start from the same seed, so classifiers with
equally many rows have the same initial weights and the same order of rows. The result is the same up to rounding.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.model_selection import StratifiedKFold  # type: ignore[import-untyped]
from torch import Tensor, nn

PENALTIES: Final = (1e-5, 1e-4, 1e-3, 1e-2)
BATCH: Final = 64
ROUND: Final = 4  # epochs
PATIENCE: Final = 5
MOST_EPOCHS: Final = 200
FOLDS: Final = 10
HELD_OUT: Final = 0.05  # share of the rows, for the last fit
SEED: Final = 1111
AT_ONCE: Final = 10  # problems that are trained together; their batches fit into the processor's cache

Places: TypeAlias = NDArray[np.intp]


@dataclass(frozen=True)
class Rows:
    """Features (n, d) and classes (n). The last feature is 1 and carries the bias."""

    features: Tensor
    classes: Tensor

    @classmethod
    def of(cls, features: NDArray[np.floating], classes: Sequence[int]) -> "Rows":
        values = torch.tensor(features, dtype=torch.float32)
        return cls(torch.cat([values, torch.ones(len(values), 1)], 1), torch.tensor(classes))

    def __len__(self) -> int:
        return len(self.classes)

    def __add__(self, other: "Rows") -> "Rows":
        return Rows(torch.cat([self.features, other.features]), torch.cat([self.classes, other.classes]))

    def __getitem__(self, places: Places) -> "Rows":
        index = torch.from_numpy(places)
        return Rows(self.features[index], self.classes[index])

    def right(self, weight: Tensor) -> Tensor:
        """Which rows each classifier gets right, (r, n), for weights (r, c, d)."""
        logits = (weight.flatten(0, 1) @ self.features.T).unflatten(0, weight.shape[:2])  # (r, c, n)
        right: Tensor = logits.argmax(1) == self.classes
        return right


@dataclass(frozen=True)
class Problem:
    """The rows to train on, the rows that choose the weights, and the penalties. Each penalty has a classifier.

    `shuffled` is how many rows were shuffled with the same seed before training.
    """

    train: Places
    dev: Places
    penalties: tuple[float, ...] = PENALTIES
    shuffled: int = 0


@dataclass(frozen=True)
class Fitted:
    """The weights (r, c, d) of a problem's classifiers, and their accuracies (r) on its development rows."""

    weight: Tensor
    accuracy: Tensor


def nested_protocol(rows: Rows) -> NDArray[np.bool_]:
    """Which rows are right, each by a classifier of the other outer folds: MR, CR, SUBJ and MPQA.

    SentEval rounds the accuracy of each outer fold and averages them; the mean over rows differs by less than 0.01.
    """
    right = np.zeros(len(rows), dtype=bool)
    outer = _folds(rows)
    fitted = _penalized(rows, [train for train, _ in outer])
    for (_, test), classifier in zip(outer, fitted, strict=True):
        right[test] = rows[test].right(classifier.weight)[0].numpy()
    return right


def fold_protocol(train: Rows, test: Rows) -> NDArray[np.bool_]:
    """Which test rows are right; folds of the training rows choose the penalty: TREC and MRPC."""
    (fitted,) = _penalized(train, [np.arange(len(train))])
    right: NDArray[np.bool_] = test.right(fitted.weight)[0].numpy()
    return right


def split_protocol(train: Rows, dev: Rows, test: Rows) -> NDArray[np.bool_]:
    """Which test rows are right; the development rows choose the penalty and when to stop: SST-2.

    SentEval trains the classifier with the best penalty again, which gives the same weights.
    """
    places = np.arange(len(train) + len(dev))
    (fitted,) = fit(train + dev, [Problem(places[: len(train)], places[len(train) :])])
    right: NDArray[np.bool_] = test.right(fitted.weight)[_highest(fitted.accuracy)].numpy()
    return right


def fit(rows: Rows, problems: Sequence[Problem]) -> list[Fitted]:
    """Train the classifiers of problems about the same rows. All problems have the same number of penalties."""
    fitted: dict[int, Fitted] = {}
    with _one_thread():
        for group in _alike(problems):
            fitted |= zip(group, _train(rows, [problems[place] for place in group]), strict=True)
    return [fitted[place] for place in range(len(problems))]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: the products are so small that distributing them takes longer than computing them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _alike(problems: Sequence[Problem]) -> Iterator[list[int]]:
    """The places of problems that draw the same orders of rows, at most `AT_ONCE` at a time."""
    keys = [(len(problem.train), problem.shuffled) for problem in problems]
    for key in sorted(set(keys)):
        places = [place for place, other in enumerate(keys) if other == key]
        for start in range(0, len(places), AT_ONCE):
            yield places[start : start + AT_ONCE]


def _train(rows: Rows, problems: Sequence[Problem]) -> list[Fitted]:
    """SentEval's loop, for the r classifiers of each of p problems."""
    rng = np.random.RandomState(SEED)
    rng.permutation(problems[0].shuffled)
    train = np.stack([problem.train for problem in problems])  # (p, n)
    devs = [rows[problem.dev] for problem in problems]
    decay = torch.tensor([problem.penalties for problem in problems])[..., None, None]  # (p, r, 1, 1)
    weight = _first_layer(rows).repeat(*decay.shape[:2], 1, 1)  # (p, r, c, d)
    optimizer = torch.optim.Adam([weight], lr=1e-3, fused=True)
    best = weight.clone()
    highest = torch.full(decay.shape[:2], -1.0, dtype=torch.float64)  # (p, r)
    misses = torch.zeros_like(highest)
    epochs = 0
    while epochs <= MOST_EPOCHS and bool((misses <= PATIENCE).any()):
        for _ in range(ROUND):
            _epoch(rows, train[:, rng.permutation(train.shape[1])], weight, decay, optimizer)
        epochs += ROUND
        accuracy = torch.stack([dev.right(weights).double().mean(1) for dev, weights in zip(devs, weight, strict=True)])
        better = (accuracy > highest) & (misses <= PATIENCE)
        misses += ~better
        highest = torch.where(better, accuracy, highest)
        best = torch.where(better[..., None, None], weight, best)
    return [Fitted(*classifiers) for classifiers in zip(best, highest, strict=True)]


def _epoch(rows: Rows, order: Places, weight: Tensor, decay: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """One epoch of p problems, with their rows in the order (p, n)."""
    flat = weight.flatten(1, 2)  # (p, r * c, d)
    targets = nn.functional.one_hot(rows.classes).float()
    for places in torch.from_numpy(order).split(BATCH, 1):
        features = rows.features.index_select(0, places.flatten()).unflatten(0, places.shape)  # (p, b, d)
        logits = torch.bmm(flat, features.transpose(1, 2)).unflatten(1, weight.shape[1:3])  # (p, r, c, b)
        wrong = logits.softmax(2) - targets[places].transpose(1, 2).unsqueeze(1)
        # The gradient of the mean cross-entropy, and Adam's weight_decay.
        gradient = torch.bmm(wrong.flatten(1, 2), features).div_(places.shape[1])
        weight.grad = gradient.view_as(weight).addcmul_(decay, weight)
        optimizer.step()


def _first_layer(rows: Rows) -> Tensor:
    """The initial weights (c, d) of SentEval."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        layer = nn.Linear(rows.features.shape[1] - 1, int(rows.classes.max()) + 1)
    return torch.cat([layer.weight, layer.bias[:, None]], 1).detach()


def _penalized(rows: Rows, parts: Sequence[Places]) -> list[Fitted]:
    """The classifier of each part of the rows, with the penalty that has the best mean over the part's folds."""
    inner = [[Problem(part[train], part[dev]) for train, dev in _folds(rows[part])] for part in parts]
    fitted = iter(fit(rows, [problem for problems in inner for problem in problems]))
    problems = []
    for part in parts:
        accuracy = torch.stack([next(fitted).accuracy for _ in range(FOLDS)]).mean(0)
        order = part[np.random.RandomState(SEED).permutation(len(part))]
        held_out = int(HELD_OUT * len(part))
        penalty = PENALTIES[_highest(accuracy)]
        problems.append(Problem(order[held_out:], order[:held_out], (penalty,), len(part)))
    return fit(rows, problems)


def _highest(accuracy: Tensor) -> int:
    """The place of the highest accuracy in two decimals. On a tie it is the first, which has the smallest penalty."""
    return int(np.argmax(np.round(100 * accuracy.numpy(), 2)))


def _folds(rows: Rows) -> list[tuple[Places, Places]]:
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=SEED)
    return list(folds.split(np.zeros(len(rows)), rows.classes.numpy()))
