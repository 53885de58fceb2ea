"""python -m training.evaluate PATH --data DIR: the figures of a run, a bundle, any encoder or a running server."""

import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field
from pydantic_settings import CliPositionalArg, CliVariadicArg

from encoding.command import program
from evaluation.options import HELP, ScoringOptions

__all__ = ["EvaluateOptions", "main"]


class EvaluateOptions(ScoringOptions):
    """Print the figures of a run, a bundle, any encoder or a running server.

    A bundle's graphs are run as they are, one row per precision. Test sets compare models; the two development sets,
    printed apart, are the ones to choose by. Collections to search are those in the data's folder retrieval.
    """

    path: CliPositionalArg[str] = Field(
        description="a run, a bundle, an encoder's folder, a hub name, or a server's http://HOST:PORT"
    )
    suite: CliVariadicArg[list[str]] = Field([], description=HELP)
    out: Path | None = Field(None, alias="json", description="file to write the figures to as well")
    card: bool = Field(False, description="write the figures to the bundle's model card as well")
    beside: CliVariadicArg[list[Path]] = Field(
        [], description="for the card and the report: figures of other models, from files that --json wrote"
    )
    report: Path | None = Field(None, description="folder for a report: report.html, report.json and report.md")


def main(arguments: Sequence[str] | None = None) -> None:
    """Raises ClozeError."""
    options = EvaluateOptions.read(sys.argv[1:] if arguments is None else arguments, program("training.evaluate"))

    from evaluation.evaluate import evaluate  # torch takes seconds, for which help and a wrong option need not wait

    evaluate(options)
