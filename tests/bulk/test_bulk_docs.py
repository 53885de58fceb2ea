"""docs/bulk.md, docs/scale.md and docs/notes/scale.md: their tables, and every example that says it is tested."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import PATIENCE
from reference.tables import TABLES, documented

from cloze.service.bulk.__main__ import BulkOptions

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "bulk.md").read_text(encoding="utf-8")
MARK = re.compile(r"^(?:<!-- ([^\n]+) -->\n)?```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = MARK.findall(PAGE)
TESTED = [code for mark, code in BLOCKS if mark == "tested"]
TEXTS = ["A man plays a guitar.", "Someone makes music.", "Shares fell.", "Two dogs run."]


@pytest.mark.parametrize("name", [name for name in TABLES if name not in ("settings", "metrics")])
def test_the_documented_tables_are_the_code_and_the_measurements(name: str) -> None:
    assert documented(name) == TABLES[name][1](), "run `make reference`"


def test_every_example_says_whether_it_is_tested() -> None:
    assert [mark for mark, _ in BLOCKS if not re.fullmatch("tested|shape only: .+", mark)] == []
    assert len(TESTED) == 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the examples run: the output of the page's first command, and the shipped model."""
    home = tmp_path_factory.mktemp("examples")
    (home / "models").symlink_to(ROOT / "models")
    (home / "texts.txt").write_text("\n".join(TEXTS))
    words = ["texts.txt", "vectors", "--bundle", "models/cloze-mini", "--rows-per-file", "2"]
    run([sys.executable, "-m", "cloze.service.bulk", *words], home)
    return home


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.parametrize("code", TESTED, ids=lambda code: re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE)[0])
def test_an_example_prints_what_the_page_shows(code: str, folder: Path) -> None:
    shown = re.findall(r"print\(.*\)  # (.+)$", code, re.MULTILINE)
    assert shown
    assert run([sys.executable, "-c", code], folder).splitlines()[-len(shown) :] == shown


def run(command: list[str], home: Path) -> str:
    own = {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    environ = os.environ | own | {"RAY_ADDRESS": "local"}  # else it joins the cluster of a test that runs beside it
    done = subprocess.run(command, cwd=home, env=environ, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_several_columns_are_named_one_after_the_other() -> None:
    words = ["texts.jsonl", "vectors", "--columns", "title", "url", "--id-column", "url"]
    options = BulkOptions.parse(words, "bulk")
    assert (options.columns, options.id_column, str(options.out)) == (["title", "url"], "url", "vectors")
