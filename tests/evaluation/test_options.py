"""The command line of evaluate, which is read before anything slow is imported."""

import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("words", "end"),
    [
        (["--help"], "SystemExit(0)"),
        (["models/cloze-mini", "--suit", "sts"], "OptionError('unrecognized arguments: --suit"),
    ],
)
def test_help_and_wrong_options_do_not_wait_for_torch(words: list[str], end: str) -> None:
    script = f"""
import sys
from training.evaluate import main
try:
    main({words!r})
except BaseException as error:
    print(repr(error))
print(sorted({{"torch", "transformers", "scipy", "sklearn"}} & set(sys.modules)))
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE)
    ended, imported = found.stdout.splitlines()[-2:]
    assert ended.startswith(end), found.stderr
    assert imported == "[]"
