"""cloze templates ENCODER --dev FILE: find the template that suits an untuned encoder best."""

import sys
from collections.abc import Sequence

from cloze.command import run
from cloze.training.evaluation.options import TemplateOptions


def main(arguments: Sequence[str] | None = None) -> None:
    """Raises ClozeError."""
    options = TemplateOptions.parse(arguments, "cloze templates")

    # torch takes seconds to load; help and option errors need not wait
    from cloze.training.evaluation.templates import search

    search(options)


if __name__ == "__main__":
    sys.exit(run(main))
