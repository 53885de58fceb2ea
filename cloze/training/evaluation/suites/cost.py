"""The cost of a model on this machine: sentences per second, its size, and the memory of the process that runs it.

The sentences are the first of STS-B test. The speed is the median of several passes after a short warm-up. The memory
is the peak of this process during the passes, including the other suites' data; outside Linux, the peak of the process
so far. For a server only the speed is measured, as its client sees it.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import ClassVar, Final

from cloze.machine import available_cpus, peak_memory, processor
from cloze.training.evaluation.sts import load_tasks
from cloze.training.evaluation.task import Score, Subject, Task

SENTENCES: Final = 1000
WARM_UP: Final = 64
PASSES: Final = 3


def tasks(data: Path | None, own: Sequence[Path]) -> list[Task]:
    """One task. Raises CorpusError."""
    if data is None:
        return []
    sentences = load_tasks(data, ("STS-B",))["STS-B"].left[:SENTENCES]
    return [CostTask("STS-B", sentences, f"{processor()}, CPUs: {available_cpus()}")]


@dataclass(frozen=True)
class CostTask(Task):
    suite: ClassVar[str] = "cost"
    timed: ClassVar[bool] = True
    sentences: list[str]
    machine: str

    def run(self, subject: Subject) -> list[Score]:
        _forget_peak()
        subject.embed(self.sentences[:WARM_UP])
        seconds = []
        for _ in range(PASSES):
            start = time.perf_counter()
            subject.embed(self.sentences)
            seconds.append(time.perf_counter() - start)
        figures = {"sentences/s": len(self.sentences) / median(seconds)}
        if subject.size is not None:
            figures |= {"size MB": subject.size / 1e6}
            figures |= {"peak memory MB": peak / 1e6} if (peak := peak_memory()) else {}
        counts, details = {"sentences": len(self.sentences)}, {"machine": self.machine}
        return [Score(self.suite, self.name, metric, value, counts, None, details) for metric, value in figures.items()]


def _forget_peak() -> None:
    """Reset the kernel's peak, so that one precision's memory does not count for the next one."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
