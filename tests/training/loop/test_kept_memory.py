"""Memory that a run keeps: what is freed is taken again without the system's doing."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, sys
import numpy as np
from cloze.training.loop.processes import keep_memory

class Allocated(ctypes.Structure):  # malloc.h
    names = "arena ordblks smblks hblks mapped usmblks fsmblks used free top".split()
    _fields_ = [(name, ctypes.c_size_t) for name in names]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Allocated
if sys.argv[1] == "kept":
    keep_memory()
array = np.ones(5_000_000)  # 40 MB, more than glibc keeps by itself
mapped = libc.mallinfo2().mapped
del array
print(mapped >= 40_000_000, libc.mallinfo2().free >= 40_000_000)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's mallopt")
@pytest.mark.parametrize(("way", "found"), [("kept", "False True"), ("given back", "True False")])
def test_what_is_freed_is_kept(way: str, found: str) -> None:
    """A tensor is not mapped separately, and its memory stays with the process."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, way], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == found
