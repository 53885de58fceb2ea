"""The service's threads: how the CPUs are shared between batches, the pools, and separate threads."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Thread
from time import monotonic
from typing import Final, NamedTuple, TypeVar

from cloze.encoding.errors import OptionError
from cloze.machine import available_cpus
from cloze.service.client import Client

Result = TypeVar("Result")

OWN_THREAD: Final = "own"  # name of the threads that `run_in_own_thread` starts
MAX_WORKERS: Final = 16  # more would wait for Python's lock
SMALL_SIZE: Final = 2**16  # characters that are tokenised in a fraction of a second
MAX_SIZE: Final = MAX_WORKERS * SMALL_SIZE  # characters tokenised at once; each may be a token of 400 bytes
MAX_THREADS_PER_BATCH: Final = 4  # more gain little on batches of a few hundred tokens


class Threads(NamedTuple):
    """The threads that run graphs on the CPU: `batches` run concurrently, each with `per_batch` threads."""

    batches: int
    per_batch: int


def share_threads(total: int) -> Threads:
    """Share `total` threads (0: the available CPUs) between batches: each batch gets half of them, but at most 4.

    Two batches of one thread finish sooner than one batch after the other with two threads: some operators have only
    one thread's work, and at the end of each the threads wait for the slowest. Raises OptionError.
    """
    if total < 0:
        raise OptionError(f"threads is {total}; write 0 for all available CPUs, or a number above 0")
    total = total or available_cpus()
    per_batch = min(MAX_THREADS_PER_BATCH, max(1, total // 2))
    return Threads(total // per_batch, per_batch)


class _Turns:
    """Turns of clients: at most `tasks` run at once, with a total size of at most MAX_SIZE unless one runs alone."""

    def __init__(self, tasks: int) -> None:
        self._tasks = tasks
        self._running = self._size = 0  # tasks, and their size
        self._waiting: dict[Client, deque[tuple[asyncio.Future[None], int]]] = {}  # the next client comes first

    async def begin(self, client: Client, size: int) -> None:
        """Wait for the client's turn. Each turn that has begun must `end`."""
        if not self._waiting and self._fits(size):
            self._add(size)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append((turn, size))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # its turn came just before
                self.end(size)
            raise

    def end(self, size: int) -> None:
        """End a turn, and let others begin."""
        self._running -= 1
        self._size -= size
        while self._waiting:
            client, turns = next(iter(self._waiting.items()))
            turn, following = turns[0]
            if not turn.cancelled() and not self._fits(following):
                return
            turns.popleft()
            del self._waiting[client]
            if turns:
                self._waiting[client] = turns  # after the others
            if not turn.cancelled():
                self._add(following)
                turn.set_result(None)

    def _fits(self, size: int) -> bool:
        return not self._running or (self._running < self._tasks and self._size + size <= MAX_SIZE)

    def _add(self, size: int) -> None:
        self._running += 1
        self._size += size


class Workers:
    """Threads in which clients take turns, however many tasks each of them has.

    Large tasks, which run for seconds and take memory, leave one thread to the others.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="worker")
        self._small, self._large = _Turns(threads), _Turns(threads - 1)

    async def run(self, client: Client, task: Callable[[], Result], size: int = 0) -> Result:
        """Run a task of `size` characters in a thread. If it is cancelled before its turn, it does not run."""
        loop, turns = asyncio.get_running_loop(), self._large if size > SMALL_SIZE else self._small
        await turns.begin(client, size)
        job = self.pool.submit(task)
        try:
            return await asyncio.wrap_future(job)
        finally:
            if job.done():
                turns.end(size)
            else:  # cancelled, but its thread cannot be: it continues
                job.add_done_callback(lambda _: loop.call_soon_threadsafe(turns.end, size))


class Executors:
    """`graphs` runs batches, as many at once as `threads` allows on the CPU; `workers` tokenise and write responses."""

    def __init__(self, threads: Threads) -> None:
        self.threads = threads
        self.graphs = ThreadPoolExecutor(threads.batches, thread_name_prefix="graphs")
        self.workers = Workers(min(MAX_WORKERS, max(2, available_cpus())))
        self.running: dict[int, float] = {}  # thread → when its batch began; sessions write it

    @property
    def busy_for(self) -> float:
        """Return the seconds since the oldest running batch began; 0.0 if none runs."""
        started = list(self.running.values())  # a copy: other threads change it
        return monotonic() - min(started) if started else 0.0

    async def close(self, seconds: float) -> bool:
        """Accept no more tasks and wait for those that run; False if a batch runs for more than `seconds`.

        Only the end of the process ends such a batch.
        """
        remaining = max(0.0, seconds - self.busy_for)
        pools = (self.graphs, self.workers.pool)
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
        ended = [asyncio.wrap_future(run_in_own_thread(pool.shutdown)) for pool in pools]
        _, hanging = await asyncio.wait(ended, timeout=remaining)
        return not hanging


def run_in_own_thread(task: Callable[[], Result]) -> Future[Result]:
    """Run a task in its own thread, which the caller may abandon: it blocks neither a pool nor the process's exit."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(task())
        except BaseException as error:
            future.set_exception(error)

    future.set_running_or_notify_cancel()  # from now on it cannot be cancelled
    Thread(target=run, name=OWN_THREAD, daemon=True).start()
    return future
