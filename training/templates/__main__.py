"""python -m training.templates ENCODER --dev FILE: the template that suits an untuned encoder best."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator
from pydantic_settings import CliPositionalArg, CliVariadicArg
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from encoding.command import program, run
from encoding.options import Command
from training.data.scored_pairs import load_pairs
from training.errors import EncoderError
from training.model.encoder import SentenceEncoder
from training.model.model_path import model_folder
from training.model.pretrained import fastest_device
from training.result_file import check_new_file
from training.templates.scorer import Scorer, Watched, read_templates
from training.templates.search import PREFIXES, RELATIONS, greedy, rank, related, wrapped
from training.templates.t5 import TemplateWriter, read_definitions

__all__ = ["main"]

Count = Annotated[int, Field(ge=1)]


class TemplateOptions(Command):
    """Find the template that suits an untuned encoder best.

    Each template is scored by Spearman's correlation x100 of its [MASK] vectors on scored pairs. The default is a
    greedy search as in PromptBERT's Table 4: first for the words between text and mask, then for the words around the
    text. --templates scores the templates of a file instead, and --t5 those that a T5 writes around words and their
    definitions.
    """

    encoder: CliPositionalArg[str] = Field(description="a run, an encoder's folder or a hub name")
    dev: Path = Field(description="file of scored pairs, such as sts-dev.csv")
    templates: Path | None = Field(None, description="score the templates of this file, one per line")
    t5: str | None = Field(None, description="score the templates that this T5 writes; needs --definitions")
    figures: Path | None = Field(None, alias="json", description="file to write the full list to as well")
    relations: CliVariadicArg[list[str]] = Field(
        list(RELATIONS), min_length=1, description='greedy search: words between [X] and [MASK]; "" for none'
    )
    prefixes: CliVariadicArg[list[str]] = Field(
        list(PREFIXES), description="greedy search: words before [X], or around it if [X] is written"
    )
    definitions: Path | None = Field(
        None, description="for a T5: csv, tsv or jsonl with the columns word and definition"
    )
    examples: Count = Field(32, description="for a T5: number of definitions to use, from the first")
    count: Count = Field(100, description="for a T5: number of templates to write")
    denoise: bool = Field(False, description="subtract the vector of the template alone")
    final_period: bool | None = Field(None, description="give a text without closing punctuation a period, or do not")
    max_tokens: Count | None = Field(None, description="longest sequence (default: the encoder's positions)")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.t5 is None) != (self.definitions is None):
            raise ValueError("--t5 and --definitions go together")
        if self.t5 is not None and self.templates is not None:
            raise ValueError("--templates and --t5 are two sources of templates; choose one")
        return self


def main(arguments: Sequence[str] | None = None) -> None:
    """Raises ClozeError."""
    options = TemplateOptions.read(sys.argv[1:] if arguments is None else arguments, program("training.templates"))
    if options.figures:
        check_new_file(options.figures)
    pairs = load_pairs(options.dev)  # before the encoder: reading is quick and may fail
    scorer = Scorer(_load(options), pairs, options.denoise)
    written = _write(options.t5, options.definitions, options, scorer) if options.t5 and options.definitions else {}
    rows: list[dict[str, object]] = [
        {"template": template, "score": score, "tokens": scorer.pooling(template).text_encoder.template_tokens}
        | ({"log_probability": written[template]} if written else {})
        for template, score in _scores(options, scorer, list(written)).items()
    ]
    _show(options, rows)
    if options.figures:
        content = {
            "encoder": options.encoder,
            "dev": options.dev.name,
            "denoise": options.denoise,
            "final_period": scorer.encoder.config.final_period,
            "templates": rows,
        }
        options.figures.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _load(options: TemplateOptions) -> SentenceEncoder:
    # with [CLS] pooling for now, so that Scorer can say that a tokenizer has no mask token
    encoder = SentenceEncoder.load(
        model_folder(options.encoder),
        template="[X]",
        pooling="cls",
        denoising=False,
        max_tokens=options.max_tokens,
        final_period=options.final_period,
    )
    return encoder.to(fastest_device())


def _write(t5: str, definitions: Path, options: TemplateOptions, scorer: Scorer) -> dict[str, float]:
    """The templates that the T5 writes and the encoder can use, with their log-probabilities."""
    examples = read_definitions(definitions)
    writer = TemplateWriter.load(t5)
    writer.model.to(scorer.encoder.device)
    used = examples[: options.examples]
    console = Console(stderr=True, highlight=False)
    console.print(f"{t5} writes {options.count} templates for {len(used)} of {len(examples)} definitions")
    written = writer.write(used, options.count)
    usable = {template: score for template, score in written.items() if scorer.takes(template)}
    if not usable:
        raise EncoderError(f"{t5} wrote no template that can be used; raise --count, or give another T5")
    return usable


def _scores(options: TemplateOptions, scorer: Scorer, written: list[str]) -> dict[str, float]:
    """Every template is checked before the first is scored."""
    if options.templates or written:
        templates = read_templates(options.templates, scorer) if options.templates else written
        with Watched(scorer, len(templates)) as score:
            return rank(score, templates)
    relations, prefixes = options.relations, options.prefixes
    for template in [*map(related, relations), *(wrapped(related(relations[0]), prefix) for prefix in prefixes)]:
        scorer.pooling(template)
    with Watched(scorer, len(relations) + len(prefixes)) as score:
        return greedy(score, relations, prefixes)


def _show(options: TemplateOptions, rows: Sequence[dict[str, object]]) -> None:
    pooling = "[MASK] minus the template's bias" if options.denoise else "[MASK]"
    table = Table(title=escape(f"{options.encoder}: {pooling} on {options.dev.name}"), title_justify="left")
    table.add_column("template", overflow="fold")
    table.add_column("Spearman x100", justify="right")
    table.add_column("tokens", justify="right")
    if "log_probability" in rows[0]:
        table.add_column("T5's log-probability", justify="right")
    for row in rows:
        figures = [f"{row[name]:.2f}" for name in ("log_probability",) if name in row]
        table.add_row(escape(str(row["template"])), f"{row['score']:.2f}", str(row["tokens"]), *figures)
    width = None if sys.stdout.isatty() else 110  # a pipe has no width of its own
    Console(width=width).print(table)


if __name__ == "__main__":
    sys.exit(run(main))
