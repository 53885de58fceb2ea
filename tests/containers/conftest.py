"""A real engine and the image. Only where no engine can be had are these tests skipped, and then aloud."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from container_engine import have_engine
from stack import Stack, run
from tiny_bundle import write_bundle


@pytest.fixture(scope="session")
def engine() -> None:
    if missing := have_engine():
        pytest.skip(f"No container engine can be had here: {missing}")


@pytest.fixture(scope="session")
def project(engine: None) -> Iterator[str]:
    """A project whose image is built here, and removed at the end."""
    stack = Stack(f"cloze-test-{os.getpid()}")
    stack.compose("build", "service")
    yield stack.project
    stack.down()
    run("docker", "image", "rm", f"{stack.project}-service")  # `down --rmi` passes it over once its containers are gone


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In a folder that any user may enter, as pytest's own is not."""
    folder = tmp_path_factory.mktemp("bundles")
    folder.chmod(0o755)
    return write_bundle(folder / "tiny")
