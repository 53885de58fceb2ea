"""The machine and the package versions that a figure was measured with."""

import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

__all__ = ["processor", "threads", "versions"]

VECTOR_FLAGS: Final = ("avx2", "avx512f", "avx512_vnni", "avx_vnni")


def processor() -> str:
    """Name of the CPU, and which of the vector extensions that int8 arithmetic uses it has."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    vectors = [flag for flag in VECTOR_FLAGS if flag in found.get("flags", "").split()]
    return f"{found.get('model name') or platform.processor()} ({', '.join(vectors) or 'no AVX2'})"


def threads() -> int:
    """Number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Versions of the packages that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
