"""A real engine and the image. Only where no engine can be had are these tests skipped, and then aloud."""

import fcntl
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from patience import PATIENCE
from stack import ROOT, Stack, run
from tiny_bundle import write_bundle

ENGINE = ROOT.parent / "shared" / "tools" / "docker-engine.sh"
OWN = Path(tempfile.gettempdir()) / "cloze-tests-engine"  # not empty while there is an engine that tests brought up

left_running: list[str] = []


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Take the engine down that the tests brought up, when the last worker has ended."""
    if not hasattr(session.config, "workerinput") and OWN.is_file() and OWN.stat().st_size:
        _take_down()
        OWN.unlink()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for reason in left_running:
        terminalreporter.section("ENGINE NOT TAKEN DOWN", yellow=True, bold=True)
        terminalreporter.write_line(reason)


@pytest.fixture(scope="session")
def engine() -> None:
    """An engine that answers: the machine's own, else one for all workers, which is brought up by the first of them."""
    with OWN.open("a") as own:
        fcntl.flock(own, fcntl.LOCK_EX)
        missing = _missing()
        if not missing:
            return
        if not ENGINE.is_file():
            _skip(missing)
        own.write("up")
        own.flush()
        up = subprocess.run([ENGINE, "up"], capture_output=True, text=True, timeout=PATIENCE)
        if missing := _missing():
            _skip(f"{missing}; `{ENGINE.name} up` ended with {up.returncode}: {up.stderr.strip()[-2000:]}")


def _take_down() -> None:
    """Try twice, since a mount or a control group may be busy for a moment; report what remains."""
    for _ in range(2):
        down = subprocess.run([ENGINE, "down"], capture_output=True, text=True, timeout=PATIENCE)
        if not down.returncode:
            return
    left_running.append(
        f"`{ENGINE.name} down` ended with {down.returncode}: {(down.stdout + down.stderr).strip()[-2000:]}"
    )


def _missing() -> str | None:
    """What keeps `docker compose` from working here, or None."""
    for command in (["docker", "info"], ["docker", "compose", "version"]):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        except OSError as error:
            return f"`{' '.join(command)}` cannot be run ({error})"
        if done.returncode:
            return f"`{' '.join(command)}` failed ({done.stderr.strip()})"
    return None


def _skip(reason: str) -> NoReturn:
    pytest.skip(f"No container engine can be had here: {reason}")


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
