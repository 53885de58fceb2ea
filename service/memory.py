"""The process's memory: what is no longer needed goes back to the system."""

import asyncio
import ctypes
from collections.abc import Awaitable, Callable
from typing import Final

__all__ = ["give_back", "trim_often"]

M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
M_ARENA_MAX: Final = -8
LARGE: Final = 1_048_576  # bytes
PERIOD: Final = 10.0  # seconds between two trims


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


async def trim_often(work: Callable[[Callable[[], object]], Awaitable[object]]) -> None:
    """Have glibc return the free pages between blocks, which it never does by itself; for ever, each in a worker.

    Under a mixed load for half an hour they came to a twentieth of the process's memory, and rose.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return
    while True:
        await asyncio.sleep(PERIOD)
        await work(lambda: trim(0))
