"""python -m training.evaluate PATH --data DIR: the STS and search figures of a run, a bundle or any encoder.

A bundle's graphs are run as they are, one row a precision. Test sets compare models; the two development sets, printed
apart, are the ones to choose by. Collections to search are those in the data's folder retrieval.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from encoding.bundle import PRECISIONS, Bundle
from encoding.template import POOLINGS
from training.cli import check_new_file, positive, run
from training.encoder import SentenceEncoder, fastest_device
from training.errors import RunError
from training.evaluate.sts import DEV_TASKS, STS_TASKS
from training.evaluate.suite import SEARCH, Suite, search_columns
from training.runner import GraphEncoder
from training.source import resolve
from training.sts import Embed
from training.words import MaskedWords

__all__ = ["main", "subjects"]

CONFIG_OPTIONS = ("template", "pooling", "max_tokens", "final_period", "denoise")


def main(arguments: Sequence[str] | None = None) -> int | None:
    """Raises ClozeError; usage errors end the process with 2."""
    options = _parser().parse_args(arguments)
    if options.json:
        check_new_file(options.json)
    suite = Suite.load(options.data)  # first: reading is quick and may fail
    scores: dict[str, dict[str, float]] = {}
    for name, embed in subjects(options).items():
        scores[name] = _score(embed, suite, name)
    _show(options.path, scores)
    if options.json:
        content = {"path": options.path, "suite": options.suite, "scores": scores}
        options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return None


def subjects(options: argparse.Namespace) -> dict[str, Embed]:
    """Name -> what embeds: a bundle's precisions, or one model in torch. Raises ClozeError."""
    kind = resolve(options.path)
    changes = {name: getattr(options, name) for name in CONFIG_OPTIONS if getattr(options, name) is not None}
    if kind == "bundle":
        if options.top_k:
            changes["top_k"] = options.top_k
        if changes:
            raise RunError(f"{options.path} is a bundle, its configuration is fixed; leave out {_words(changes)}")
        bundle = Bundle.load(options.path)
        precisions = [options.precision] if options.precision else bundle.precisions
        return {precision: GraphEncoder.of(bundle, precision).embed for precision in precisions}
    if options.precision:
        raise RunError(f"{options.path} is no bundle, so it has no precisions; leave out --precision")
    if options.top_k and options.pooling not in (None, "mask"):
        raise RunError(f"--top-k takes the tokens at [MASK]; leave out --pooling {options.pooling}")
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m training.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", metavar="PATH", help="a run, a bundle, an encoder's folder or a hub name")
    parser.add_argument(
        "--data", required=True, metavar="DIR", help="the folder that holds senteval/downstream, downstream or STS"
    )
    parser.add_argument("--suite", choices=("sts",), default="sts", help="what to score (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument("--precision", choices=PRECISIONS, help="of a bundle: only this graph (default: all)")
    reading = parser.add_argument_group("how an encoder without a configuration of its own is read")
    reading.add_argument("--template", metavar="T", help='such as: This sentence of "[X]" means [MASK].')
    reading.add_argument("--pooling", choices=POOLINGS, help="where the vector is read")
    reading.add_argument("--max-tokens", type=positive, metavar="N", help="default: what the encoder has positions for")
    reading.add_argument("--final-period", action="store_const", const=True, help="give a text without one a period")
    reading.add_argument("--denoise", action="store_const", const=True, help="subtract what the template gives alone")
    reading.add_argument(
        "--top-k",
        type=positive,
        metavar="K",
        help="of a masked language model: the K likeliest tokens' word embeddings",
    )
    return parser


def _words(changes: dict[str, object]) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in changes)


if __name__ == "__main__":
    sys.exit(run(main))
