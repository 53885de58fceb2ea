"""Items into batches, without a clock: a batch is what has arrived when the last one has ended.

Asyncio only; knows neither HTTP nor ONNX nor text. What runs a batch is given as `run`.
"""

import asyncio
import bisect
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, TypeVar

from service.errors import Overloaded, Unavailable

__all__ = ["Batcher"]

Item = TypeVar("Item")
Result = TypeVar("Result")

logger = logging.getLogger(__name__)
_rank = attrgetter("rank")


@dataclass(eq=False, slots=True)
class _Request(Generic[Result]):
    """What one caller submitted; done when the last result is in, the first error, or the caller gone."""

    future: "asyncio.Future[list[Result]]"
    results: dict[int, Result] = field(default_factory=dict)
    size: int = 0
    waiting: int = 0  # cost of its items that no batch has taken
    waiting_items: int = 0


@dataclass(eq=False, slots=True)
class _Entry(Generic[Item, Result]):
    """One item of a request."""

    request: _Request[Result]
    index: int
    item: Item
    rank: tuple[int, int]  # cost, then order of arrival
    taken: bool = False

    @property
    def cost(self) -> int:
        return self.rank[0]

    @property
    def live(self) -> bool:
        return not self.taken and not self.request.future.done()


class Batcher(Generic[Item, Result]):
    """Runs items in batches whose padded cost, longest × count, stays within `max_cost`.

    Each batch holds the oldest item, so that none starves, and then the items nearest to it in cost, so that
    little is padding. An item dearer than `max_cost` runs alone. A batch that fails is halved until the guilty
    item is alone; only its request fails.
    """

    def __init__(
        self,
        run: Callable[[list[Item]], Awaitable[Sequence[Result]]],
        cost: Callable[[Item], int],
        max_cost: int,
        max_waiting: int,
    ) -> None:
        self._run = run
        self._cost = cost
        self.max_cost = max_cost
        self.max_waiting = max_waiting
        self.waiting = 0  # cost of all items that no batch has taken
        self.waiting_items = 0
        self._arrivals: deque[_Entry[Item, Result]] = deque()  # by order
        self._sorted: list[_Entry[Item, Result]] = []  # by cost, then order
        self._orders = 0
        self._requests = 0
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to take batches; needs a running loop."""
        self._task = asyncio.create_task(self._work(), name="batcher")

    async def submit(self, items: Sequence[Item]) -> list[Result]:
        """Wait for the results, in order. A caller that is cancelled takes its items with it.

        Raises Overloaded, before any item is taken, where the items would pass `max_waiting`; a request that is
        larger by itself is taken when nothing else waits. Raises Unavailable once `drain` has begun, and what
        `run` raised for one of the items alone.
        """
        costs = [self._cost(item) for item in items]
        self.admit(sum(costs))
        if not items:
            return []
        request: _Request[Result] = _Request(asyncio.get_running_loop().create_future(), size=len(items))
        self._enqueue(request, items, costs)
        self._requests += 1
        self._idle.clear()
        try:
            return await request.future
        finally:
            self._leave(request)

    def admit(self, cost: int = 1) -> None:
        """Raise what `submit` would raise for items of this cost."""
        if self._closed:
            raise Unavailable("the service is stopping; send the request to another instance")
        if self.waiting and self.waiting + cost > self.max_waiting:
            raise Overloaded(
                f"{self.waiting} tokens wait and the request brings {cost}, at most {self.max_waiting} may wait; "
                "send it again later"
            )

    async def drain(self) -> int:
        """Refuse what comes, finish what has come, stop; returns how many requests were finished."""
        self._closed = True
        pending = self._requests
        await self._idle.wait()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        return pending

    def _enqueue(self, request: _Request[Result], items: Sequence[Item], costs: list[int]) -> None:
        entries = []
        for index, (item, cost) in enumerate(zip(items, costs, strict=True)):
            entries.append(_Entry(request, index, item, (cost, self._orders)))
            self._orders += 1
        self._count(request, sum(costs), len(entries))
        self._arrivals.extend(entries)
        if len(entries) * 16 < len(self._sorted):  # where few join many, a sort would cost more
            for entry in entries:
                bisect.insort(self._sorted, entry, key=_rank)
        else:
            self._sorted.extend(entries)
            self._sorted.sort(key=_rank)
        self._wake.set()

    def _leave(self, request: _Request[Result]) -> None:
        self._count(request, -request.waiting, -request.waiting_items)
        self._requests -= 1
        if not self._requests:
            self._idle.set()

    def _count(self, request: _Request[Result], cost: int, items: int) -> None:
        request.waiting += cost
        request.waiting_items += items
        self.waiting += cost
        self.waiting_items += items

    async def _work(self) -> None:
        batch: list[_Entry[Item, Result]] = []
        while True:
            await self._wake.wait()
            try:
                batch = self._take()
                if batch:
                    await self._attempt(batch)
                else:
                    self._wake.clear()
            except Exception as error:
                logger.exception("the batcher failed. This is a bug.")
                self._abandon([*batch, *self._arrivals], error)

    def _abandon(self, entries: list[_Entry[Item, Result]], error: Exception) -> None:
        """Leave no caller waiting for ever."""
        for entry in entries:
            if not entry.request.future.done():
                entry.request.future.set_exception(error)
        self._arrivals.clear()
        self._sorted.clear()
        self._wake.clear()

    def _take(self) -> list[_Entry[Item, Result]]:
        """The next batch: the oldest item and its neighbours in cost. Empty where nothing waits."""
        self._forget()
        if not self._arrivals:
            return []
        oldest = self._arrivals[0]
        batch, longest = [oldest], oldest.cost
        below = bisect.bisect_left(self._sorted, oldest.rank, key=_rank) - 1
        above = below + 2
        while True:
            below = self._skip(below, -1)
            above = self._skip(above, 1)
            shorter = self._sorted[below] if below >= 0 else None
            longer = self._sorted[above] if above < len(self._sorted) else None
            if longer and longer.cost * (len(batch) + 1) > self.max_cost:
                longer = None
            if longest * (len(batch) + 1) > self.max_cost:
                break
            if longer and (not shorter or longer.cost - oldest.cost <= oldest.cost - shorter.cost):
                batch.append(longer)
                longest = longer.cost
                above += 1
            elif shorter:
                batch.append(shorter)
                below -= 1
            else:
                break
        del self._sorted[below + 1 : above]
        for entry in batch:
            entry.taken = True
            self._count(entry.request, -entry.cost, -1)
        return batch

    def _skip(self, place: int, step: int) -> int:
        """The next place from here that holds a live item, or one past either end."""
        while 0 <= place < len(self._sorted) and not self._sorted[place].live:
            place += step
        return place

    def _forget(self) -> None:
        """Drop what callers left behind; the whole list only when most of it is dead, so the cost is shared."""
        while self._arrivals and not self._arrivals[0].live:
            self._arrivals.popleft()
        if len(self._sorted) > 2 * self.waiting_items:
            self._sorted = [entry for entry in self._sorted if entry.live]
        if len(self._arrivals) > 2 * self.waiting_items:
            self._arrivals = deque(entry for entry in self._arrivals if entry.live)

    async def _attempt(self, batch: list[_Entry[Item, Result]]) -> None:
        batch = [entry for entry in batch if not entry.request.future.done()]
        if not batch:
            return
        try:
            results = await self._run([entry.item for entry in batch])
            if len(results) != len(batch):
                raise RuntimeError(f"{len(batch)} items gave {len(results)} results. This is a bug.")
        except Exception as error:
            await self._retry(batch, error)
            return
        for entry, result in zip(batch, results, strict=True):
            _deliver(entry, result)

    async def _retry(self, batch: list[_Entry[Item, Result]], error: Exception) -> None:
        """Run the halves of a failed batch; an item that failed alone fails its request."""
        if len(batch) == 1:
            logger.warning("an item failed: %s", error.__cause__ or error)
            if not batch[0].request.future.done():
                batch[0].request.future.set_exception(error)
            return
        logger.debug("a batch of %d failed and is halved", len(batch))
        middle = len(batch) // 2
        await self._attempt(batch[:middle])
        await self._attempt(batch[middle:])


def _deliver(entry: _Entry[Item, Result], result: Result) -> None:
    request = entry.request
    if request.future.done():
        return
    request.results[entry.index] = result
    if len(request.results) == request.size:
        request.future.set_result([request.results[index] for index in range(request.size)])
