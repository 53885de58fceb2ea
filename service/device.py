"""The service's threads: some run graphs, whatever the model, and some do what would hold the event loop up."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import get_ident
from time import monotonic
from typing import Any, Final, TypeVar

from service.cpu import Threads

__all__ = ["Device"]

T = TypeVar("T")

ONE: Final = Threads(1, 1)


class Device:
    """`run` takes turns in the threads for graphs, `work` in the workers'.

    `threads` says how many batches run at once on the CPU, and how many threads ONNX Runtime uses for each.
    """

    def __init__(self, workers: int, threads: Threads = ONE, clock: Callable[[], float] = monotonic) -> None:
        self.workers = workers
        self.threads = threads
        self._clock = clock
        self._graphs = ThreadPoolExecutor(threads.batches, thread_name_prefix="graphs")
        self._workers = ThreadPoolExecutor(workers, thread_name_prefix="worker")
        self._started: dict[int, float] = {}  # by thread, of the graphs that run
        self._running: set[Future[Any]] = set()  # and those that wait for a thread

    @property
    def busy_for(self) -> float:
        """Seconds since the oldest running graph started, 0 where none runs."""
        started = list(self._started.values())  # a copy: the other threads may end meanwhile
        return self._clock() - min(started) if started else 0.0

    async def run(self, task: Callable[[], T]) -> T:
        """Run one graph, once a thread for graphs is free."""
        future = self._graphs.submit(self._timed, task)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return await asyncio.wrap_future(future)

    async def work(self, task: Callable[[], T], *, small: bool = False) -> T:
        """Run `task` in a worker thread, or at once if it is `small`: then the hop to a thread would take longer."""
        if small:
            return task()
        return await asyncio.get_running_loop().run_in_executor(self._workers, task)

    async def close(self, seconds: float) -> bool:
        """Take nothing more. False where a task runs longer than so many seconds: only the process' end ends it."""
        left = max(0.0, seconds - self.busy_for)
        _, hanging = await asyncio.to_thread(wait, list(self._running), left)
        self._graphs.shutdown(wait=not hanging, cancel_futures=True)
        self._workers.shutdown(wait=not hanging, cancel_futures=True)
        return not hanging

    def _timed(self, task: Callable[[], T]) -> T:
        thread = get_ident()
        self._started[thread] = self._clock()
        try:
            return task()
        finally:
            del self._started[thread]
