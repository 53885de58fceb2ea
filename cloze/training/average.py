"""cloze average RUN RUN ... --out OUT: the mean of several runs' weights, as a run.

Export and evaluate OUT like any other run.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic_settings import CliPositionalArg, CliVariadicArg

from cloze.command import run
from cloze.options import Options


class AverageOptions(Options):
    """Write a run whose weights are the mean of several runs from one parent, or of runs and their parent."""

    runs: CliPositionalArg[list[Path]] = Field(
        description="finished runs with the same parent and the same configuration"
    )
    out: Path = Field(description="run folder to write")
    weights: CliVariadicArg[list[Annotated[float, Field(gt=0, allow_inf_nan=False)]]] = Field(
        [], description="mixing coefficient of each run (default: equal)"
    )
    parent_share: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = Field(
        0.0, description="the parent's mixing coefficient; the runs share the rest"
    )
    parent: str = Field("", description="the parent encoder (default: the one in the first run's recipe)")


def main(arguments: Sequence[str] | None = None) -> None:
    """Raises ClozeError."""
    options = AverageOptions.parse(arguments, "cloze average")

    from cloze.training.loop.soup import average  # torch takes seconds to load; help and option errors need not wait

    average(options.runs, options.out, options.weights, options.parent_share, options.parent)


if __name__ == "__main__":
    sys.exit(run(main))
