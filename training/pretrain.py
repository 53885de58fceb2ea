"""python -m training.pretrain [--key value ...]: masked language modelling, continued or from scratch.

The recipe `mlm` of training.fit under its own name. The run's model/ is a masked language model that transformers, the
prompt methods and DiffCSE's generator read; as an encoder it can be trained further, evaluated and exported.
"""

import sys
from collections.abc import Sequence

from training import fit
from training.cli import run

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Raises ClozeError; usage errors end the process with 2."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    resumes = any(word.partition("=")[0] == "--resume" for word in words)
    return fit.main(words if resumes else ["mlm", *words], "training.pretrain")


if __name__ == "__main__":
    sys.exit(run(main))
