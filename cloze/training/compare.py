"""cloze compare A B C --data DIR: models side by side, and which differences are more than chance."""

import sys
from collections.abc import Sequence

from cloze.command import run
from cloze.training.evaluation.options import CompareOptions


def main(arguments: Sequence[str] | None = None) -> None:
    """Raises ClozeError."""
    options = CompareOptions.parse(arguments, "cloze compare")

    # torch takes seconds to load; help and option errors need not wait
    from cloze.training.evaluation.compare import compare

    compare(options)


if __name__ == "__main__":
    sys.exit(run(main))
