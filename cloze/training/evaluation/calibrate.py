"""cloze calibrate BUNDLE --pairs FILE: learn what a cosine of the bundle means, as a score or a probability."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic_settings import CliPositionalArg

from cloze.command import run
from cloze.options import Options


class CalibrateOptions(Options):
    """Fit a curve from a bundle's cosines to scores or probabilities on judged pairs, and add it to the bundle."""

    bundle: CliPositionalArg[Path] = Field(
        description="folder of the bundle; a file and a section of the model card are added to it"
    )
    pairs: Path = Field(
        description="csv, tsv, jsonl or parquet with sentence1, sentence2 and label (1 for the same meaning, else 0) "
        "or score; or an sts-*.csv of the STS benchmark"
    )
    wanted_precision: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.95, description="also find the threshold with this precision, if the pairs have labels"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Raises ClozeError."""
    options = CalibrateOptions.parse(arguments, "cloze calibrate")

    # torch takes seconds to load; help and option errors need not wait
    from cloze.training.evaluation.curves import calibrate

    calibrate(options.bundle, options.pairs, options.wanted_precision)


if __name__ == "__main__":
    sys.exit(run(main))
