"""From a user's documents and judged queries to a run that is better on them, or a statement that it is not.

documents, pairs -> judgements -> rounds of training, each on a part of the queries and scored on the others -> a last
round on all queries -> the mean of all rounds and the parent. The held-out queries choose the parent's share, which may
be 1: the parent alone.
"""

import csv
import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import KMeans  # type: ignore[import-untyped]
from sklearn.exceptions import ConvergenceWarning  # type: ignore[import-untyped]
from sklearn.model_selection import KFold  # type: ignore[import-untyped]

from cloze.encoding.bundle import Source
from cloze.encoding.chunks import UNSPACED
from cloze.training.adaptation.documents import Document, read_documents
from cloze.training.adaptation.held_out import HeldOutQueries
from cloze.training.adaptation.pairs import Judgements, read_pairs
from cloze.training.adaptation.rounds import DOCUMENT, Rounds, load_parent, make_queries, search_embedders
from cloze.training.bar import console
from cloze.training.encoder_source import kind_of
from cloze.training.errors import CorpusError, EncoderError
from cloze.training.evaluation.measures import mean_interval
from cloze.training.loop.prepare import check_ranking_devices
from cloze.training.loop.soup import average_weights
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.pretrained import fastest_device
from cloze.training.run_folder import ADAPTED, Run, provenance_of_encoder

LABEL_FILE: Final = "label.csv"
DOCUMENTS_FILE: Final = "documents.jsonl"
FOLDER: Final = "rounds-of-adapt"

FEWEST_QUERIES: Final = 10
FEWEST_DOCUMENTS: Final = 50
MOST_DOCUMENTS: Final = 10_000  # to train on and to search; all of them are embedded once
MOST_FOR_GROWTH: Final = 5000  # documents; with more, the extra round that measures `growth` takes too long
ROUNDS: Final = 2
SHARES: Final = (0.3, 0.5)  # the parent's shares that are tried
CAUTIOUS: Final = (0.5, 0.7)  # the same if the held-out queries are synthetic
MADE: Final = 150  # most synthetic queries that are held out; at most one for every three documents
EXAMPLES: Final = 10
TO_LABEL: Final = 50
FOREIGN: Final = 1.5  # mean tokens per word of letters; English, even with code, has fewer than 1.3
UNSPACED_LETTERS: Final = 2  # of a word, where words have no blanks between them
LETTERS: Final = re.compile(r"[^\W\d_]+")
SAMPLE: Final = 200  # documents in which they are counted


def adapt(
    encoder: str,
    pairs: Path | None,
    columns: Sequence[str],
    paths: Sequence[Path],
    document_columns: Sequence[str],
    out: Path,
    seed: int,
) -> None:
    """Write the run `out`. Errors in the files are reported before anything is computed. Raises ClozeError."""
    kind_of(encoder)
    if (out / FOLDER).is_dir():
        _remove_unfinished(out)
    run = Run.fresh(out)
    check_ranking_devices()
    documents = read_documents(paths, document_columns) if paths else []
    judged = _smaller(_judgements(pairs, documents, columns), seed)
    _show(judged, documents, pairs)
    synthetic = None if pairs else _synthetic_queries(judged.documents, seed)
    parent = load_parent(encoder)
    if parent.token_weights is not None:
        raise EncoderError(
            f"{encoder} came from cloze weigh, and a mean of weights cannot include its token weights; give the "
            "encoder that was weighed, and weigh the result"
        )
    _warn_of_language(parent, judged.documents)
    run.make()
    try:
        rounds = Rounds(encoder, parent, judged, out / FOLDER, seed)
        result = _without_labels(rounds, *synthetic) if synthetic else _with_labels(rounds)
        if not pairs:
            _write_to_label(out / LABEL_FILE, judged.documents, rounds.vectors, seed)
        names = {"pairs": [str(path) for path in (pairs,) if path], "documents": [str(path) for path in paths]}
        texts = {"pairs": judged.queries, "documents": judged.documents}
        data = [_source(names[option], texts[option]) for option in names if names[option]]
        inputs = names | {"columns": [*columns], "document_columns": [*document_columns]}
        if documents:
            _write_documents(out / DOCUMENTS_FILE, documents)
        _write(run, result, parent, {"method": ADAPTED, "encoder": encoder, "seed": seed} | inputs, data)
        shutil.rmtree(out / FOLDER)
    except BaseException:
        _remove_unfinished(out)
        raise
    _report(run, encoder, result, labelled=pairs is not None)


@dataclass(frozen=True)
class AdaptationResult:
    """The runs to average with the parent, and nDCG@10 of each held-out query, (n).

    `before` has the parent's scores. `after` has those of its mean with the runs, for each share that was tried.
    """

    runs: list[Path]
    before: NDArray[np.float64]
    after: dict[float, NDArray[np.float64]]
    judged: bool  # whether people judged the held-out queries
    growth: float | None = None  # gain of the first round's mean from half of its queries to all of them

    @property
    def share(self) -> float:
        """The parent's share with the highest sure gain on held-out queries; 1, the parent alone, if there is none."""
        return max(filter(self._is_sure, self.after), key=self._mean, default=1.0)

    @property
    def shown(self) -> float:
        """`share`, or if that is 1 the best share that was tried."""
        return self.share if self.share < 1 else max(self.after, key=self._mean)

    def gains(self, share: float) -> NDArray[np.float64]:
        """The gain of each held-out query, (n)."""
        return self.after.get(share, self.before) - self.before

    def _is_sure(self, share: float) -> bool:
        """Whether the mean gain exceeds one standard error; for synthetic queries, whether its interval is above 0."""
        gains = self.gains(share)
        return bool(gains.mean() > gains.std() / len(gains) ** 0.5 if self.judged else mean_interval(gains)[0] > 0)

    def _mean(self, share: float) -> float:
        return float(self.after[share].mean())


def _with_labels(rounds: Rounds) -> AdaptationResult:
    """Rounds that each hold out a different part of the queries, and, if these gain, a last one on all queries.

    The mean includes all of them, because the rounds on parts of the queries are trained anyway.
    """
    count, everything = len(rounds.judged), range(len(rounds.judged.documents))
    spellings = rounds.judged.spellings()  # to learn one spelling would give away a held-out one
    split = KFold(ROUNDS, shuffle=True, random_state=rounds.seed).split(np.arange(len(spellings)))
    runs, before, scores = list[Path](), list[NDArray[np.float64]](), list[dict[float, NDArray[np.float64]]]()
    halves = ([sorted(chain(*(spellings[place] for place in part))) for part in both] for both in split)
    parts = [(learnt, rounds.held_out(group)) for learnt, group in halves]
    for number, (learnt, held_out) in enumerate(parts, 1):
        console.print(
            f"round {number} of {ROUNDS}: {len(learnt)} queries to learn from, {len(held_out.queries)} held out"
        )
        before.append(held_out.scores(*search_embedders(rounds.parent)))
        runs.append(rounds.train(f"round-{number}", learnt, everything, held_out.queries))
        scores.append({share: _scores(runs[-1], held_out, share, rounds.parent) for share in SHARES})
    after = {share: np.concatenate([score[share] for score in scores]) for share in SHARES}
    result = AdaptationResult([], np.concatenate(before), after, judged=True)
    if result.share == 1:
        return result
    if len(everything) <= MOST_FOR_GROWTH:
        (learnt, held_out), half = parts[0], parts[0][0][::2]
        console.print(f"a round with {len(half)} of these queries, to estimate what more queries would add")
        half_scores = _scores(
            rounds.train("half", half, everything, held_out.queries), held_out, result.share, rounds.parent
        )
        result = replace(result, growth=float((scores[0][result.share] - half_scores).mean()))
    console.print(f"last round: all {count} queries to learn from")
    return replace(result, runs=[*runs, rounds.train("last", range(count), everything)])


def _scores(run: Path, held_out: HeldOutQueries, share: float, parent: SentenceEncoder) -> NDArray[np.float64]:
    """nDCG@10 of each query, for the mean of a round and the parent, with this share of the parent."""
    return held_out.scores(*search_embedders(_mean_of([run], share, parent)[0]))


def _mean_of(runs: Sequence[Path], share: float, parent: SentenceEncoder) -> tuple[SentenceEncoder, dict[str, Any]]:
    """The mean of rounds and the parent, with the parent's `max_tokens`, and its provenance."""
    mean, provenance = average_weights(runs, parent_share=share)
    mean.reconfigure(mean.config.model_copy(update={"max_tokens": parent.config.max_tokens}))
    return mean.to(fastest_device()), provenance


def _synthetic_queries(documents: Sequence[str], seed: int) -> tuple[Judgements, list[int]]:
    """Synthetic queries to be held out, and the indices of their documents. Raises CorpusError."""
    order = np.random.default_rng(seed).permutation(len(documents))
    queried = sorted(order[: min(MADE, len(documents) // 3)].tolist())
    queries = make_queries(documents, queried, seed)
    if len(queries) < FEWEST_QUERIES:
        raise CorpusError(
            f"only {len(queries)} of {len(queried)} documents have two or more sentences, so that one can serve as a "
            "query; give --pairs with queries of your own"
        )
    return queries, queried


def _without_labels(rounds: Rounds, synthetic: Judgements, queried: Sequence[int]) -> AdaptationResult:
    """One round. Synthetic queries of other documents are held out. A gain that may be chance does not count."""
    sources = sorted({*range(len(synthetic.documents))} - {*queried})
    console.print(
        f"one round: queries made from {len(sources):,} documents; {len(synthetic)} queries from others are held out"
    )
    vectors = rounds.vectors.copy()
    shortened = [synthetic.documents[place] for place in queried]  # without the sentences that became queries
    vectors[queried] = rounds.embedded(DOCUMENT, shortened)
    held_out = rounds.held_out_of(synthetic, list(range(len(synthetic))), vectors)
    before, run = held_out.scores(*search_embedders(rounds.parent)), rounds.train("round-1", [], sources)
    scores = {share: _scores(run, held_out, share, rounds.parent) for share in CAUTIOUS}
    return AdaptationResult([run], before, scores, judged=False)


def _write(
    run: Run, result: AdaptationResult, parent: SentenceEncoder, recipe: dict[str, Any], data: Sequence[Source]
) -> None:
    """Write the run: the mean of the rounds and the parent, or the parent unchanged."""
    encoder = recipe["encoder"]
    if result.share < 1:
        mean, provenance = _mean_of(result.runs, result.share, parent)
    else:
        mean, provenance = parent, provenance_of_encoder(encoder) | {"seeds": [recipe["seed"]]}
    gains = result.gains(result.share)
    low, high = mean_interval(gains)
    figures = {
        "queries": len(result.before),
        "before": round(float(result.before.mean()), 2),
        "after": round(float((result.before + gains).mean()), 2),
        "interval": [round(low, 2), round(high, 2)],
        **({} if result.growth is None else {"growth": round(result.growth, 2)}),
    }
    mean.save(run.model)
    own = {"recipe": recipe | {"parent_share": result.share, "held_out": figures}, "rows": figures["queries"]}
    sources = [source.model_dump(mode="json") for source in data]
    run.write_provenance(provenance | own | {"data": [*provenance_of_encoder(encoder)["data"], *sources]})


def _source(paths: Sequence[str], texts: Sequence[str]) -> Source:
    """What was read, for the provenance: the last parts of the paths, the number of texts, and their digest."""
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    return Source(name=", ".join(Path(path).name for path in paths), sentences=len(texts), sha256=digest)


def _judgements(pairs: Path | None, documents: Sequence[Document], columns: Sequence[str]) -> Judgements:
    """Raises CorpusError if there are too few queries or documents."""
    if pairs is None and not documents:
        raise CorpusError(
            "nothing to learn from; give --documents, and --pairs with queries and the documents that answer them"
        )
    texts = list(dict.fromkeys(document.text for document in documents))
    judged = Judgements([], texts, []) if pairs is None else read_pairs(pairs, documents, columns)
    if pairs is not None and (count := len(judged.spellings())) < FEWEST_QUERIES:
        raise CorpusError(
            f"{pairs} has {count} queries with a document that answers them, too few to hold some out; give "
            f"{FEWEST_QUERIES} or more, better a hundred, or omit --pairs"
        )
    if len(judged.documents) < FEWEST_DOCUMENTS:
        raise CorpusError(
            f"{len(judged.documents)} documents are too few to compare rankings; give "
            f"{FEWEST_DOCUMENTS} or more with --documents"
            + ("; a table of labels has the columns text and label" if pairs and not documents else "")
        )
    return judged


def _smaller(judged: Judgements, seed: int) -> Judgements:
    """At most MOST_DOCUMENTS documents: all judged ones, and others at random."""
    count = len(judged.documents)
    if count <= MOST_DOCUMENTS:
        return judged
    needed = sorted({place for grades in judged.grades for place in grades})
    unjudged = np.setdiff1d(np.arange(count), needed)
    sampled = np.random.default_rng(seed).permutation(unjudged)[: max(0, MOST_DOCUMENTS - len(needed))]
    chosen = sorted([*needed, *sampled.tolist()])
    places = {place: number for number, place in enumerate(chosen)}
    grades = [{places[place]: grade for place, grade in by_place.items()} for by_place in judged.grades]
    console.print(
        f"documents: using {len(chosen):,} of {count:,}: those with judgements, and a random sample of the others"
    )
    return Judgements(judged.queries, [judged.documents[place] for place in chosen], grades)


def _show(judged: Judgements, documents: Sequence[Document], pairs: Path | None) -> None:
    """Print what was read, with examples, before anything is trained."""
    files = len({document.name for document in documents})
    console.print(f"documents: {len(judged.documents):,}" + (f", of {files:,} files or rows" if documents else ""))
    if pairs is None:
        for text in judged.documents[:: max(1, len(judged.documents) // EXAMPLES)][:EXAMPLES]:
            console.print(f"  {text[:100]}")
        return
    known = {document.text for document in documents}
    added = [text for text in judged.documents if text not in known] if documents else []
    if added:
        console.print(
            f"{len(added):,} texts in {pairs.name} are not in --documents and are added to them: {added[0][:100]}"
        )
    count = sum(len(judged.relevant(query)) for query in range(len(judged)))
    console.print(f"queries: {len(judged):,}, answered by {count:,} documents; such as:")
    for query in range(min(EXAMPLES, len(judged))):
        answer = judged.documents[judged.relevant(query)[0]]
        console.print(f"  {judged.queries[query][:60]}  ->  {answer[:60]}")


def _warn_of_language(encoder: SentenceEncoder, documents: Sequence[str]) -> None:
    words = [LETTERS.findall(text) for text in documents[:: max(1, len(documents) // SAMPLE)]]
    unspaced = sum(len(UNSPACED.findall(word)) for of_text in words for word in of_text)
    spaced = sum(UNSPACED.search(word) is None for of_text in words for word in of_text)
    count = spaced + unspaced / UNSPACED_LETTERS
    tokens = sum(encoder.text_encoder.count(" ".join(of_text)) for of_text in words)
    if tokens > FOREIGN * count:
        console.print(
            f"warning: a word takes {tokens / count:.1f} tokens of this encoder, so it was probably not trained on "
            "this language, and such text stays hard for it; give --encoder one that knows the language"
        )


def _report(run: Run, encoder: str, result: AdaptationResult, labelled: bool) -> None:
    """Print the figures, what they mean, and the next command."""
    gains = result.gains(result.shown)
    (low, high), before, gain = mean_interval(gains), result.before.mean(), gains.mean()
    held_out = f"{len(result.before):,} queries held out: nDCG@10 {before:.1f} with {encoder}"
    console.print(
        f"{held_out}, {before + gain:.1f} after training ({gain:+.1f}, 95 % interval {low:+.1f} to {high:+.1f}), with "
        f"{result.shown:g} of the parent's weights"
    )
    if result.share == 1:
        reason = "this may be chance" if gain > 0 else "training did not help"
        console.print(f"{reason}, so {run.model} is {encoder} unchanged")
    if (growth := result.growth) is not None:
        console.print(
            f"with half of its queries, a round gained {abs(growth):.1f} {'less' if growth > 0 else 'more'}"
            + ("; twice as many should add about as much again" if growth > 0 else "; more would not help much")
        )
    if not labelled:
        helped = "text alone did not help" if result.share == 1 else "real queries help more"
        console.print(
            f"{helped}: in {run.path / LABEL_FILE}, write for each document a query that it answers, delete documents "
            "that need none, and give that file as --pairs"
        )
    console.print(f"finished: {run.model}; next: {run.export_command}")


def _remove_unfinished(out: Path) -> None:
    """Remove the files of an interrupted `adapt`, which cannot be resumed, unless its run is finished."""
    run = Run(out)
    if not run.finished:
        for folder in (run.model, out / FOLDER):
            shutil.rmtree(folder, ignore_errors=True)
        for name in (DOCUMENTS_FILE, LABEL_FILE):
            (out / name).unlink(missing_ok=True)


def _write_documents(file: Path, documents: Sequence[Document]) -> None:
    """Write the texts that were trained on, so that a search can embed the same ones."""
    with file.open("w", encoding="utf-8") as out:
        for document in documents:
            out.write(json.dumps({"document": document.name, "text": document.text}, ensure_ascii=False) + "\n")


def _write_to_label(file: Path, documents: Sequence[str], vectors: NDArray[np.float32], seed: int) -> None:
    """Write the documents for which a query is worth most: of each of TO_LABEL groups, the one nearest to another.

    Groups are far from each other, so that the queries cover the collection. A search is likely to confuse a document
    with its near neighbours (arXiv:2604.25142).
    """
    count = min(TO_LABEL, len(documents))
    with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):  # fewer distinct vectors than groups
        groups = KMeans(count, random_state=seed, n_init=1).fit_predict(vectors)
    nearest = np.array([np.partition(vectors @ vector, -2)[-2] for vector in vectors])  # other than itself
    members = (np.flatnonzero(groups == group).tolist() for group in np.unique(groups))
    chosen = [max(places, key=lambda place: float(nearest[place])) for places in members]
    with file.open("w", encoding="utf-8-sig", newline="") as out:  # so that Excel reads it as UTF-8
        writer = csv.writer(out)
        writer.writerow(("query", "document"))
        writer.writerows(("", documents[place]) for place in sorted(chosen, key=lambda place: -float(nearest[place])))
