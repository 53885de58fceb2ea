"""A bundle of a run or of another encoder: its graphs, compared with torch and scored, the model card and the contract.

In the fp32 graph the tokens of all texts are the rows of one matrix. The fp16 graph is fused, the int8 graph quantised.

The bundle is written completely or not at all. fp32 is refused if it differs from torch by more than 1e-4, int8 if it
loses more than 0.3 points of Spearman on STS-B dev, or more than 0.5 of nDCG@10 on a retrieval collection.
"""

import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from math import isfinite
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto

from cloze.encoding.bundle import (
    GRAPHS,
    PRECISIONS,
    SEARCH_NAMES,
    Bundle,
    Precision,
    Provenance,
    learnt_parts,
    seal,
    sha256,
    staging,
)
from cloze.encoding.canaries import CANARY_TEXTS, Canaries
from cloze.encoding.rows import ENDINGS, ending_of
from cloze.encoding.text import TOKENIZER_FILES
from cloze.training.bar import console
from cloze.training.data.corpus import read_lines
from cloze.training.encoder_source import kind_of
from cloze.training.errors import ExportError, RunError
from cloze.training.evaluation.card import with_figures
from cloze.training.evaluation.suites import load_suites
from cloze.training.evaluation.tables import figures
from cloze.training.evaluation.task import Subject, Task, score_tasks, search_columns
from cloze.training.export.card import model_card, parent_metadata, provenance_of
from cloze.training.export.graph import fuse, halve, trace
from cloze.training.export.layers import Form, one_row, writable
from cloze.training.export.options import BundleOptions
from cloze.training.export.parity import difference, probes
from cloze.training.export.quantise import feeds_of, quantise, vocabulary_feeds
from cloze.training.hub.sentence_transformer import check_words_only, is_sentence_transformer, saved_settings
from cloze.training.hub.sentence_transformer import write as write_sentence_transformer
from cloze.training.model.encoder import SentenceEncoder, weights_digest
from cloze.training.model.graph_encoder import GraphEncoder
from cloze.training.run_folder import Run

CALIBRATED: Final = 64  # texts; 500 gave the same cosine with torch
LEAST_CALIBRATED: Final = 8
CLOSE: Final = 0.995  # mean cosine of int8 with torch
LEAST_COSINE: Final[dict[Precision, float]] = {"fp16": 0.999, "int8": 0.97}  # mean over the probes, with torch

Traced = Callable[[Form | Literal["plain"]], ModelProto]

LARGEST_DIFFERENCE: Final = 1e-4  # of fp32 from torch, relative
LARGEST_LOSS: Final = 0.3  # of int8 against fp32, in points of Spearman x100 on STS-B dev
LARGEST_GRAPH: Final = 2**31  # bytes of a graph, which is a single protobuf file
LARGEST_SEARCH_LOSS: Final = 0.5  # the same in points of nDCG@10 x100 on each collection


def make_graph(
    precision: Precision, traced: Traced, encoder: SentenceEncoder, texts: Sequence[str] = ()
) -> tuple[ModelProto, str]:
    """A graph and its short description. `traced` gives the encoder's graph in one of the forms of `layers`.

    int8 is fitted to the activations of `texts`, or of random tokens if there are none.
    """
    written = writable(encoder.backbone)
    if precision == "int8":
        # products of one row per text stay in fp32: they are cheap, and the last layer causes a third of the loss
        own = encoder.text_encoder
        feeds = feeds_of(own, texts) if texts else vocabulary_feeds(own)
        model = quantise(traced("exact" if written else "plain"), feeds, one_row(encoder))
        fitted = f", fitted to {len(texts)} texts" if texts else ""
        return model, f"weights in 7 bits by column, activations in 8 bits{fitted}"
    if not written:
        plain = traced("plain")
        return (plain if precision == "fp32" else halve(plain)), "plain"
    if precision == "fp32":
        return traced("rows"), "rows"
    try:
        return halve(fuse(traced("fusible"), encoder)), "fused"
    except ExportError as error:
        console.print(f"{precision}: not fused; {error}")
        return halve(traced("fusible")), "plain"


@dataclass
class _Findings:
    """The measurements of each precision."""

    graphs: dict[Precision, str] = field(default_factory=dict)
    parity: dict[Precision, float] = field(default_factory=dict)
    scores: dict[Precision, dict[str, float]] = field(default_factory=dict)


def export(
    run: Path,
    out: Path,
    options: BundleOptions,
    settings: dict[str, Any],
    *,
    sentence_transformers: bool = False,
) -> None:
    """Write the bundle `out` of a finished run, a bundle, or a bundle that sentence-transformers has fine-tuned.

    `settings` replace fields of the run's embedding configuration. Raises ClozeError.
    """
    model, saved = _source(run)
    rounded = kind_of(str(run)) == "bundle" and "fp32" not in Bundle.load(run).precisions  # `out` may be the same one
    provenance, parent = provenance_of(run)
    tasks = load_suites(options.data) if options.data else []

    def load(folder: Path) -> SentenceEncoder:
        encoder = SentenceEncoder.load(str(model), **saved | settings)
        for name in ("config.json", *TOKENIZER_FILES):
            shutil.copyfile(model / name, folder / name)
        return encoder

    write_bundle(out, load, provenance, parent, options, tasks, sentence_transformers=sentence_transformers)
    if kind_of(str(run)) == "run" and (warning := Run(run).warning()):
        console.print(warning)
    if rounded:
        console.print(
            f"note: the weights come from the int8 graph of {run} and have 7 bits; export its run for the exact ones"
        )


def _source(run: Path) -> tuple[Path, dict[str, Any]]:
    """The folder of a run's weights, and the settings that the folder lacks. Raises RunError, EncoderError."""
    kind = kind_of(str(run))
    if kind == "run":
        return Run(run).model, {}
    if kind == "bundle":
        bundle = Bundle.load(run)
        return bundle.path, {"max_tokens": bundle.spec.max_tokens}
    if kind == "encoder" and is_sentence_transformer(run):
        return run, saved_settings(run)
    raise RunError(f"{run} is not a run; export takes a folder that cloze fit wrote, or a bundle")


def write_bundle(
    out: Path,
    load: Callable[[Path], SentenceEncoder],
    provenance: Provenance,
    parent: Path,
    options: BundleOptions,
    tasks: Sequence[Task],
    *,
    sentence_transformers: bool = False,
) -> None:
    """Write the bundle `out` of the encoder that `load` loads. The graphs are scored by `tasks`. The model card takes
    metadata that is not set from the card of `parent`.

    `load` also writes the encoder's config.json and TOKENIZER_FILES into the folder that it is given. Raises ClozeError
    and leaves nothing behind then.
    """
    notes = _read(options.notes) if options.notes else ""
    precisions = options.precisions
    texts = _calibration(options.calibrate, precisions) if options.calibrate else []
    if lost := learnt_parts(out):
        console.print(lost)
    with staging(out) as folder:
        encoder = load(folder)
        if sentence_transformers:
            check_words_only(encoder)
        if encoder.continuous is not None and encoder.config.templates:
            raise ExportError(
                f"trained vectors replace the words of one template, but the encoder also has templates for "
                f"{', '.join(encoder.config.templates)}; train without these"
            )
        findings, canaries = _graphs(encoder, folder, precisions, tasks, texts, force=options.force)
        Canaries.write(folder, canaries)
        if options.calibrate:
            findings.graphs["int8"] += f" of {options.calibrate.name}, sha256 {sha256(options.calibrate)[:16]}"
        provenance = provenance.model_copy(update=vars(findings))
        if sentence_transformers:
            config = {name: (folder / name).read_bytes() for name in ("config.json", *TOKENIZER_FILES)}
            usage = write_sentence_transformer(encoder, folder, probes(encoder.config.max_tokens))
            notes = f"{usage}\n\n{notes}"
            for name, content in config.items():
                (folder / name).write_bytes(content)
        sizes = {name: (folder / GRAPHS[name]).stat().st_size for name in precisions}
        name, inherited = out.absolute().name, parent_metadata(parent, "license")
        card = model_card(
            name,
            encoder.config,
            provenance,
            sizes,
            options.licence or inherited,
            inherited is not None and options.licence in (None, inherited),
            notes,
            parent_metadata(parent, "language"),
            "sentence-transformers" if sentence_transformers else "cloze",
            _parts(encoder),
        )
        card = with_figures(card, name, provenance, sizes)
        (folder / "README.md").write_text(card, encoding="utf-8")
        spec = seal(folder, encoder.config, encoder.dimension, weights_digest(encoder), provenance)
    total = sum((out / name).stat().st_size for name in spec.files)
    console.print(f"{out}: {total / 1e6:.1f} MB, {', '.join(precisions)}, vector space {spec.space}")


def _parts(encoder: SentenceEncoder) -> list[str]:
    """Sentences for the model card about what a graph has besides backbone and pooling."""
    parts = []
    if encoder.continuous is not None:
        parts.append("Trained vectors replace the embeddings of the template's words.")
    if encoder.token_weights is not None:
        parts.append("The more often a token occurs in a corpus, the less it counts in the mean.")
    if encoder.head is not None:
        parts.append(f"A {encoder.head.kind} head comes last.")
    return parts


def _graphs(
    encoder: SentenceEncoder,
    folder: Path,
    precisions: Sequence[Precision],
    tasks: Sequence[Task],
    texts: Sequence[str],
    *,
    force: bool,
) -> tuple[_Findings, dict[str, NDArray[np.float32]]]:
    """Make, compare and score every precision, and always fp32, against which the others are measured.

    Also return the vectors of the canary texts, (texts, d), by precision.
    """
    size = 4 * sum(weights.numel() for weights in encoder.parameters())
    if size >= LARGEST_GRAPH:
        raise ExportError(
            f"the model has {size / 1e9:.2f} GB of weights in fp32, and a graph at most {LARGEST_GRAPH / 1e9:.2f} GB; "
            "choose a smaller model"
        )
    findings, canaries = _Findings(), dict[str, NDArray[np.float32]]()
    traced = cache(partial(trace, encoder))
    (folder / "onnx").mkdir()
    to_make: set[Precision] = {"fp32", *precisions}
    for precision in sorted(to_make, key=PRECISIONS.index):
        console.print(f"{precision}: making the graph")
        model, findings.graphs[precision] = make_graph(precision, traced, encoder, texts)
        path = folder / GRAPHS[precision]
        onnx.save(model, path)
        own = encoder.text_encoder
        graph = GraphEncoder(path, own, encoder.config.named_encoders(own))
        findings.parity[precision] = _parity(precision, encoder, graph, fitted=bool(texts), force=force)
        canaries[precision] = graph.embed(CANARY_TEXTS)
        if tasks:
            findings.scores[precision] = _scores(precision, graph, path.stat().st_size, tasks)
    if "int8" in precisions and not force:
        _refuse_loss(findings.scores)
    if "fp32" not in precisions:
        (folder / GRAPHS["fp32"]).unlink()
        del findings.graphs["fp32"], findings.parity["fp32"], canaries["fp32"]
    return findings, canaries


def _parity(precision: Precision, encoder: SentenceEncoder, graph: GraphEncoder, *, fitted: bool, force: bool) -> float:
    largest, mean_cosine, least_cosine = difference(encoder, graph, probes(encoder.config.max_tokens))
    console.print(
        f"{precision}: differs from torch by {largest:.1e} of the longest vector; cosine {mean_cosine:.4f} on average, "
        f"{least_cosine:.4f} at least"
    )
    if precision == "int8" and mean_cosine < CLOSE and not fitted:
        console.print("int8: --calibrate TEXTS fits the graph to your own text, which may bring it closer")
    if precision == "fp32" and not largest <= LARGEST_DIFFERENCE:
        raise ExportError(
            f"the fp32 graph differs from torch by {largest:.1e} of the longest vector; the limit is "
            f"{LARGEST_DIFFERENCE:.0e}; nothing was written. This is a bug: please report it with the recipe"
        )
    if not isfinite(largest):
        raise ExportError(
            f"the {precision} graph gives numbers that are not finite; nothing was written. Leave {precision} out of "
            "--precision"
        )
    floor = LEAST_COSINE.get(precision, -1)
    if not (mean_cosine >= floor or force):
        raise ExportError(
            f"the {precision} graph has a mean cosine of {mean_cosine:.4f} to the model's own vectors; at least "
            f"{floor} is required, so nothing was written. Leave {precision} out of --precision, or give --force"
            + (", or --calibrate TEXTS" if precision == "int8" and not fitted else "")
        )
    return largest


def _scores(precision: Precision, graph: GraphEncoder, size: int, tasks: Sequence[Task]) -> dict[str, float]:
    queries, documents = map(graph.named, SEARCH_NAMES)
    subject = Subject(precision, graph.embed, queries.embed, "", size, embed_documents=documents.embed)
    scores = figures(score_tasks(subject, tasks))
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
                f"{after[name]:.2f}); the limit is {limit}, so nothing was written. Leave int8 out of --precision"
            )


def _calibration(path: Path, precisions: Sequence[Precision]) -> list[str]:
    """At most CALIBRATED lines of a file, drawn with a fixed seed. Raises ClozeError."""
    if "int8" not in precisions:
        raise ExportError("--calibrate fits the int8 graph; add int8 to --precision")
    if not path.is_file():
        raise ExportError(f"{path} is not a file; give --calibrate a text file with one text per line")
    if (ending := ending_of(path.name)) in ENDINGS and ending != ".txt":
        raise ExportError(f"{path} is a table; give --calibrate a text file with one text per line")
    texts = [line.strip() for line in read_lines(path) if line.strip()]
    if len(texts) < LEAST_CALIBRATED:
        raise ExportError(f"{path} has {len(texts)} texts; --calibrate needs at least {LEAST_CALIBRATED}")
    return random.Random(0).sample(texts, min(CALIBRATED, len(texts)))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{path} cannot be read as UTF-8 text ({error})") from error
