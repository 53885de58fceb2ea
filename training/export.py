"""python -m training.export RUN OUT: a finished run -> graphs, compared with torch and scored -> a bundle.

The bundle appears whole or not at all. fp32 is refused where it differs from torch by more than 1e-4, int8 where it
costs more than 0.3 points of Spearman on STS-B dev, or more than 0.5 of nDCG@10 on a collection to search.
"""

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Final

import onnx
from rich.console import Console

from encoding.bundle import GRAPHS, PRECISIONS, Precision, seal, staging
from encoding.text import TOKENIZER_FILES
from training.candidates import make_graph
from training.card import model_card, parent_licence
from training.cli import positive
from training.cli import run as run_command
from training.encoder import SentenceEncoder
from training.errors import ExportError, RunError
from training.evaluate.suite import Suite, search_columns
from training.graph import trace
from training.origin import origin
from training.parity import difference, probes
from training.runner import GraphEncoder
from training.source import resolve

__all__ = ["LARGEST_DIFFERENCE", "LARGEST_LOSS", "LARGEST_SEARCH_LOSS", "export", "main"]

LARGEST_DIFFERENCE: Final = 1e-4  # of fp32 from torch, relative
LARGEST_LOSS: Final = 0.3  # of int8 against fp32, in points of Spearman x100 on STS-B dev
LARGEST_SEARCH_LOSS: Final = 0.5  # the same in points of nDCG@10 x100 on each collection

console = Console(stderr=True, soft_wrap=True, highlight=False)


@dataclass
class _Findings:
    """What is learnt about each precision on the way."""

    graphs: dict[str, str] = field(default_factory=dict)
    parity: dict[str, float] = field(default_factory=dict)
    scores: dict[str, dict[str, float]] = field(default_factory=dict)


def main(arguments: Sequence[str] | None = None) -> int | None:
    """Raises ClozeError; usage errors end the process with 2."""
    options = _parser().parse_args(arguments)
    export(
        Path(options.run),
        Path(options.out),
        options.precision,
        max_tokens=options.max_tokens,
        denoise=options.denoise,
        final_period=options.final_period,
        data=options.data,
        licence=options.license,
        notes=options.notes,
    )
    return None


def export(
    run: Path,
    out: Path,
    precisions: Sequence[Precision],
    *,
    max_tokens: int | None = None,
    denoise: bool | None = None,
    final_period: bool | None = None,
    data: str | None = None,
    licence: str | None = None,
    notes: str | None = None,
) -> None:
    """Write the bundle `out`. Raises ClozeError, and then leaves nothing behind."""
    if resolve(str(run)) != "run":
        raise RunError(f"{run} is not a run; export takes a folder that training.fit made")
    provenance, parent = origin(run)
    notes_text = _read(Path(notes)) if notes else ""
    suite = Suite.load(data) if data else None
    with staging(out) as folder:
        encoder = SentenceEncoder.load(
            str(run / "model"), max_tokens=max_tokens, denoising=denoise, final_period=final_period
        )
        findings = _graphs(encoder, folder, precisions, suite)
        provenance = provenance.model_copy(update=vars(findings))
        for name in ("config.json", *TOKENIZER_FILES):
            shutil.copyfile(run / "model" / name, folder / name)
        sizes = {name: (folder / GRAPHS[name]).stat().st_size for name in precisions}
        licence = licence or parent_licence(parent)
        card = model_card(out.name, encoder.config, provenance, sizes, licence, notes_text, _parts(encoder))
        (folder / "README.md").write_text(card, encoding="utf-8")
        seal(folder, encoder.config, encoder.dimension, provenance)
    total = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    console.print(f"{out}: {total / 1e6:.1f} MB, {', '.join(precisions)}")


def _parts(encoder: SentenceEncoder) -> list[str]:
    """What the card tells of a graph beside its reading."""
    parts = []
    if encoder.continuous is not None:
        parts.append("In place of the embeddings of the template's words stand vectors that were trained.")
    if encoder.head is not None:
        parts.append(f"A {encoder.head.kind} head comes last.")
    return parts


def _graphs(encoder: SentenceEncoder, folder: Path, precisions: Sequence[Precision], suite: Suite | None) -> _Findings:
    """Make, compare and score every precision; fp32 is the measure of the others, asked for or not."""
    findings = _Findings()
    traced = cache(partial(trace, encoder))
    (folder / "onnx").mkdir()
    for precision in ("fp32", *(name for name in PRECISIONS if name in precisions and name != "fp32")):
        console.print(f"{precision}: making the graph")
        model, findings.graphs[precision] = make_graph(precision, traced, encoder, console)
        path = folder / GRAPHS[precision]
        onnx.save(model, path)
        graph = GraphEncoder(path, encoder.prompt.text_encoder)
        findings.parity[precision] = _parity(precision, encoder, graph)
        if suite is not None:
            findings.scores[precision] = _scores(precision, graph, suite)
    if "int8" in precisions:
        _refuse_loss(findings.scores)
    if "fp32" not in precisions:
        (folder / GRAPHS["fp32"]).unlink()
        del findings.graphs["fp32"], findings.parity["fp32"]
    return findings


def _parity(precision: Precision, encoder: SentenceEncoder, graph: GraphEncoder) -> float:
    largest = difference(encoder, graph, probes(encoder.config.max_tokens))
    console.print(f"{precision}: differs from torch by {largest:.1e}")
    if precision == "fp32" and not largest <= LARGEST_DIFFERENCE:
        raise ExportError(
            f"the fp32 graph differs from torch by {largest:.1e} of the longest vector, allowed is "
            f"{LARGEST_DIFFERENCE:.0e}; nothing was written. This is a bug: please report it with the recipe"
        )
    return largest


def _scores(precision: Precision, graph: GraphEncoder, suite: Suite) -> dict[str, float]:
    def follow(names: list[str]) -> Iterator[str]:
        with console.status("") as status:
            for name in names:
                status.update(f"{precision}: {name}")
                yield name

    scores = suite.score(graph.embed, follow)
    console.print(f"{precision}: " + ", ".join(f"{name} {score:.2f}" for name, score in scores.items()))
    return scores


def _refuse_loss(scores: dict[str, dict[str, float]]) -> None:
    if not scores:
        console.print("int8: not compared with fp32; give --data to measure what it costs")
        return
    before, after = scores["fp32"], scores["int8"]
    limits = {"STS-B dev": LARGEST_LOSS} | dict.fromkeys(search_columns([before]), LARGEST_SEARCH_LOSS)
    for name, limit in limits.items():
        if not round(before[name] - after[name], 2) <= limit:
            raise ExportError(
                f"int8 costs {before[name] - after[name]:.2f} points on {name} ({before[name]:.2f} to "
                f"{after[name]:.2f}), allowed are {limit}; nothing was written. Leave int8 out of --precision"
            )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{path} cannot be read as UTF-8 text ({error})") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m training.export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="a finished run's folder")
    parser.add_argument("out", metavar="OUT", help="the bundle to write; a bundle there is replaced")
    parser.add_argument(
        "--precision", type=_precisions, default=["fp32"], metavar="P,…", help="of fp32, fp16, int8 (default: fp32)"
    )
    parser.add_argument("--max-tokens", type=positive, metavar="N", help="longest sequence, template included")
    parser.add_argument(
        "--denoise",
        action=argparse.BooleanOptionalAction,
        help="take off the template's own vector, or do not (PromptBERT; default: as it was trained to be served)",
    )
    parser.add_argument(
        "--final-period",
        action=argparse.BooleanOptionalAction,
        help="give a text without one a period, or do not (PromptBERT's evaluation does; default: as it was trained)",
    )
    parser.add_argument(
        "--data",
        metavar="DIR",
        help="score the graphs: the folder that holds senteval/downstream and, if there are any, retrieval/NAME",
    )
    parser.add_argument("--license", metavar="ID", help="of the model (default: that of its parent's card)")
    parser.add_argument("--notes", metavar="FILE", help="Markdown to add to the model card")
    return parser


def _precisions(text: str) -> list[Precision]:
    names = text.split(",")
    if unknown := [name for name in names if name not in PRECISIONS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(PRECISIONS)}")
    return [precision for precision in PRECISIONS if precision in names]


if __name__ == "__main__":
    sys.exit(run_command(main))
