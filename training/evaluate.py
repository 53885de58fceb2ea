"""python -m training.evaluate PATH --data DIR: the figures of a run, a bundle, any encoder or a running server."""

import sys

from encoding.command import run
from evaluation.command import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(run(main))
