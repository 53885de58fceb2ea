"""From a user's documents and judged queries to a run that is better on them, or a plain word that it is not.

documents, pairs -> judgements -> rounds of training on a part of the queries each, scored on the others -> a last round
on all queries, and its mean with the parent, whose share the held-out queries chose. The parent alone is a candidate.
"""

import csv
import hashlib
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from sklearn.cluster import KMeans  # type: ignore[import-untyped]
from sklearn.exceptions import ConvergenceWarning  # type: ignore[import-untyped]

from encoding.bundle import Source
from encoding.machine import has_bf16
from evaluation.measures import Embed, units
from training.adaptation.documents import Document, read_documents
from training.adaptation.held_out import HeldOutQueries, interval
from training.adaptation.pairs import Judgements, read_pairs
from training.adaptation.rounds import Plan, made_queries, recipe_of_round, split
from training.encoder_source import own_reading
from training.errors import CorpusError, EncoderError
from training.hub.adoption import served
from training.loop import processes
from training.loop.run import fit
from training.loop.soup import averaged
from training.methods.teacher import embedded, parts
from training.model.encoder import SentenceEncoder
from training.run_folder import Run, provenance_of_encoder

__all__ = ["METHOD", "adapt", "fast"]

METHOD: Final = "adapt"
LABEL_FILE: Final = "label.csv"

FEWEST_QUERIES: Final = 10
FEWEST_DOCUMENTS: Final = 50
MOST_DOCUMENTS: Final = 10_000  # that are trained on and searched; a round embeds them all
ROUNDS: Final = 2
SHARES: Final = (0.3, 0.5)  # of the parent
CAUTIOUS: Final = (0.5, 0.7)  # the same where nobody judged the queries held out
MADE: Final = 150  # queries that are made and held out, at most; one of every three documents
EXAMPLES: Final = 10
TO_LABEL: Final = 50
FOREIGN: Final = 2.5  # tokens of a word, on average: the encoder does not know the words
SAMPLE: Final = 200  # documents that decide it

console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)


def adapt(
    encoder: str,
    pairs: Path | None,
    columns: Sequence[str],
    paths: Sequence[Path],
    document_columns: Sequence[str],
    out: Path,
    seed: int,
) -> None:
    """Write the run `out`. Whatever is wrong with the files is said before anything is computed. Raises ClozeError."""
    run = Run.fresh(out)
    documents = read_documents(paths, document_columns) if paths else []
    judged = _smaller(_judgements(pairs, documents, columns), seed)
    _show(judged, documents, pairs)
    made = None if pairs else _made(judged.documents, seed)
    run.make()
    try:
        place = Workplace(encoder, judged, out / "rounds", seed)
        _warn_of_language(place.parent, judged.documents)
        found = _without_labels(place, *made) if made else _with_labels(place)
        if not pairs:
            _write_to_label(out / LABEL_FILE, judged.documents, place.vectors, seed)
        names = {"pairs": [str(path) for path in (pairs,) if path], "documents": [str(path) for path in paths]}
        texts = {"pairs": judged.queries, "documents": judged.documents}
        data = [_source(names[what], texts[what]) for what in names if names[what]]
        asked = names | {"columns": [*columns], "document_columns": [*document_columns]}
        _write(run, found, {"method": METHOD, "encoder": encoder, "seed": seed} | asked, data)
    finally:
        shutil.rmtree(out / "rounds", ignore_errors=True)
    _report(run, encoder, found, labelled=pairs is not None)


@dataclass(frozen=True)
class Found:
    """nDCG@10 of each held-out query, (n): before training, and with each share of the parent that was tried."""

    runs: list[Path]
    before: NDArray[np.float64]
    after: dict[float, NDArray[np.float64]]
    growth: float | None = None  # of the mean, from half of a round's queries to all of them

    @property
    def share(self) -> float:
        """The parent's share that is best; 1 if none gains more than one standard error over the parent."""
        gains = {share: scores - self.before for share, scores in self.after.items()}
        sure = {share: gain.mean() for share, gain in gains.items() if gain.mean() > gain.std() / len(gain) ** 0.5}
        return max(sure, key=sure.__getitem__, default=1.0)

    @property
    def gains(self) -> NDArray[np.float64]:
        return self.after.get(self.share, self.before) - self.before


def _with_labels(place: "Workplace") -> Found:
    """Rounds that hold out another part of the queries each, and a last one that learns from all, if that helps."""
    judged, count, everything = place.judged, len(place.judged), range(len(place.judged.documents))
    groups = split(count, ROUNDS, place.seed)
    scores = list[dict[float, NDArray[np.float64]]]()
    for number, group in enumerate(groups, 1):
        console.print(f"round {number} of {ROUNDS}: {count - len(group)} queries to learn from, {len(group)} held out")
        others = sorted({*range(count)} - {*group})
        run = place.trained(f"round-{number}", judged, others, everything)
        scores.append(place.scored(run, place.held_out(judged, group, place.vectors), SHARES))
    joined = {share: np.concatenate([score[share] for score in scores]) for share in scores[0]}
    found = Found([], joined.pop(1.0), joined)
    if found.share == 1:
        return found
    growth = _growth(place, groups, scores[0], found.share)
    console.print(f"last round: all {count} queries to learn from")
    return replace(found, runs=[place.trained("last", judged, range(count), everything)], growth=growth)


def _growth(
    place: "Workplace", groups: Sequence[list[int]], whole: dict[float, NDArray[np.float64]], share: float
) -> float:
    """What the second half of a round's queries added: the first round's figure less that of one with half of them."""
    half = sorted(query for group in groups[1:] for query in group)[::2]
    console.print(f"a round with {len(half)} of these queries, for what more of them bring")
    run = place.trained("half", place.judged, half, range(len(place.judged.documents)))
    scores = place.scored(run, place.held_out(place.judged, groups[0], place.vectors), [share])
    return float(whole[share].mean() - scores[share].mean())


def _made(documents: Sequence[str], seed: int) -> tuple[Judgements, list[int]]:
    """Queries made of some documents, to be held out, and those documents' indices. Raises CorpusError."""
    drawn = np.random.default_rng(seed).permutation(len(documents))
    asked = sorted(drawn[: min(MADE, len(documents) // 3)].tolist())
    made = made_queries(documents, asked, seed)
    if len(made) < FEWEST_QUERIES:
        raise CorpusError(
            f"of {len(asked)} documents only {len(made)} have two sentences or more, one of which could be a query; "
            "give --pairs with queries of your own"
        )
    return made, asked


def _without_labels(place: "Workplace", made: Judgements, asked: Sequence[int]) -> Found:
    """One round; held out are queries that were made of other documents. A gain that may be chance is none."""
    others = sorted({*range(len(made.documents))} - {*asked})
    console.print(f"one round: queries made of {len(others):,} documents, {len(made)} of others held out")
    vectors = place.vectors.copy()
    vectors[asked] = place.embedded([made.documents[number] for number in asked])  # without the sentences taken out
    run = place.trained("round-1", place.judged, [], others)
    scores = place.scored(run, place.held_out(made, list(range(len(made))), vectors), CAUTIOUS)
    before = scores.pop(1.0)
    return Found([run], before, {share: each for share, each in scores.items() if interval(each - before)[0] > 0})


def _write(run: Run, found: Found, recipe: dict[str, Any], data: Sequence[Source]) -> None:
    """The run: the mean of the rounds and the parent, or the parent as it is."""
    encoder = recipe["encoder"]
    if found.share < 1:
        mean, provenance = averaged(found.runs, parent_share=found.share)
    else:
        mean, provenance = loaded(encoder), provenance_of_encoder(encoder) | {"seeds": [recipe["seed"]]}
    low, high = interval(found.gains)
    figures = {
        "queries": len(found.before),
        "before": round(float(found.before.mean()), 2),
        "after": round(float((found.before + found.gains).mean()), 2),
        "interval": [round(low, 2), round(high, 2)],
    }
    mean.save(run.model)
    own = {"recipe": recipe | {"parent_share": found.share, "held_out": figures}, "rows": figures["queries"]}
    sources = [source.model_dump(mode="json") for source in data]
    run.write_provenance(provenance | own | {"data": [*provenance_of_encoder(encoder)["data"], *sources]})


def _source(paths: Sequence[str], texts: Sequence[str]) -> Source:
    """What was read, as a provenance names it: the last parts of the paths, the number of texts, and their digest."""
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    return Source(name=", ".join(Path(path).name for path in paths), sentences=len(texts), sha256=digest)


def _judgements(pairs: Path | None, documents: Sequence[Document], columns: Sequence[str]) -> Judgements:
    """Raises CorpusError if there are too few queries or documents."""
    if pairs is None and not documents:
        raise CorpusError("nothing to learn from; give --documents, and --pairs with queries and what answers them")
    texts = [document.text for document in documents]
    judged = Judgements([], texts, []) if pairs is None else read_pairs(pairs, documents, columns)
    if pairs is not None and len(judged) < FEWEST_QUERIES:
        raise CorpusError(
            f"{pairs} has {len(judged)} queries with a document that answers them, of which a part has to be held out; "
            f"give {FEWEST_QUERIES} or more, better a hundred, or leave out --pairs"
        )
    if len(judged.documents) < FEWEST_DOCUMENTS:
        raise CorpusError(
            f"{len(judged.documents)} documents are too few to tell one ranking from another; give "
            f"{FEWEST_DOCUMENTS} or more with --documents"
        )
    return judged


def _smaller(judged: Judgements, seed: int) -> Judgements:
    """At most MOST_DOCUMENTS: those that somebody judged, and others at random."""
    count = len(judged.documents)
    if count <= MOST_DOCUMENTS:
        return judged
    needed = sorted({place for grades in judged.grades for place in grades})
    others = np.setdiff1d(np.arange(count), needed)
    drawn = np.random.default_rng(seed).permutation(others)[: max(0, MOST_DOCUMENTS - len(needed))]
    kept = sorted([*needed, *drawn.tolist()])
    places = {place: number for number, place in enumerate(kept)}
    grades = [{places[place]: grade for place, grade in each.items()} for each in judged.grades]
    console.print(f"documents: {len(kept):,} of {count:,} are used: those that are judged, and others at random")
    return Judgements(judged.queries, [judged.documents[place] for place in kept], grades)


def _show(judged: Judgements, documents: Sequence[Document], pairs: Path | None) -> None:
    """What was read, with examples, before anything is trained."""
    files = len({document.name for document in documents})
    console.print(f"documents: {len(judged.documents):,}" + (f", with {files:,} names" if documents else ""))
    if pairs is None:
        for text in judged.documents[:: max(1, len(judged.documents) // EXAMPLES)][:EXAMPLES]:
            console.print(f"  {text[:100]}")
        return
    count = sum(len(judged.relevant(query)) for query in range(len(judged)))
    console.print(f"queries: {len(judged):,}, answered by {count:,} documents; such as:")
    for query in range(min(EXAMPLES, len(judged))):
        answer = judged.documents[judged.relevant(query)[0]]
        console.print(f"  {judged.queries[query][:60]}  ->  {answer[:60]}")


def _warn_of_language(encoder: SentenceEncoder, documents: Sequence[str]) -> None:
    sample = documents[:: max(1, len(documents) // SAMPLE)]
    words = sum(len(text.split()) for text in sample)
    tokens = sum(map(encoder.pooling.text_encoder.count, sample))
    if tokens > FOREIGN * words:
        console.print(
            f"warning: a word takes {tokens / words:.1f} tokens of this encoder; text of a language that it was not "
            "trained on stays hard for it: give --encoder one that knows the language"
        )


class Workplace:
    """Where the rounds are trained, with the vectors of the encoder before training, which all of them need."""

    def __init__(self, encoder: str, judged: Judgements, folder: Path, seed: int) -> None:
        self.encoder, self.judged, self.folder, self.seed = encoder, judged, folder, seed
        self.parent = loaded(encoder)
        self._embed = (served(encoder) or self.parent).embed
        self.vectors = self.embedded(judged.documents)

    def embedded(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors (n, d) of length 1 of the encoder before training; each text is embedded once."""
        folder = self.folder / "vectors"
        folder.mkdir(parents=True, exist_ok=True)
        found = list(embedded(parts(texts), len(texts), self._embed, folder))
        return units(np.concatenate(found).astype(np.float32)).astype(np.float32)

    def held_out(self, judged: Judgements, queries: list[int], vectors: NDArray[np.float32]) -> HeldOutQueries:
        asked = self.embedded([judged.queries[query] for query in queries])
        return HeldOutQueries.among_nearest(judged, queries, vectors, asked)

    def trained(self, name: str, judged: Judgements, queries: Sequence[int], sources: Sequence[int]) -> Path:
        """The run of a round."""
        plan = Plan(self.encoder, judged, self.folder, self.seed, self.parent.config.max_tokens)
        recipe, run = recipe_of_round(plan, name, queries, sources), Run(self.folder / name)
        shutil.copytree(self.folder / "vectors", run.prepared)
        quiet, processes.console.quiet = processes.console.quiet, True
        try:
            if not fit(recipe, run):
                raise KeyboardInterrupt
        finally:
            processes.console.quiet = quiet
        return run.path

    def scored(self, run: Path, held_out: HeldOutQueries, shares: Sequence[float]) -> dict[float, NDArray[np.float64]]:
        """nDCG@10 of each query with each share of the parent; with the share 1 it is the parent's."""
        found = {1.0: held_out.scores(fast(self.parent))}
        for share in shares:
            found[share] = held_out.scores(fast(averaged([run], parent_share=share)[0]))
        return found


def loaded(encoder: str) -> SentenceEncoder:
    """An encoder with its own template and pooling, also one that sentence-transformers saved. Raises ClozeError."""
    reading = own_reading(encoder)
    if reading is None:
        raise EncoderError(
            f"nothing says how {encoder!r} is read; train it for sentences first, such as by `cloze fit promptbert`"
        )
    return SentenceEncoder.load(encoder, **reading)


def fast(encoder: SentenceEncoder) -> Embed:
    """In bf16 where the CPU has it: twice as fast, and as exact as a ranking needs."""

    def embed(texts: Sequence[str]) -> NDArray[np.float32]:
        with torch.autocast(encoder.device.type, torch.bfloat16, enabled=has_bf16()):
            return encoder.embed(texts)

    return embed


def _report(run: Run, encoder: str, found: Found, labelled: bool) -> None:
    """The figures, what they mean, and the next command."""
    low, high = interval(found.gains)
    before, gain = found.before.mean(), found.gains.mean()
    held_out = f"{len(found.before):,} queries held out: nDCG@10 {before:.1f} with {encoder}"
    if found.share == 1:
        console.print(f"{held_out}, and not surely more after training; {run.model} is {encoder} as it was")
    else:
        console.print(
            f"{held_out}, {before + gain:.1f} after training ({gain:+.1f}, 95 % interval {low:+.1f} to {high:+.1f}), "
            f"with {found.share:g} of the parent's weights"
        )
    if found.growth is not None:
        console.print(
            f"with half of its queries a round gained {abs(found.growth):.1f} {'less' if found.growth > 0 else 'more'}"
            + ("; twice as many should add about as much again" if found.growth > 0 else "; more would not help much")
        )
    if not labelled:
        helped = "text alone did not help" if found.share == 1 else "real queries help more"
        console.print(
            f"{helped}: write a query that each document of {run.path / LABEL_FILE} answers, leave out what is worth "
            "none, and give that file as --pairs"
        )
    console.print(f"finished: {run.model}; next: cloze export {run.path} models/NAME")


def _write_to_label(file: Path, documents: Sequence[str], vectors: NDArray[np.float32], seed: int) -> None:
    """The documents that are most worth a query: of each of TO_LABEL groups, the one that is most like others.

    Groups are far from each other, so that the queries cover the collection, and a document that has near neighbours is
    one that a search is likely to confuse (arXiv:2604.25142).
    """
    count = min(TO_LABEL, len(documents))
    with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):  # fewer distinct vectors than groups
        groups = KMeans(count, random_state=seed, n_init=1).fit_predict(vectors)
    nearest = np.array([np.partition(vectors @ vector, -2)[-2] for vector in vectors])  # beside itself
    members = (np.flatnonzero(groups == group).tolist() for group in np.unique(groups))
    chosen = [max(places, key=lambda place: float(nearest[place])) for places in members]
    with file.open("w", encoding="utf-8", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(("query", "document"))
        writer.writerows(("", documents[place]) for place in sorted(chosen, key=lambda place: -float(nearest[place])))
