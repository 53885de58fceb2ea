"""The file to which a command writes its result at the end."""

from pathlib import Path

from training.errors import RunError

__all__ = ["check_new_file"]


def check_new_file(path: Path) -> None:
    """Check before long work that its result can be written to the file `path`. Raises RunError."""
    if path.is_dir():
        raise RunError(f"{path} is a folder; name a file to write in it")
    if not path.parent.is_dir():
        raise RunError(f"{path.parent} is not a folder; make it first, {path.name} is written there at the end")
