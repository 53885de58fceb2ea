"""What each way of training gains on a collection that is somebody's own, from its text alone and from labels.

    python -m benchmarks.roads COLLECTION ... --data DATA --out FILE [--roads simcse pairs ...] [--teacher FOLDER]

A collection is a folder in BEIR's layout; the seed splits its queries into halves as benchmarks.adaptation does. Each
road trains cloze-mini for the same number of steps on rows that are made of the documents, or of one half's queries
with the documents that answer them. The mean of the run and its parent, for each share of the parent, is scored by
exact search of all documents for the other half. FILE has a line for each result; what is there is not computed again.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.adaptation import DEV, ENCODER, JUDGED, TOKENS, halves, scores
from cloze.machine import has_bf16, processor, versions
from cloze.training.adaptation.queries import QueryMaker, sentences_of
from cloze.training.adaptation.rounds import in_bf16
from cloze.training.bar import console
from cloze.training.evaluation.measures import mean_interval
from cloze.training.evaluation.search import Collection, load_collection
from cloze.training.evaluation.sts import load_pairs, spearman
from cloze.training.loop.run import fit
from cloze.training.loop.soup import average_weights
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.recipes.command import load_recipe
from cloze.training.run_folder import Run

QUERIES: Final = 100  # to learn from, at most
SHARES: Final = (0.0, 0.3, 0.5, 0.7)  # of the parent
STEPS: Final = 100
ROWS: Final = 6400  # of a corpus at most: 100 steps of 64
CROP: Final = 40  # words of a random crop

Row = tuple[str, ...]
Rows = Callable[[Collection, Sequence[int], random.Random], Iterator[Row]]


@dataclass(frozen=True)
class Road:
    """A recipe with the keys that differ from its own, and the rows that it reads."""

    recipe: str
    rows: Rows
    keys: dict[str, Any] = field(default_factory=dict)


def sentences(collection: Collection, learnt: Sequence[int], rng: random.Random) -> Iterator[Row]:
    return ((sentence,) for document in collection.documents for sentence in sentences_of(document))


def passages(collection: Collection, learnt: Sequence[int], rng: random.Random) -> Iterator[Row]:
    yield from ((document,) for document in collection.documents)
    yield from sentences(collection, learnt, rng)


def first_and_rest(collection: Collection, learnt: Sequence[int], rng: random.Random) -> Iterator[Row]:
    """A title, or the first sentence, and what follows it."""
    for document in collection.documents:
        first, *rest = sentences_of(document)
        if rest:
            yield first, " ".join(rest)


def one_and_rest(collection: Collection, learnt: Sequence[int], rng: random.Random) -> Iterator[Row]:
    """Inverse cloze: any sentence, and its document without it."""
    for document in collection.documents:
        parts = sentences_of(document)
        for number, sentence in enumerate(parts):
            if len(parts) > 1:
                yield sentence, " ".join(parts[:number] + parts[number + 1 :])


def neighbours(collection: Collection, learnt: Sequence[int], rng: random.Random) -> Iterator[Row]:
    for document in collection.documents:
        yield from pairwise(sentences_of(document))


def crops(collection: Collection, learnt: Sequence[int], rng: random.Random) -> Iterator[Row]:
    """Two spans of a document, drawn independently (Contriever, arXiv:2112.09118)."""
    for document in collection.documents * 4:
        words = document.split()
        starts = [rng.randrange(max(1, len(words) - CROP + 1)) for _ in range(2)]
        yield tuple(" ".join(words[start : start + CROP]) for start in starts)


def made_queries(collection: Collection, learnt: Sequence[int], rng: random.Random) -> Iterator[Row]:
    """Queries that `adapt` makes: sentences, fragments, words."""
    maker = QueryMaker(collection.documents, rng.randrange(2**31))
    for place in [*range(len(collection.documents))] * 4:
        yield maker(place), collection.documents[place]


def labelled(collection: Collection, learnt: Sequence[int], rng: random.Random) -> Iterator[Row]:
    """Queries with the documents that answer them, again until there are enough rows."""
    pairs = [
        (collection.queries[query], collection.documents[place])
        for query in learnt
        for place, grade in collection.relevance[query].items()
        if grade > 0
    ]
    for _ in range(-(-ROWS // len(pairs))):
        yield from rng.sample(pairs, len(pairs))


PAIR: Final = {"columns": ["a", "b"], "max_tokens": 96, "batch_size": 32, "learning_rate": 3e-5, "no_duplicates": True}
OTHER: Final = 'This text : "[X]" means [MASK].'
MASK: Final = {"template": "[X] means [MASK].", "pooling": "mask"}
TEXT: Final = {
    "simcse": Road("simcse", sentences),
    "s-simcse": Road("ssimcse", sentences),
    "promptbert": Road("promptbert", sentences, MASK | {"second_template": OTHER, "batch_size": 64}),
    "promptbert-same": Road("promptbert-same", sentences, MASK | {"batch_size": 64}),
    "sg-opt": Road("sg-opt", sentences, {"max_tokens": 64, "batch_size": 32, "patience": None}),
    "diffcse-delete": Road("diffcse-delete", sentences, {}),
    "first and rest": Road("simcse", first_and_rest, PAIR),
    "one and rest": Road("simcse", one_and_rest, PAIR),
    "neighbours": Road("simcse", neighbours, PAIR),
    "crops": Road("simcse", crops, PAIR),
    "made queries": Road("simcse", made_queries, PAIR),
    "ranking": Road("ranking", made_queries, {"judged_weight": 0.0}),
}
TEACHER: Final = Road("distill", passages, {"max_tokens": 96, "batch_size": 64, "learning_rate": 1e-4})
LABELS: Final = {
    "pairs": Road("simcse", labelled, PAIR),
    "pairs, guide": Road("simcse", labelled, PAIR | {"guide": ENCODER}),
    "pairs, 1e-4": Road("simcse", labelled, PAIR | {"learning_rate": 1e-4}),
    "pairs, LoRA": Road("simcse", labelled, PAIR | {"lora_rank": 16, "lora_alpha": 32, "learning_rate": 5e-4}),
}


def trained(road: Road, collection: Collection, learnt: Sequence[int], seed: int, folder: Path) -> Path:
    """The run of a road."""
    rng = random.Random(seed)
    rows = list(road.rows(collection, learnt, rng))
    rng.shuffle(rows)
    columns = ["query", "document"] if road.recipe == "ranking" else ["a", "b"]
    corpus, documents = folder / "corpus.jsonl", folder / "documents.jsonl"
    texts = (dict(zip(columns, row, strict=False)) for row in rows[:ROWS])
    corpus.write_text("".join(json.dumps(text) + "\n" for text in texts), encoding="utf-8")
    documents.write_text("".join(json.dumps({"document": text}) + "\n" for text in collection.documents), "utf-8")
    keys: dict[str, Any] = {
        "encoder": ENCODER,
        "corpus": [str(corpus)],
        "columns": columns[: len(rows[0])],
        "max_steps": STEPS,
        "epochs": 100.0,
        "log_steps": STEPS,
        "held_out": 0,
        "seed": seed,
        "precision": "bf16" if has_bf16() else "fp32",
    }
    extra: dict[str, Any] = {"documents": [str(documents)]} if road.recipe == "ranking" else {}
    if road.rows is labelled:  # and no query stands twice in a batch
        extra["batch_size"] = min(road.keys["batch_size"], len(learnt) // 2)
    run, console.quiet = Run(folder / "run"), True
    if not fit(load_recipe(road.recipe, keys | road.keys | extra), run):
        raise KeyboardInterrupt
    return run.path


@cache
def parent_scores(folder: Path, seed: int) -> NDArray[np.float64]:
    """Of the half that judges, (n)."""
    collection = load_collection(folder)
    _, judging = halves(collection, seed)
    return scores(SentenceEncoder.load(ENCODER, max_tokens=TOKENS), collection, judging[:JUDGED])


def measured(
    name: str, road: Road, place: Path, seed: int, shares: Sequence[float], dev: Any, elsewhere: float
) -> dict[str, Any]:
    """One road, judged with each share of the parent; `elsewhere` is the parent's figure of the pairs `dev`."""
    collection, before = load_collection(place), parent_scores(place, seed)
    learnt, judging = halves(collection, seed)
    judging = judging[:JUDGED]
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        run = trained(road, collection, learnt[:QUERIES], seed, Path(folder))
        seconds = time.monotonic() - began
        gains, prices, intervals = {}, {}, {}
        for share in shares:
            encoder = average_weights([run], parent_share=share)[0] if share else SentenceEncoder.load(str(run))
            encoder.reconfigure(encoder.config.model_copy(update={"max_tokens": TOKENS}))
            gain = scores(encoder, collection, judging) - before
            gains[str(share)] = round(float(gain.mean()), 2)
            intervals[str(share)] = [round(bound, 2) for bound in mean_interval(gain)]
            prices[str(share)] = round(spearman(in_bf16(encoder), dev) - elsewhere, 2)
    return {
        "collection": collection.name,
        "road": name,
        "seed": seed,
        "steps": STEPS,
        "judging": len(judging),
        "before": round(float(before.mean()), 2),
        "gains": gains,
        "intervals": intervals,
        "sts-b dev": prices,
        "seconds": round(seconds),
        "machine": processor(),
        "versions": versions(["torch", "transformers"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("collections", nargs="+", type=Path, help="folders in BEIR's layout")
    parser.add_argument("--roads", nargs="+", choices=[*TEXT, *LABELS, "teacher"], default=[*TEXT, *LABELS])
    parser.add_argument("--teacher", help="for the road `teacher`: a larger encoder")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES, help="of the parent")
    parser.add_argument("--data", type=Path, required=True, help="SentEval's layout, for STS-B dev")
    parser.add_argument("--out", type=Path, required=True, help="json lines")
    options = parser.parse_args()
    rows = options.out.read_text(encoding="utf-8").splitlines() if options.out.is_file() else []
    done = {(row["collection"], row["road"], row["seed"]) for row in map(json.loads, rows)}
    roads = TEXT | LABELS | {"teacher": Road("distill", passages, TEACHER.keys | {"teacher": options.teacher})}
    dev = load_pairs(options.data / DEV)
    elsewhere = spearman(in_bf16(SentenceEncoder.load(ENCODER, max_tokens=TOKENS)), dev)
    for seed in options.seeds:
        for name in options.roads:
            for folder in options.collections:
                if (folder.name, name, seed) not in done:
                    row = measured(name, roads[name], folder, seed, options.shares, dev, elsewhere)
                    with options.out.open("a", encoding="utf-8") as out:
                        out.write(json.dumps(row) + "\n")
                    print(row["collection"], name, seed, row["gains"], row["sts-b dev"], row["seconds"], flush=True)


if __name__ == "__main__":
    main()
