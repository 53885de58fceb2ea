"""Memory that a run keeps: what is freed is taken again without the system's doing."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import numpy as np
from cloze.training.loop.processes import keep_memory

if sys.argv[1] == "kept":
    keep_memory()
for step in range(21):
    np.ones(5_000_000)  # 40 MB, more than glibc keeps by itself
    if not step:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(way: str) -> int:
    """Pages that the system gave to 20 arrays, made one after the other."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, way], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's mallopt")
def test_what_is_freed_is_taken_again() -> None:
    assert 10 * faults("kept") < faults("given back")
