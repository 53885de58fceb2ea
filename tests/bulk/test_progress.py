"""The progress bar: its estimate of the rows, and what it prints."""

import re
from collections.abc import Iterator
from functools import partial

import pytest
from tqdm import tqdm

from cloze.service.bulk.output import Counts
from cloze.service.bulk.progress import Progress, estimated_rows, show


@pytest.mark.parametrize(
    ("total_bytes", "rows", "read_bytes", "estimate"),
    [(1000, 10, 100, 100), (1000, 10, 1000, 10), (1000, 3, 900, 3), (1000, 0, 100, 0), (1000, 0, 0, None)],
)
def test_rows_are_estimated_from_the_bytes_of_a_row(
    total_bytes: int, rows: int, read_bytes: int, estimate: int | None
) -> None:
    assert estimated_rows(total_bytes, rows, read_bytes) == estimate


class Clock:
    """Time that passes only while a part is computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        for name in ("tqdm.std.time", "cloze.service.bulk.progress.time", "cloze.service.bulk.progress.perf_counter"):
            monkeypatch.setattr(name, lambda: self.now)

    def parts(self) -> Iterator[Progress]:
        """100 rows of 500 bytes, after 9 seconds in which Ray started."""
        for rows, failed, seconds in ((20, 0, 9 + 10), (10, 10, 10), (60, 0, 30)):
            self.now += seconds
            counts = Counts(rows=rows, failed=failed)
            yield Progress(bytes=5 * counts.all_rows, counts=counts, seconds=min(seconds, 10))


def shown(printed: str) -> list[str]:
    """What the bar showed, one after another, without the bar itself."""
    lines = [re.sub(r"\|.*\|", "", line) for line in printed.split("\r")]
    return [" ".join(line.split()) for line in lines if line]


def test_the_bar_shows_rows_their_estimate_and_the_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloze.service.bulk.progress.tqdm", partial(tqdm, ncols=100))
    counts, seconds = show(Clock(monkeypatch).parts(), 1100, Counts())
    assert counts == Counts(rows=90, failed=10)
    assert seconds == 50
    assert shown(capsys.readouterr().err)[:-1] == [
        "0/about ? rows [00:00, ? left, ? rows/s]",
        "9% 20/about 220 rows [00:10, 01:40 left, 2.00 rows/s]",
        "18% 40/about 220 rows [00:20, 01:30 left, 2.00 rows/s]",
        "45% 100/about 220 rows [00:50, 01:00 left, 2.00 rows/s]",
        "100% 100/100 rows [00:50, 00:00 left, 2.00 rows/s]",
    ]


def test_rows_of_an_earlier_start_are_done_and_do_not_count_as_speed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloze.service.bulk.progress.tqdm", partial(tqdm, ncols=100))
    show(Clock(monkeypatch).parts(), 1100, Counts(rows=90, failed=30))
    assert shown(capsys.readouterr().err)[:-1] == [
        "120/about ? rows [00:00, ? left, ? rows/s]",
        "64% 140/about 220 rows [00:10, 00:40 left, 2.00 rows/s]",
        "73% 160/about 220 rows [00:20, 00:30 left, 2.00 rows/s]",
        "100% 220/about 220 rows [00:50, 00:00 left, 2.00 rows/s]",
        "100% 220/220 rows [00:50, 00:00 left, 2.00 rows/s]",
    ]


def test_nothing_is_left_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert show(iter(()), 1100, Counts(rows=3)) == (Counts(), 0)
    assert " 3/3 rows [" in capsys.readouterr().err.split("\r")[-1]
