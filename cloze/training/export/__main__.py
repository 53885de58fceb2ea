"""cloze export RUN OUT: a finished run -> graphs, compared with torch and scored -> a bundle.

A bundle can be exported again, for example in another precision: the weights are read from its graph. Bundles that
sentence-transformers has fine-tuned are accepted too.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field
from pydantic_settings import CliPositionalArg

from cloze.command import run
from cloze.training.export.options import BundleOptions


class ExportOptions(BundleOptions):
    """Export a finished run as a bundle of ONNX graphs, which are compared with torch and, with --data, scored."""

    run: CliPositionalArg[Path] = Field(
        description="folder of a finished run, a bundle, or a bundle that was fine-tuned with sentence-transformers"
    )
    out: CliPositionalArg[Path] = Field(description="bundle to write; an existing bundle is replaced")
    denoise: bool | None = Field(
        None,
        description="denoising, as in PromptBERT: subtract the vector of the template alone, or do not (default: as "
        "in training)",
    )
    final_period: bool | None = Field(
        None,
        description="add a period to a text that lacks closing punctuation, as in PromptBERT's evaluation, or do not "
        "(default: as in training)",
    )
    sentence_transformers: bool = Field(False, description="also write the files that sentence-transformers loads")


def main(arguments: Sequence[str] | None = None) -> None:
    """Raises ClozeError."""
    options = ExportOptions.parse(arguments, "cloze export")
    changes = {"max_tokens": options.max_tokens, "denoising": options.denoise, "final_period": options.final_period}
    settings = {name: value for name, value in changes.items() if value is not None}

    # torch takes seconds to load; help and option errors need not wait
    from cloze.training.export.bundle import export

    export(options.run, options.out, options, settings, sentence_transformers=options.sentence_transformers)


if __name__ == "__main__":
    sys.exit(run(main))
