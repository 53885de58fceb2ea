"""python -m training.templates ENCODER --dev FILE: the template that suits an untuned encoder best."""

import sys

from encoding.command import run
from evaluation.templates import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(run(main))
