"""cloze bridge OLD NEW OUT --texts T: a map from a new model's vectors to the old model's vectors in an index.

Two maps are fitted on the texts: an orthogonal one (Procrustes, Schönemann 1966) and an affine one (ridge regression).
As in Drift-Adapter (arXiv:2509.23471), the criterion is whether the old index finds the same texts: recall@10 of the
old model's results. Some texts are held out to choose the map, and others to measure the chosen one.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from pydantic_settings import CliPositionalArg, CliVariadicArg

from cloze.command import run
from cloze.encoding.bridge import About, Bridge, BridgeKind
from cloze.encoding.bundle import Bundle
from cloze.encoding.files import check_new_file
from cloze.options import Options
from cloze.training.bar import bar
from cloze.training.data.corpus import check_not_read, read_corpus
from cloze.training.errors import CorpusError, RunError
from cloze.training.evaluation.measures import mean_interval, nearest, units
from cloze.training.evaluation.options import ModelOptions

if TYPE_CHECKING:
    from cloze.training.evaluation.task import Subject

DEPTH: Final = 10  # results of a search
LEAST_TEXTS: Final = 500
QUERY_SHARE: Final = 0.1  # share of the texts that choose the map; as many others measure it
MOST_QUERIES: Final = 1000  # for each of the two purposes
DISTINCT: Final = 0.5  # least share of distinct vectors; a model that does not know the language has fewer
PENALTIES: Final = np.logspace(-3, 2, 6)  # of ridge regression, chosen by leave-one-out
Unit = Annotated[float, Field(ge=0, le=1)]
Vectors = NDArray[np.floating]


class Map(NamedTuple):
    """`matrix` (new, old) and `offset` (old) map unit vectors of the new model to vectors of the old one."""

    matrix: NDArray[np.floating]
    offset: NDArray[np.floating]

    def __call__(self, vectors: NDArray[np.floating]) -> NDArray[np.floating]:
        """Unit vectors (n, new) -> (n, old)."""
        mapped: NDArray[np.floating] = vectors @ self.matrix + self.offset
        return mapped


class BridgeOptions(Options):
    """Fit a map from the vectors of a new bundle to those of an old one, so that the old index can still be searched.

    `cloze serve --bridge` uses the map. Nothing is written if too few of the old model's results are found.
    """

    old: CliPositionalArg[Path] = Field(description="bundle whose vectors the index holds")
    new: CliPositionalArg[Path] = Field(description="bundle to serve")
    out: CliPositionalArg[Path] = Field(description="file to write")
    texts: CliVariadicArg[list[str]] = Field(
        min_length=1, description="files of your own texts, one per line, preferably those in the index"
    )
    columns: CliVariadicArg[list[str]] = Field(
        [], max_length=1, description="the text column of csv, tsv, jsonl or parquet files"
    )
    sample: Annotated[int, Field(ge=LEAST_TEXTS)] = Field(
        20_000, description="use a random sample of at most this many texts"
    )
    least_recall: Unit = Field(
        0.8, description="minimum recall@10 of the old model's results; below it nothing is written"
    )
    force: bool = Field(False, description="write the map even if the recall is lower")
    seed: int = Field(0, ge=0, description="seed of the random draws")


def orthogonal(new: Vectors, old: Vectors) -> Map:
    """The matrix with orthonormal rows or columns (both, if the widths are equal) that maps `new` closest to `old`.

    Both have unit vectors of the same texts as rows.
    """
    left, _, right = np.linalg.svd(new.T @ old, full_matrices=False)
    return Map(left @ right, np.zeros(old.shape[1]))


def affine(new: Vectors, old: Vectors) -> Map:
    """Least squares with an offset and a ridge penalty."""
    from sklearn.linear_model import RidgeCV  # type: ignore[import-untyped]

    fitted = RidgeCV(PENALTIES).fit(new, old)
    return Map(fitted.coef_.T, fitted.intercept_)


def recalls(mapped: Vectors, old: Vectors, documents: Vectors, depth: int = DEPTH) -> NDArray[np.float64]:
    """For each query the share of the `depth` documents nearest to its old vector that its mapped vector finds, (n).

    `mapped`, `old` and `documents` are vectors of the old space. `old` are the old model's vectors of the queries.
    """
    documents = units(documents)
    pairs = zip(nearest(units(mapped), documents, depth), nearest(units(old), documents, depth), strict=True)
    shown = bar(pairs, total=len(mapped), desc="searching", unit=" queries")
    return np.array([len(np.intersect1d(retrieved, expected)) / depth for (_, retrieved), (_, expected) in shown])


def main(arguments: Sequence[str] | None = None) -> None:
    """Raises ClozeError."""
    options = BridgeOptions.parse(arguments, "cloze bridge")

    # torch takes seconds to load; help and option errors need not wait
    from cloze.training.evaluation.subjects import subjects

    check_new_file(options.out)
    check_not_read(options.out, options.texts)
    spaces = {path: Bundle.load(path).spec.space for path in (options.old, options.new)}
    if spaces[options.old] == spaces[options.new]:
        raise RunError(f"{options.old} and {options.new} have the same vector space; their vectors need no bridge")
    texts = _texts(options)
    old, new = (next(subjects(str(path), ModelOptions())) for path in (options.old, options.new))
    bridge = _fit(old, new, texts, spaces[options.old], spaces[options.new], options.seed)
    about = bridge.about
    recall = f"recall@{DEPTH} {about.recall:.3f} [{about.least:.3f}, {about.most:.3f}]"
    if about.recall < options.least_recall and not options.force:
        raise RunError(
            f"the {about.kind} map keeps too little of the old results: {recall} on {about.queries} texts held out; at "
            f"least {options.least_recall} is required: give more of your own texts, embed the index again with "
            "`cloze bulk`, or write it anyway with --force"
        )
    bridge.write(options.out)
    command = f"cloze serve --bundle {shlex.quote(str(options.new))} --bridge {shlex.quote(str(options.out))}"
    print(
        f"{options.out}: {about.kind} map from space {about.new} to {about.old}, {recall} on {about.queries} texts "
        f"held out, of {about.searched} searched; next: {command}"
    )


def _texts(options: BridgeOptions) -> list[str]:
    """Distinct texts in random order. Raises CorpusError if there are too few."""
    texts = list(dict.fromkeys(text for (text,) in read_corpus(options.texts, options.columns).rows))
    if len(texts) < LEAST_TEXTS:
        raise CorpusError(
            f"{', '.join(options.texts)}: {len(texts)} distinct texts; a bridge needs {LEAST_TEXTS} or more"
        )
    order = np.random.default_rng(options.seed).permutation(len(texts))[: options.sample]
    return [texts[place] for place in order]


def _fit(old: "Subject", new: "Subject", texts: Sequence[str], old_space: str, new_space: str, seed: int) -> Bridge:
    """The better of the two maps, with the share of the old results that it keeps."""
    count = min(int(len(texts) * QUERY_SHARE), MOST_QUERIES)
    held_out, fitted = list(texts[: 2 * count]), list(texts[2 * count :])
    old_documents = units(old.documents(fitted))
    new_documents = units(new.documents(fitted))
    for model, documents in ("old", old_documents), ("new", new_documents):
        if (distinct := len(np.unique(documents.round(4), axis=0))) < DISTINCT * len(fitted):
            raise CorpusError(
                f"the {model} model gives {len(fitted)} different texts only {distinct} different vectors: it cannot "
                "read them; give texts in a language that both models know"
            )
    queries = units(new.embed_queries(held_out)), units(old.embed_queries(held_out))
    choosing_new, choosing_old = (vectors[:count] for vectors in queries)
    judging_new, judging_old = (vectors[count:] for vectors in queries)
    maps: dict[BridgeKind, Map] = {
        "orthogonal": orthogonal(new_documents, old_documents),
        "affine": affine(new_documents, old_documents),
    }
    kind = max(maps, key=lambda name: recalls(maps[name](choosing_new), choosing_old, old_documents).mean())
    best = maps[kind]
    found = recalls(best(judging_new), judging_old, old_documents)
    least, most = mean_interval(found, seed)
    about = About(
        kind=kind,
        old=old_space,
        new=new_space,
        fitted=len(fitted),
        queries=count,
        searched=len(fitted),
        recall=float(found.mean()),
        least=least,
        most=most,
    )
    return Bridge(about, best.matrix.astype(np.float32), best.offset.astype(np.float32))


if __name__ == "__main__":
    sys.exit(run(main))
