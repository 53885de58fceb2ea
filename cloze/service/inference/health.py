"""Check whether the service works, and end a process that does not.

The service is ready while it is not stopping, no batch has run for `stall_seconds`, the last batch of every model
succeeded, and no task in the background fails. A busy service is ready. A fault that lasts ends the process, so that
its supervisor starts a new one:

    HUNG  70   a batch, or the loading of a model at start, has run for 3 × stall_seconds; or the event loop has hung
    LOST  71   every batch of a model, even a test with an empty text, has failed for 2 × stall_seconds: a lost GPU

A thread judges this, because a hanging event loop cannot.
"""

import logging
import math
from asyncio import Task
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Event, Thread
from time import monotonic
from typing import Final

from cloze.service.errors import Unavailable
from cloze.service.inference.model import Model
from cloze.service.monitoring.background import Background
from cloze.service.monitoring.logs import end_process

HUNG: Final = 70
LOST: Final = 71
HUNG_AFTER: Final = 3.0  # times stall_seconds
LOST_AFTER: Final = 2.0
PERIOD: Final = 1.0  # seconds between two checks
FROZEN: Final = 10.0  # seconds between two checks of a process that was frozen, for example by `docker pause`

logger = logging.getLogger(__name__)


@dataclass
class Health:
    """`check` raises the reason why the service is not ready; `judge` ends a process that cannot recover."""

    models: Iterable[Model]
    busy_for: Callable[[], float]
    background: Background
    stall_seconds: float
    end: Callable[[int], object] = end_process
    clock: Callable[[], float] = monotonic
    stopping: bool = False

    def __post_init__(self) -> None:
        self._looked = self.clock()
        self._awake_since = -math.inf
        self._probe: Task[None] | None = None  # tries the models whose last batch failed
        self._beat = self.clock()  # when the event loop last ran `look`
        self._unwatched = Event()

    @property
    def ready(self) -> bool:
        """Whether the service is ready, as far as is known without trying a model."""
        failing = self.background.failing or any(model.failing_for for model in self.models)
        return not (self.stopping or self._stalled or failing)

    async def check(self, model: Model | None = None) -> None:
        """Raise Unavailable, with the reason, if `model` or, by default, any model is not ready.

        A model whose last batch failed is tried first.
        """
        if self.stopping:
            raise Unavailable("the service is stopping; send requests to another instance")
        if self._stalled:
            raise Unavailable(f"a batch has run for {self.busy_for():.0f} s; the limit is {self.stall_seconds:g} s")
        for name, error in self.background.failing.items():
            raise Unavailable(f"the background task {name} fails: {error!r}; see the log")
        for served in [model] if model else self.models:
            await served.check()

    def watch(self) -> None:
        """Run `look` every second in the event loop, and `judge` in a thread."""
        self._beat = self.clock()
        self.background.every(PERIOD, "watch", self.look)
        Thread(target=self._guard, name="watch", daemon=True).start()

    def unwatch(self) -> None:
        """Stop judging, before the event loop ends."""
        self._unwatched.set()

    def _guard(self) -> None:
        logged = ""
        while not self._unwatched.wait(PERIOD):
            try:
                self.judge()
                logged = ""
            except Exception as error:  # the thread continues; `look` gets the same error, and readiness shows it
                if logged != repr(error):
                    logged = repr(error)
                    logger.exception("the health watch failed")

    def judge(self) -> None:
        """End a process that cannot recover. The time for which it was frozen does not count."""
        now = self.clock()
        if now - self._looked > FROZEN:
            self._awake_since = now
        self._looked, awake = now, now - self._awake_since
        least = max(self.stall_seconds, PERIOD)  # the event loop does not beat more often
        hung = ("a batch", self.busy_for(), self.stall_seconds), ("the event loop", now - self._beat, least)
        for subject, seconds, limit in hung:
            if min(seconds, awake) > HUNG_AFTER * limit:
                logger.critical("%s has hung for %.0f s: the process ends with status %d", subject, seconds, HUNG)
                self.end(HUNG)
        for model in self.models:
            if min(model.failing_for, awake) > LOST_AFTER * self.stall_seconds:
                logger.critical(
                    "model %s has failed for %.0f s: the process ends with status %d",
                    model.name,
                    model.failing_for,
                    LOST,
                )
                self.end(LOST)

    async def look(self) -> None:
        """Try failed models again, and record that the event loop runs."""
        self._beat = self.clock()
        probed = self._probe is None or self._probe.done()
        if probed and not self._stalled and any(model.failing_for for model in self.models):
            self._probe = self.background.once("probe", self._try)

    @property
    def _stalled(self) -> bool:
        return self.busy_for() > self.stall_seconds

    async def _try(self) -> None:
        """Try every model whose last batch failed; the result is in its `failing_for`."""
        for model in self.models:
            try:
                await model.check()
            except Unavailable as error:
                logger.warning("%s", error)
