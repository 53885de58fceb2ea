"""cloze evaluate PATH --data DIR: the figures of a run, a bundle, any encoder or a running server."""

import sys
from collections.abc import Sequence

from cloze.command import run
from cloze.training.evaluation.options import EvaluateOptions


def main(arguments: Sequence[str] | None = None) -> None:
    """Raises ClozeError."""
    options = EvaluateOptions.parse(arguments, "cloze evaluate")

    # torch takes seconds to load; help, option errors and a missing package need not wait
    if options.report:
        import matplotlib  # noqa: F401 - of another extra
    from cloze.training.evaluation.evaluate import evaluate

    evaluate(options)


if __name__ == "__main__":
    sys.exit(run(main))
