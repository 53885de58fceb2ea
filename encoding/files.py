"""Files that appear when they are complete."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["replacing", "write_whole"]


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
