"""Memory goes back to the system."""

import platform
import subprocess
import sys

import pytest
from harness import ROOT

MEBIBYTE = 2**20
RESIDENT = """
import os, sys
from pathlib import Path
from service import memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
"""
LARGE = """
if sys.argv[1] == "given back":
    memory.give_back()
for size in (8, 16, 30):  # each of them freed makes glibc keep blocks of its size
    bytearray(size * 2**20)
blocks = [bytearray(b"x" * (2 * 2**20)) for _ in range(60)]
full = resident()
blocks = blocks[-1:]
print(full - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.parametrize("way", ["given back", "kept"])
def test_large_blocks_are_given_back(way: str) -> None:
    """Among them is one that is still needed, as there is in a service; without us glibc keeps the rest."""
    assert (freed(LARGE, way) > 100 * MEBIBYTE) == (way == "given back")


HOLES = """
memory.give_back()
blocks = [bytearray(b"x" * 2**17) for _ in range(800)]
blocks = blocks[::8]  # holes between what is still needed, none of them at the end
full = resident()
if sys.argv[1] == "trimmed":
    memory.trim()
print(full - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.parametrize("way", ["trimmed", "kept"])
def test_holes_are_given_back(way: str) -> None:
    assert (freed(HOLES, way) > 50 * MEBIBYTE) == (way == "trimmed")


def freed(code: str, way: str) -> int:
    """The bytes that it prints, in a process of its own."""
    command = [sys.executable, "-c", RESIDENT + code, way]
    return int(subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout)
