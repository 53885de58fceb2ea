"""The options of the commands that score models, and the names of the suites; neither needs torch."""

from pathlib import Path
from typing import Annotated, Final

from pydantic import Field
from pydantic_settings import CliVariadicArg

from encoding.bundle import Precision
from encoding.options import Command
from encoding.template import PoolingMode

__all__ = ["DEFAULT", "HELP", "NAMES", "NOT_COMPARED", "OWN", "ModelOptions", "ScoringOptions"]

NAMES: Final = (  # of the suites
    *("sts", "retrieval", "neighbours", "pairs", "triplets", "labels", "probes", "space", "maps"),
    *("transfer", "transfer-fast", "cost", "baselines"),
)
DEFAULT: Final = ("sts", "retrieval")  # with a data folder and without names
OWN: Final = ("sts", "retrieval", "pairs", "triplets", "labels", "probes")  # that read own files or folders
NOT_COMPARED: Final = ("maps", "cost")  # whose figures are not computed from items
HELP: Final = f"what to score: {', '.join(NAMES)} (default: {' and '.join(DEFAULT)})"
Paths = CliVariadicArg[list[Path]]


class ModelOptions(Command):
    """How the model that a command names is read."""

    key_file: Path | None = Field(None, description="file with the API key of a server")
    precision: Precision | None = Field(None, description="only this graph of a bundle (default: all)")
    template: str | None = Field(
        None, description='for an encoder without a configuration of its own: This sentence of "[X]" means [MASK].'
    )
    query_template: str | None = Field(None, description="words around a search query (default: the model's own)")
    document_template: str | None = Field(
        None, description="words around a document that is searched (default: the model's own)"
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


class ScoringOptions(ModelOptions):
    """What `evaluate` and `compare` share."""

    data: Path | None = Field(None, description="folder that holds senteval/downstream, downstream or STS")
    sts: Paths = Field([], description="own folders in SemEval's format: STS.input.X.txt with STS.gs.X.txt")
    retrieval: Paths = Field([], description="own folders in BEIR's layout: corpus.jsonl, queries.jsonl, qrels.tsv")
    pairs: Paths = Field([], description="own files with sentence1, sentence2 and score, or label 1 or 0")
    triplets: Paths = Field([], description="own files with anchor, positive and negative")
    labels: Paths = Field([], description="own files with text and label")
    probes: Paths = Field([], description="own files with one English sentence per line, to make the probes of")
    cache: Path = Field(Path("runs/scores"), description="folder in which the scores of finished sets are kept")
    fresh: bool = Field(False, description="score again what the cache has")

    @property
    def own(self) -> dict[str, list[Path]]:
        """Suite -> the user's own files and folders."""
        return {name: getattr(self, name) for name in OWN}
