"""The progress bar of a job: the rows done, the estimated total, and the time left.

Counting the rows of text files beforehand would mean reading them twice, so the total is an estimate until the end.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter, time
from typing import Final

from tqdm import tqdm

from cloze.service.bulk.output import Counts

BAR: Final = "{l_bar}{bar}| {n_fmt}/{total_fmt} rows [{elapsed}, {remaining} left, {rate_noinv_fmt}]"
ESTIMATED: Final = BAR.replace("{total_fmt}", "about {total_fmt}")


@dataclass(frozen=True)
class Progress:
    """The progress of a complete part: the bytes that it takes in its file, its counts and its seconds."""

    bytes: int
    counts: Counts
    seconds: float


def estimated_rows(total_bytes: int, rows: int, read_bytes: int) -> int | None:
    """Estimate the rows of the input, as if all were as long as those read; None before the first bytes."""
    return round(total_bytes * rows / read_bytes) if read_bytes else None


def show(progress: Iterable[Progress], total_bytes: int, earlier: Counts) -> tuple[Counts, float]:
    """Show the parts of a job as they complete. `earlier` counts the rows of previous runs.

    Return the sum of the counts, and the seconds from the beginning of the first part to the end of the last one.
    """
    total, read_bytes, began, now = Counts(), 0, None, 0.0
    # The speed is the mean (smoothing 0), because parts arrive in bursts.
    with tqdm(initial=earlier.all_rows, unit=" rows", smoothing=0, miniters=1, bar_format=ESTIMATED) as bar:
        for part in progress:
            now = perf_counter()
            if began is None:
                began = now - part.seconds
                bar.start_t = time() - part.seconds  # the speed of the workers, without the start of Ray
            total = Counts.total([total, part.counts])
            read_bytes += part.bytes
            rows = earlier.all_rows + total.all_rows
            estimate = estimated_rows(total_bytes, total.all_rows, read_bytes)
            bar.total = estimate and max(estimate, rows)
            bar.update(rows - bar.n)
        bar.bar_format, bar.total = BAR, bar.n
        bar.refresh()
    return total, now - (began or now)
