"""Health: ready or why not, and the end of a process that will not be ready again."""

import asyncio
import logging
import re
import threading

import pytest
from harness import PATIENCE, samples_of, until

from cloze.service.errors import Unavailable
from cloze.service.inference.health import HUNG, LOST, Health
from cloze.service.monitoring.background import Background
from cloze.service.monitoring.metrics import Metrics

pytestmark = pytest.mark.anyio


class Model:
    """One that fails for as long as a test says."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.failing_for = 0.0
        self.recovers = False
        self.checks = 0
        self.free = asyncio.Event()
        self.free.set()

    async def check(self) -> None:
        self.checks += 1
        await self.free.wait()
        if self.recovers:
            self.failing_for = 0.0
        if self.failing_for:
            raise Unavailable(f"model {self.name} fails")


class World:
    """Two models, a device, and the statuses that the process would have ended with."""

    def __init__(self) -> None:
        self.models = [Model("one"), Model("two")]
        self.busy_for = 0.0
        self.ends: list[int] = []
        self.now = 1000.0
        self.metrics = Metrics()
        self.background = Background(self.metrics.background_errors)
        self.health = Health(
            self.models, lambda: self.busy_for, self.background, 30, self.ends.append, clock=lambda: self.now
        )

    async def look(self) -> None:
        """What the event loop and the thread do each second."""
        await self.health.look()
        self.health.judge()


@pytest.fixture
async def world() -> World:
    return World()


async def test_ready(world: World) -> None:
    assert world.health.ready
    await world.health.check()


async def test_busy_is_ready(world: World) -> None:
    world.busy_for = 29
    assert world.health.ready
    await world.health.check()
    await world.look()
    assert world.ends == []


async def test_stopping_is_not_ready(world: World) -> None:
    world.health.stopping = True
    assert not world.health.ready
    with pytest.raises(Unavailable, match="stopping"):
        await world.health.check()


async def test_a_batch_that_hangs_is_not_ready_and_then_the_end(world: World) -> None:
    world.busy_for = 31
    assert not world.health.ready
    with pytest.raises(Unavailable, match="a batch has run for 31 s; the limit is 30 s"):
        await world.health.check()
    await world.look()
    assert world.ends == []
    world.busy_for = 91
    await world.look()
    assert world.ends == [HUNG]


async def test_a_batch_that_ends_late_is_forgiven(world: World) -> None:
    world.busy_for = 89
    await world.look()
    world.busy_for = 0
    await world.look()
    assert world.health.ready
    assert world.ends == []


async def test_a_model_that_fails_is_not_ready_and_is_tried_again(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.models[1].failing_for = 5
    assert not world.health.ready
    with pytest.raises(Unavailable, match="model two fails"):
        await world.health.check()
    with caplog.at_level(logging.WARNING):
        await world.look()
        await until(lambda: caplog.messages == ["model two fails"])
    world.models[1].recovers = True
    await world.look()
    await until(lambda: world.health.ready)
    assert world.ends == []


async def test_a_trial_under_way_is_not_begun_again(world: World) -> None:
    world.models[0].failing_for = 5
    world.models[0].free.clear()
    for _ in range(10):
        await world.look()
        await asyncio.sleep(0)
    assert world.models[0].checks == 1
    world.models[0].free.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await world.look()
    await until(lambda: world.models[0].checks == 2)


async def test_a_model_that_fails_for_too_long_is_the_end(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.models[0].failing_for = 61
    await world.look()
    assert world.ends == [LOST]
    assert "model one has failed for 61 s" in caplog.text


async def test_the_time_in_which_the_process_was_frozen_does_not_count(world: World) -> None:
    """As by `docker pause`: batches that ran before it continue after it."""

    async def watch(seconds: int) -> None:
        for _ in range(seconds):
            world.now += 1
            await world.look()

    world.now += 1000
    world.busy_for = world.models[0].failing_for = 1000
    await world.look()
    await watch(60)
    assert world.ends == []
    await watch(1)
    assert world.ends == [LOST]
    world.models[0].failing_for = 0
    await watch(29)
    assert world.ends == [LOST]
    await watch(1)
    assert world.ends == [LOST, HUNG]


async def test_nothing_is_tried_while_a_batch_hangs(world: World) -> None:
    """The trial would only wait behind it."""
    world.busy_for = 31
    world.models[0].failing_for = 5
    await world.look()
    await asyncio.sleep(0)
    assert world.models[0].checks == 0


async def test_the_watch_looks_again_and_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloze.service.inference.health.PERIOD", 0.001)
    world.health.watch()
    world.busy_for = 91
    await until(lambda: len(world.ends) > 2)
    world.health.unwatch()
    await world.background.stop()
    assert world.background.failing == {}


async def test_an_event_loop_that_hangs_is_the_end(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread judges while the loop is held."""
    monkeypatch.setattr("cloze.service.inference.health.PERIOD", 0.001)
    ended = threading.Event()
    world.health.end = lambda status: (world.ends.append(status), ended.set())
    world.health.watch()
    await until(lambda: world.background.failing == {})
    for _ in range(60):
        world.now += 2  # while awake: a longer step would be taken for a frozen process
        world.health.judge()
    assert ended.wait(PATIENCE)  # without giving control back to the loop
    assert world.ends[0] == HUNG
    assert re.search(r"the event loop has hung for \d+ s", caplog.text)
    world.health.unwatch()
    await world.background.stop()


async def test_the_loop_may_take_its_time(world: World) -> None:
    for _ in range(45):
        world.now += 2
        world.health.judge()
    assert world.ends == []
    world.now += 2
    world.health.judge()
    assert world.ends == [HUNG]


async def test_a_limit_below_a_second_leaves_an_idle_service_alone(world: World) -> None:
    """The event loop is looked at every second, so a second without a beat says nothing."""
    world.health.stall_seconds = 0.1
    world.now += 2
    world.health.judge()
    assert world.ends == []
    world.now += 2
    world.health.judge()
    assert world.ends == [HUNG]


async def test_the_watch_goes_on_after_an_error_and_readiness_shows_it(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cloze.service.inference.health.PERIOD", 0.001)
    models, world.health.models = world.models, None  # type: ignore[assignment]
    world.health.watch()
    await until(lambda: errors(world) > 3)
    assert not world.health.ready
    with pytest.raises(Unavailable, match="the background task watch fails: TypeError"):
        await world.health.check()
    assert caplog.text.count("the background task watch failed") == 1  # not at every turn
    assert "TypeError: 'NoneType' object is not iterable" in caplog.text
    world.health.models = models
    await until(lambda: world.health.ready)
    await world.health.check()
    world.busy_for = 91
    await until(lambda: world.ends)
    world.health.unwatch()
    await world.background.stop()


async def test_a_probe_that_raises_is_counted_and_the_next_one_follows(world: World) -> None:
    world.models[0].failing_for = 5
    world.models[0].name = None  # type: ignore[assignment]
    world.models[0].check = None  # type: ignore[method-assign, assignment]
    for count in (1, 2, 3):
        await world.look()
        await until(lambda count=count: errors(world, "probe") == count)


def errors(world: World, task: str = "watch") -> float:
    return samples_of(world.metrics.text().decode())[f"cloze_background_errors_total{{task={task}}}"]
