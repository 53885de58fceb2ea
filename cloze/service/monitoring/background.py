"""Background tasks under one supervisor: an error in one is logged and counted, and the others continue."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context
from typing import Any

from prometheus_client import Counter

Work = Callable[[], Awaitable[object]]

logger = logging.getLogger(__name__)


class Background:
    """Runs tasks, each once or repeatedly. `errors` counts what they raise, by the task's name.

    `failing` has the error of every repeated task whose last turn raised one: the service is not ready meanwhile.
    """

    def __init__(self, errors: Counter) -> None:
        self.failing: dict[str, BaseException] = {}
        self._errors = errors
        self._tasks: set[asyncio.Task[None]] = set()

    def once(self, name: str, work: Work) -> asyncio.Task[None]:
        """Start a task; it raises nothing, whatever its work raises."""
        return self._start(name, self._turn(name, work))

    def every(self, seconds: float, name: str, work: Work) -> None:
        """Start a task that waits `seconds` between its turns."""
        self._start(name, self._turns(seconds, name, work))

    async def stop(self, name: str | None = None) -> None:
        """Cancel every task, or those of a name, and wait for their end."""
        tasks = [task for task in self._tasks if name is None or task.get_name() == name]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, name: str, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine, name=name, context=Context())  # not a request's context
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _turns(self, seconds: float, name: str, work: Work) -> None:
        while True:
            await self._turn(name, work, repeated=True)
            await asyncio.sleep(seconds)

    async def _turn(self, name: str, work: Work, *, repeated: bool = False) -> None:
        """Run the work once. For a repeated task, only the first of several errors in a row is logged."""
        try:
            await work()
            self.failing.pop(name, None)
        except (Exception, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            self._errors.labels(name).inc()
            if name not in self.failing:
                logger.exception("the background task %s failed", name)
            if repeated:
                self.failing[name] = error
