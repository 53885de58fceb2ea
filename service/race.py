"""Which of a model's graphs is fastest on this machine: timed in turn, on a short text alone and on a batch."""

import logging
from collections.abc import Callable, Sequence
from math import exp, log
from time import perf_counter
from typing import Final, Protocol, TypeVar

from encoding.text import Batch, TextEncoder

__all__ = ["fastest"]

SHAPES: Final = ((1, 16), (8, 32))  # texts and tokens
ROUNDS: Final = 5  # the best of them counts, and the first warms

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """What races: a graph of one precision."""

    @property
    def precision(self) -> str:
        """Its name."""

    def run(self, batch: Batch) -> object:
        """One batch."""


T = TypeVar("T", bound=Runner)


def fastest(runners: Sequence[T], encoder: TextEncoder, name: str, clock: Callable[[], float] = perf_counter) -> T:
    """The runner with the least time, the mean over both shapes; the first of equals. Logs what was found.

    Vectors of two precisions are near and not the same, so an operator who compares machines names one instead.
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
    """The least seconds of each; in turn, so that all see the same machine."""
    best = [float("inf")] * len(runners)
    for _ in range(ROUNDS):
        for place, runner in enumerate(runners):
            started = clock()
            runner.run(batch)
            best[place] = min(best[place], max(clock() - started, 1e-9))
    return best
