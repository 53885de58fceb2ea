"""python -m training.pretrain [--key-name value ...]: masked language modelling, continued or from scratch.

This is the recipe `mlm` of training.fit. The run's model/ is a masked language model that transformers, the prompt
methods and DiffCSE's generator can load. As an encoder it can be trained further, evaluated and exported.
"""

import sys
from collections.abc import Sequence

from encoding.command import program, run
from training.loop import fit_command
from training.methods.mlm import MLM

__all__ = ["main"]

METHODS = {"mlm": MLM}


def main(arguments: Sequence[str] | None = None) -> int:
    """Raises ClozeError."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if any(word == "--resume" or word.startswith("--resume=") for word in words):
        return fit_command.resume(METHODS, words)
    return fit_command.train(METHODS, "mlm", words, program("training.pretrain"))


if __name__ == "__main__":
    sys.exit(run(main))
