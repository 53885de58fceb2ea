"""python -m training.adopt MODEL OUT: any model of sentence-transformers -> a bundle.

The bundle is compared with sentence-transformers itself and written completely or not at all.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field
from pydantic_settings import CliPositionalArg

from encoding.command import program, run
from training.export.options import BundleOptions

__all__ = ["main"]


class AdoptOptions(BundleOptions):
    """Make a bundle of a sentence-transformers model, compared with sentence-transformers itself."""

    model: CliPositionalArg[str] = Field(description="folder of a sentence-transformers model, or its hub name")
    out: CliPositionalArg[Path] = Field(description="bundle to write; a bundle there is replaced")


def main(arguments: Sequence[str] | None = None) -> None:
    """Raises ClozeError."""
    options = AdoptOptions.read(sys.argv[1:] if arguments is None else arguments, program("training.adopt"))

    from training.export.adoption import adopt  # torch takes seconds, for which help and a wrong option need not wait

    adopt(options.model, options.out, options)


if __name__ == "__main__":
    sys.exit(run(main))
