"""cloze weigh MODEL --corpus FILES --out OUT: a run whose mean pooling gives frequent tokens less weight.

Nothing is trained: the tokens of the corpus are counted (training/model/token_weights.py). It improves search more than
similarity. Export and evaluate OUT like any other run.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic_settings import CliPositionalArg, CliVariadicArg

from cloze.command import run
from cloze.options import Options


class WeighOptions(Options):
    """Write a run whose mean pooling gives a token less weight the more often it occurs in your text."""

    model: CliPositionalArg[str] = Field(
        description="a run, a bundle, an encoder's folder or a hub name, with mean pooling; an encoder without a "
        "configuration of its own is read with mean pooling"
    )
    corpus: CliVariadicArg[list[str]] = Field(
        min_length=1, description="files of sentences like those to embed, one per line; their tokens are counted"
    )
    columns: CliVariadicArg[list[str]] = Field([], description="text columns of csv, tsv, jsonl or parquet files")
    smoothing: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        0.03,
        description="the weight of a token that makes up the share p of the corpus is this / (this + p); the larger, "
        "the more equal the weights",
    )
    out: Path = Field(description="run folder to write")


def main(arguments: Sequence[str] | None = None) -> None:
    """Raises ClozeError."""
    options = WeighOptions.parse(arguments, "cloze weigh")

    from cloze.training.loop.weigh import weigh  # torch takes seconds to load; help and option errors need not wait

    weigh(options.model, options.out, options.corpus, options.columns, options.smoothing)


if __name__ == "__main__":
    sys.exit(run(main))
