"""What waits for a batch, in fair order between clients. Knows neither asyncio nor text."""

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["FairQueue", "Waiting"]


@dataclass(eq=False, slots=True)
class Waiting:
    """Something that waits for its turn; the queue sets `tag` and `waits`."""

    cost: int
    client: str
    tag: int = field(default=0, init=False)
    waits: bool = field(default=False, init=False)


Entry = TypeVar("Entry", bound=Waiting)


@dataclass(slots=True)
class _Batch(Generic[Entry]):
    """A batch that is being filled, within `max_cost`, longest × count, of which `max_padding` is padding."""

    max_cost: int
    max_padding: int
    entries: list[Entry] = field(default_factory=list)
    longest: int = 0
    cost: int = 0  # without padding

    def room(self, cost: int) -> int:
        """How many more of this cost it may take; 0 of all beyond a cost that it may take none of."""
        longest = max(self.longest, cost)
        spare = self.max_padding - (longest * len(self.entries) - self.cost)
        if spare < 0:
            return 0
        count = max(0, self.max_cost // longest - len(self.entries))
        return min(count, spare // (longest - cost)) if longest > cost else count

    def add(self, entries: list[Entry]) -> None:
        for entry in entries:
            self.longest = max(self.longest, entry.cost)
            self.cost += entry.cost
        self.entries += entries


@dataclass(slots=True)
class _Client:
    """A client of which something waits; its tag, the last it was given, is then no less than the virtual time."""

    tag: int
    items: int = 0


class FairQueue(Generic[Entry]):
    """Self-clocked fair queueing (Golestani 1994), for batches.

    An entry's tag is max(virtual time, its client's last tag) + cost: as many tokens as the client will have had
    since it began to wait. The entry with the least tag is the seed of the next batch, and the virtual time becomes
    its tag; the entries nearest to it in cost fill the batch, of one cost those with the least tags. So clients that
    always have something waiting get equal tokens, whatever the number and size of their requests, and what
    fills a batch is charged as what seeds one. Entries of one client and one cost leave in order of arrival.

    No seed has a tag below the virtual time, and the seeds of one client lie at least their cost apart. So an entry
    d past the virtual time at its arrival is taken within C (1 + d / m) batches, where C clients wait with entries
    that cost m or more; d is its own cost where its client had nothing waiting.

    A client is forgotten when nothing of it waits. To add, remove or take an entry is O(log n), sweeps shared out.
    """

    def __init__(self) -> None:
        self.cost = 0  # of all that waits
        self._items = 0
        self._time = 0
        self._clients: dict[str, _Client] = {}
        self._turns: list[tuple[int, int, Entry]] = []  # heap of tag, order, entry; all that waits and some that left
        self._shelves: dict[int, list[tuple[int, int, Entry]]] = {}  # the same by cost
        self._costs: list[int] = []  # the shelves' costs, sorted
        self._orders = 0
        self._left = 0  # entries that left since the last sweep

    def __len__(self) -> int:
        return self._items

    def add(self, entry: Entry) -> None:
        client = self._clients.setdefault(entry.client, _Client(self._time))
        client.tag += entry.cost
        entry.tag = client.tag
        entry.waits = True
        client.items += 1
        self._items += 1
        self.cost += entry.cost
        place = (entry.tag, self._orders, entry)
        self._orders += 1
        heapq.heappush(self._turns, place)
        if entry.cost not in self._shelves:
            self._shelves[entry.cost] = []
            insort(self._costs, entry.cost)
        heapq.heappush(self._shelves[entry.cost], place)

    def remove(self, entry: Entry) -> None:
        """Let an entry go, if it still waits."""
        if not entry.waits:
            return
        entry.waits = False
        self._left += 1
        self._items -= 1
        self.cost -= entry.cost
        client = self._clients[entry.client]
        client.items -= 1
        if not client.items:
            del self._clients[entry.client]

    def take(self, max_cost: int, max_padding: int) -> list[Entry]:
        """The next batch: longest × count within `max_cost`, and of that no more padding than `max_padding`.

        A seed dearer than that is alone. Empty where nothing waits.
        """
        self._sweep()
        while self._turns and not self._turns[0][-1].waits:
            heapq.heappop(self._turns)
        if not self._turns:
            return []
        seed = heapq.heappop(self._turns)[-1]
        self._time = seed.tag
        self.remove(seed)
        batch = _Batch[Entry](max_cost, max_padding)
        batch.add([seed])
        self._fill(batch)
        return batch.entries

    def _fill(self, batch: _Batch[Entry]) -> None:
        """Add the seed's neighbours, shelf by shelf outwards; of two as near the longer first."""
        costs, seed = self._costs, batch.longest
        above = bisect_left(costs, seed)
        below = above - 1
        while True:
            longer = costs[above] if above < len(costs) and batch.room(costs[above]) else None
            shorter = costs[below] if below >= 0 and batch.room(costs[below]) else None
            if longer is not None and (shorter is None or longer - seed <= seed - shorter):
                cost, above = longer, above + 1
            elif shorter is not None:
                cost, below = shorter, below - 1
            else:
                break
            if found := self._unshelve(cost, batch.room(cost)):
                batch.add(found)
        self._discard(below + 1, above)

    def _unshelve(self, cost: int, count: int) -> list[Entry]:
        """Take up to so many of this cost, in order of their tags."""
        shelf, taken = self._shelves[cost], list[Entry]()
        while shelf and len(taken) < count:
            entry = heapq.heappop(shelf)[-1]
            if entry.waits:
                self.remove(entry)
                taken.append(entry)
        return taken

    def _discard(self, start: int, stop: int) -> None:
        """Discard the empty ones of these shelves."""
        seen = self._costs[start:stop]
        for cost in seen:
            if not self._shelves[cost]:
                del self._shelves[cost]
        self._costs[start:stop] = [cost for cost in seen if cost in self._shelves]

    def _sweep(self) -> None:
        """Clear out what left, once it is more than what waits; a sorted list is a heap."""
        if self._left <= self._items:
            return
        self._left = 0
        self._turns = sorted(place for place in self._turns if place[-1].waits)
        self._shelves = {}
        for place in self._turns:
            self._shelves.setdefault(place[-1].cost, []).append(place)
        self._costs = sorted(self._shelves)
