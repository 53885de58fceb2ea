"""The command line of evaluate, which is read before anything slow is imported."""

import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("words", [["--help"], ["models/cloze-mini", "--suit", "sts"]])
def test_help_and_wrong_options_do_not_wait_for_torch(words: list[str]) -> None:
    script = f"""
import contextlib, sys
from training.evaluate import main
with contextlib.suppress(SystemExit, Exception):
    main({words!r})
print(sorted({{"torch", "transformers", "scipy", "sklearn"}} & set(sys.modules)))
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE)
    assert found.stdout.splitlines()[-1] == "[]", found.stderr
