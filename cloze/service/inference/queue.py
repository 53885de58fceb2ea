"""The queue of texts that wait for a batch, in fair order between clients. Knows neither asyncio nor text."""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from sortedcontainers import SortedKeyList  # type: ignore[import-untyped]

from cloze.service.client import STRIDES, Client, Priority


@dataclass(eq=False, slots=True)
class Waiting:
    """An entry of the queue; the queue sets `tag`, and `order` while the entry waits."""

    cost: int
    client: Client
    tag: int = field(default=0, init=False)
    order: int | None = field(default=None, init=False)


Entry = TypeVar("Entry", bound=Waiting)


@dataclass(slots=True)
class _OpenBatch(Generic[Entry]):
    """A batch that is being filled: longest × count within `max_cost`, of which at most `max_padding` is padding."""

    max_cost: int
    max_padding: int
    entries: list[Entry] = field(default_factory=list)
    longest: int = 0
    cost: int = 0  # without padding

    def room(self, cost: int) -> int:
        """Return how many more entries of this cost fit. Where none of a cost fits, none further from the seed does."""
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
    """A client with queued entries. `tag` is the tag of its last entry."""

    tag: int
    entries: int = 0


class FairQueue(Generic[Entry]):
    """Self-clocked fair queueing (Golestani 1994), for batches.

    The tag of an entry is max(virtual time, last tag of its client) + cost. The entry with the least tag is the seed of
    the next batch, and the virtual time becomes its tag. The entries nearest to the seed in cost fill the batch; among
    entries of equal cost, those with the least tags go first. Clients that always have entries waiting therefore get
    equal numbers of tokens, whatever the number and size of their requests, and an entry that fills a batch is charged
    like one that seeds it. Entries of one client and one cost leave in order of arrival.

    An entry d past the virtual time at its arrival is taken within C (1 + d / m) batches, where C clients wait with
    entries of cost m or more; d is the entry's own cost where its client had nothing waiting.

    A client is forgotten when nothing of it waits. Adding, removing and taking an entry are O(log n).
    """

    def __init__(self) -> None:
        self.cost = 0  # of all entries
        self._time = 0
        self._orders = 0
        self._clients: dict[Client, _Client] = {}
        self._by_tag: SortedKeyList[Entry] = SortedKeyList(key=lambda entry: (entry.tag, entry.order))
        self._by_cost: SortedKeyList[Entry] = SortedKeyList(key=lambda entry: (entry.cost, entry.tag, entry.order))

    def __len__(self) -> int:
        return len(self._by_tag)

    def add(self, entry: Entry) -> None:
        client = self._clients.setdefault(entry.client, _Client(self._time))
        client.tag += entry.cost
        client.entries += 1
        entry.tag, entry.order = client.tag, self._orders
        self._orders += 1
        self.cost += entry.cost
        self._by_tag.add(entry)
        self._by_cost.add(entry)

    def remove(self, entry: Entry) -> None:
        """Remove an entry, if it still waits."""
        if entry.order is None:
            return
        self._by_tag.remove(entry)
        self._by_cost.remove(entry)
        entry.order = None
        self.cost -= entry.cost
        client = self._clients[entry.client]
        client.entries -= 1
        if not client.entries:
            del self._clients[entry.client]

    def take(self, max_cost: int, max_padding: int) -> list[Entry]:
        """Remove and return the next batch; empty where nothing waits.

        Longest × count is within `max_cost`, and at most `max_padding` of it is padding. An entry that costs more than
        `max_cost` is alone in its batch.
        """
        if not self._by_tag:
            return []
        batch = _OpenBatch[Entry](max_cost, max_padding)
        batch.add([self._by_tag[0]])
        self._time = batch.entries[0].tag
        self.remove(batch.entries[0])
        self._fill(batch)
        for entry in batch.entries[1:]:
            self.remove(entry)
        return batch.entries

    def _fill(self, batch: _OpenBatch[Entry]) -> None:
        """Add the entries nearest to the seed in cost, outwards; of two costs as near, the larger first."""
        queue, seed = self._by_cost, batch.longest
        above = queue.bisect_key_left((seed,))  # index of the next larger cost
        below = above - 1  # index of the last entry of the next smaller cost
        while True:
            indices = [index for index in (above, below) if 0 <= index < len(queue) and batch.room(queue[index].cost)]
            if not indices:
                return
            nearest = min(indices, key=lambda index: abs(queue[index].cost - seed))
            cost = queue[nearest].cost
            start, stop = queue.bisect_key_left((cost,)), queue.bisect_key_left((cost + 1,))
            above, below = (stop, below) if nearest == above else (above, start - 1)
            batch.add(list(queue[start : min(stop, start + batch.room(cost))]))


class PriorityQueue(Generic[Entry]):
    """A fair queue for each class. While both classes wait, one token of bulk is taken for 64 interactive ones.

    Start-time fair queueing (Goyal, Vin and Cheng 1996) between the classes: the class with the least start tag gives
    the next batch, which then adds its cost × STRIDES to that tag; virtual time is the tag of the last batch, and a
    class in which nothing waited begins at it. Therefore an interactive entry waits for at most one batch of bulk while
    interactive clients ask for less than their share, and bulk never starves. No batch has entries of both classes: one
    with an interactive entry is as short as it can be.
    """

    def __init__(self) -> None:
        self._queues: dict[Priority, FairQueue[Entry]] = {priority: FairQueue() for priority in STRIDES}
        self._starts: dict[Priority, int] = dict.fromkeys(STRIDES, 0)
        self._time = 0

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    @property
    def cost(self) -> int:
        """Return the cost of all entries."""
        return sum(queue.cost for queue in self._queues.values())

    def add(self, entry: Entry) -> None:
        priority = entry.client.priority
        if not self._queues[priority]:
            self._starts[priority] = max(self._starts[priority], self._time)
        self._queues[priority].add(entry)

    def remove(self, entry: Entry) -> None:
        """Remove an entry, if it still waits."""
        self._queues[entry.client.priority].remove(entry)

    def take(self, max_cost: int, max_padding: int) -> list[Entry]:
        """Remove and return the next batch, as FairQueue does; empty where nothing waits."""
        waiting = [priority for priority, queue in self._queues.items() if queue]
        if not waiting:
            return []
        priority = min(waiting, key=self._starts.__getitem__)  # of equal tags the first: interactive
        batch = self._queues[priority].take(max_cost, max_padding)
        self._time = self._starts[priority]
        self._starts[priority] += STRIDES[priority] * sum(entry.cost for entry in batch)
        return batch
