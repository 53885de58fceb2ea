"""cloze explain TEXT ... --encoder PATH: the words that an encoder predicts at [MASK]."""

import sys
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field
from pydantic_settings import CliPositionalArg
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cloze.command import run
from cloze.options import Options
from cloze.training.encoder_source import kind_of


class ExplainOptions(Options):
    """Show the words that an encoder predicts at [MASK], most probable first (PromptBERT's Table 7)."""

    texts: CliPositionalArg[list[str]] = Field(description="texts to explain")
    encoder: str = Field(description="masked language model: a run, a folder or a hub name")
    template: str | None = Field(None, description="template, such as: [X] means [MASK]. (default: the model's own)")
    top_k: Annotated[int, Field(ge=1)] = Field(10, description="number of words to show")
    denoise: bool | None = Field(None, description="denoising: subtract the vector of the template alone, or do not")
    final_period: bool | None = Field(
        None, description="add a period to a text that lacks closing punctuation, or do not"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Raises ClozeError."""
    options = ExplainOptions.parse(arguments, "cloze explain")

    # torch takes seconds to load; help and option errors need not wait
    from cloze.training.model.masked_words import MaskedWords

    kind_of(options.encoder)  # raises RunError for a folder that is not a model
    words = MaskedWords.load(
        options.encoder,
        template=options.template,
        denoising=options.denoise,
        final_period=options.final_period,
    )
    console = Console(width=None if sys.stdout.isatty() else 110)  # a pipe has no width
    for text, likeliest in zip(options.texts, words.words(options.texts, options.top_k), strict=True):
        table = Table(title=Text(text), title_justify="left", min_width=30)
        table.add_column("token")
        table.add_column("probability", justify="right")
        for word, probability in likeliest:
            table.add_row(Text(word), f"{probability:.4f}")
        console.print(table)


if __name__ == "__main__":
    sys.exit(run(main))
