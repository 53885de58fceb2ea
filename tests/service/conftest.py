"""Fixtures of the service: tiny bundles, an app around them, and server processes."""

import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from harness import LIMITS, PATIENCE, Hold, MakeApp, MakeBundle, MakeClient, Process, Serve, open_client
from live import Held, ServeHeld
from numpy.typing import NDArray
from tiny_bundle import OTHER, write_bundle

from cloze.command import run
from cloze.encoding.text import Batch
from cloze.service.__main__ import main
from cloze.service.app import create_app
from cloze.service.inference.session import Session
from cloze.service.settings import Settings

AnyProcess = TypeVar("AnyProcess", bound=Process)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def make_bundle(tmp_path_factory: pytest.TempPathFactory) -> MakeBundle:
    def make(**options: Any) -> Path:
        return write_bundle(tmp_path_factory.mktemp("bundles") / "tiny", **options)

    return make


@pytest.fixture(scope="session")
def bundle(make_bundle: MakeBundle) -> Path:
    return make_bundle()


@pytest.fixture(scope="session")
def two_bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of `tiny` and of `other`, which has another template, pooling, length, dimension and graph."""
    folder = tmp_path_factory.mktemp("several")
    write_bundle(folder / "tiny")
    write_bundle(folder / "other", **OTHER)
    return folder


@pytest.fixture
def settings(bundle: Path) -> Settings:
    return Settings(bundle=bundle, provider="cpu", threads=1, **LIMITS)


@pytest.fixture
def make_app(settings: Settings) -> MakeApp:
    """A new app; its settings may be changed by name."""

    def make(**changes: Any) -> FastAPI:
        return create_app(Settings(**settings.model_dump() | changes))

    return make


@pytest.fixture
def client(make_app: MakeApp) -> MakeClient:
    """A client of a new app; its settings may be changed by name."""

    def make(**changes: Any) -> AbstractAsyncContextManager[httpx.AsyncClient]:
        return open_client(make_app(**changes))

    return make


@pytest.fixture(scope="module")
async def both(two_bundles: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of one app that serves `tiny`, the default, and `other`; for tests that leave nothing behind."""
    settings = Settings(bundle=two_bundles, model="tiny", provider="cpu", threads=1, token_ids=True, **LIMITS)
    async with open_client(create_app(settings)) as http:
        yield http


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Hold:
    """Within its block no graph ends; those that have begun do with it."""
    free, run = threading.Event(), Session._infer
    free.set()

    def held(self: Session, batch: Batch) -> NDArray[np.float32]:
        assert free.wait(PATIENCE)
        return run(self, batch)

    @contextmanager
    def held_up() -> Iterator[None]:
        free.clear()
        try:
            yield
        finally:
            free.set()

    monkeypatch.setattr(Session, "_infer", held)
    return held_up


@pytest.fixture(scope="module")
def serve() -> Iterator[Serve]:
    """Start server processes, which end with the module's tests."""
    yield from _started(Process)


@pytest.fixture(scope="module")
def serve_held() -> Iterator[ServeHeld]:
    """Start servers that hold some batches until the test lets them go."""
    yield from _started(Held)


def _started(kind: type[AnyProcess]) -> Iterator[Callable[..., AnyProcess]]:
    running: list[AnyProcess] = []

    def start(*arguments: str) -> AnyProcess:
        running.append(kind(*arguments))
        return running[-1]

    yield start
    for process in running:
        process.close()


@pytest.fixture
def check_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """`cloze serve … --check` in this process, whose signals, log, memory and environment stay what they were."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    monkeypatch.setattr("cloze.service.__main__.configure_logs", lambda *_: caplog.set_level("INFO"))
    monkeypatch.setattr("cloze.service.__main__.limit_free_memory", lambda: None)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")

    def run_here(*arguments: str) -> tuple[int, str, str]:
        status = run(partial(main, [*arguments, "--check"]))
        assert caplog.messages == []  # each would be a line of stderr
        return status, *capsys.readouterr()

    yield run_here
    for number, handler in handlers.items():
        signal.signal(number, handler)
