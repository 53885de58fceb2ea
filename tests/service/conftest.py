"""Fixtures of the service: tiny bundles, an app around them, and server processes."""

from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness import MakeBundle, MakeClient, Process, Serve, open_client
from tiny_bundle import OTHER, graph, write_bundle

from service.app import create_app
from service.settings import Settings


@pytest.fixture
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
def slow_bundle(make_bundle: MakeBundle) -> Path:
    """Takes a few milliseconds a text."""
    return make_bundle(model=graph(work=200))


@pytest.fixture(scope="session")
def two_bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of `tiny` and of `other`, which has another template, read-out, length, dimension and graph."""
    folder = tmp_path_factory.mktemp("several")
    write_bundle(folder / "tiny")
    write_bundle(folder / "other", **OTHER)
    return folder


@pytest.fixture
def settings(bundle: Path) -> Settings:
    return Settings(bundle=bundle, threads=1, tokenizer_threads=2)


@pytest.fixture
def client(settings: Settings) -> MakeClient:
    """A client of a new app; its settings may be changed by name."""

    def make(**changes: Any) -> AbstractAsyncContextManager[httpx.AsyncClient]:
        return open_client(create_app(Settings(**settings.model_dump() | changes)))

    return make


@pytest.fixture(scope="module")
def serve() -> Iterator[Serve]:
    """Start server processes, which end with the module's tests."""
    running: list[Process] = []

    def start(*arguments: str) -> Process:
        running.append(Process(*arguments))
        return running[-1]

    yield start
    for process in running:
        process.close()
