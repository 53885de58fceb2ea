"""From own texts to a service: docs/training.md and docs/tutorial.md as they are printed, without a hub."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import httpx
import numpy as np
import pytest
from harness import ROOT, Process
from patience import PATIENCE
from test_fixtures import BUNDLE

from cloze.command import COMMANDS
from cloze.encoding.bundle import Bundle
from cloze.training.adaptation import rounds
from cloze.training.model.graph_encoder import GraphEncoder

PAGE = ROOT / "docs" / "training.md"
BOX = set("┏┡└│")
OF_A_GAIN = ("a round with", "last round", "with half")  # two steps of training may give none
SIZES = "DOCUMENTS, LEARN, CHECK = 1500, 100, 300"
WORDS = ["dog", "man", "letter", "city", "rain", "guitar", "market", "friend", "stage", "field", "text", "green", "old"]
TEXTS = [f"The {a} and the {b} run over the {c}." for a in WORDS for b in WORDS for c in WORDS][:1400]

PAGES = {
    "hours": "The library is open from nine to six. On Sundays it is closed.",
    "fees": "A late book costs a pound a week. A lost one is paid in full.",
    "loans": "A reader may keep ten books for three weeks. Renew them at the desk.",
    "rooms": "Two rooms can be booked for an hour. Food is not allowed there.",
    "printing": "A printed page costs ten pence. Pay with a card at the machine.",
    "cards": "Bring a letter with your address. The card is free for residents.",
    "children": "Stories are read on Saturday mornings. Parents stay in the building.",
    "garden": "The garden behind the house is open in summer. Dogs wait outside.",
    "archive": "Old newspapers are kept in the cellar. Ask a day before your visit.",
    "music": "Scores and records are on the second floor. Headphones are lent out.",
    "network": "The wireless network needs no password. Its limit is an hour a day.",
    "lockers": "Leave bags in the lockers at the entrance. A coin is given back.",
    "access": "A ramp leads to the side door. The lift goes to all floors.",
    "donations": "Books in good condition are welcome. We cannot fetch them.",
    "courses": "Courses for computers begin in March. Beginners are welcome.",
    "jobs": "Students can work on two evenings. Write to the office.",
}
ASKED = {
    "hours": "when can I come",
    "fees": "what if I am late",
    "loans": "how long can I borrow",
    "rooms": "place for a meeting",
    "printing": "print a document",
    "cards": "how to join",
    "children": "events for kids",
    "garden": "sit outdoors",
    "archive": "historic papers",
    "music": "listen to an album",
    "network": "internet for my laptop",
    "lockers": "where to put a coat",
    "access": "wheelchair",
    "donations": "give away novels",
    "courses": "learn to use a PC",
    "jobs": "earn money here",
}


def commands(mark: str) -> list[list[str]]:
    """The words of each line of the block that names this test."""
    begin = f"<!-- tested by {Path(__file__).relative_to(ROOT)}{mark} -->"
    found = re.search(re.escape(begin) + r"\n```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return [shlex.split(line) for line in found[1].replace("\\\n", "").splitlines()]


def run(words: list[str]) -> None:
    """`cloze NAME ...`."""
    cloze, command, *arguments = words
    assert cloze == "cloze"
    name = f"cloze.{COMMANDS[command][0]}"
    spec = find_spec(name)
    assert spec is not None
    module = import_module(name if spec.submodule_search_locations is None else f"{name}.__main__")
    assert not module.main(arguments)


@pytest.fixture
def small_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory has a small bundle called cloze-mini, which commands take before the shipped one."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(BUNDLE, "cloze-mini")


@pytest.mark.long
@pytest.mark.usefixtures("small_default")
def test_documents_and_queries_become_a_served_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder of Markdown, and a table that names its files."""
    monkeypatch.setattr(rounds, "STEPS", 4)
    Path("docs").mkdir()
    for number, (name, text) in enumerate(PAGES.items()):
        Path("docs", f"{name}.md").write_text(f"# {name}\n\n{text}\n", encoding="utf-8")
        for more in range(3):
            page = f"# {name}, part {more}\n\nSee also part {number}. {TEXTS[7 * number + more]}\n"
            Path("docs", f"{name}-{more}.md").write_text(page, encoding="utf-8")
    rows = [f"{query},{name}.md\n" for name, query in ASKED.items()]
    Path("queries.csv").write_text("query,document\n" + "".join(rows), encoding="utf-8")
    adapt, export, serve = commands("")
    assert [words[:2] for words in (adapt, export, serve)] == [["cloze", each] for each in ("adapt", "export", "serve")]
    run(adapt)
    shown = capsys.readouterr().err
    assert "queries: 16, answered by 16 documents" in shown
    assert "16 queries held out: nDCG@10" in shown
    assert "next: cloze export runs/mine models/NAME" in shown
    found = json.loads(Path("runs/mine/run.json").read_text(encoding="utf-8"))["recipe"]["held_out"]
    assert found["after"] >= found["before"]
    run(export)
    assert f"nDCG@10 was {found['before']:.1f} with cloze-mini" in Path("models/mine/README.md").read_text(
        encoding="utf-8"
    )
    assert serve[2:] == ["--bundle", "models/mine"]
    assert Bundle.load("models/mine").spec.template == Bundle.load("cloze-mini").spec.template
    assert_served(tmp_path / "models" / "mine")


@pytest.mark.long
@pytest.mark.usefixtures("small_default")
def test_each_step_is_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("texts.csv").write_text("text\n" + "".join(f"{text}\n" for text in TEXTS), encoding="utf-8")
    pairs = [f"{TEXTS[at]},{TEXTS[at + 1 if at % 2 else 13 * at]},{at % 2}\n" for at in range(2, 102)] * 2
    Path("pairs.csv").write_text("sentence1,sentence2,label\n" + "".join(pairs), encoding="utf-8")
    *steps, serve = commands(", with a recipe")
    assert [words[1] for words in steps] == ["fit", "evaluate", "compare", "export"]
    assert serve == ["cloze", "serve", "--bundle", "models/mine"]
    for words in steps:
        run(words)
    shown = capsys.readouterr()
    assert re.search(r"finished: runs/mine/model \(step \d+ of \d+, dev_average_precision [\d.]+; before", shown.err)
    assert "average precision" in shown.out
    assert "cloze-mini int8" in shown.out
    chosen = json.loads(Path("runs/mine/run.json").read_text(encoding="utf-8"))
    assert f"{chosen['dev_score']:.2f}" in shown.out  # evaluate gives the figure by which fit chose
    assert_served(tmp_path / "models" / "mine")


@pytest.mark.long
def test_the_tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each block of docs/tutorial.md in order, with the model that comes with Cloze, less text and shorter training.

    The lines that the page shows appear.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rounds, "STEPS", 2)
    page = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    (install, folder, *steps), [script] = (
        re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("sh", "python")
    )
    assert (install.split()[:3], folder.split()[0]) == (["python3", "-m", "venv"], "mkdir")
    assert script.count(SIZES) == 1
    Path("make_text.py").write_text(script.replace(SIZES, "DOCUMENTS, LEARN, CHECK = 60, 16, 10"), encoding="utf-8")
    make_text, *in_process, export_and_serve, request = steps
    subprocess.run([sys.executable, *shlex.split(make_text)[1:]], check=True)
    export, serve = export_and_serve.splitlines()
    for command in (*in_process, export):
        run(shlex.split(command))
    printed = capsys.readouterr()
    output = printed.out + printed.err
    lines = {without_digits(line) for line in output.splitlines()}
    for line in "".join(re.findall(r"```text\n(.*?)```", page, re.DOTALL)).splitlines():
        if line.startswith("┃"):  # the head of a table
            assert all(column.strip() in output for column in line.split("┃"))
        elif not BOX.intersection(line) and "->" not in line and not line.startswith(OF_A_GAIN):
            assert without_digits(line) in lines
    assert serve == "cloze serve --bundle models/mine"
    process = Process("--bundle", str(tmp_path / "models" / "mine"), "--threads", "1")
    try:
        request = request.replace("127.0.0.1:8080", process.url.removeprefix("http://"))
        answer = subprocess.run(["bash", "-c", request], check=True, capture_output=True, text=True)
    finally:
        process.close()
    [example] = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    assert [sorted(entry) for entry in json.loads(answer.stdout)] == [sorted(entry) for entry in json.loads(example)]


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


def without_digits(line: str) -> str:
    """A line of output without what differs from run to run: numbers, and the blanks that align them."""
    return re.sub(r"[-+]?\d[\d.,]*", "0", " ".join(line.split()))
