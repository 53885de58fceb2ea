"""The progress bar: where it is shown, when, and by which work."""

import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_bundle import write_bundle
from tqdm import tqdm

from cloze.encoding.bundle import Bundle
from cloze.training.bar import PATIENCE, bar
from cloze.training.data.corpus import read_corpus
from cloze.training.data.lexical import Lexical
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.graph_encoder import GraphEncoder

TEXTS = [f"a man plays guitar number {number} of the two dogs" for number in range(40)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Time that passes by `step` whenever it is asked for."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 1000.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def shown(monkeypatch: pytest.MonkeyPatch, step: float, stderr: io.StringIO | None = None) -> io.StringIO:
    """What is written to a terminal from now on, on which work takes `step` seconds and more for each look at it."""
    stderr = Terminal() if stderr is None else stderr
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setattr("tqdm.std.time", Clock(step))
    monkeypatch.setattr(tqdm, "monitor_interval", 0)
    return stderr


def test_work_of_more_than_two_seconds_has_a_bar_with_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = shown(monkeypatch, step=1.0)
    assert list(bar(range(10), desc="counting", unit=" rows")) == list(range(10))
    lines = terminal.getvalue().split("\r")
    assert any(re.search(r"counting: +\d0%.* \d/10 \[00:\d\d<00:\d\d, .*rows", line) for line in lines)
    assert "| 0/10" not in terminal.getvalue()  # not before its time
    assert lines[-1] == "" == lines[-2].strip()  # and gone at the end


@pytest.mark.parametrize(("step", "stderr"), [(PATIENCE / 100, Terminal()), (1.0, io.StringIO())])
def test_quick_work_has_none_and_what_is_not_a_terminal_neither(
    step: float, stderr: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown(monkeypatch, step, stderr)
    assert list(bar(range(10))) == list(range(10))
    assert stderr.getvalue() == ""


def test_whatever_embeds_reads_or_indexes_has_one(
    tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    torch = SentenceEncoder.load(str(tiny_bert), template="[X]", pooling="mean")
    graph = GraphEncoder.of(Bundle.load(write_bundle(tmp_path / "bundle")), "fp32")
    work: list[tuple[str, Callable[[], object]]] = [
        ("embedding", lambda: torch.embed(TEXTS, batch_tokens=16)),
        ("embedding", lambda: graph.embed(TEXTS, batch_tokens=16)),
        ("reading", lambda: read_corpus([str(tmp_path / "texts.txt")])),
        ("indexing", lambda: Lexical(TEXTS)),
    ]
    for name, run in work:
        terminal = shown(monkeypatch, step=1.0)
        run()
        assert f"{name}: " in terminal.getvalue()
