"""Which of a model's graphs is fastest on this machine, timed in turn on one short text and on a batch."""

import logging
from collections.abc import Callable, Sequence
from math import exp, log
from time import perf_counter
from typing import Final, Protocol, TypeVar

from encoding.text import Batch, TextEncoder

SHAPES: Final = ((1, 16), (8, 32))  # texts and tokens
ROUNDS: Final = 5  # the best round counts; the first warms up

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """A graph of one precision."""

    @property
    def precision(self) -> str:
        """Return the name of its precision."""

    def run(self, batch: Batch) -> object:
        """Run one batch."""


T = TypeVar("T", bound=Runner)


def fastest(runners: Sequence[T], encoder: TextEncoder, name: str, clock: Callable[[], float] = perf_counter) -> T:
    """Return the runner with the least geometric mean time over both shapes, and log the relative speeds.

    Vectors of two precisions are close but not the same: an operator of several machines should name one instead.
    """
    logarithms = dict.fromkeys(range(len(runners)), 0.0)
    for texts, length in SHAPES:
        batch = encoder.pad([encoder.longest[:length]] * texts)
        for place, seconds in enumerate(_best(runners, batch, clock)):
            logarithms[place] += log(seconds)
    chosen = runners[min(logarithms, key=logarithms.__getitem__)]
    speeds = {
        runner.precision: exp((logarithms[0] - logarithms[place]) / len(SHAPES)) for place, runner in enumerate(runners)
    }
    found = ", ".join(f"{precision} {speed:.2f}" for precision, speed in speeds.items())
    logger.info("model %s: relative speeds on this machine: %s; precision=auto takes %s", name, found, chosen.precision)
    return chosen


def _best(runners: Sequence[Runner], batch: Batch, clock: Callable[[], float]) -> list[float]:
    """Return the least seconds of each; the runners take turns, so that all see the same load."""
    best = [float("inf")] * len(runners)
    for _ in range(ROUNDS):
        for place, runner in enumerate(runners):
            started = clock()
            runner.run(batch)
            best[place] = min(best[place], max(clock() - started, 1e-9))
    return best
