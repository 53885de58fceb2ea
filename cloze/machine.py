"""The machine: processor, packages, and the CPUs and memory that affinity and cgroup limits allow this process."""

import ctypes
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
PROCESSORS = Path("/proc/cpuinfo")
STATUS = Path("/proc/self/status")
BF16_FLAGS: Final = ("avx512_bf16", "amx_bf16", "bf16")  # the last on ARM
VECTOR_FLAGS: Final = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm")


def processor(file: Path = PROCESSORS) -> str:
    """Return the name of the CPU, and those of its vector extensions that int8 arithmetic uses."""
    facts = _facts(file)
    name = facts.get("model name") or platform.processor() or platform.machine()
    flags = ", ".join(flag for flag in VECTOR_FLAGS if flag in _flags(facts))
    return f"{name} ({flags or 'no vector extensions known'})"


def has_bf16(file: Path = PROCESSORS) -> bool:
    """Whether the CPU multiplies in bf16; other CPUs emulate it, many times slower than fp32."""
    return not set(_flags(_facts(file))).isdisjoint(BF16_FLAGS)


def _facts(file: Path) -> dict[str, str]:
    """The system's description of its last processor, by key."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _flags(facts: dict[str, str]) -> list[str]:
    return facts.get("flags", facts.get("Features", "")).split()  # the second on ARM


def available_cpus(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """Count whole CPUs, at least one. A quota of 1.5 gives 1, since a second thread would only be throttled."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([affinity, *map(int, _quotas(root, membership))]))


def memory_limit(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int | None:
    """Return the bytes that the process's cgroups (v2) allow; None if they set no limit."""
    texts = (_read(group / "memory.max").strip() for group in _groups(root, membership))
    return min((int(text) for text in texts if text.isdecimal()), default=None)


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Versions of the packages that are installed."""
    installed = {}
    for name in packages:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed


def resident_memory(status: Path = STATUS) -> int | None:
    """The resident memory of this process in bytes; None if the system is not Linux."""
    match = re.search(r"VmRSS:\s*(\d+) kB", _read(status))
    return 1024 * int(match[1]) if match else None


def peak_memory() -> int | None:
    """The peak memory of this process in bytes; None if the system does not report it, as on Windows."""
    if match := re.search(r"VmHWM:\s*(\d+) kB", _read(STATUS)):  # Linux's getrusage also counts the parent program
        return 1024 * int(match[1])
    try:
        from resource import RUSAGE_SELF, getrusage  # here, because Windows has no such module
    except ImportError:
        return None
    peak: int = getrusage(RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # bytes on macOS, KiB elsewhere


def _quotas(root: Path, membership: Path) -> Iterator[float]:
    """Yield every quota from the process's cgroup up to the root, in CPUs."""
    for group in _groups(root, membership):
        v2 = _read(group / "cpu.max").split()  # "max 100000" or "150000 100000"
        v1 = [*_read(group / "cpu.cfs_quota_us").split(), *_read(group / "cpu.cfs_period_us").split()]
        for words in (v2, v1):
            if len(words) == 2 and words[0] not in ("max", "-1"):
                yield int(words[0]) / int(words[1])


def _groups(root: Path, membership: Path) -> Iterator[Path]:
    """Yield the folders of the process's cgroups and of their parents. Inside a container only the root may exist."""
    for line in _read(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        parts = [part for part in path.split("/") if part not in ("", "..")]
        if not controllers or "cpu" in controllers.split(","):
            for folder in (root / controllers, root / "cpu") if controllers else (root, root / "unified"):
                yield from (folder.joinpath(*parts[:depth]) for depth in range(len(parts) + 1))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""


def mallopt(values: Mapping[int, int]) -> None:
    """Set parameters of glibc's malloc(3); does nothing with another C library."""
    if call := _of_glibc("mallopt"):
        for parameter, value in values.items():
            call(parameter, value)


def trim_memory() -> None:
    """Return all freed memory to the system, small blocks too; does nothing with another C library than glibc."""
    if call := _of_glibc("malloc_trim"):
        call(ctypes.c_size_t(0))


def _of_glibc(name: str) -> Callable[..., int] | None:
    """A function of glibc's malloc. musl and macOS do not have these functions, and Windows not even such a library."""
    try:
        return getattr(ctypes.CDLL(None), name)  # type: ignore[no-any-return]
    except (AttributeError, OSError, TypeError):
        return None
