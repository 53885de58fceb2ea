"""The service's threads: how many CPUs it may use, by affinity and cgroup quotas (v1 and v2), and the pools on them."""

import asyncio
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from typing import Final, NamedTuple

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
MOST: Final = 4  # threads of one batch: more gain little on batches of a few hundred tokens


class Threads(NamedTuple):
    """The threads that run graphs on the CPU: so many batches run at once, each with `per_batch` threads."""

    batches: int
    per_batch: int


def share_threads(total: int) -> Threads:
    """Share `total` threads (0: the available CPUs) between batches, half of them for each batch, 1 to MOST.

    Two batches of one thread finish sooner than one batch after the other with two threads: some operators have only
    one thread's work, and at the end of each the threads wait for the slowest.
    """
    total = total or available_cpus()
    per_batch = min(MOST, max(1, total // 2))
    return Threads(total // per_batch, per_batch)


class Executors:
    """`graphs` runs batches, as many at once as `threads` allows on the CPU; `workers` tokenises and writes answers."""

    def __init__(self, threads: Threads) -> None:
        self.threads = threads
        self.tokenization_workers = min(4, max(2, available_cpus() // 2))
        self.graphs = ThreadPoolExecutor(threads.batches, thread_name_prefix="graphs")
        self.workers = ThreadPoolExecutor(self.tokenization_workers, thread_name_prefix="worker")
        self.running: dict[int, float] = {}  # thread → when its batch began; sessions write it

    @property
    def busy_for(self) -> float:
        """Return the seconds since the oldest running batch began; 0.0 where none runs."""
        started = list(self.running.values())  # a copy: other threads change it
        return monotonic() - min(started) if started else 0.0

    async def close(self, seconds: float) -> bool:
        """Accept no more tasks and wait for those that run; False where a batch runs longer than so many seconds.

        Only the end of the process ends such a batch.
        """
        left = max(0.0, seconds - self.busy_for)
        pools = (self.graphs, self.workers)
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
        ended = asyncio.gather(*(asyncio.to_thread(pool.shutdown) for pool in pools))
        try:
            await asyncio.wait_for(asyncio.shield(ended), left)
        except TimeoutError:
            return False
        return True


def available_cpus(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """Count whole CPUs, at least one. A quota of 1.5 gives 1, since a second thread would only be throttled."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([affinity, *map(int, _quotas(root, membership))]))


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
