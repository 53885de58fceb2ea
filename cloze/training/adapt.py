"""cloze adapt --documents PATHS --pairs FILE --out OUT: a run that is better on your own documents.

Queries and the documents that answer them help most; a hundred are already many. Each round of training holds out a
part of them, which chooses the parent's share in the result. Without pairs, queries are made from the documents, and
label.csv lists the documents for which a real query would help most.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator
from pydantic_settings import CliVariadicArg

from cloze.command import run
from cloze.encoding.bundle import DEFAULT
from cloze.options import Options, flag
from cloze.training.recipes.recipe import LARGEST_SEED


class AdaptOptions(Options):
    """Fine-tune an encoder on your documents and on queries that they answer, and report whether it improved."""

    encoder: str = Field(
        DEFAULT, description="encoder to start from, the parent: a run, a bundle, a folder, a hub name, or cloze-mini"
    )
    pairs: Path | None = Field(
        None,
        description="table (csv, tsv, jsonl, parquet) with the columns query, document and, optionally, score; or "
        "sentence1, sentence2 and label; or text and label; or a folder in BEIR's layout. A document is given by "
        "its text or its name",
    )
    columns: CliVariadicArg[list[str]] = Field(
        [],
        max_length=3,
        description="columns of the table that hold query, document and score, if they have other names",
    )
    documents: CliVariadicArg[list[Path]] = Field(
        [],
        description="folders of .txt, .md and .html files, single files of these types, or tables with a title and a "
        "text",
    )
    document_columns: CliVariadicArg[list[str]] = Field([], description="text columns in tables of documents")
    out: Path = Field(Path("runs/adapt"), description="run folder to write")
    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED)] = Field(42, description="seed of all random draws")

    @model_validator(mode="after")
    def _columns_of_something(self) -> Self:
        for columns, of in (("columns", "pairs"), ("document_columns", "documents")):
            if getattr(self, columns) and not getattr(self, of):
                raise ValueError(f"{flag(columns)} names columns of {flag(of)}, which is not given")
        return self


def main(arguments: Sequence[str] | None = None) -> None:
    """Raises ClozeError."""
    options = AdaptOptions.parse(arguments, "cloze adapt")

    # torch takes seconds to load; help and option errors need not wait
    from cloze.training.adaptation.adapt import adapt

    adapt(
        options.encoder,
        options.pairs,
        options.columns,
        options.documents,
        options.document_columns,
        options.out,
        options.seed,
    )


if __name__ == "__main__":
    sys.exit(run(main))
