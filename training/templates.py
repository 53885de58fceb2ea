"""python -m training.templates ENCODER --dev FILE: which template reads an untuned encoder best.

Each template is scored by Spearman's correlation x100 of its [MASK] vectors on scored pairs. By default:
greedy search as in PromptBERT's Table 4, first the words between text and mask, then the words around the text; or the
templates that a T5 writes around words and their definitions.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from encoding.errors import TemplateError
from training.cli import check_new_file, positive, run
from training.corpus import read_lines
from training.encoder import SentenceEncoder, fastest_device
from training.errors import CorpusError, EncoderError
from training.pooling import Pooling
from training.search import PREFIXES, RELATIONS, greedy, rank, related, wrapped
from training.source import model_folder
from training.sts import Pairs, load_pairs, spearman
from training.t5 import TemplateWriter, read_definitions

__all__ = ["Scorer", "main", "read_templates"]


class Scorer:
    """One loaded encoder, read under one template after the other and held against the pairs."""

    def __init__(self, encoder: SentenceEncoder, pairs: Pairs, denoise: bool = False) -> None:
        if encoder.tokenizer.mask_token_id is None:
            raise EncoderError("the encoder's tokenizer has no mask token to read at; choose another encoder")
        self.encoder = encoder
        self.pairs = pairs
        self.denoise = denoise

    def __call__(self, template: str) -> float:
        self.encoder.prompt = self.prompt(template)
        return spearman(self.encoder.embed, self.pairs)

    def prompt(self, template: str) -> Pooling:
        """Raises TemplateError for a template that cannot be used."""
        return self.encoder.make_prompt(template, self.encoder.config.max_tokens, self.denoise, "mask")

    def takes(self, template: str) -> bool:
        try:
            self.prompt(template)
        except TemplateError:
            return False
        return True


def read_templates(path: Path, scorer: Scorer) -> list[str]:
    """A template a line, blank lines left out. Raises CorpusError, TemplateError, which name the line."""
    if not path.is_file():
        raise CorpusError(f"{path} is not a file; give a file of templates, one a line")
    templates = []
    for number, line in enumerate(read_lines(path), 1):
        template = line.strip()
        if not template:
            continue
        try:
            scorer.prompt(template)
        except TemplateError as error:
            raise TemplateError(f"{path}, line {number}: {error}") from error
        templates.append(template)
    if not templates:
        raise CorpusError(f"{path} has no templates; write one a line, such as: [X] means [MASK].")
    return list(dict.fromkeys(templates))


def main(arguments: Sequence[str] | None = None) -> None:
    """Raises ClozeError; usage errors end the process with 2."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if (options.t5 is None) != (options.definitions is None):
        parser.error("--t5 and --definitions go together")
    if options.json:
        check_new_file(options.json)
    pairs = load_pairs(options.dev)  # before the encoder: reading is quick and may fail
    scorer = Scorer(_load(options), pairs, options.denoise)
    written = _write(options, scorer) if options.t5 else {}
    rows: list[dict[str, object]] = [
        {"template": template, "score": score, "tokens": scorer.prompt(template).text_encoder.template_tokens}
        | ({"log_probability": written[template]} if written else {})
        for template, score in _scores(options, scorer, list(written)).items()
    ]
    _show(options, rows)
    if options.json:
        content = {
            "encoder": options.encoder,
            "dev": options.dev.name,
            "denoise": options.denoise,
            "final_period": scorer.encoder.config.final_period,
            "templates": rows,
        }
        options.json.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _load(options: argparse.Namespace) -> SentenceEncoder:
    # read at [CLS] for the moment: a tokenizer without a mask token gets the message that says so
    encoder = SentenceEncoder.load(
        model_folder(options.encoder),
        template="[X]",
        pooling="cls",
        denoising=False,
        max_tokens=options.max_tokens,
        final_period=options.final_period,
    )
    return encoder.to(fastest_device())


def _write(options: argparse.Namespace, scorer: Scorer) -> dict[str, float]:
    """What the T5 writes and the encoder can be read with, and its log-probability."""
    examples = read_definitions(options.definitions)
    writer = TemplateWriter.load(options.t5)
    writer.model.to(scorer.encoder.device)
    used = examples[: options.examples]
    console = Console(stderr=True, highlight=False)
    console.print(f"{options.t5} writes {options.count} templates for {len(used)} of {len(examples)} definitions")
    written = writer.write(used, options.count)
    usable = {template: score for template, score in written.items() if scorer.takes(template)}
    if not usable:
        raise EncoderError(f"{options.t5} wrote no template that can be used; raise --count, or give another T5")
    return usable


def _scores(options: argparse.Namespace, scorer: Scorer, written: list[str]) -> dict[str, float]:
    """Every template is checked before the first is scored."""
    if options.templates or written:
        templates = written or read_templates(options.templates, scorer)
        with _Watched(scorer, len(templates)) as score:
            return rank(score, templates)
    relations, prefixes = options.relations, options.prefixes
    for template in [*map(related, relations), *(wrapped(related(relations[0]), prefix) for prefix in prefixes)]:
        scorer.prompt(template)
    with _Watched(scorer, len(relations) + len(prefixes)) as score:
        return greedy(score, relations, prefixes)


class _Watched(Progress):
    """A score function under a progress bar that names the template."""

    def __init__(self, scorer: Scorer, total: int) -> None:
        console = Console(stderr=True)
        columns = (
            BarColumn(20),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
        )
        super().__init__(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.scorer = scorer
        self.add_task("", total=total)

    def __call__(self, template: str) -> float:
        (task,) = self.task_ids
        self.update(task, description=template)
        score = self.scorer(template)
        self.advance(task)
        return score


def _show(options: argparse.Namespace, rows: Sequence[dict[str, object]]) -> None:
    reading = "[MASK] less the template's bias" if options.denoise else "[MASK]"
    table = Table(title=escape(f"{options.encoder}: {reading} on {options.dev.name}"), title_justify="left")
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m training.templates", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("encoder", metavar="ENCODER", help="a run, an encoder's folder or a hub name")
    parser.add_argument("--dev", type=Path, required=True, metavar="FILE", help="scored pairs, such as sts-dev.csv")
    given = parser.add_mutually_exclusive_group()
    given.add_argument("--templates", type=Path, metavar="FILE", help="score these, one a line, in place of a search")
    given.add_argument("--t5", metavar="PATH", help="score what this T5 writes, in place of a search")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the full list there as well")
    search = parser.add_argument_group("greedy search")
    search.add_argument(
        "--relations", nargs="+", default=RELATIONS, metavar="WORDS", help='between [X] and [MASK]; "" for none'
    )
    search.add_argument(
        "--prefixes", nargs="*", default=PREFIXES, metavar="WORDS", help="before [X], or around it where [X] is written"
    )
    t5 = parser.add_argument_group("templates from a T5")
    t5.add_argument(
        "--definitions", type=Path, metavar="FILE", help="csv, tsv or jsonl with the columns word and definition"
    )
    t5.add_argument("--examples", type=positive, default=32, metavar="N", help="use the first N of them (default: 32)")
    t5.add_argument("--count", type=positive, default=100, metavar="N", help="write N templates (default: 100)")
    reading = parser.add_argument_group("how the encoder is read")
    reading.add_argument("--denoise", action="store_true", help="subtract what the template gives without a text")
    reading.add_argument("--final-period", action="store_const", const=True, help="give a text without one a period")
    reading.add_argument("--max-tokens", type=positive, metavar="N", help="default: what the encoder has positions for")
    return parser


if __name__ == "__main__":
    sys.exit(run(main))
