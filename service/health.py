"""Whether the service works, and the end of a process that does not.

Ready is: not stopping, no batch hangs, and the last batch of every model was good. A busy service is ready. What has
not worked for too long ends the process, so that whatever supervises it starts a new one:

    HUNG  70   a batch, or warming up at start, has lasted longer than stall_seconds + fault_seconds
    LOST  71   a model has failed on everything, a text of nothing too, for fault_seconds: a GPU that is gone, say
"""

import asyncio
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import TIMEOUT_MAX, Timer
from time import monotonic
from typing import Final, Protocol

from service.errors import Unavailable

__all__ = ["HUNG", "LOST", "Health", "Model", "limited"]

HUNG: Final = 70
LOST: Final = 71
PERIOD: Final = 1.0  # seconds between two looks
FROZEN: Final = 10.0  # seconds between two looks that tell of a process that was stopped, by `docker pause` say

logger = logging.getLogger(__name__)


class Model(Protocol):
    """What can fail."""

    name: str

    @property
    def failing_for(self) -> float:
        """Seconds since the first failure after the last success, 0 after a success."""

    async def check(self) -> None:
        """Raise Unavailable where it fails still."""


class Health:
    """`check` raises the reason why the service is not ready; `watch` ends a process that will not be again."""

    def __init__(
        self,
        models: Callable[[], Iterable[Model]],
        busy_for: Callable[[], float],
        stall_seconds: float,
        fault_seconds: float,
        end: Callable[[int], object] = os._exit,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.stopping = False
        self._models = models
        self._busy_for = busy_for
        self._stall = stall_seconds
        self._fault = fault_seconds
        self.end = end
        self._clock = clock
        self._looked = clock()
        self._awake_since = -math.inf
        self._probes: dict[str, asyncio.Task[None]] = {}  # by model, one each

    @property
    def ready(self) -> bool:
        """What is known without a trial."""
        return not self.stopping and not self._stalled and not any(model.failing_for for model in self._models())

    async def check(self, model: Model | None = None) -> None:
        """Raise Unavailable, saying why, of all models or of one; a model whose last batch failed is tried first."""
        if self.stopping:
            raise Unavailable("the service is stopping; send requests to another instance")
        if self._stalled:
            raise Unavailable(f"a batch has run for {self._busy_for():.0f} s, the limit is {self._stall:g} s")
        for each in [model] if model else self._models():
            await each.check()

    async def watch(self) -> None:
        """Look every second, for ever."""
        while True:
            self.look()
            await asyncio.sleep(PERIOD)

    def look(self) -> None:
        """End the process where it is beyond help, as far as it was awake; try again what has failed."""
        now = self._clock()
        if now - self._looked > FROZEN:
            self._awake_since = now
        self._looked, awake = now, now - self._awake_since
        if min(self._busy_for(), awake) > self._stall + self._fault:
            logger.critical("a batch has hung for %.0f s: the process ends with status %d", self._busy_for(), HUNG)
            self.end(HUNG)
        for model in self._models():
            if min(model.failing_for, awake) > self._fault:
                logger.critical(
                    "model %s has failed for %.0f s: the process ends with status %d",
                    model.name,
                    model.failing_for,
                    LOST,
                )
                self.end(LOST)
            elif model.failing_for and not self._stalled:
                self._try(model)

    @property
    def _stalled(self) -> bool:
        return self._busy_for() > self._stall

    def _try(self, model: Model) -> None:
        """Its result is in `failing_for`."""
        if model.name not in self._probes:
            probe = self._probes[model.name] = asyncio.create_task(_quietly(model))
            probe.add_done_callback(lambda _: self._probes.pop(model.name))


async def _quietly(model: Model) -> None:
    try:
        await model.check()
    except Unavailable as error:
        logger.warning("%s", error)


@contextmanager
def limited(seconds: float, task: str) -> Iterator[None]:
    """End the process where the block lasts longer: before there is a loop that could watch."""
    timer = Timer(min(seconds, TIMEOUT_MAX), _end_hung, (task, seconds))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end_hung(task: str, seconds: float) -> None:
    logger.critical("%s has hung for %.0f s: the process ends with status %d", task, seconds, HUNG)
    os._exit(HUNG)
