"""The batcher, driven with integers whose cost is themselves, and a `run` that waits for `release`."""

import asyncio
import random
from collections.abc import Callable, Sequence

import pytest
from harness import PATIENCE
from hypothesis import given
from hypothesis import strategies as some

from cloze.service.client import Client, Priority
from cloze.service.errors import DeadlineExceeded, Unavailable
from cloze.service.inference.batcher import Batcher, Failed

pytestmark = pytest.mark.anyio

Fault = Callable[[list[int]], bool]

A = Client("a")


class Worker:
    """A `run` that doubles; each call shows its batch and waits for `release`, unless it runs freely."""

    def __init__(self, *, free: bool = True, fails: Fault = lambda batch: False) -> None:
        self.batches: list[list[int]] = []
        self.free = free
        self.fails = fails
        self.entered = asyncio.Event()
        self.gate = asyncio.Event()

    async def __call__(self, batch: list[int]) -> list[int]:
        self.batches.append(batch)
        self.entered.set()
        if not self.free:
            await self.gate.wait()
            self.gate.clear()
        if self.fails(batch):
            raise ValueError(f"cannot run {batch}")
        return [2 * item for item in batch]

    async def release(self) -> None:
        """Let the present batch end, and wait for the next."""
        self.entered.clear()
        self.gate.set()
        await self.entered.wait()

    def let_go(self) -> None:
        self.free = True
        self.gate.set()


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Numbers(Batcher[int, list[int]]):
    """A batcher of integers that puts the shares of a request in order."""

    async def results(self, items: Sequence[int], client: Client) -> list[int]:
        found = dict[int, int]()
        for places, batch, rows in await self.submit(items, client):
            assert found.keys().isdisjoint(places)
            found.update(zip(places, batch[rows], strict=True))
        return [found[place] for place in range(len(items))]


def start(
    worker: Worker, max_cost: int = 100, max_age: float = 30, clock: Clock | None = None, *, parallel: int = 1
) -> Numbers:
    batcher = Numbers(worker, lambda item: item, max_cost, max_cost, max_age, parallel=parallel, clock=clock or Clock())
    batcher.start()
    return batcher


async def submit(
    batcher: Numbers, *items: int, client: str = "", priority: Priority = "interactive"
) -> "asyncio.Task[list[int]]":
    """Submit and come back as soon as the items wait."""
    task = asyncio.create_task(batcher.results(items, Client(client, priority)))
    await asyncio.sleep(0)
    return task


async def test_results_keep_the_order_of_the_items() -> None:
    worker = Worker()
    batcher = start(worker, max_cost=8)
    assert await batcher.results([3, 1, 4, 1, 5, 9, 2, 6], A) == [6, 2, 8, 2, 10, 18, 4, 12]
    assert len(worker.batches) > 2
    await batcher.stop()


async def test_no_items_give_no_results_and_no_batch() -> None:
    worker = Worker()
    batcher = start(worker)
    assert await batcher.results([], A) == []
    assert worker.batches == []
    await batcher.stop()


async def test_a_lone_item_does_not_wait_for_company() -> None:
    worker = Worker()
    batcher = start(worker)
    assert await batcher.results([7], A) == [14]
    assert worker.batches == [[7]]
    await batcher.stop()


class Held:
    """A `run` whose every batch waits until `free`, by its number, lets it end."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.events: list[asyncio.Event] = []

    async def __call__(self, batch: list[int]) -> list[int]:
        self.batches.append(batch)
        self.events.append(asyncio.Event())
        await self.events[-1].wait()
        return [2 * item for item in batch]

    def free(self, *numbers: int) -> None:
        for number in numbers:
            self.events[number].set()


async def turns() -> None:
    """Let everything that can run, run."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_batches_that_may_start_together_share_what_waits() -> None:
    held = Held()
    batcher = Numbers(held, lambda item: item, 100, 4, 30, parallel=2)
    batcher.start()
    whole = await submit(batcher, *[5] * 8)
    await turns()
    assert [len(batch) for batch in held.batches] == [4, 4]
    held.free(0, 1)
    assert await whole == [10] * 8
    await batcher.stop()


async def test_no_more_batches_run_at_once_than_allowed() -> None:
    held = Held()
    batcher = Numbers(held, lambda item: item, 100, 0, 30, parallel=2)
    batcher.start()
    tasks = [await submit(batcher, item) for item in (1, 2, 3)]
    await turns()
    assert held.batches == [[1], [2]]
    held.free(1)  # the younger ends first, and its place is taken
    await turns()
    assert held.batches == [[1], [2], [3]]
    assert (tasks[0].done(), tasks[1].done()) == (False, True)
    held.free(0, 2)
    assert [await task for task in tasks] == [[2], [4], [6]]
    await batcher.stop()


async def test_a_failure_in_one_batch_leaves_the_other_alone() -> None:
    worker = Worker(fails=lambda batch: 13 in batch)
    batcher = start(worker, max_cost=13, parallel=2)
    results = await asyncio.gather(*(batcher.results([item], A) for item in (13, 4, 5, 6)), return_exceptions=True)
    assert isinstance(results[0], Failed)
    assert results[1:] == [[8], [10], [12]]
    await batcher.stop()


async def test_what_arrives_while_a_batch_runs_is_the_next_batch() -> None:
    worker = Worker(free=False)
    batcher = start(worker)
    tasks = [await submit(batcher, 1)]
    await worker.entered.wait()
    tasks += [await submit(batcher, item) for item in (2, 3, 4)]
    await worker.release()
    assert [sorted(batch) for batch in worker.batches] == [[1], [2, 3, 4]]
    worker.let_go()
    assert await asyncio.gather(*tasks) == [[2], [4], [6], [8]]
    await batcher.stop()


@pytest.mark.parametrize("max_cost", [10, 17, 64])
async def test_padded_cost_stays_within_the_limit(max_cost: int) -> None:
    worker = Worker()
    batcher = start(worker, max_cost)
    await batcher.results([item % 10 + 1 for item in range(200)], A)
    assert all(max(batch) * len(batch) <= max_cost for batch in worker.batches)
    assert sum(map(len, worker.batches)) == 200
    await batcher.stop()


async def test_an_item_dearer_than_the_limit_runs_alone() -> None:
    worker = Worker()
    batcher = start(worker, max_cost=10)
    assert await batcher.results([1, 50, 1], A) == [2, 100, 2]
    assert sorted(worker.batches, key=len) == [[50], [1, 1]]
    await batcher.stop()


async def test_neighbours_in_cost_share_a_batch() -> None:
    worker = Worker(free=False)
    batcher = start(worker, max_cost=30)
    tasks = [await submit(batcher, 1)]
    await worker.entered.wait()
    tasks.append(await submit(batcher, 10, 2, 9, 2, 10, 2))
    await worker.release()
    assert sorted(worker.batches[1]) == [9, 10, 10]
    worker.let_go()
    await asyncio.gather(*tasks)
    assert worker.batches[2] == [2, 2, 2]
    await batcher.stop()


@pytest.mark.parametrize("first", [0, 1])
async def test_one_item_is_in_the_next_batch_whatever_another_client_has_waiting(first: int) -> None:
    worker = Worker(free=False)
    batcher = start(worker, max_cost=8)
    many = await submit(batcher, *[1] * 10_000, client="many")
    await worker.entered.wait()
    for _ in range(first):
        await worker.release()
    one = await submit(batcher, 1, client="one")
    await worker.release()
    assert not one.done()
    await worker.release()
    assert await one == [2]
    assert len(worker.batches) == first + 3  # the one that ran, its own, and the one that runs now
    worker.let_go()
    assert await many == [2] * 10_000
    await batcher.stop()


@pytest.mark.parametrize("batches", [0, 1, 10])
async def test_an_interactive_item_is_alone_in_the_next_batch_whatever_bulk_waits(batches: int) -> None:
    worker = Worker(free=False)
    batcher = start(worker, max_cost=8)
    bulk = [await submit(batcher, *[1] * 100, client=str(number), priority="bulk") for number in range(64)]
    bulk.append(await submit(batcher, *[1] * 100, client="own", priority="bulk"))
    await worker.entered.wait()
    for _ in range(batches):
        await worker.release()
    own = await submit(batcher, 1, client="own")
    await worker.release()  # the batch that runs
    await worker.release()
    assert await own == [2]
    assert worker.batches[batches + 1] == [1]
    worker.let_go()
    assert await asyncio.gather(*bulk) == [[2] * 100] * 65
    await batcher.stop()


async def test_an_odd_item_is_not_put_off_by_neighbours_that_keep_coming() -> None:
    worker = Worker(free=False)
    batcher = start(worker, max_cost=12)
    tasks = [await submit(batcher, 1)]
    await worker.entered.wait()
    tasks.append(await submit(batcher, 12, client="odd"))
    while [12] not in worker.batches:
        tasks.append(await submit(batcher, *[3] * 8, client="even"))
        await worker.release()
    assert worker.batches[1:] == [[3] * 4, [12]]  # 12 tokens each; the second batch of 3s would be 24
    worker.let_go()
    await asyncio.gather(*tasks)
    await batcher.stop()


async def test_a_request_that_no_batch_has_touched_for_too_long_is_late() -> None:
    worker, clock = Worker(free=False), Clock()
    batcher = start(worker, max_cost=8, max_age=30, clock=clock)
    running = await submit(batcher, 8)
    await worker.entered.wait()
    late = await submit(batcher, 8, 8, client="late")
    clock.now += 1.5
    in_time = await submit(batcher, 8, client="in time")
    clock.now += 30
    worker.let_go()
    with pytest.raises(DeadlineExceeded, match=r"waited 31\.5 s for a batch; the limit is 30 s: send it again later"):
        await late
    assert await asyncio.gather(running, in_time) == [[16], [16]]
    assert worker.batches == [[8], [8]]
    assert (batcher.waiting, batcher.waiting_items, batcher.age) == (0, 0, 0.0)
    await batcher.stop()


async def test_a_request_is_late_while_a_batch_hangs() -> None:
    worker, clock = Worker(free=False), Clock()
    batcher = start(worker, max_cost=8, max_age=0.01, clock=clock)
    hanging = await submit(batcher, 8)
    await worker.entered.wait()
    for _ in range(2):
        late = await submit(batcher, 8, 8)
        clock.now += 1
        with pytest.raises(DeadlineExceeded, match=r"waited 1\.0 s for a batch; the limit is 0\.01 s"):
            await asyncio.wait_for(late, PATIENCE)
        assert batcher.waiting_items == 0
    worker.let_go()
    assert await hanging == [16]
    assert worker.batches == [[8]]
    await batcher.stop()


async def test_a_request_that_has_begun_is_not_late() -> None:
    worker, clock = Worker(free=False), Clock()
    batcher = start(worker, max_cost=8, max_age=30, clock=clock)
    begun = await submit(batcher, 8, 8, 8)
    await worker.entered.wait()
    clock.now += 1000
    worker.let_go()
    assert await begun == [16, 16, 16]
    await batcher.stop()


async def test_age_is_that_of_the_oldest_item_that_waits() -> None:
    worker, clock = Worker(free=False), Clock()
    batcher = start(worker, max_cost=8, clock=clock)
    assert batcher.age == 0.0
    tasks = [await submit(batcher, 8, 8)]
    await worker.entered.wait()
    clock.now += 2
    tasks.append(await submit(batcher, 8))
    clock.now += 3
    assert batcher.age == 5.0
    await worker.release()
    assert batcher.age == 3.0
    tasks[1].cancel()
    await asyncio.wait(tasks[1:])
    assert batcher.age == 0.0
    worker.let_go()
    await tasks[0]
    await batcher.stop()


async def test_a_cancelled_caller_takes_its_items_with_it() -> None:
    worker = Worker(free=False)
    batcher = start(worker)
    first = await submit(batcher, 1)
    await worker.entered.wait()
    gone, stays = await submit(batcher, 20, 30), await submit(batcher, 4)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    assert (batcher.waiting, batcher.waiting_items) == (4, 1)
    worker.let_go()
    assert await asyncio.gather(first, stays) == [[2], [8]]
    assert worker.batches == [[1], [4]]
    await batcher.stop()


async def test_a_caller_cancelled_while_its_batch_runs_hurts_nobody() -> None:
    worker = Worker(free=False)
    batcher = start(worker)
    first = await submit(batcher, 1)
    await worker.entered.wait()
    gone, stays = await submit(batcher, 5), await submit(batcher, 6)
    await worker.release()
    gone.cancel()
    worker.let_go()
    assert await asyncio.gather(first, stays) == [[2], [12]]
    await batcher.stop()


async def test_many_cancelled_requests_leave_nothing_behind() -> None:
    worker = Worker(free=False)
    batcher = start(worker)
    first = await submit(batcher, 1)
    await worker.entered.wait()
    gone = [await submit(batcher, 1 + item % 50, 3) for item in range(300)]
    last = await submit(batcher, 2)
    for task in gone:
        task.cancel()
    await asyncio.gather(*gone, return_exceptions=True)
    worker.let_go()
    await asyncio.gather(first, last)
    assert worker.batches == [[1], [2]]
    assert (batcher.waiting, batcher.waiting_items) == (0, 0)
    await batcher.stop()
    assert not batcher._requests


async def test_one_bad_item_fails_alone() -> None:
    worker = Worker(free=False, fails=lambda batch: 13 in batch)
    batcher = start(worker, max_cost=1000)
    tasks = [await submit(batcher, 1)]
    await worker.entered.wait()
    tasks += [await submit(batcher, item) for item in (11, 12, 13, 14, 15)]
    worker.let_go()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [result for result in results if isinstance(result, list)] == [[2], [22], [24], [28], [30]]
    assert isinstance(results[3], Failed)
    assert str(results[3].__cause__) == "cannot run [13]"
    await batcher.stop()


async def test_a_failed_request_takes_the_rest_of_its_items_with_it() -> None:
    worker = Worker(fails=lambda batch: 13 in batch)
    batcher = start(worker, max_cost=13)
    with pytest.raises(Failed, match="item 0 failed"):
        await batcher.results([13, 13, 13, 13], A)
    assert worker.batches == [[13]]
    assert (batcher.waiting, batcher.waiting_items) == (0, 0)
    await batcher.stop()


async def test_a_failed_batch_is_not_run_further_for_a_request_that_has_failed() -> None:
    worker = Worker(fails=lambda batch: True)
    batcher = start(worker)
    with pytest.raises(Failed, match="item 0 failed"):
        await batcher.results([5, 5, 5, 5], A)
    await batcher.stop()
    assert [len(batch) for batch in worker.batches] == [4, 2, 1]


async def test_an_item_may_fail_after_its_caller_has_gone() -> None:
    worker = Worker(free=False, fails=lambda batch: batch == [5])
    batcher = start(worker)
    gone = await submit(batcher, 5)
    await worker.entered.wait()
    gone.cancel()
    worker.let_go()
    assert await batcher.results([6], A) == [12]
    await batcher.stop()


async def test_everything_may_fail_and_the_next_request_is_served() -> None:
    worker = Worker(fails=lambda batch: True)
    batcher = start(worker)
    tasks = [await submit(batcher, item) for item in range(1, 20)]
    assert all(isinstance(result, Failed) for result in await asyncio.gather(*tasks, return_exceptions=True))
    worker.fails = lambda batch: False
    assert await batcher.results([5], A) == [10]
    await batcher.stop()


async def test_a_bug_in_the_batcher_leaves_no_caller_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    batcher = start(Worker())

    def broken() -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(batcher, "_take", broken)
        with pytest.raises(ZeroDivisionError):
            await batcher.results([1, 2], A)
    assert await batcher.results([3], A) == [6]
    assert (batcher.waiting, batcher.waiting_items) == (0, 0)
    await batcher.stop()


async def test_a_run_that_is_cancelled_is_an_error_and_the_next_is_served() -> None:
    async def run(batch: list[int]) -> list[int]:
        if 13 in batch:
            raise asyncio.CancelledError
        return batch

    batcher = Numbers(run, lambda item: item, 100, 100, 30)
    batcher.start()
    with pytest.raises(Failed) as failed:
        await batcher.results([12, 13], A)
    assert failed.value.place == 1
    assert str(failed.value.__cause__) == "a batch was cancelled while it ran. This is a bug."
    assert await batcher.results([3], A) == [3]
    await batcher.stop()


async def test_stop_fails_what_is_not_finished() -> None:
    worker = Worker(free=False)
    batcher = start(worker)
    runs = await submit(batcher, 1)
    await worker.entered.wait()
    waits = await submit(batcher, 2, 3)
    await batcher.stop()
    for task in (runs, waits):
        with pytest.raises(Unavailable, match="has stopped; send the request again"):
            await task
    assert batcher.waiting_items == 0
    with pytest.raises(Unavailable, match="has stopped; send the request again"):
        await batcher.results([5], A)


async def test_a_large_request_joined_by_small_ones_is_served_in_full() -> None:
    worker = Worker(free=False)
    batcher = start(worker, max_cost=64)
    first = await submit(batcher, 1)
    await worker.entered.wait()
    items = [1 + item * 7 % 31 for item in range(5000)]
    tasks = [await submit(batcher, *items), *[await submit(batcher, item) for item in range(1, 40)]]
    worker.let_go()
    large, *small = await asyncio.gather(*tasks)
    assert large == [2 * item for item in items]
    assert small == [[2 * item] for item in range(1, 40)]
    await asyncio.gather(first)
    await batcher.stop()


@given(seed=some.integers(0, 2**32))
async def test_whatever_happens_each_caller_gets_its_own(seed: int) -> None:
    """Random clients, requests, faults, waits and departures; then nothing is left."""
    dice, clock = random.Random(seed), Clock()
    max_cost = dice.choice([5, 20, 64])
    padded: list[int] = []
    failed_items: list[int] = []
    answers = 0

    async def run(batch: list[int]) -> list[int]:
        padded.append(max(map(cost, batch)) * len(batch) if len(batch) > 1 else 0)
        clock.now += 1
        await asyncio.sleep(0)
        if any(item % 97 == 13 for item in batch):
            raise ValueError(batch)
        return [2 * item for item in batch]

    def cost(item: int) -> int:
        return item % 12 + 1

    async def call(items: list[int], leaves: bool) -> None:
        nonlocal answers
        task = asyncio.create_task(batcher.results(items, Client(dice.choice("abc"))))
        if leaves:
            for _ in range(dice.randrange(20)):
                await asyncio.sleep(0)
            task.cancel()
        try:
            assert await task == [2 * item for item in items]
        except Failed as failed:
            failed_items.append(items[failed.place])
        except DeadlineExceeded:
            assert max_age < 100
        except asyncio.CancelledError:
            assert leaves
        answers += 1

    max_age = dice.choice([5, 30, 10**6])
    padding = dice.choice([0, 3, max_cost])
    parallel, ahead = dice.choice([(1, 0), (2, 0), (1, 1)])
    batcher = Numbers(run, cost, max_cost, padding, max_age, parallel=parallel, ahead=ahead, clock=clock)
    batcher.start()
    calls = []
    for _ in range(dice.randint(50, 300)):
        items = [dice.randrange(5000) for _ in range(dice.choice([1, 1, 1, 2, 5, 40]))]
        calls.append(asyncio.create_task(call(items, dice.random() < 0.2)))
        if dice.random() < 0.3:
            await asyncio.sleep(0)
    await asyncio.gather(*calls)
    assert answers == len(calls)
    assert max(padded) <= max_cost
    assert all(item % 97 == 13 for item in failed_items)
    assert (batcher.waiting, batcher.waiting_items, batcher.age) == (0, 0, 0.0)
    await batcher.stop()
    assert not batcher._requests
    assert len(batcher._queue) == 0


async def test_a_large_request_enters_and_leaves_at_once() -> None:
    """The queue has an entry for each cost, not for each item, so it takes no time that others would wait."""
    batcher = start(Worker(free=False), max_cost=64)
    task = await submit(batcher, *[item % 50 + 1 for item in range(20_000)])
    [request] = batcher._requests
    assert len(request.entries) == 50
    assert batcher.waiting_items == 20_000
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (batcher.waiting, batcher.waiting_items) == (0, 0)
    await batcher.stop()


async def test_a_batch_is_prepared_while_another_runs_if_it_is_full() -> None:
    held = Held()
    batcher = Numbers(held, lambda item: item, 8, 0, 30, ahead=1)
    batcher.start()
    tasks = [await submit(batcher, 1), await submit(batcher, *[2] * 3)]
    await turns()
    assert held.batches == [[1]]  # 6 of 8 wait, and more may come
    tasks.append(await submit(batcher, *[2] * 6))
    await turns()
    assert held.batches == [[1], [2, 2, 2, 2]]  # and no third one
    held.free(0)
    await turns()
    assert held.batches[2:] == [[2, 2, 2, 2]]  # full
    held.free(1)
    await turns()
    assert held.batches[3:] == []  # one runs, and what waits does not fill a batch
    held.free(2)
    await turns()
    held.free(3)
    assert await asyncio.gather(*tasks) == [[2], [4] * 3, [4] * 6]
    await batcher.stop()
