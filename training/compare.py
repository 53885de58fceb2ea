"""python -m training.compare A B C --data DIR: models side by side, and which differences are more than chance."""

import sys

from encoding.command import run
from evaluation.compare import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(run(main))
