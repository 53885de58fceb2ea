"""Write files and folders atomically, and check where a result can be written."""

import ctypes
import errno
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from cloze.encoding.errors import OptionError

HERE: Final = -100  # AT_FDCWD: paths are relative to the working directory
EXCHANGE: Final = 2  # RENAME_EXCHANGE, renameat2(2)
NOT_HERE: Final = (errno.ENOSYS, errno.EINVAL, errno.EXDEV, errno.ENOTSUP)  # not supported by the kernel or file system


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a file to write, which replaces `path` at the end of the block.

    If two processes write at the same time, the file of the later one stays. After an error, the new file is removed.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        yield partial
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def exchange(first: Path, second: Path) -> bool:
    """Exchange two folders in one step, so that both paths have a complete folder at any time.

    Return False and do nothing if the system cannot: on other systems than Linux, and on some network file systems.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if os.name == "posix" else None
    if call is None:
        return False
    if call(HERE, os.fsencode(first), HERE, os.fsencode(second), EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in NOT_HERE:
        return False
    raise OSError(number, os.strerror(number), str(first), None, str(second))


def write_whole(path: Path, text: str) -> None:
    """Write the text atomically, even if the machine stops. A link, a device or a pipe is written to, not replaced."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_text(text, encoding="utf-8")
        return
    with replacing(path) as partial, partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def check_folder(path: Path) -> None:
    """Check before long work that files can be written to a folder, which may not exist yet. Raises OptionError."""
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise OptionError(f"{path} cannot be written to ({error.strerror}); choose another folder") from error


def check_new_file(path: Path) -> None:
    """Check before long work that its result can be written to the file `path`. Raises OptionError."""
    if path.is_dir():
        raise OptionError(f"{path} is a folder; name a file to write in it")
    if not path.parent.is_dir():
        raise OptionError(f"{path.parent} is not a folder; create it first: {path.name} is written to it at the end")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise OptionError(f"{path.parent} cannot be written to ({error.strerror}); name a file elsewhere") from error
