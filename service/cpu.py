"""How many CPUs this process may use: its affinity, bounded by the quotas of its cgroups (v1 and v2)."""

import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["available_cpus"]

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def available_cpus(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """Count whole CPUs, at least one: a quota of 1.5 gives 1, for a second thread would only be throttled."""
    quotas = [int(quota) for quota in _quotas(root, membership)]
    return max(1, min([_affinity(), *quotas]))


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quotas(root: Path, membership: Path) -> Iterator[float]:
    """Every quota from the process's cgroup up to the root, in CPUs."""
    for line in _read(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            folders = [root, root / "unified"]
        elif "cpu" in controllers.split(","):
            folders = [root / controllers, root / "cpu"]
        else:
            continue
        for folder in folders:
            for group in _up(folder, path):
                yield from _quota(group)


def _up(folder: Path, path: str) -> Iterator[Path]:
    """The group, its parents, and the root; inside a container the outer path may not exist, the root does."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        yield folder.joinpath(*parts[:depth])


def _quota(group: Path) -> Iterator[float]:
    match _read(group / "cpu.max").split():  # v2: "max 100000" or "150000 100000"
        case [quota, period] if quota != "max":
            yield int(quota) / int(period)
    quota, period = _read(group / "cpu.cfs_quota_us").strip(), _read(group / "cpu.cfs_period_us").strip()
    if quota and period and int(quota) > 0:  # v1: -1 is no quota
        yield int(quota) / int(period)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
