"""Run the examples of docs/clients.md against a live server with the shipped model.

The mark above each block says how: `<!-- tested -->`, `<!-- tested with OPTIONS -->` of the server, or
`<!-- shape only: why -->`. A Python example must print the comments beside its prints. A shell example must return the
JSON block that follows it.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
from harness import ROOT, Process

from benchmarks.readme import MODEL

PAGE = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
URL = "127.0.0.1:8080"
HEADING = re.compile(r"^##? (.+)$", re.MULTILINE)
FENCE = re.compile(r"(?:^<!-- ([^\n]+) -->\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"tested|tested with (.+)|shape only: .+")
QUIET = {"HAYSTACK_TELEMETRY_ENABLED": "False", "HF_HUB_DISABLE_TELEMETRY": "1"}

Start = Callable[[str], str]


class Block(NamedTuple):
    heading: str
    mark: str
    language: str
    content: str


def blocks() -> list[Block]:
    return [Block(HEADING.findall(PAGE, 0, at.start())[-1], at[1] or "", at[2], at[3]) for at in FENCE.finditer(PAGE)]


def recipes() -> list[object]:
    """Each tested example, and the JSON block after it, if there is one."""
    every = [*blocks(), Block("", "", "", "")]
    return [
        pytest.param(recipe, after.content if after.language == "json" else "", id=recipe.heading)
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


@pytest.mark.parametrize("block", blocks(), ids=lambda block: block.heading)
def test_a_block_says_whether_it_is_tested(block: Block) -> None:
    if block.language == "json":
        assert not block.mark, "a JSON block is the response to the example before it"
    else:
        assert MARK.fullmatch(block.mark), "write <!-- tested --> or <!-- shape only: why --> above the block"


@pytest.mark.parametrize(("recipe", "answer"), recipes())
def test_a_recipe_does_what_the_page_shows(recipe: Block, answer: str, start: Start, tmp_path: Path) -> None:
    options = MARK.fullmatch(recipe.mark)
    assert options is not None
    code = recipe.content.replace(URL, start(options[1] or ""))
    if recipe.language == "python":
        shown = re.findall(r"print\(.*\)  # (.+)$", recipe.content, re.MULTILINE)
        assert shown, "an example prints something, and a comment beside it has the output"
        assert run([sys.executable, "-c", code], tmp_path).splitlines() == shown
    else:
        if not shutil.which("curl"):
            pytest.skip("curl is not installed")
        answers, expected = parts(run(["bash", "-euc", code], tmp_path)), parts(answer)
        assert expected, "a JSON block with the response follows a shell example"
        assert same(answers, expected), "\n".join(map(json.dumps, answers))


def run(command: list[str], home: Path) -> str:
    """Output of the command. HOME is an empty folder, and telemetry of the clients is off."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CLOZE_", "OPENAI_", "HF_"))}
    done = subprocess.run(command, env=kept | QUIET | {"HOME": str(home)}, capture_output=True, text=True, timeout=120)
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
