"""How every command ends: 0 when done, 1 on an error that its user can put right, 130 after Ctrl-C.

Usage errors end with 2: argparse does that.
"""

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

from encoding.errors import ClozeError
from training.errors import RunError

__all__ = ["check_new_file", "positive", "positive_number", "run"]


def run(main: Callable[[], int | None]) -> int:
    """Call `main` and give the exit code, its own or 0; a ClozeError becomes one line on stderr, no traceback."""
    try:
        return main() or 0
    except ClozeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def positive(word: str) -> int:
    """An option's whole number from 1 on, for argparse."""
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is no whole number from 1 on")
    return int(word)


def positive_number(word: str) -> float:
    """An option's number above 0, for argparse."""
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{word!r} is no number above 0")
    return number


def check_new_file(path: Path) -> None:
    """Raises RunError where no file can be written at `path`: before the work whose result will go there."""
    if path.is_dir():
        raise RunError(f"{path} is a folder; name a file to write in it")
    if not path.parent.is_dir():
        raise RunError(f"{path.parent} is not a folder; make it first, {path.name} is written there at the end")
