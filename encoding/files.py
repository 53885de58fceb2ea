"""Files that appear when they are complete, and where a result can be written."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from encoding.errors import OptionError

__all__ = ["check_new_file", "replacing", "write_whole"]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a file to write, which takes the place of `path` at the end of the block."""
    partial = path.with_name(f".{path.name}.partial")
    yield partial
    partial.replace(path)


def write_whole(path: Path, text: str) -> None:
    """Write all of the text, or nothing, even if the machine stops."""
    with replacing(path) as partial, partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def check_new_file(path: Path) -> None:
    """Check before long work that its result can be written to the file `path`. Raises OptionError."""
    if path.is_dir():
        raise OptionError(f"{path} is a folder; name a file to write in it")
    if not path.parent.is_dir():
        raise OptionError(f"{path.parent} is not a folder; make it first, {path.name} is written there at the end")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise OptionError(f"{path.parent} cannot be written to ({error.strerror}); name a file elsewhere") from error
