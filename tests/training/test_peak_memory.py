"""What the machine offers and what a process has used, also where the system is not Linux."""

import re
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from patience import PATIENCE

from cloze import machine
from cloze.machine import peak_memory

ROOT = Path(__file__).parents[2]

ELSEWHERE = """
import os, sys
import torch, transformers.trainer  # which may ask Linux what they like
del os.sched_getaffinity
sys.modules["resource"] = None  # as on Windows
import cloze.training.evaluation.evaluate, cloze.training.export.bundle, cloze.training.loop.run
from cloze.machine import available_cpus
print(available_cpus())
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="it is about the other systems")
def test_the_commands_can_be_imported_where_the_system_is_not_linux() -> None:
    found = subprocess.run(
        [sys.executable, "-c", ELSEWHERE], capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE
    )
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) >= 1


@pytest.mark.parametrize(("platform", "size"), [("darwin", 5_000_000), ("freebsd14", 5_120_000_000)])
def test_the_peak_memory_is_in_bytes_on_every_system(platform: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(machine, "STATUS", Path("none"))
    monkeypatch.setattr(resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=5_000_000))
    assert peak_memory() == size


def test_the_peak_memory_is_unknown_where_the_system_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "STATUS", Path("none"))
    monkeypatch.setitem(sys.modules, "resource", None)
    assert peak_memory() is None


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_on_linux_the_peak_memory_is_that_of_this_program_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrusage", lambda _: pytest.fail("it counts the program that started this one"))
    now = re.findall(r"VmRSS:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert (peak_memory() or 0) >= 1024 * int(now[0])
