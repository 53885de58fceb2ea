"""Keep the memory that PyTorch frees on a CPU: the next training step needs as much again."""

import ctypes
import sys
from typing import Final

__all__ = ["keep_memory"]

M_TRIM_THRESHOLD: Final = -1  # glibc's mallopt(3)
M_MMAP_MAX: Final = -4
LARGEST: Final = 2**31 - 1


def keep_memory() -> None:
    """Tell glibc to map no tensor separately and to return no memory to the system before the process ends.

    Otherwise the system maps, clears and unmaps each large tensor in each step. Without glibc this does nothing.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, LARGEST)
