"""python -m training.export RUN OUT: a finished run -> graphs, compared with torch and scored -> a bundle.

A bundle that sentence-transformers has trained further is exported in the same way as a run.

The bundle is written completely or not at all. fp32 is refused if it differs from torch by more than 1e-4, int8 if it
costs more than 0.3 points of Spearman on STS-B dev, or more than 0.5 of nDCG@10 on a collection to search.
"""

import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import CliPositionalArg, CliVariadicArg
from rich.console import Console

from encoding.bundle import GRAPHS, PRECISIONS, Precision, seal, staging
from encoding.canaries import CANARY_TEXTS, Canaries
from encoding.command import program
from encoding.command import run as run_command
from encoding.options import Command
from encoding.text import TOKENIZER_FILES
from training.errors import ExportError, RunError
from training.evaluate.figures import figures, search_columns
from training.evaluate.subject import Subject
from training.evaluate.suites import load_suites
from training.evaluate.task import Task, score_tasks
from training.export.graph import trace
from training.export.model_card import SECTIONS, model_card, parent_metadata
from training.export.parity import difference, probes
from training.export.provenance import provenance_of
from training.export.shipped_graph import make_graph
from training.hub.sentence_transformer import is_sentence_transformer, saved_settings
from training.hub.sentence_transformer import write as write_sentence_transformer
from training.model.encoder import SentenceEncoder, weights_digest
from training.model.graph_encoder import GraphEncoder
from training.model.model_path import kind_of

__all__ = ["LARGEST_DIFFERENCE", "LARGEST_LOSS", "LARGEST_SEARCH_LOSS", "export", "main"]

LARGEST_DIFFERENCE: Final = 1e-4  # of fp32 from torch, relative
LARGEST_LOSS: Final = 0.3  # of int8 against fp32, in points of Spearman x100 on STS-B dev
LARGEST_SEARCH_LOSS: Final = 0.5  # the same in points of nDCG@10 x100 on each collection

console = Console(stderr=True, soft_wrap=True, highlight=False)


class ExportOptions(Command):
    """Export a finished run as a bundle of ONNX graphs, compared with torch and, with --data, scored."""

    run: CliPositionalArg[Path] = Field(
        description="folder of a finished run, or of a bundle that sentence-transformers has trained further"
    )
    out: CliPositionalArg[Path] = Field(description="bundle to write; a bundle there is replaced")
    precision: str = Field("fp32", description="graphs to make, separated by commas: fp32, fp16, int8")
    max_tokens: Annotated[int, Field(ge=1)] | None = Field(None, description="longest sequence, template included")
    denoise: bool | None = Field(
        None,
        description="subtract the vector of the template alone, or do not (PromptBERT; default: as in training)",
    )
    final_period: bool | None = Field(
        None,
        description="give a text without closing punctuation a period, or do not, as in PromptBERT's evaluation "
        "(default: as in training)",
    )
    data: Path | None = Field(
        None, description="score the graphs: folder with senteval/downstream and, for search, retrieval/NAME"
    )
    suite: CliVariadicArg[list[str]] = Field(
        [], description=f"score these suites too, for the model card: {', '.join(SECTIONS)}"
    )
    beside: CliVariadicArg[list[Path]] = Field(
        [], description="for the model card: figures of other models, such as the parent, that evaluate --json wrote"
    )
    sentence_transformers: bool = Field(False, description="write the files that sentence-transformers loads as well")
    licence: str | None = Field(None, alias="license", description="of the model (default: that of its parent's card)")
    notes: Path | None = Field(None, description="Markdown file to add to the model card")

    @field_validator("precision")
    @classmethod
    def _known(cls, value: str) -> str:
        for name in value.split(","):
            if name not in PRECISIONS:
                raise PydanticCustomError(
                    "precision", "{name} is not one of {known}", {"name": repr(name), "known": ", ".join(PRECISIONS)}
                )
        return value

    @field_validator("suite")
    @classmethod
    def _on_the_card(cls, value: list[str]) -> list[str]:
        for name in value:
            if name not in SECTIONS:
                raise PydanticCustomError(
                    "suite", "{name} is not one of {known}", {"name": repr(name), "known": ", ".join(SECTIONS)}
                )
        return value

    @property
    def precisions(self) -> list[Precision]:
        return [name for name in PRECISIONS if name in self.precision.split(",")]


@dataclass
class _Findings:
    """What is measured for each precision."""

    graphs: dict[Precision, str] = field(default_factory=dict)
    parity: dict[Precision, float] = field(default_factory=dict)
    scores: dict[Precision, dict[str, float]] = field(default_factory=dict)


def main(arguments: Sequence[str] | None = None) -> None:
    """Raises ClozeError."""
    options = ExportOptions.read(sys.argv[1:] if arguments is None else arguments, program("training.export"))
    export(
        options.run,
        options.out,
        options.precisions,
        max_tokens=options.max_tokens,
        denoise=options.denoise,
        final_period=options.final_period,
        data=options.data,
        suites=options.suite,
        beside=options.beside,
        licence=options.licence,
        notes=options.notes,
        sentence_transformers=options.sentence_transformers,
    )


def export(
    run: Path,
    out: Path,
    precisions: Sequence[Precision],
    *,
    max_tokens: int | None = None,
    denoise: bool | None = None,
    final_period: bool | None = None,
    data: Path | None = None,
    suites: Sequence[str] = (),
    beside: Sequence[Path] = (),
    licence: str | None = None,
    notes: Path | None = None,
    sentence_transformers: bool = False,
) -> None:
    """Write the bundle `out`. Raises ClozeError and leaves nothing behind then."""
    model, settings = _source(run)
    provenance, parent = provenance_of(run)
    notes_text = _read(notes) if notes else ""
    tasks = load_suites(data) if data else []
    tasks += load_suites(data, suites) if suites else []
    others = {name: scores for file in beside for name, scores in _figures(file).items()}
    with staging(out) as folder:
        asked = {"max_tokens": max_tokens, "denoising": denoise, "final_period": final_period}
        settings |= {name: value for name, value in asked.items() if value is not None}
        encoder = SentenceEncoder.load(str(model), **settings)
        findings, canaries = _graphs(encoder, folder, precisions, tasks)
        Canaries.write(folder, canaries)
        provenance = provenance.model_copy(update=vars(findings))
        if sentence_transformers:
            usage = write_sentence_transformer(encoder, folder, probes(encoder.config.max_tokens))
            notes_text = f"{usage}\n\n{notes_text}"
        for name in ("config.json", *TOKENIZER_FILES):
            shutil.copyfile(model / name, folder / name)
        sizes = {name: (folder / GRAPHS[name]).stat().st_size for name in precisions}
        card = model_card(
            out.name,
            encoder.config,
            provenance,
            sizes,
            licence or parent_metadata(parent, "license"),
            notes_text,
            parent_metadata(parent, "language"),
            "sentence-transformers" if sentence_transformers else "cloze",
            _parts(encoder),
            others,
        )
        (folder / "README.md").write_text(card, encoding="utf-8")
        seal(folder, encoder.config, encoder.dimension, weights_digest(encoder), provenance)
    total = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    console.print(f"{out}: {total / 1e6:.1f} MB, {', '.join(precisions)}")


def _source(run: Path) -> tuple[Path, dict[str, Any]]:
    """The folder of a run's weights, and the settings that are not in it. Raises RunError, EncoderError."""
    kind = kind_of(str(run))
    if kind == "run":
        return run / "model", {}
    if kind == "encoder" and is_sentence_transformer(run):
        return run, saved_settings(run)
    raise RunError(f"{run} is not a run; export takes a folder that training.fit wrote")


def _parts(encoder: SentenceEncoder) -> list[str]:
    """Sentences for the model card about what a graph has beside backbone and pooling."""
    parts = []
    if encoder.continuous is not None:
        parts.append("Trained vectors replace the embeddings of the template's words.")
    if encoder.head is not None:
        parts.append(f"A {encoder.head.kind} head comes last.")
    return parts


def _graphs(
    encoder: SentenceEncoder, folder: Path, precisions: Sequence[Precision], tasks: Sequence[Task]
) -> tuple[_Findings, dict[str, NDArray[np.float32]]]:
    """Make, compare and score every precision, and always fp32: the others are measured against it.

    Return also the canary texts' vectors, (texts, d), by precision.
    """
    findings, canaries = _Findings(), dict[str, NDArray[np.float32]]()
    traced = cache(partial(trace, encoder))
    (folder / "onnx").mkdir()
    made: set[Precision] = {"fp32", *precisions}
    for precision in sorted(made, key=PRECISIONS.index):
        console.print(f"{precision}: making the graph")
        model, findings.graphs[precision] = make_graph(precision, traced, encoder, console)
        path = folder / GRAPHS[precision]
        onnx.save(model, path)
        graph = GraphEncoder(path, encoder.pooling.text_encoder)
        findings.parity[precision] = _parity(precision, encoder, graph)
        canaries[precision] = graph.embed(CANARY_TEXTS)
        if tasks:
            findings.scores[precision] = _scores(precision, graph, path.stat().st_size, tasks)
    if "int8" in precisions:
        _refuse_loss(findings.scores)
    if "fp32" not in precisions:
        (folder / GRAPHS["fp32"]).unlink()
        del findings.graphs["fp32"], findings.parity["fp32"], canaries["fp32"]
    return findings, canaries


def _parity(precision: Precision, encoder: SentenceEncoder, graph: GraphEncoder) -> float:
    largest = difference(encoder, graph, probes(encoder.config.max_tokens))
    console.print(f"{precision}: differs from torch by {largest:.1e}")
    if precision == "fp32" and not largest <= LARGEST_DIFFERENCE:
        raise ExportError(
            f"the fp32 graph differs from torch by {largest:.1e} of the longest vector, the limit is "
            f"{LARGEST_DIFFERENCE:.0e}; nothing was written. This is a bug: please report it with the recipe"
        )
    return largest


def _scores(precision: Precision, graph: GraphEncoder, size: int, tasks: Sequence[Task]) -> dict[str, float]:
    def follow(names: list[str]) -> Iterator[str]:
        with console.status("") as status:
            for name in names:
                status.update(f"{precision}: {name}")
                yield name

    subject = Subject(precision, graph.embed, graph.embed, "", size)
    scores = figures(score_tasks(subject, tasks, follow))
    console.print(f"{precision}: " + ", ".join(f"{name} {score:.2f}" for name, score in scores.items()))
    return scores


def _refuse_loss(scores: Mapping[Precision, dict[str, float]]) -> None:
    if not scores:
        console.print("int8: not compared with fp32; give --data to measure its cost")
        return
    before, after = scores["fp32"], scores["int8"]
    limits = {"STS-B dev": LARGEST_LOSS} | dict.fromkeys(search_columns([before]), LARGEST_SEARCH_LOSS)
    for name, limit in limits.items():
        if not round(before[name] - after[name], 2) <= limit:
            raise ExportError(
                f"int8 costs {before[name] - after[name]:.2f} points on {name} ({before[name]:.2f} to "
                f"{after[name]:.2f}), the limit is {limit}; nothing was written. Leave int8 out of --precision"
            )


def _figures(file: Path) -> dict[str, dict[str, float]]:
    """Model -> figures, from a file that `evaluate --json` wrote. Raises RunError."""
    try:
        content = json.loads(_read(file))
        name = Path(content["path"]).name
        return {
            name if len(content["scores"]) == 1 else f"{name} {part}": {key: float(value) for key, value in row.items()}
            for part, row in content["scores"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{file} cannot be read as figures of evaluate --json ({error!r}); write it again") from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{path} cannot be read as UTF-8 text ({error})") from error


if __name__ == "__main__":
    sys.exit(run_command(main))
