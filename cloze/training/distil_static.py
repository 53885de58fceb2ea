"""cloze distil-static BUNDLE OUT --corpus FILES: a bundle whose vectors are means of token vectors."""

import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field
from pydantic_settings import CliPositionalArg, CliVariadicArg

from cloze.command import run
from cloze.options import Options


class DistilStaticOptions(Options):
    """Make a bundle whose vectors are means of token vectors: without layers, it is much faster and less accurate."""

    bundle: CliPositionalArg[Path] = Field(description="bundle to distil")
    out: CliPositionalArg[Path] = Field(description="bundle to write; an existing bundle is replaced")
    corpus: CliVariadicArg[list[str]] = Field(
        min_length=1, description="files of sentences like those to embed, one per line; 50,000 are a good start"
    )
    columns: CliVariadicArg[list[str]] = Field(
        [], max_length=1, description="the text column of csv, tsv, jsonl or parquet files"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Raises ClozeError."""
    options = DistilStaticOptions.parse(arguments, "cloze distil-static")

    # torch takes seconds to load; help and option errors need not wait
    from cloze.training.export.static import distil

    distil(options.bundle, options.out, options.corpus, options.columns)


if __name__ == "__main__":
    sys.exit(run(main))
