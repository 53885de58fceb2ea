"""cloze mine MODEL --pairs FILE --out FILE: hard negatives for pairs, found by a model.

The negatives of a pair are the texts most similar to its first text, without the positive and without texts whose
similarity exceeds the positive's minus `margin`: those are often unmarked positives (NV-Retriever, arXiv:2407.15831).
The result is a corpus with one more column per negative.
"""

import csv
import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from pydantic_settings import CliPositionalArg, CliVariadicArg

from cloze.command import run
from cloze.encoding.files import check_new_file, replacing
from cloze.training.bar import bar, console
from cloze.training.data.corpus import check_not_read, read_corpus
from cloze.training.errors import RunError
from cloze.training.evaluation.measures import nearest, units
from cloze.training.evaluation.options import ModelOptions

Count = Annotated[int, Field(ge=1)]
ENDINGS: Final = (".csv", ".tsv", ".jsonl")


class MineOptions(ModelOptions):
    """Find hard negatives for pairs of texts with a model, in the pairs' own second column or in other files."""

    model: CliPositionalArg[str] = Field(
        description="a run, a bundle (its most precise graph, or --precision), an encoder's folder, a hub name, or a "
        "server's http://HOST:PORT"
    )
    pairs: Path = Field(description="file of pairs: csv, tsv, jsonl or parquet")
    columns: CliVariadicArg[list[str]] = Field(
        ["sent0", "sent1"], min_length=2, max_length=2, description="columns of the text and of its positive"
    )
    corpus: CliVariadicArg[list[str]] = Field(
        [], description="files of sentences to take negatives from (default: the second column of the pairs)"
    )
    corpus_columns: CliVariadicArg[list[str]] = Field(
        [], max_length=1, description="the text column of csv, tsv, jsonl or parquet files in --corpus"
    )
    out: Path = Field(description="file to write, .csv, .tsv or .jsonl: the pairs, with one column per negative")
    negatives: Annotated[Count, Field(le=8)] = Field(
        1, description="negatives per pair, at most the 8 that a recipe reads; pairs with fewer are skipped"
    )
    margin: Annotated[float, Field(ge=0, le=2)] = Field(
        0.05, description="the cosine of a negative is at most the positive's minus this margin"
    )
    depth: Count = Field(100, description="number of nearest texts from which to choose")


def main(arguments: Sequence[str] | None = None) -> None:
    """Raises ClozeError."""
    options = MineOptions.parse(arguments, "cloze mine")

    # torch takes seconds to load; help and option errors need not wait
    from cloze.training.evaluation.subjects import subjects

    if options.out.suffix not in ENDINGS:
        raise RunError(f"--out is {options.out}; its name must end in {', '.join(ENDINGS)}")
    names = ["negative"] if options.negatives == 1 else [f"negative{n}" for n in range(1, options.negatives + 1)]
    header = [*options.columns, *names]
    if twice := [name for name in header if header.count(name) > 1]:
        raise RunError(f"two columns of {options.out} would have the name {twice[0]!r}; rename one of --columns")
    if options.corpus_columns and not options.corpus:
        raise RunError(
            "--corpus-columns names columns of --corpus, which is not given; give it, or omit --corpus-columns"
        )
    check_new_file(options.out)
    check_not_read(options.out, [str(options.pairs), *options.corpus])
    pairs = read_corpus([str(options.pairs)], options.columns)
    positives = list(dict.fromkeys(positive for _, positive in pairs.rows))
    texts = positives
    if options.corpus:
        texts = list(dict.fromkeys(text for (text,) in read_corpus(options.corpus, options.corpus_columns).rows))
    subject = next(subjects(options.model, options))
    queries = units(subject.embed_queries([text for text, _ in pairs.rows]))
    places = {text: place for place, text in enumerate(dict.fromkeys([*texts, *positives]))}
    vectors = units(subject.documents(list(places)))  # the texts come first
    likeness = (queries * vectors[[places[positive] for _, positive in pairs.rows]]).sum(1)
    neighbours = nearest(queries, vectors[: len(texts)], min(options.depth, len(texts)))
    neighbours = bar(neighbours, total=len(queries), desc="searching", unit=" pairs")
    negatives = mine(pairs.rows, likeness, neighbours, texts, options.negatives, options.margin)
    rows = [(*pair, *mined) for pair, mined in zip(pairs.rows, negatives, strict=True) if mined]
    if not rows:
        raise RunError(
            f"no pair has {options.negatives} negatives among its {options.depth} nearest texts with a margin of "
            f"{options.margin}; lower --margin or --negatives, raise --depth, or give more texts with --corpus"
        )
    _write(options.out, header, rows)
    next_words = f"--corpus {shlex.quote(str(options.out))} --columns {shlex.join(header)}"
    console.print(f"{options.out}: {len(rows):,} rows from {len(pairs):,} pairs; next: cloze fit RECIPE {next_words}")


def mine(
    pairs: Sequence[tuple[str, ...]],
    likeness: NDArray[np.floating],
    neighbours: Iterable[tuple[NDArray[np.floating], NDArray[np.integer]]],
    texts: Sequence[str],
    count: int,
    margin: float,
) -> list[tuple[str, ...]]:
    """The `count` negatives of each pair, most similar first; an empty tuple if there are fewer.

    `likeness` (n) has the cosine of each pair, `neighbours` the cosines and the indices of its nearest `texts`. The
    pair's own texts are excluded, and so are the positives of other pairs with the same first text.
    """
    own: dict[str, set[str]] = {}
    for text, positive in pairs:
        own.setdefault(text, {text}).add(positive)
    negatives: list[tuple[str, ...]] = []
    for (text, _), limit, (cosines, places) in zip(pairs, likeness - margin, neighbours, strict=True):
        candidates = (texts[place] for cosine, place in zip(cosines, places, strict=True) if cosine <= limit)
        chosen = [candidate for candidate in candidates if candidate not in own[text]][:count]
        negatives.append(tuple(chosen) if len(chosen) == count else ())
    return negatives


def _write(file: Path, names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    with replacing(file) as partial, partial.open("w", encoding="utf-8", newline="") as out:
        if file.suffix == ".jsonl":
            for row in rows:
                out.write(json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False) + "\n")
            return
        writer = csv.writer(out, delimiter="\t" if file.suffix == ".tsv" else ",")
        writer.writerow(names)
        writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(run(main))
