"""Whether the service works, and the end of a process that does not.

The service is ready while it is not stopping, no batch has run for `stall_seconds`, and the last batch of every model
succeeded. A busy service is ready. A fault that lasts ends the process, so that its supervisor starts a new one:

    HUNG  70   a batch, or the warm-up at start, has run for 3 × stall_seconds
    LOST  71   every batch of a model, also a test with an empty text, has failed for 2 × stall_seconds: a lost GPU
"""

import asyncio
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import TIMEOUT_MAX, Timer
from time import monotonic
from typing import Final, Protocol

from service.errors import Unavailable

HUNG: Final = 70
LOST: Final = 71
HUNG_AFTER: Final = 3.0  # times stall_seconds
LOST_AFTER: Final = 2.0
PERIOD: Final = 1.0  # seconds between two checks
FROZEN: Final = 10.0  # seconds between two checks of a process that was frozen, for example by `docker pause`

logger = logging.getLogger(__name__)


class Model(Protocol):
    """A model that can fail."""

    name: str

    @property
    def failing_for(self) -> float:
        """Return the seconds since the first failure after the last success; 0 after a success."""

    async def check(self) -> None:
        """Raise Unavailable where it still fails."""


@dataclass
class Health:
    """`check` raises the reason why the service is not ready; `watch` ends a process that cannot recover."""

    models: Callable[[], Iterable[Model]]
    busy_for: Callable[[], float]
    stall_seconds: float
    end: Callable[[int], object] = os._exit
    clock: Callable[[], float] = monotonic
    stopping: bool = False

    def __post_init__(self) -> None:
        self._looked = self.clock()
        self._awake_since = -math.inf
        self._probes: dict[str, asyncio.Task[None]] = {}  # by model, one each

    @property
    def ready(self) -> bool:
        """Return what is known without trying a model."""
        return not self.stopping and not self._stalled and not any(model.failing_for for model in self.models())

    async def check(self, model: Model | None = None) -> None:
        """Raise Unavailable, with the reason, for all models or one. A model whose last batch failed is tried first."""
        if self.stopping:
            raise Unavailable("the service is stopping; send requests to another instance")
        if self._stalled:
            raise Unavailable(f"a batch has run for {self.busy_for():.0f} s, the limit is {self.stall_seconds:g} s")
        for each in [model] if model else self.models():
            await each.check()

    async def watch(self) -> None:
        """Look every second until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(PERIOD)

    def look(self) -> None:
        """End a process that cannot recover, and try failed models again. Time while frozen does not count."""
        now = self.clock()
        if now - self._looked > FROZEN:
            self._awake_since = now
        self._looked, awake = now, now - self._awake_since
        if min(self.busy_for(), awake) > HUNG_AFTER * self.stall_seconds:
            logger.critical("a batch has hung for %.0f s: the process ends with status %d", self.busy_for(), HUNG)
            self.end(HUNG)
        for model in self.models():
            if min(model.failing_for, awake) > LOST_AFTER * self.stall_seconds:
                logger.critical(
                    "model %s has failed for %.0f s: the process ends with status %d",
                    model.name,
                    model.failing_for,
                    LOST,
                )
                self.end(LOST)
            elif model.failing_for and not self._stalled and model.name not in self._probes:
                self._probes[model.name] = asyncio.create_task(self._try(model))

    @property
    def _stalled(self) -> bool:
        return self.busy_for() > self.stall_seconds

    async def _try(self, model: Model) -> None:
        """Try a model in the background; the result is in its `failing_for`."""
        try:
            await model.check()
        except Unavailable as error:
            logger.warning("%s", error)
        finally:
            del self._probes[model.name]


@contextmanager
def limited(seconds: float, task: str) -> Iterator[None]:
    """End the process where the block takes longer: at start no event loop can watch it."""

    def end() -> None:
        logger.critical("%s has hung for %.0f s: the process ends with status %d", task, seconds, HUNG)
        os._exit(HUNG)

    timer = Timer(min(seconds, TIMEOUT_MAX), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
