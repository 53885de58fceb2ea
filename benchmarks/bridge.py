"""Measure what a bridge keeps of an old index: recall@10 of its results, and nDCG@10, on the search collections.

    python -m benchmarks.bridge OLD NEW --data DATA

The maps are fitted on 6,000 sentences of Wikipedia, and on the texts of the index: the collection's documents and 4,000
sentences of them. Queries are embedded by NEW, documents by OLD. The command adds its figures to
benchmarks/results/bridge.json and prints them.
"""

import argparse
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cloze.training.bridge import Map, affine, orthogonal, recalls
from cloze.training.evaluation.measures import mean_interval, units
from cloze.training.evaluation.options import ModelOptions
from cloze.training.evaluation.search import find_collections, load_collection, rankings, search_metrics
from cloze.training.evaluation.subjects import subjects

RESULTS: Final = Path(__file__).parent / "results" / "bridge.json"
SENTENCES: Final = 6000
OWN_SENTENCES: Final = 4000
FEWEST_WORDS: Final = 4  # of a sentence of a document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--data", type=Path, required=True)
    options = parser.parse_args()
    old, new = (next(subjects(path, ModelOptions())) for path in (options.old, options.new))
    lines = (options.data / "corpus/enwiki_sentences.txt").read_text(encoding="utf-8").splitlines()
    sentences = random.Random(0).sample(list(dict.fromkeys(filter(None, map(str.strip, lines)))), SENTENCES)
    maps = fitted(units(new.documents(sentences)), units(old.documents(sentences)))
    results: dict[str, Any] = {}
    for folder in find_collections(options.data):
        collection = load_collection(folder)
        before, after = units(old.embed_queries(collection.queries)), units(new.embed_queries(collection.queries))
        documents = units(old.documents(collection.documents))
        parts = sentences_of(collection.documents)
        own = [*collection.documents, *parts]
        own_maps = fitted(units(new.documents(own)), np.concatenate([documents, units(old.documents(parts))]))

        def score(queries: NDArray[np.floating]) -> dict[str, Any]:
            found = recalls(queries, before, documents)  # noqa: B023 - called in this round
            ranked = rankings(queries, documents, collection.own)  # noqa: B023
            ndcg = float(np.mean(search_metrics(ranked, collection.relevance)["nDCG@10"]))  # noqa: B023
            recall = [round(each, 3) for each in (float(found.mean()), *mean_interval(found))]
            return {"recall@10": recall, "nDCG@10": round(100 * ndcg, 2)}

        rows = {name: score(mapping(after)) for name, mapping in maps.items()}
        rows |= {f"{name}, texts of the index": score(mapping(after)) for name, mapping in own_maps.items()}
        rows |= {"old queries": score(before)}
        if before.shape[1] == after.shape[1]:
            rows["unmapped"] = score(after)
        results[folder.name] = rows
        for name, row in rows.items():
            print(folder.name, name, row, flush=True)
    known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    known[f"{Path(options.new).name} to {Path(options.old).name}"] = results
    RESULTS.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def fitted(new: NDArray[np.floating], old: NDArray[np.floating]) -> dict[str, Map]:
    """Both maps between unit vectors of the same texts."""
    return {method.__name__: method(new, old) for method in (orthogonal, affine)}


def sentences_of(documents: Sequence[str]) -> list[str]:
    """Sentences of the documents, drawn at random."""
    sentences = [part for text in documents for part in re.split(r"(?<=[.!?])\s+", text)]
    sentences = [part for part in sentences if len(part.split()) >= FEWEST_WORDS]
    return random.Random(0).sample(sentences, min(OWN_SENTENCES, len(sentences)))


if __name__ == "__main__":
    main()
