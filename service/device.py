"""The service's threads: one runs graphs, whatever the model, and a few do what would hold the event loop up.

One thread for all graphs, because two at once would only share the same cores or the same GPU.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import TypeVar

__all__ = ["Device"]

T = TypeVar("T")


class Device:
    """`run` takes turns in the graphs' thread, `work` in the workers'."""

    def __init__(self, workers: int, clock: Callable[[], float] = monotonic) -> None:
        self.workers = workers
        self._clock = clock
        self._graphs = ThreadPoolExecutor(1, thread_name_prefix="graphs")
        self._workers = ThreadPoolExecutor(workers, thread_name_prefix="worker")
        self._since: float | None = None

    @property
    def busy_for(self) -> float:
        """Seconds that the task at work has lasted, 0 where none is."""
        since = self._since  # read once: the other thread may end meanwhile
        return 0.0 if since is None else self._clock() - since

    async def run(self, task: Callable[[], T]) -> T:
        """Run one graph."""
        return await asyncio.get_running_loop().run_in_executor(self._graphs, self._timed, task)

    async def work(self, task: Callable[[], T], *, small: bool = False) -> T:
        """Run `task` in a worker thread, or at once if it is `small`: then the hop to a thread would take longer."""
        if small:
            return task()
        return await asyncio.get_running_loop().run_in_executor(self._workers, task)

    async def close(self, seconds: float) -> bool:
        """Take nothing more. False where a task runs longer than so many seconds: only the process' end ends it."""
        left = max(0.0, seconds - self.busy_for)
        done, _ = await asyncio.wait([asyncio.ensure_future(self.run(lambda: None))], timeout=left)
        self._graphs.shutdown(wait=bool(done), cancel_futures=True)
        self._workers.shutdown(wait=bool(done), cancel_futures=True)
        return bool(done)

    def _timed(self, task: Callable[[], T]) -> T:
        self._since = self._clock()
        try:
            return task()
        finally:
            self._since = None
