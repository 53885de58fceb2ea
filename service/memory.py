"""The process's memory: what is no longer needed goes back to the system."""

import asyncio
import contextlib
import ctypes
from typing import Final

__all__ = ["give_back", "keep_trimmed", "trim"]

M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
M_ARENA_MAX: Final = -8
LARGE: Final = 1_048_576  # bytes
TRIM_SECONDS: Final = 15.0


def give_back() -> None:
    """Have glibc return freed blocks of a mebibyte or more at once; nothing with another C library.

    Else that limit rises by itself to 32 MiB, and each thread keeps the room of the largest bodies and answers that
    it has ever held.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl and macOS have none, Windows no such library
        return
    for parameter, value in ((M_MMAP_THRESHOLD, LARGE), (M_TRIM_THRESHOLD, LARGE), (M_ARENA_MAX, 2)):
        mallopt(parameter, value)


async def keep_trimmed() -> None:
    """`trim` every TRIM_SECONDS, for ever."""
    while True:
        await asyncio.sleep(TRIM_SECONDS)
        await asyncio.to_thread(trim)


def trim() -> None:
    """Have glibc return the free pages between blocks, as it never does by itself; nothing with another C library."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
