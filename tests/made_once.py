"""Files that the workers of one run of the tests share."""

from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


def made_once(path: Path, make: Callable[[Path], object]) -> Path:
    """The file or folder `path`, which `make` writes for the first worker that needs it."""
    with FileLock(f"{path}.lock"):
        if not path.exists():
            unfinished = path.with_name(f"unfinished-{path.name}")
            make(unfinished)
            unfinished.rename(path)
    return path
