"""The engine of the tests in containers: the machine's own, else one that a run brings up for all of its workers.

The first worker that needs it brings it up, and the process that began the run takes it down when all have ended.
"""

import fcntl
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TextIO

from patience import PATIENCE

ENGINE: Final = Path(__file__).parents[2] / "shared" / "tools" / "docker-engine.sh"
OWNER: Final = Path(tempfile.gettempdir()) / "cloze-tests-engine"  # the process id of the run that brought it up


def have_engine() -> str | None:
    """Bring an engine up if none answers. Return what keeps `docker compose` from working here, or None."""
    with _owner() as owner:
        answers = not (missing := _missing())
        if answers and not _left_behind(owner):
            return None
        if missing and not ENGINE.is_file():
            return missing
        owner.truncate(0)
        owner.write(str(_run()))
        owner.flush()
        if answers:
            return None
        up = subprocess.run([ENGINE, "up"], capture_output=True, text=True, timeout=PATIENCE)
        missing = _missing()
        return missing and f"{missing}; `{ENGINE.name} up` ended with {up.returncode}: {up.stderr.strip()[-2000:]}"


def take_down() -> str | None:
    """Take down the engine that this run brought up, if it did. Return what went wrong, or None.

    It is tried twice, since a mount or a control group may be busy for a moment.
    """
    with _owner() as owner:
        if owner.read() != str(os.getpid()):
            return None
        owner.truncate(0)
        for _ in range(2):
            down = subprocess.run([ENGINE, "down"], capture_output=True, text=True, timeout=PATIENCE)
            if not down.returncode:
                return None
        return f"`{ENGINE.name} down` ended with {down.returncode}: {(down.stdout + down.stderr).strip()[-2000:]}"


@contextmanager
def _owner() -> Iterator[TextIO]:
    """The file, for one process at a time."""
    with OWNER.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        yield file


def _run() -> int:
    """The process that began the run: of a worker, its parent."""
    return os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()


def _left_behind(owner: TextIO) -> bool:
    """Whether the engine that answers was brought up by a run that was killed."""
    owner.seek(0)
    process = owner.read()
    return bool(process) and not Path("/proc", process).is_dir()


def _missing() -> str | None:
    for command in (["docker", "info"], ["docker", "compose", "version"]):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        except OSError as error:
            return f"`{' '.join(command)}` cannot be run ({error})"
        if done.returncode:
            return f"`{' '.join(command)}` failed ({done.stderr.strip()})"
    return None
