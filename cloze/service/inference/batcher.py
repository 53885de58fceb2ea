"""Dynamic batching without a timer: a batch is what has arrived when the previous one has ended.

Asyncio only; knows neither HTTP nor ONNX nor text. `run` runs a batch; the queue decides what is in it.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from cloze.service.client import Client
from cloze.service.errors import DeadlineExceeded, Unavailable
from cloze.service.inference.queue import PriorityQueue, Waiting

Item = TypeVar("Item")
Result = TypeVar("Result")

STOPPED: Final = "the batcher has stopped; send the request again"
SLICE: Final = 256  # items that enter or leave the queue at once; other requests get their turn between two slices

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Request(Generic[Result]):
    """What one caller submitted. Done at the last result, at the first error, or when the caller is cancelled."""

    future: "asyncio.Future[list[Result]]"
    since: float
    size: int
    entries: "list[_Entry[Any, Result]]" = field(default_factory=list)  # empty once it is done
    waiting: int = 0  # entries that no batch has taken
    results: dict[int, Result] = field(default_factory=dict)
    context: Context = field(default_factory=copy_context)  # the caller's, for what is logged of its items

    @property
    def untouched(self) -> bool:
        """Whether all of it still waits."""
        return 0 < self.waiting == len(self.entries)

    def deliver(self, places: list[int], result: Result) -> None:
        self.results.update(dict.fromkeys(places, result))
        if len(self.results) == self.size and not self.future.done():
            self.future.set_result([self.results[place] for place in range(self.size)])


@dataclass(eq=False, slots=True)
class _Entry(Waiting, Generic[Item, Result]):
    """One item of a request, and the indices at which it stands there."""

    request: _Request[Result]
    key: Hashable
    item: Item
    places: list[int]


class Failed(Exception):
    """`run` failed on the caller's item at index `place` alone; the cause says why."""

    def __init__(self, place: int) -> None:
        super().__init__(f"item {place} failed")
        self.place = place


@dataclass(eq=False)
class Batcher(Generic[Item, Result]):
    """Runs items in batches whose padded cost, longest × count, is at most `max_cost`, `max_padding` of it padding.

    PriorityQueue chooses the items: interactive ones first, clients take turns by cost, and items of similar cost share
    a batch. `cost` is 1 or more; an item that costs more than `max_cost` runs alone. A batch that fails is halved until
    the item that fails is alone; only the requests that contain it fail.

    Up to `parallel` batches run at once; when several may start, they share what waits.

    Items with the same `key` that wait or run at the same time run once, within a request and across requests. Queued
    duplicates run at the earliest turn of any of them; a duplicate of a running item waits for its result.
    """

    run: Callable[[list[Item]], Awaitable[Sequence[Result]]]
    cost: Callable[[Item], int]
    max_cost: int
    max_padding: int
    max_age: float
    key: Callable[[Item], Hashable] = lambda item: object()  # by default no two are equal
    parallel: int = 1  # batches that run at once
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._queue: PriorityQueue[_Entry[Item, Result]] = PriorityQueue()
        self._same: dict[Hashable, dict[_Entry[Item, Result], None]] = {}  # queued and running, by key
        self._running: set[Hashable] = set()  # the keys that left the queue and have no result yet
        self._requests: OrderedDict[_Request[Result], None] = OrderedDict()  # unfinished, by arrival
        self._expiry: asyncio.TimerHandle | None = None  # one, while there may be something untouched
        self._wake = asyncio.Event()
        self._busy = 0  # batches that run
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def waiting(self) -> int:
        """Return the cost of all items that no batch has taken."""
        return self._queue.cost

    @property
    def waiting_items(self) -> int:
        return len(self._queue)

    @property
    def age(self) -> float:
        """Return how many seconds the oldest waiting item has waited; 0.0 where nothing waits."""
        return next((self.clock() - request.since for request in self._requests if request.waiting), 0.0)

    def start(self) -> None:
        """Start to take batches; needs a running loop."""
        self._tasks = [
            asyncio.create_task(self._work(), name=f"batcher-{number}", context=Context())  # of no request
            for number in range(self.parallel)
        ]

    async def submit(self, items: Sequence[Item], client: Client) -> list[Result]:
        """Wait for the results, in order. Where the caller is cancelled, its items leave the queue.

        Raises DeadlineExceeded where no batch has taken any of them for `max_age` seconds, Failed where `run` raised
        for one of them alone, and Unavailable after `stop`.
        """
        if not self._tasks:
            raise Unavailable(STOPPED)
        if not items:
            return []
        request: _Request[Result] = _Request(asyncio.get_running_loop().create_future(), self.clock(), len(items))
        self._requests[request] = None
        try:
            for first in range(0, len(items), SLICE):
                if first:
                    await asyncio.sleep(0)
                if request.future.done():  # it failed
                    break
                self._enqueue(request, items[first : first + SLICE], first, client)
            return await request.future
        finally:
            self._withdraw(request)
            del self._requests[request]

    async def stop(self) -> None:
        """Take no more batches. Requests that are not finished fail with Unavailable."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._expiry is not None:
            self._expiry.cancel()
        self._abandon(Unavailable(STOPPED))

    def _enqueue(self, request: _Request[Result], items: Sequence[Item], first: int, client: Client) -> None:
        """Let some items of a request wait, which stand in it from the index `first` on."""
        entries: dict[Hashable, _Entry[Item, Result]] = {}
        for place, item in enumerate(items, first):
            key = self.key(item)
            if key in entries:
                entries[key].places.append(place)
            else:
                entries[key] = _Entry(self.cost(item), client, request, key, item, [place])
        request.entries += entries.values()
        for entry in entries.values():
            self._same.setdefault(entry.key, {})[entry] = None
            if entry.key not in self._running:
                self._queue.add(entry)
                request.waiting += 1
        if self._expiry is None:
            self._watch()
        self._wake.set()

    def _withdraw(self, request: _Request[Result]) -> None:
        """Forget the entries of a request that have no result yet: a slice of them now, and the others soon."""
        if len(request.results) == request.size:
            request.entries.clear()
        for entry in request.entries[-SLICE:]:
            same = self._same.get(entry.key, {})
            if entry not in same:  # it has its result, or all was abandoned meanwhile
                continue
            del same[entry]
            if not same:
                del self._same[entry.key]
            if entry.order is not None:
                self._queue.remove(entry)
                request.waiting -= 1
        del request.entries[-SLICE:]
        if request.entries:
            asyncio.get_running_loop().call_soon(self._withdraw, request)

    def _fail(self, request: _Request[Result], error: Exception) -> None:
        if not request.future.done():
            request.future.set_exception(error)
        self._withdraw(request)

    async def _work(self) -> None:
        while True:
            await self._wake.wait()
            try:
                if batch := self._take():
                    self._busy += 1
                    try:
                        await self._attempt(batch)
                    finally:
                        self._busy -= 1
                else:
                    self._wake.clear()
            except Exception as error:
                logger.exception("the batcher failed. This is a bug.")
                self._abandon(error)

    def _abandon(self, error: Exception) -> None:
        """Fail every request, so that no caller waits for ever."""
        self._queue = PriorityQueue()
        self._same.clear()
        self._running.clear()
        for request in self._requests:
            request.entries.clear()
            request.waiting = 0
            self._fail(request, error)
        self._wake.clear()

    def _take(self) -> list[_Entry[Item, Result]]:
        """Take the next batch, one entry of each key; empty where nothing waits. Requests that are too old fail."""
        self._expire()
        share = -(-self._queue.cost // (self.parallel - self._busy))  # of the queue, for each batch that may start now
        limit = min(self.max_cost, share + self.max_padding)
        taken = {entry.key: entry for entry in self._queue.take(limit, self.max_padding)}
        for key in taken:
            for entry in self._same[key]:
                self._queue.remove(entry)
                entry.request.waiting -= 1
        self._running.update(taken)
        return list(taken.values())

    def _watch(self) -> None:
        """Expire requests now and when the next one is due, also while a batch runs."""
        self._expire()
        self._expiry = None
        if request := next((request for request in self._requests if request.untouched), None):
            due = request.since + self.max_age
            self._expiry = asyncio.get_running_loop().call_later(due - self.clock(), self._watch)

    def _expire(self) -> None:
        """Fail the requests of which no batch has taken anything in time."""
        for request in self._requests:
            waited = self.clock() - request.since
            if waited <= self.max_age:
                break
            if request.untouched:
                message = f"the request waited {waited:.1f} s for a batch, at most {self.max_age:g} s are allowed"
                self._fail(request, DeadlineExceeded(f"{message}; send it again later, or in smaller requests"))

    async def _attempt(self, batch: list[_Entry[Item, Result]]) -> None:
        self._running.difference_update([entry.key for entry in batch if entry.key not in self._same])
        batch = [entry for entry in batch if entry.key in self._same]  # the others have no caller left
        if not batch:
            return
        try:
            results = await self._results(batch)
        except Exception as error:
            await self._retry(batch, error)
            return
        for entry, result in zip(batch, results, strict=True):
            self._running.discard(entry.key)
            for each in self._same.pop(entry.key, ()):
                each.request.deliver(each.places, result)

    async def _results(self, batch: list[_Entry[Item, Result]]) -> Sequence[Result]:
        try:
            results = await self.run([entry.item for entry in batch])
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise RuntimeError("a batch was cancelled while it ran. This is a bug.") from None
        if len(results) != len(batch):
            raise RuntimeError(f"{len(batch)} items gave {len(results)} results. This is a bug.")
        return results

    async def _retry(self, batch: list[_Entry[Item, Result]], error: Exception) -> None:
        """Run both halves of a failed batch; an item that failed alone fails its requests."""
        if len(batch) == 1:
            self._running.discard(batch[0].key)
            for entry in list(self._same.get(batch[0].key, ())):
                entry.request.context.run(logger.warning, "an item failed: %s", error.__cause__ or error)
                failed = Failed(entry.places[0])
                failed.__cause__ = error
                self._fail(entry.request, failed)
            return
        logger.debug("a batch of %d failed and is halved", len(batch))
        middle = len(batch) // 2
        await self._attempt(batch[:middle])
        await self._attempt(batch[middle:])
