"""python -m training.explain TEXT ... --encoder PATH: the words an encoder puts at [MASK], most probable first.

PromptBERT's Table 7. With --denoise, what the template gives without a text is subtracted first.
"""

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from training.cli import positive, run
from training.source import model_folder
from training.words import MaskedWords

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Raises ClozeError; usage errors end the process with 2."""
    options = _parser().parse_args(arguments)
    words = MaskedWords.load(
        model_folder(options.encoder),
        template=options.template,
        denoising=options.denoise,
        final_period=options.final_period,
    )
    console = Console(width=None if sys.stdout.isatty() else 110)  # a pipe has no width of its own
    for text, likeliest in zip(options.texts, words.words(options.texts, options.k), strict=True):
        table = Table(title=escape(text), title_justify="left", min_width=30)
        table.add_column("token")
        table.add_column("probability", justify="right")
        for word, probability in likeliest:
            table.add_row(escape(word), f"{probability:.4f}")
        console.print(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m training.explain", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("texts", nargs="+", metavar="TEXT", help="what to read")
    parser.add_argument(
        "--encoder", required=True, metavar="PATH", help="a masked language model: a run, a folder or a hub name"
    )
    parser.add_argument("--template", metavar="T", help="such as: [X] means [MASK]. (default: the model's own)")
    parser.add_argument("--k", type=positive, default=10, metavar="N", help="how many tokens (default: %(default)s)")
    parser.add_argument(
        "--denoise", action="store_const", const=True, help="subtract what the template gives without a text"
    )
    parser.add_argument("--final-period", action="store_const", const=True, help="give a text without one a period")
    return parser


if __name__ == "__main__":
    sys.exit(run(main))
