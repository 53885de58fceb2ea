"""The device: threads for graphs and for the rest, and a shutdown that does not wait for a task that hangs."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest
from harness import until

from service.cpu import Threads
from service.device import Device

pytestmark = pytest.mark.anyio


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def device(clock: Clock) -> AsyncIterator[Device]:
    made = Device(2, clock=clock)
    yield made
    await made.close(60)


def name() -> str:
    return threading.current_thread().name


async def test_graphs_have_a_thread_of_their_own(device: Device) -> None:
    graphs = await asyncio.gather(*(device.run(name) for _ in range(20)))
    workers = await asyncio.gather(*(device.work(name) for _ in range(20)))
    assert len(set(graphs)) == 1
    assert set(graphs).isdisjoint(workers)
    assert name() not in {*graphs, *workers}


async def test_graphs_take_turns_in_order(device: Device) -> None:
    ran: list[int] = []
    tasks: list[Callable[[], None]] = [lambda number=number: ran.append(number) for number in range(50)]  # type: ignore[misc]
    await asyncio.gather(*(device.run(task) for task in tasks))
    assert ran == list(range(50))


async def test_how_long_it_is_busy(device: Device, clock: Clock) -> None:
    assert device.busy_for == 0
    begun, free = threading.Event(), threading.Event()
    running = asyncio.create_task(device.run(lambda: begun.set() or free.wait(60)))
    await until(begun.is_set)
    clock.now += 7
    assert device.busy_for == 7
    waiting = asyncio.create_task(device.run(lambda: device.busy_for))
    free.set()
    assert await running
    assert await waiting == 0  # the next has its own time
    assert device.busy_for == 0


async def test_as_many_graphs_run_at_once_as_there_are_threads_for_them(clock: Clock) -> None:
    device, together, free = Device(1, Threads(2, 1), clock), threading.Barrier(3), threading.Event()

    def first() -> None:
        together.wait(60)
        free.wait(60)

    older = asyncio.create_task(device.run(first))
    await until(lambda: together.n_waiting == 1)
    clock.now += 3
    newer = asyncio.create_task(device.run(lambda: together.wait(60)))
    await until(lambda: together.n_waiting == 2)
    clock.now += 4
    assert device.busy_for == 7  # the older one's
    together.wait(60)
    await newer
    assert device.busy_for == 7
    free.set()
    await older
    assert device.busy_for == 0
    assert await device.close(60)


async def test_the_end_waits_for_every_graph() -> None:
    device, begun, free = Device(1, Threads(2, 1)), threading.Event(), threading.Event()
    held = asyncio.create_task(device.run(lambda: begun.set() or free.wait(60)))
    await until(begun.is_set)
    await device.run(name)  # in the other thread
    closing = asyncio.create_task(device.close(60))
    await asyncio.sleep(0.05)
    assert not closing.done()
    free.set()
    assert await closing
    assert await held


async def test_a_task_that_raises_leaves_it_idle(device: Device) -> None:
    with pytest.raises(ZeroDivisionError):
        await device.run(lambda: 1 / 0)
    assert device.busy_for == 0
    assert await device.run(lambda: "the next") == "the next"


async def test_the_end_waits_for_what_runs() -> None:
    device, begun, free = Device(1), threading.Event(), threading.Event()
    running = asyncio.create_task(device.run(lambda: begun.set() or free.wait(60)))
    await until(begun.is_set)
    closing = asyncio.create_task(device.close(60))
    await asyncio.sleep(0)
    assert not closing.done()
    free.set()
    assert await closing
    assert await running
    with pytest.raises(RuntimeError):
        await device.run(name)


async def test_the_end_does_not_wait_for_what_hangs(clock: Clock) -> None:
    """What has hung for longer than the limit is given no more time."""
    device, begun, free = Device(1, clock=clock), threading.Event(), threading.Event()
    running = asyncio.create_task(device.run(lambda: begun.set() or free.wait(60)))
    await until(begun.is_set)
    clock.now += 61
    assert not await device.close(60)
    assert not running.done()
    free.set()
    assert await running
