"""python -m training.evaluate PATH --data DIR: the STS and search figures of a run, a bundle or any encoder."""

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_settings import CliPositionalArg
from rich.console import Console
from rich.progress import track
from rich.table import Table

from encoding.bundle import Bundle, Precision
from encoding.command import program, run
from encoding.options import Command, flag
from encoding.template import PoolingMode
from training.errors import RunError
from training.evaluate.sts import DEV_TASKS, STS_TASKS
from training.evaluate.suite import SEARCH, Suite, search_columns
from training.model.encoder import SentenceEncoder
from training.model.graph_encoder import GraphEncoder
from training.model.masked_words import MaskedWords
from training.model.model_path import kind_of
from training.model.pooling import Embed
from training.model.pretrained import fastest_device
from training.result_file import check_new_file

__all__ = ["EvaluateOptions", "main", "subjects"]

CONFIG_OPTIONS = ("template", "pooling", "max_tokens", "final_period", "denoise")


class EvaluateOptions(Command):
    """Print the STS and search figures of a run, a bundle or any encoder.

    A bundle's graphs are run as they are, one row per precision. Test sets compare models; the two development sets,
    printed apart, are the ones to choose by. Collections to search are those in the data's folder retrieval.
    """

    path: CliPositionalArg[str] = Field(description="a run, a bundle, an encoder's folder or a hub name")
    data: Path = Field(description="folder that holds senteval/downstream, downstream or STS")
    suite: Literal["sts"] = Field("sts", description="what to score")
    figures: Path | None = Field(None, alias="json", description="file to write the figures to as well")
    precision: Precision | None = Field(None, description="only this graph of a bundle (default: all)")
    template: str | None = Field(
        None, description='for an encoder without a configuration of its own: This sentence of "[X]" means [MASK].'
    )
    pooling: PoolingMode | None = Field(None, description="for such an encoder: how the vector is read")
    max_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="longest sequence (default: what the encoder has positions for)"
    )
    final_period: bool | None = Field(None, description="give a text without closing punctuation a period, or do not")
    denoise: bool | None = Field(None, description="subtract the vector of the template alone, or do not")
    top_k: Annotated[int, Field(ge=1)] | None = Field(
        None, description="for a masked language model: use the word embeddings of the K likeliest tokens"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Raises ClozeError."""
    options = EvaluateOptions.read(sys.argv[1:] if arguments is None else arguments, program("training.evaluate"))
    if options.figures:
        check_new_file(options.figures)
    suite = Suite.load(options.data)  # first: reading is quick and may fail
    scores: dict[str, dict[str, float]] = {}
    for name, embed in subjects(options).items():
        scores[name] = _score(embed, suite, name)
    _show(options.path, scores)
    if options.figures:
        content = {"path": options.path, "suite": options.suite, "scores": scores}
        options.figures.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def subjects(options: EvaluateOptions) -> dict[str, Embed]:
    """Name -> what embeds: each precision of a bundle, or one model in torch. Raises ClozeError."""
    kind = kind_of(options.path)
    changes: dict[str, Any] = {
        name: getattr(options, name) for name in CONFIG_OPTIONS if getattr(options, name) is not None
    }
    if kind == "bundle":
        if options.top_k:
            changes["top_k"] = options.top_k
        if changes:
            raise RunError(f"{options.path} is a bundle and its configuration is fixed; leave out {_words(changes)}")
        bundle = Bundle.load(options.path)
        precisions = [options.precision] if options.precision else bundle.precisions
        return {precision: GraphEncoder.of(bundle, precision).embed for precision in precisions}
    if options.precision:
        raise RunError(f"{options.path} is not a bundle, so it has no precisions; leave out --precision")
    if options.top_k and options.pooling not in (None, "mask"):
        raise RunError(f"--top-k needs mask pooling; leave out --pooling {options.pooling}")
    folder = str(Path(options.path, "model")) if kind == "run" else options.path
    changes["denoising"] = changes.pop("denoise", None)
    if options.top_k:
        embed = partial(MaskedWords.load(folder, **changes).embed, k=options.top_k)
        return {f"torch fp32, top {options.top_k} tokens": embed}
    return {"torch fp32": SentenceEncoder.load(folder, **changes).to(fastest_device()).embed}


def _score(embed: Embed, suite: Suite, name: str) -> dict[str, float]:
    console = Console(stderr=True)
    follow = partial(track, description=name, console=console, transient=True, disable=not console.is_terminal)
    return suite.score(embed, follow)


def _show(path: str, scores: dict[str, dict[str, float]]) -> None:
    tables: dict[str, Sequence[str]] = {
        f"{path}: STS test sets, Spearman x100 ('all')": (*STS_TASKS, "Avg."),
        "Development sets": DEV_TASKS,
        "Search, nDCG@10 x100": search_columns(scores.values()),
    }
    for title, columns in tables.items():
        if not columns:
            continue
        table = Table(title=title, title_justify="left")
        table.add_column("")
        for column in columns:
            table.add_column(column.removesuffix(SEARCH), justify="right")
        for name, row in scores.items():
            table.add_row(name, *(f"{row[column]:.2f}" for column in columns))
        width = None if sys.stdout.isatty() else 110  # a pipe has no width of its own
        Console(width=width).print(table)


def _words(changes: dict[str, object]) -> str:
    return ", ".join(flag(name) for name in changes)


if __name__ == "__main__":
    sys.exit(run(main))
