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

    key_file: Path | None = Field(None, description="file with the API key of a server")
    precision: Precision | None = Field(None, description="only this graph of a bundle (default: all)")
    template: str | None = Field(
        None,
        description="words around a text, for an encoder without a configuration of its own, such as: "
        'This sentence of "[X]" means [MASK].',
    )
    query_template: str | None = Field(None, description="words around a search query (default: the model's own)")
    document_template: str | None = Field(
        None, description="words around a document that is searched (default: the model's own)"
    )
    pooling: PoolingMode | None = Field(None, description="how the vector is read, for such an encoder")
    max_tokens: Count | None = Field(None, description="longest sequence (default: what the encoder has positions for)")
    final_period: bool | None = Field(None, description="give a text without closing punctuation a period, or do not")
    denoise: bool | None = Field(None, description="subtract the vector of the template alone, or do not")
    top_k: Count | None = Field(
        None, description="for a masked language model: use the word embeddings of the K likeliest tokens"
    )


class ScoringOptions(ModelOptions):
    """What `evaluate` and `compare` share."""

    data: Path | None = Field(None, description="folder that holds senteval/downstream, downstream or STS")
    sts: Paths = Field([], description="your own folders in SemEval's format: STS.input.X.txt with STS.gs.X.txt")
    retrieval: Paths = Field(
        [], description="your own folders in BEIR's layout: corpus.jsonl, queries.jsonl, qrels.tsv"
    )
    pairs: Paths = Field([], description="your own files with sentence1, sentence2 and score, or label 1 or 0")
    triplets: Paths = Field([], description="your own files with anchor, positive and negative")
    labels: Paths = Field([], description="your own files with text and label")
    probes: Paths = Field(
        [], description="your own files with one English sentence per line, from which the probes are made"
    )
    cache: Path = Field(Path("runs/scores"), description="folder in which the scores of finished sets are kept")
    fresh: bool = Field(False, description="score again what the cache has")

    @property
    def own(self) -> dict[str, list[Path]]:
        """Suite -> the user's own files and folders."""
        return {name: getattr(self, name) for name in OWN}


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
    beside: Paths = Field(
        [], description="for the card and the report: figures of other models, from files that --json wrote"
    )
    report: Path | None = Field(None, description="folder for a report: report.html, report.json and report.md")


class CompareOptions(ScoringOptions):
    """Compare models with the first one: the difference on each set, with its 95 % interval.

    Sets that `evaluate` has scored are read from the cache. The options of a model, such as --template, are used for
    the encoders that have no configuration of their own.
    """

    models: CliPositionalArg[list[str]] = Field(
        description="two or more runs, bundles, encoders, servers, or files that evaluate --json wrote"
    )
    suite: CliVariadicArg[list[str]] = Field([], description=HELP)
    resamples: Annotated[int, Field(ge=100)] = Field(1000, description="resamples of the bootstrap")
    out: Path | None = Field(None, alias="json", description="file to write the differences to as well")


class TemplateOptions(Options):
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
