"""How many CPUs this process may use, by its affinity and the quotas of its cgroups (v1 and v2), and for what."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["Threads", "available_cpus", "share_threads"]

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
MOST: Final = 4  # threads of one batch: more gain little on batches of a few hundred tokens


class Threads(NamedTuple):
    """The threads that run graphs on the CPU: `batches` run at once, each with `per_batch` threads."""

    batches: int
    per_batch: int


def share_threads(total: int, per_batch: int) -> Threads:
    """Share `total` threads between batches; 0 takes the available CPUs, and half of the threads for each batch.

    Two batches of one thread finish sooner than one batch after the other with two threads: some operators have only
    one thread's work, and at the end of each the threads wait for the slowest.
    """
    total = total or available_cpus()
    per_batch = min(total, per_batch or min(MOST, max(1, total // 2)))
    return Threads(total // per_batch, per_batch)


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
