"""The service's threads: how long the oldest batch has run, and an end that does not wait for a batch that hangs."""

import asyncio
import threading
from time import monotonic

import numpy as np
import pytest
from harness import until
from numpy.typing import NDArray
from patience import PATIENCE
from tiny_bundle import DIMENSION

from cloze.encoding.bundle import Bundle
from cloze.encoding.text import Batch
from cloze.service.client import Client
from cloze.service.inference.session import Session
from cloze.service.inference.threads import MAX_SIZE, SMALL_SIZE, Executors, Threads, Workers, share_threads
from cloze.service.settings import Settings

pytestmark = pytest.mark.anyio


async def test_threads_are_shared_between_batches(subtests: pytest.Subtests) -> None:
    for total, shared in [(1, (1, 1)), (2, (2, 1)), (3, (3, 1)), (4, (2, 2)), (6, (2, 3)), (8, (2, 4)), (16, (4, 4))]:
        with subtests.test(total=total):
            assert share_threads(total) == shared


async def test_threads_default_to_the_available_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloze.service.inference.threads.available_cpus", lambda: 6)
    assert share_threads(0) == (2, 3)


class Held:
    """Two batches of one session in two threads, each of which ends when its event is set."""

    def __init__(self, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        for module in ("session", "threads"):
            monkeypatch.setattr(f"cloze.service.inference.{module}.monotonic", lambda: self.now)
        self.executors = Executors(Threads(2, 1))
        session = Session.load(Bundle.load(settings.bundle), provider="cpu", threads=1)
        session.running = self.executors.running
        self.free = [threading.Event(), threading.Event()]

        def infer(batch: Batch) -> NDArray[np.float32]:
            assert self.free[int(batch.input_ids[0, 0])].wait(PATIENCE)
            return np.zeros((1, DIMENSION), dtype=np.float32)

        monkeypatch.setattr(session, "_infer", infer)
        self._run = session.run

    async def run(self, number: int) -> "asyncio.Future[NDArray[np.float32]]":
        """Start a batch, and return when it runs."""
        running, ids = len(self.executors.running), np.array([[number]])
        task = asyncio.get_running_loop().run_in_executor(self.executors.graphs, self._run, Batch(ids, ids))
        await until(lambda: len(self.executors.running) > running)
        return task


@pytest.fixture
def held(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Held:
    return Held(settings, monkeypatch)


async def test_how_long_the_oldest_batch_has_run(held: Held) -> None:
    assert held.executors.busy_for == 0
    older = await held.run(0)
    held.now += 3
    newer = await held.run(1)
    held.now += 4
    assert held.executors.busy_for == 7
    held.free[1].set()
    await newer
    assert held.executors.busy_for == 7
    held.free[0].set()
    await older
    assert held.executors.busy_for == 0
    assert await held.executors.close(60)


async def test_closing_waits_for_every_batch_that_runs(held: Held) -> None:
    running = [await held.run(0), await held.run(1)]
    closing = asyncio.create_task(held.executors.close(60))
    held.free[0].set()
    await running[0]
    assert not closing.done()
    held.free[1].set()
    assert await closing
    with pytest.raises(RuntimeError):
        held.executors.graphs.submit(monotonic)


async def test_closing_does_not_wait_for_a_batch_that_hangs(held: Held) -> None:
    """A batch that has run for longer than the limit gets no more time."""
    running = await held.run(0)
    held.now += 61
    assert not await held.executors.close(60)
    assert not running.done()
    held.free[0].set()
    await running


class Turns:
    """Tasks of some threads, each of which ends when its own event is set; `begun` has their names."""

    def __init__(self, threads: int = 2) -> None:
        self.workers = Workers(threads)
        self.begun: list[str] = []
        self.free: dict[str, threading.Event] = {}

    def ask(self, name: str, size: int = 0) -> "asyncio.Task[None]":
        """The client is the first letter of the name."""
        free = self.free[name] = threading.Event()

        def task() -> None:
            self.begun.append(name)
            assert free.wait(PATIENCE)

        return asyncio.create_task(self.workers.run(Client(name[0]), task, size))

    async def end(self, name: str, begun: str) -> None:
        """Let a task end, after which these have begun."""
        self.free[name].set()
        await until(lambda: sorted(self.begun) == sorted(begun.split()))


async def test_clients_take_turns_whoever_has_more_tasks() -> None:
    turns = Turns()
    tasks = [turns.ask(name) for name in ("a1", "a2", "a3", "a4", "b1", "c1", "b2")]
    await until(lambda: sorted(turns.begun) == ["a1", "a2"])
    for name, begun in (("a1", "a3"), ("a2", "b1"), ("a3", "c1"), ("b1", "a4"), ("c1", "b2")):
        await turns.end(name, " ".join([*turns.begun, begun]))
    for name in ("a4", "b2"):
        turns.free[name].set()
    await asyncio.gather(*tasks)
    turns.workers.pool.shutdown()


async def test_a_task_cancelled_before_its_turn_does_not_run_and_one_that_runs_keeps_its_thread() -> None:
    turns = Turns()
    running, other, gone, last = (turns.ask(name) for name in ("a1", "a2", "a3", "b1"))
    await until(lambda: len(turns.begun) == 2)
    for task in (running, gone):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert sorted(turns.begun) == ["a1", "a2"]
    await turns.end("a1", "a1 a2 b1")
    for name in ("a2", "b1"):
        turns.free[name].set()
    await asyncio.gather(other, last)
    fresh = turns.ask("c1")
    turns.free["c1"].set()
    await fresh
    turns.workers.pool.shutdown()


async def test_large_tasks_have_a_limit_of_size_and_leave_a_thread_to_the_others() -> None:
    turns = Turns(4)
    sizes = {"a1": MAX_SIZE // 2, "b1": MAX_SIZE, "a2": MAX_SIZE // 2, "c1": SMALL_SIZE, "d1": 2 * MAX_SIZE, "e1": 1}
    tasks = [turns.ask(name, size) for name, size in sizes.items()]
    await until(lambda: sorted(turns.begun) == ["a1", "c1", "e1"])
    for name, begun in (("c1", ""), ("a1", "b1"), ("b1", "a2"), ("a2", "d1")):
        await turns.end(name, " ".join([*turns.begun, *begun.split()]))
    for name in ("d1", "e1"):
        turns.free[name].set()
    await asyncio.gather(*tasks)
    turns.workers.pool.shutdown()


async def test_as_many_large_tasks_as_fit_run_but_for_one_thread() -> None:
    turns = Turns(3)
    tasks = [turns.ask(name, 2 * SMALL_SIZE) for name in ("a1", "b1", "c1")]
    tasks.append(turns.ask("d1"))
    await until(lambda: sorted(turns.begun) == ["a1", "b1", "d1"])
    await turns.end("d1", "a1 b1 d1")
    await turns.end("b1", "a1 b1 c1 d1")
    for name in ("a1", "c1"):
        turns.free[name].set()
    await asyncio.gather(*tasks)
    turns.workers.pool.shutdown()
