"""Dynamic batching without a timer: a batch is what has arrived when the previous one has ended.

Asyncio only; independent of HTTP, ONNX and text. `run` runs a batch; the queue decides what is in it.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any, Final, Generic, NamedTuple, TypeVar

from cloze.service.client import Client
from cloze.service.errors import DeadlineExceeded, Unavailable
from cloze.service.inference.queue import PriorityQueue, Waiting

Item = TypeVar("Item")
Result = TypeVar("Result")

STOPPED: Final = "the batcher has stopped; send the request again"

logger = logging.getLogger(__name__)


class Share(NamedTuple, Generic[Result]):
    """A request's share of one batch: the rows `rows` of its result belong to the request's items at `places`."""

    places: list[int]
    result: Result
    rows: slice


@dataclass(eq=False, slots=True)
class _Request(Generic[Item, Result]):
    """What one caller submitted. Done at the last result, at the first error, or when the caller is cancelled."""

    items: Sequence[Item]
    future: "asyncio.Future[list[Share[Result]]]"
    since: float
    waiting: int  # items that no batch has taken
    missing: int  # items without a result
    shares: list[Share[Result]] = field(default_factory=list)
    entries: "list[_Entry[Item, Result]]" = field(default_factory=list)
    context: Context = field(default_factory=copy_context)  # the caller's, for log records about its items

    @property
    def untouched(self) -> bool:
        """Whether all of its items still wait."""
        return self.waiting == len(self.items)

    def deliver(self, share: Share[Result]) -> None:
        self.shares.append(share)
        self.missing -= len(share.places)
        if not self.missing and not self.future.done():
            self.future.set_result(self.shares)


@dataclass(eq=False, slots=True)
class _Entry(Waiting, Generic[Item, Result]):
    """The items of a request that have the same cost, by their places in it."""

    request: _Request[Item, Result]
    places: list[int]
    taken: int = 0


class _Piece(NamedTuple, Generic[Item, Result]):
    """One request's items in a batch."""

    request: _Request[Item, Result]
    places: list[int]


class Failed(Exception):
    """`run` failed on the caller's item at index `place` alone; the cause says why."""

    def __init__(self, place: int) -> None:
        super().__init__(f"item {place} failed")
        self.place = place


@dataclass(eq=False)
class Batcher(Generic[Item, Result]):
    """Runs items in batches: the padded cost, longest × count, is at most `max_cost`, and the padding `max_padding`.

    PriorityQueue chooses the items: interactive ones first, clients take turns by cost, and items of similar cost share
    a batch. `cost` is 1 or more; an item that costs more than `max_cost` runs alone. A batch that fails is halved until
    the item that fails is alone; only the requests that contain it fail.

    Up to `parallel` batches run at once; if several may start, they share the waiting items. In addition, `run` gets up
    to `ahead` batches early, each when enough items wait to fill one: it prepares them, and they wait for their turn.
    """

    run: Callable[[list[Item]], Awaitable[Result]]
    cost: Callable[[Item], int]
    max_cost: int
    max_padding: int
    max_age: float
    parallel: int = 1
    ahead: int = 0
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._queue: PriorityQueue[_Entry[Item, Result]] = PriorityQueue()
        self._requests: OrderedDict[_Request[Item, Result], None] = OrderedDict()  # unfinished, by arrival
        self._expiry: asyncio.TimerHandle | None = None  # one timer, while a request may be untouched
        self._wake = asyncio.Event()
        self._busy = 0  # batches that run or are prepared
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
        """Return how many seconds the oldest waiting item has waited; 0.0 if nothing waits."""
        return next((self.clock() - request.since for request in self._requests if request.waiting), 0.0)

    def start(self) -> None:
        """Start taking batches; needs a running event loop."""
        self._tasks = [
            asyncio.create_task(self._work(), name=f"batcher-{number}", context=Context())  # not a request's context
            for number in range(self.parallel + self.ahead)
        ]

    async def submit(self, items: Sequence[Item], client: Client) -> list[Share[Result]]:
        """Wait for the results, in shares that have each item once. If the caller is cancelled, its items are removed.

        Raises DeadlineExceeded if no batch has taken any of them for `max_age` seconds, Failed if `run` raised an error
        for one of them alone, and Unavailable after `stop`.
        """
        if not self._tasks:
            raise Unavailable(STOPPED)
        if not items:
            return []
        count, future = len(items), asyncio.get_running_loop().create_future()
        request: _Request[Item, Result] = _Request(items, future, self.clock(), count, count)
        self._requests[request] = None
        try:
            self._enqueue(request, client)
            return await future  # type: ignore[no-any-return]
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

    def _enqueue(self, request: _Request[Item, Result], client: Client) -> None:
        by_cost = dict[int, list[int]]()  # indices of the items
        for place, cost in enumerate(map(self.cost, request.items)):
            by_cost.setdefault(cost, []).append(place)
        request.entries = [_Entry(cost, client, len(places), request, places) for cost, places in by_cost.items()]
        for entry in request.entries:
            self._queue.add(entry)
        if self._expiry is None:
            self._watch()
        self._wake.set()

    def _withdraw(self, request: _Request[Item, Result]) -> None:
        """Remove the items of a request that still wait."""
        for entry in request.entries:
            self._queue.remove(entry)
        request.entries = []
        request.waiting = 0

    def _fail(self, request: _Request[Item, Result], error: Exception) -> None:
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
                        self._wake.set()
                else:
                    self._wake.clear()
            except Exception as error:
                logger.exception("the batcher failed. This is a bug.")
                self._abandon(error)

    def _abandon(self, error: Exception) -> None:
        """Fail every request, so that no caller waits forever."""
        self._queue = PriorityQueue()
        for request in self._requests:
            request.entries = []
            self._fail(request, error)
        self._wake.clear()

    def _take(self) -> list[_Piece[Item, Result]]:
        """Take the next batch; empty if none should start. Requests that are too old fail."""
        self._expire()
        if self._busy >= self.parallel and self._queue.cost < self.max_cost:
            return []
        share = -(-self._queue.cost // max(1, self.parallel - self._busy))  # of the queue, per batch that may start now
        limit = min(self.max_cost, share + self.max_padding)
        batch = []
        for entry, count in self._queue.take(limit, self.max_padding):
            places = entry.places[entry.taken : entry.taken + count]
            entry.taken += count
            entry.request.waiting -= count
            batch.append(_Piece(entry.request, places))
        return batch

    def _watch(self) -> None:
        """Expire requests now and when the next one is due, also while a batch runs."""
        self._expire()
        self._expiry = None
        if request := next((request for request in self._requests if request.untouched), None):
            due = request.since + self.max_age
            self._expiry = asyncio.get_running_loop().call_later(due - self.clock(), self._watch)

    def _expire(self) -> None:
        """Fail the requests from which no batch has taken an item in time."""
        for request in self._requests:
            waited = self.clock() - request.since
            if waited <= self.max_age:
                break
            if request.untouched:
                message = f"the request waited {waited:.1f} s for a batch; the limit is {self.max_age:g} s"
                self._fail(request, DeadlineExceeded(f"{message}: send it again later, or in smaller requests"))

    async def _attempt(self, batch: list[_Piece[Item, Result]]) -> None:
        batch = [piece for piece in batch if not piece.request.future.done()]  # the others have no caller left
        if not batch:
            return
        try:
            result = await self._result([piece.request.items[place] for piece in batch for place in piece.places])
        except Exception as error:
            await self._retry(batch, error)
            return
        row = 0
        for request, places in batch:
            request.deliver(Share(places, result, slice(row, row + len(places))))
            row += len(places)

    async def _result(self, items: list[Item]) -> Result:
        try:
            return await self.run(items)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise RuntimeError("a batch was cancelled while it ran. This is a bug.") from None

    async def _retry(self, batch: list[_Piece[Item, Result]], error: Exception) -> None:
        """Run both halves of a failed batch; an item that failed alone fails its request."""
        count = sum(len(piece.places) for piece in batch)
        if count == 1:
            [(request, [place])] = batch
            request.context.run(logger.warning, "an item failed: %s", error.__cause__ or error)
            failed = Failed(place)
            failed.__cause__ = error
            self._fail(request, failed)
            return
        logger.debug("a batch of %d failed and is halved", count)
        for half in _halves(batch, count // 2):
            await self._attempt(half)


def _halves(batch: list[_Piece[Any, Any]], count: int) -> tuple[list[_Piece[Any, Any]], list[_Piece[Any, Any]]]:
    """Split a batch after its first `count` items."""
    first, second = list[_Piece[Any, Any]](), list[_Piece[Any, Any]]()
    for request, places in batch:
        if places[:count]:
            first.append(_Piece(request, places[:count]))
        if places[count:]:
            second.append(_Piece(request, places[count:]))
        count -= min(count, len(places))
    return first, second
