"""The race of a model's graphs: who wins, and what is logged."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tiny_bundle import not_finite, write_bundle

from cloze.encoding.bundle import Bundle
from cloze.encoding.text import Batch
from cloze.service.errors import SessionError
from cloze.service.inference.session import ROUNDS, SHAPES, Session, fastest


class Clock:
    """Time that passes only while a runner runs."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Runner:
    """Takes so many seconds for a text alone and for a batch; the first run of all takes longer, to warm."""

    precision: str
    clock: Clock
    alone: float
    batch: float
    runs: int = 0

    def run(self, batch: Batch) -> object:
        self.runs += 1
        self.clock.now += (self.alone if len(batch.input_ids) == 1 else self.batch) * (9 if self.runs == 1 else 1)
        return None


@pytest.mark.parametrize(
    ("fp32", "int8", "winner", "speeds"),
    [
        ((2.0, 20.0), (1.0, 8.0), "int8", "fp32 1.00, int8 2.24"),
        ((2.0, 20.0), (3.0, 30.0), "fp32", "fp32 1.00, int8 0.67"),
        ((2.0, 20.0), (2.0, 20.0), "fp32", "fp32 1.00, int8 1.00"),
        ((2.0, 20.0), (4.0, 5.0), "int8", "fp32 1.00, int8 1.41"),
    ],
)
def test_the_least_time_over_both_shapes_wins(
    fp32: tuple[float, float],
    int8: tuple[float, float],
    winner: str,
    speeds: str,
    bundle: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    runners = [Runner("fp32", clock, *fp32), Runner("int8", clock, *int8)]
    with caplog.at_level(logging.INFO, "cloze.service.inference.session"):
        chosen = fastest(runners, Bundle.load(bundle).text_encoder, "mini", clock)
    assert chosen.precision == winner
    assert [runner.runs for runner in runners] == [ROUNDS * len(SHAPES)] * 2
    assert f"model mini: relative speeds on this machine: {speeds}; precision=auto chooses {winner}" in caplog.text


def test_a_graph_that_fails_in_the_race_is_named(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "tiny", not_finite(), precisions=("fp32", "int8"))
    with pytest.raises(
        SessionError, match=r"tiny: a graph fails: .* not finite .*; name the precision that works, fp32"
    ):
        Session.load(Bundle.load(folder), provider="cpu")


def test_real_sessions_race(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that passes only while the first one runs."""
    loaded, clock, run = Bundle.load(bundle), Clock(), Session.run
    slow, fast = (Session.load(loaded, provider="cpu") for _ in range(2))

    def timed(session: Session, batch: Batch) -> Any:
        clock.now += session is slow
        return run(session, batch)

    monkeypatch.setattr(Session, "run", timed)
    assert fastest([slow, fast], loaded.text_encoder, "mini", clock) is fast
    assert clock.now == ROUNDS * len(SHAPES)
