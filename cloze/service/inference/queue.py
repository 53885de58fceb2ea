"""The queue of texts that wait for a batch, in fair order between clients. Independent of asyncio and text."""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from sortedcontainers import SortedKeyList  # type: ignore[import-untyped]

from cloze.service.client import STRIDES, Client, Priority


@dataclass(eq=False, slots=True)
class Waiting:
    """An entry of the queue: `count` items of the same cost, which leave it from the front.

    The queue lowers `count`. While items wait, it sets `tag`, the tag of the next item, and `order`.
    """

    cost: int  # of one item
    client: Client
    count: int
    tag: int = field(default=0, init=False)
    order: int | None = field(default=None, init=False)


Entry = TypeVar("Entry", bound=Waiting)
Taken = list[tuple[Entry, int]]  # entries, and how many items of each


@dataclass(slots=True)
class _OpenBatch:
    """A batch that is being filled: longest × count within `max_cost`, with at most `max_padding` of padding."""

    max_cost: int
    max_padding: int
    count: int = 0
    longest: int = 0
    cost: int = 0  # without padding

    def room(self, cost: int) -> int:
        """Return how many more items of this cost fit. The first item always fits.

        If no item of a cost fits, no item further from the seed does.
        """
        longest = max(self.longest, cost)
        spare = self.max_padding - (longest * self.count - self.cost)
        if spare < 0:
            return 0
        count = max(0 if self.count else 1, self.max_cost // longest - self.count)
        return min(count, spare // (longest - cost)) if longest > cost else count

    def add(self, cost: int, count: int) -> None:
        self.longest = max(self.longest, cost)
        self.cost += cost * count
        self.count += count


@dataclass(slots=True)
class _Client(Generic[Entry]):
    """A client with queued entries, in order of arrival. `tag` is the tag of its last item."""

    tag: int
    entries: dict[Entry, None] = field(default_factory=dict)
    cancelled: list[tuple[int, int]] = field(default_factory=list)
    """For each entry that was removed before it was taken: its order, and the cost of its remaining items."""


class FairQueue(Generic[Entry]):
    """Self-clocked fair queueing (Golestani 1994), for batches.

    The tag of an item is max(virtual time, last tag of its client) + cost. The item with the least tag is the seed of
    the next batch, and the virtual time becomes its tag. The items nearest to the seed in cost fill the batch; among
    items of equal cost, those with the least tags go first. Clients that always have items waiting therefore get equal
    numbers of tokens, whatever the number and size of their requests, and an item that fills a batch is charged like
    one that seeds it. Items of one client and one cost leave in order of arrival.

    An item whose tag is d past the virtual time at its arrival is taken within C (1 + d / m) batches if C clients wait
    with items of cost m or more; d is the item's own cost if its client had nothing waiting.

    A client is charged for the items that are taken, not for those that it cancels. It is removed when none of its
    items wait. Adding and removing an entry are O(log n) in the number of entries, whatever their counts; a batch after
    a cancellation costs that for each entry of the client.
    """

    def __init__(self) -> None:
        self.cost = 0  # of all items
        self._count = 0  # of all items
        self._time = 0
        self._orders = 0
        self._clients: dict[Client, _Client[Entry]] = {}
        self._changed: set[Client] = set()  # those with cancelled entries
        self._by_tag: SortedKeyList[Entry] = SortedKeyList(key=lambda entry: (entry.tag, entry.order))
        self._by_cost: SortedKeyList[Entry] = SortedKeyList(key=lambda entry: (entry.cost, entry.tag, entry.order))

    def __len__(self) -> int:
        """Return the number of items."""
        return self._count

    def add(self, entry: Entry) -> None:
        client = self._clients.setdefault(entry.client, _Client(self._time))
        entry.tag, entry.order = client.tag + entry.cost, self._orders
        client.tag += entry.cost * entry.count
        client.entries[entry] = None
        self._orders += 1
        self._insert(entry)

    def remove(self, entry: Entry) -> None:
        """Remove an entry's waiting items. Before the next batch, its client's later items move up by their cost."""
        if entry.order is None:
            return
        self._clients[entry.client].cancelled.append((entry.order, entry.cost * entry.count))
        self._changed.add(entry.client)
        self._leave(entry)

    def take(self, max_cost: int, max_padding: int) -> Taken[Entry]:
        """Remove the next batch, the seed's entry first; empty if nothing waits.

        Longest × count is within `max_cost`, and at most `max_padding` of it is padding. An item that costs more than
        `max_cost` is alone in its batch.
        """
        if not self._by_tag:
            return []
        for client in self._changed:
            self._move_up(self._clients[client])
        self._changed.clear()
        self._time = self._by_tag[0].tag
        batch = self._fill(_OpenBatch(max_cost, max_padding), self._by_tag[0].cost)
        for entry, count in batch:
            if count == entry.count:
                self._leave(entry)
                continue
            self._withdraw(entry)
            entry.count -= count
            entry.tag += entry.cost * count
            self._insert(entry)
        return batch

    def _leave(self, entry: Entry) -> None:
        self._withdraw(entry)
        entry.order = None
        client = self._clients[entry.client]
        del client.entries[entry]
        if not client.entries:
            del self._clients[entry.client]
            self._changed.discard(entry.client)

    def _move_up(self, client: _Client[Entry]) -> None:
        """Lower the tags of a client's items by the cost of the cancelled items before them.

        No item gets a lower tag than it would get if it arrived now.
        """
        cancelled, refund, last = deque(sorted(client.cancelled)), 0, self._time
        for entry in client.entries:
            while cancelled and cancelled[0][0] < (entry.order or 0):
                refund += cancelled.popleft()[1]
            tag = min(entry.tag, max(entry.tag - refund, last + entry.cost))
            if tag < entry.tag:
                self._withdraw(entry)
                entry.tag = tag
                self._insert(entry)
            last = tag + entry.cost * (entry.count - 1)
        client.tag = max(last, client.tag - sum(cost for _, cost in client.cancelled))
        client.cancelled.clear()

    def _insert(self, entry: Entry) -> None:
        self._by_tag.add(entry)
        self._by_cost.add(entry)
        self.cost += entry.cost * entry.count
        self._count += entry.count

    def _withdraw(self, entry: Entry) -> None:
        self._by_tag.remove(entry)
        self._by_cost.remove(entry)
        self.cost -= entry.cost * entry.count
        self._count -= entry.count

    def _fill(self, batch: _OpenBatch, seed: int) -> Taken[Entry]:
        """Choose the items nearest to the cost `seed`, outwards; of two equally near costs, the larger first."""
        queue, chosen = self._by_cost, list[tuple[Entry, int]]()
        above = queue.bisect_key_left((seed,))  # index of the next larger cost; at first, of the seed's own
        below = above - 1  # index of the last entry of the next smaller cost
        while True:
            indices = [index for index in (above, below) if 0 <= index < len(queue) and batch.room(queue[index].cost)]
            if not indices:
                return chosen
            nearest = min(indices, key=lambda index: abs(queue[index].cost - seed))
            cost = queue[nearest].cost
            start, stop, room = queue.bisect_key_left((cost,)), queue.bisect_key_left((cost + 1,)), batch.room(cost)
            above, below = (stop, below) if nearest == above else (above, start - 1)
            entries = queue[start : min(stop, start + room)]
            part = [pair for pair in zip(entries, _least_tags(entries, room), strict=True) if pair[1]]
            batch.add(cost, sum(count for _, count in part))
            chosen += part


def _least_tags(entries: Sequence[Waiting], room: int) -> list[int]:
    """How many items of each entry are among the `room` with the least tags; the entries have one cost, sorted by tag.

    An entry's first item has the entry's tag, and each further item has a tag higher by one cost.
    """
    if sum(entry.count for entry in entries) <= room:
        return [entry.count for entry in entries]

    def up_to(tag: int) -> list[int]:
        return [min(entry.count, max(0, (tag - entry.tag) // entry.cost + 1)) for entry in entries]

    tags = range(entries[0].tag, max(entry.tag + entry.cost * entry.count for entry in entries))
    first = tags[bisect_right(tags, room, key=lambda tag: sum(up_to(tag)))]  # the first tag with more items than room
    counts, more = up_to(first - 1), up_to(first)
    equal = [index for index, (before, after) in enumerate(zip(counts, more, strict=True)) if after > before]
    equal.sort(key=lambda index: entries[index].order or 0)  # among equal tags, the first to arrive
    for index in equal[: room - sum(counts)]:
        counts[index] += 1
    return counts


class PriorityQueue(Generic[Entry]):
    """A fair queue for each class. While both classes wait, one bulk token is taken for every 64 interactive ones.

    Start-time fair queueing (Goyal, Vin and Cheng 1996) between the classes: the class with the least start tag gives
    the next batch, which then adds its cost × STRIDES to that tag; virtual time is the tag of the last batch, and a
    class in which nothing waited begins at it. Therefore an interactive entry waits for at most one batch of bulk while
    interactive clients ask for less than their share, and bulk never starves. No batch has entries of both classes, so
    a batch with an interactive entry is as short as it can be.
    """

    def __init__(self) -> None:
        self._queues: dict[Priority, FairQueue[Entry]] = {priority: FairQueue() for priority in STRIDES}
        self._starts: dict[Priority, int] = dict.fromkeys(STRIDES, 0)
        self._time = 0

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    @property
    def cost(self) -> int:
        """Return the cost of all items."""
        return sum(queue.cost for queue in self._queues.values())

    def add(self, entry: Entry) -> None:
        priority = entry.client.priority
        if not self._queues[priority]:
            self._starts[priority] = max(self._starts[priority], self._time)
        self._queues[priority].add(entry)

    def remove(self, entry: Entry) -> None:
        """Remove an entry's waiting items."""
        self._queues[entry.client.priority].remove(entry)

    def take(self, max_cost: int, max_padding: int) -> Taken[Entry]:
        """Remove the next batch, as FairQueue does; empty if nothing waits."""
        waiting = [priority for priority, queue in self._queues.items() if queue]
        if not waiting:
            return []
        priority = min(waiting, key=self._starts.__getitem__)  # of equal tags, the first: interactive
        batch = self._queues[priority].take(max_cost, max_padding)
        self._time = self._starts[priority]
        self._starts[priority] += STRIDES[priority] * sum(entry.cost * count for entry, count in batch)
        return batch
