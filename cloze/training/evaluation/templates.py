"""Find the template that suits an untuned encoder best, by a greedy search or among the templates of a file or a T5.

PromptBERT (arXiv:2201.04337) section 4.2 finds its templates by hand: first the words between text and mask, then the
words around the text.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

from cloze.encoding.errors import TemplateError
from cloze.encoding.files import check_new_file, write_whole
from cloze.encoding.template import MASK, TEXT
from cloze.encoding.text import TextEncoder
from cloze.training.bar import bar, console
from cloze.training.data.corpus import read_lines
from cloze.training.encoder_source import kind_of
from cloze.training.errors import CorpusError, EncoderError
from cloze.training.evaluation.measures import Pairs
from cloze.training.evaluation.options import PREFIXES, RELATIONS, TemplateOptions
from cloze.training.evaluation.sts import load_pairs, spearman
from cloze.training.evaluation.t5 import TemplateWriter, read_definitions
from cloze.training.evaluation.tables import digits, print_table
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.pretrained import fastest_device

ScoreOf: TypeAlias = Callable[[str], float]
"""A template -> its score."""


def greedy(
    score: ScoreOf, relations: Iterable[str] = RELATIONS, prefixes: Iterable[str] = PREFIXES
) -> dict[str, float]:
    """Try each relation, then each prefix with the best relation. Return all scores, best first."""
    tried = rank(score, map(related, relations))
    best = next(iter(tried))
    return _best_first(tried | rank(score, (wrapped(best, prefix) for prefix in prefixes)))


def rank(score: ScoreOf, templates: Iterable[str]) -> dict[str, float]:
    """Each distinct template and its score, best first."""
    distinct = list(dict.fromkeys(templates))
    return _best_first({template: score(template) for template in bar(distinct, desc="scoring", unit=" templates")})


def related(relation: str) -> str:
    """`means` -> `[X] means [MASK].`"""
    return f"{' '.join([TEXT, *relation.split(), MASK])}."


def wrapped(template: str, prefix: str) -> str:
    """`This` or `This [X]` before `[X] means [MASK].` -> `This [X] means [MASK].`"""
    around = prefix if TEXT in prefix else f"{prefix.strip()} {TEXT}".strip()
    return template.replace(TEXT, around)


def _best_first(scores: dict[str, float]) -> dict[str, float]:
    return dict(sorted(scores.items(), key=lambda item: -item[1]))


class Scorer:
    """A loaded encoder that scores one template after the other on the pairs."""

    def __init__(self, encoder: SentenceEncoder, pairs: Pairs, denoise: bool = False) -> None:
        if encoder.tokenizer.mask_token_id is None:
            raise EncoderError(
                "the encoder's tokenizer has no mask token, which mask pooling requires; choose another encoder"
            )
        self.encoder = encoder
        self.pairs = pairs
        self.denoise = denoise

    def __call__(self, template: str) -> float:
        config = {"template": template, "pooling": "mask", "denoising": self.denoise}
        self.encoder.reconfigure(self.encoder.config.model_copy(update=config))
        return spearman(self.encoder.embed, self.pairs)

    def text_encoder(self, template: str) -> TextEncoder:
        """Make the text encoder of a template. Raises TemplateError if the template cannot be used."""
        return self.encoder.make_text_encoder(template, self.encoder.config.max_tokens, "mask")

    def takes(self, template: str) -> bool:
        try:
            self.text_encoder(template)
        except TemplateError:
            return False
        return True


def read_templates(path: Path, scorer: Scorer) -> list[str]:
    """One template per line, without blank lines. Raises CorpusError or TemplateError, which name the line."""
    if not path.is_file():
        raise CorpusError(f"{path} is not a file; give a file of templates, one per line")
    templates = []
    for number, line in enumerate(read_lines(path), 1):
        template = line.strip()
        if not template:
            continue
        try:
            scorer.text_encoder(template)
        except TemplateError as error:
            raise TemplateError(f"{path}, line {number}: {error}") from error
        templates.append(template)
    if not templates:
        raise CorpusError(f"{path} has no templates; write one per line, such as: [X] means [MASK].")
    return list(dict.fromkeys(templates))


def search(options: TemplateOptions) -> None:
    """Score templates as the options say, and show them, best first. Raises ClozeError."""
    if options.figures:
        check_new_file(options.figures)
    pairs = load_pairs(options.dev)  # before the encoder: reading is quick and may fail
    scorer = Scorer(_load(options), pairs, options.denoise)
    written = _write(options.t5, options.definitions, options, scorer) if options.t5 and options.definitions else {}
    rows: list[dict[str, object]] = [
        {"template": template, "score": score, "tokens": scorer.text_encoder(template).template_tokens}
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
        write_whole(options.figures, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _load(options: TemplateOptions) -> SentenceEncoder:
    kind_of(options.encoder)  # raises RunError for a folder that is not a model
    # [CLS] pooling for now, so that Scorer can report a tokenizer without a mask token
    encoder = SentenceEncoder.load(
        options.encoder,
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
    console.print(f"{t5} writes {options.count} templates for {len(used)} of {len(examples)} definitions")
    written = writer.write(used, options.count)
    usable = {template: score for template, score in written.items() if scorer.takes(template)}
    if not usable:
        raise EncoderError(f"{t5} did not write a usable template; raise --count, or give another T5")
    return usable


def _scores(options: TemplateOptions, scorer: Scorer, written: list[str]) -> dict[str, float]:
    """Score the templates. Every template is checked before the first is scored."""
    if options.templates or written:
        templates = read_templates(options.templates, scorer) if options.templates else written
        return rank(scorer, templates)
    relations, prefixes = options.relations, options.prefixes
    for template in [*map(related, relations), *(wrapped(related(relations[0]), prefix) for prefix in prefixes)]:
        scorer.text_encoder(template)
    return greedy(scorer, relations, prefixes)


def _show(options: TemplateOptions, rows: Sequence[dict[str, object]]) -> None:
    pooling = "[MASK] minus the template's bias" if options.denoise else "[MASK]"
    columns = {"Spearman x100": "score", "tokens": "tokens", "T5's log-probability": "log_probability"}
    shown = {title: name for title, name in columns.items() if name in rows[0]}
    cells = []
    for row in rows:
        values = (row[name] for name in shown.values())
        figures = (digits(value) if isinstance(value, float) else str(value) for value in values)
        cells.append([str(row["template"]), *figures])
    print_table(f"{options.encoder}: {pooling} on {options.dev.name}", list(shown), cells, first="template")
