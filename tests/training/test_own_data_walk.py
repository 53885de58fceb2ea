"""From own texts to a service: the commands of docs/training.md as they are printed, without a hub."""

import json
import re
import shlex
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import httpx
import numpy as np
import pytest
from harness import ROOT, Process
from patience import PATIENCE

from encoding.bundle import Bundle
from training.model.graph_encoder import GraphEncoder

PAGE = ROOT / "docs" / "training.md"
WORDS = ["dog", "man", "letter", "city", "rain", "guitar", "market", "friend", "stage", "field", "text", "green", "old"]
TEXTS = [f"The {a} and the {b} run over the {c}." for a in WORDS for b in WORDS for c in WORDS][:1400]


def commands() -> list[list[str]]:
    """The words of each line of the block that names this test."""
    mark = f"<!-- tested by {Path(__file__).relative_to(ROOT)} -->"
    found = re.search(re.escape(mark) + r"\n```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return [shlex.split(line) for line in found[1].replace("\\\n", "").splitlines()]


def run(words: list[str]) -> None:
    python, option, name, *arguments = words
    assert (python, option) == ("python", "-m")
    spec = find_spec(name)
    assert spec is not None
    module = import_module(name if spec.submodule_search_locations is None else f"{name}.__main__")
    assert not module.main(arguments)


@pytest.mark.long
def test_each_step_is_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("texts.csv").write_text("text\n" + "".join(f"{text}\n" for text in TEXTS), encoding="utf-8")
    pairs = [f"{TEXTS[at]},{TEXTS[at + 1 if at % 2 else 13 * at]},{at % 2}\n" for at in range(2, 102)] * 2
    Path("pairs.csv").write_text("sentence1,sentence2,label\n" + "".join(pairs), encoding="utf-8")
    *steps, serve = commands()
    assert [words[2] for words in steps] == [f"training.{name}" for name in ("fit", "evaluate", "compare", "export")]
    assert serve == ["python", "-m", "service", "--bundle", "models/mine"]
    for words in steps:
        run(words)
    shown = capsys.readouterr()
    assert re.search(r"finished: runs/mine/model \(step \d+ of \d+, dev_average_precision [\d.]+; before", shown.err)
    assert "average precision" in shown.out
    assert "cloze-mini int8" in shown.out
    chosen = json.loads(Path("runs/mine/run.json").read_text(encoding="utf-8"))
    assert f"{chosen['dev_score']:.2f}" in shown.out  # evaluate gives the figure by which fit chose
    assert_served(tmp_path / "models" / "mine")


def assert_served(bundle: Path) -> None:
    """The vectors of the service are those of the bundle's graph."""
    process = Process("--bundle", str(bundle), "--threads", "1", "--precision", "fp32")
    try:
        answer = httpx.post(f"{process.url}/embed", json={"inputs": TEXTS[:3], "normalize": False}, timeout=PATIENCE)
    finally:
        process.close()
    assert answer.status_code == 200
    loaded = Bundle.load(str(bundle))
    expected = GraphEncoder.of(loaded, "fp32").embed(TEXTS[:3])
    np.testing.assert_allclose(np.array(answer.json()), expected, atol=1e-4)
