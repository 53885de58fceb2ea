"""The options of the commands that score models, and the names of the suites; neither needs torch."""

from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import Field, model_validator
from pydantic_settings import CliPositionalArg, CliVariadicArg

from cloze.encoding.bundle import Precision
from cloze.encoding.template import TEXT, PoolingMode
from cloze.options import Options

NAMES: Final = (  # the names of the suites
    *("sts", "retrieval", "neighbours", "pairs", "triplets", "labels", "probes", "space", "maps"),
    *("transfer", "transfer-fast", "cost", "baselines"),
)
DEFAULT: Final = ("sts", "retrieval")  # run if there is a data folder and no suite is named
OWN: Final = ("sts", "retrieval", "pairs", "triplets", "labels", "probes")  # suites that read own files or folders
NOT_COMPARED: Final = ("maps", "cost")  # suites whose figures are not computed from items
HELP: Final = f"what to score: {', '.join(NAMES)} (default: {' and '.join(DEFAULT)})"

# Template words from Table 4 of PromptBERT (arXiv:2201.04337): between text and mask, and around the text
RELATIONS: Final = ("", "is", "mean", "means")
PREFIXES: Final = (
    f"This {TEXT}",
    f"This sentence of {TEXT}",
    f'This sentence of "{TEXT}"',
    f'This sentence : "{TEXT}"',
)

Paths = CliVariadicArg[list[Path]]
Count = Annotated[int, Field(ge=1)]


class ModelOptions(Options):
    """How the model that a command names is read."""

    key_file: Path | None = Field(None, description="file with an API key for a server")
    precision: Precision | None = Field(None, description="use only this graph of a bundle (default: all)")
    template: str | None = Field(
        None,
        description='template for an encoder without a configuration of its own, such as: This sentence of "[X]" '
        "means [MASK].",
    )
    query_template: str | None = Field(None, description="template of search queries (default: the model's own)")
    document_template: str | None = Field(
        None, description="template of the documents that are searched (default: the model's own)"
    )
    pooling: PoolingMode | None = Field(None, description="pooling for an encoder without a configuration of its own")
    max_tokens: Count | None = Field(
        None, description="maximum number of tokens of a sequence (default: as many as the encoder has positions for)"
    )
    final_period: bool | None = Field(
        None, description="add a period to a text that lacks closing punctuation, or do not"
    )
    denoise: bool | None = Field(None, description="denoising: subtract the vector of the template alone, or do not")
    top_k: Count | None = Field(
        None,
        description="for a masked language model: embed with the word embeddings of the K likeliest tokens at [MASK]",
    )


class ScoringOptions(ModelOptions):
    """What `evaluate` and `compare` share."""

    data: Path | None = Field(None, description="folder that contains senteval/downstream, downstream or STS")
    sts: Paths = Field([], description="your own folders in SemEval's format: STS.input.X.txt and STS.gs.X.txt")
    retrieval: Paths = Field(
        [], description="your own folders in BEIR's layout: corpus.jsonl, queries.jsonl, qrels.tsv"
    )
    pairs: Paths = Field([], description="your own files with sentence1, sentence2 and score, or label 1 or 0")
    triplets: Paths = Field([], description="your own files with anchor, positive and negative")
    labels: Paths = Field([], description="your own files with text and label")
    probes: Paths = Field(
        [], description="your own files with one English sentence per line, from which the probes are made"
    )
    cache: Path = Field(Path("runs/scores"), description="folder that caches the scores of finished sets")
    fresh: bool = Field(False, description="do not read cached scores: score everything again")

    @property
    def own(self) -> dict[str, list[Path]]:
        """Suite -> the user's own files and folders."""
        return {name: getattr(self, name) for name in OWN}


class EvaluateOptions(ScoringOptions):
    """Score a run, a bundle, any encoder or a running server, and print the figures.

    A bundle's graphs are run as they are, with one row per precision. Compare models on the test sets; make choices on
    the two development sets, which are printed separately. Search collections are read from the folder `retrieval` of
    the data folder.
    """

    path: CliPositionalArg[str] = Field(
        description="a run, a bundle, an encoder's folder, a hub name, or a server's http://HOST:PORT"
    )
    suite: CliVariadicArg[list[str]] = Field([], description=HELP)
    out: Path | None = Field(None, alias="json", description="also write the figures to this file")
    card: bool = Field(False, description="also write the figures to the bundle's model card")
    beside: Paths = Field(
        [], description="figures of other models to show in the card and the report, from files that --json wrote"
    )
    report: Path | None = Field(None, description="folder to write a report to: report.html, report.json and report.md")


class CompareOptions(ScoringOptions):
    """Compare models with the first one: the difference on each set, with its 95 % confidence interval.

    Scores that `evaluate` has cached are reused. Model options such as --template apply only to encoders that have no
    configuration of their own.
    """

    models: CliPositionalArg[list[str]] = Field(
        description="two or more runs, bundles, encoders, servers, or files that evaluate --json wrote"
    )
    suite: CliVariadicArg[list[str]] = Field([], description=HELP)
    resamples: Annotated[int, Field(ge=100)] = Field(1000, description="number of bootstrap resamples")
    out: Path | None = Field(None, alias="json", description="also write the differences to this file")


class TemplateOptions(Options):
    """Find the best template for an untuned encoder.

    Each template is scored by Spearman's correlation x100 of its [MASK] vectors on scored pairs. The default is a
    greedy search as in PromptBERT's Table 4: first for the words between text and mask, then for the words around the
    text. --templates scores the templates in a file instead, and --t5 those that a T5 model generates from words and
    their definitions.
    """

    encoder: CliPositionalArg[str] = Field(description="a run, an encoder's folder or a hub name")
    dev: Path = Field(description="file of scored pairs, such as sts-dev.csv")
    templates: Path | None = Field(None, description="score the templates of this file, one per line")
    t5: str | None = Field(None, description="score the templates that this T5 model generates; requires --definitions")
    figures: Path | None = Field(None, alias="json", description="also write the full list to this file")
    relations: CliVariadicArg[list[str]] = Field(
        list(RELATIONS), min_length=1, description='greedy search: words between [X] and [MASK]; "" for none'
    )
    prefixes: CliVariadicArg[list[str]] = Field(
        list(PREFIXES), description="greedy search: words before [X], or around it if [X] is written"
    )
    definitions: Path | None = Field(
        None, description="for --t5: csv, tsv or jsonl with the columns word and definition"
    )
    examples: Count = Field(32, description="for --t5: number of definitions to use, from the start of the file")
    count: Count = Field(100, description="for --t5: number of templates to generate")
    denoise: bool = Field(False, description="denoising: subtract the vector of the template alone")
    final_period: bool | None = Field(
        None, description="add a period to a text that lacks closing punctuation, or do not"
    )
    max_tokens: Count | None = Field(
        None, description="maximum number of tokens of a sequence (default: as many as the encoder has positions for)"
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.t5 is None) != (self.definitions is None):
            raise ValueError("--t5 and --definitions go together")
        if self.t5 is not None and self.templates is not None:
            raise ValueError("--templates and --t5 are two sources of templates; choose one")
        return self
