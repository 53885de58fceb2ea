"""What `cloze adapt` gains on collections that are somebody's own: half of the queries to learn from, half to judge it.

    python -m benchmarks.adaptation COLLECTION ... --queries 0 10 100 --data DATA --out FILE

A collection is a folder in BEIR's layout. The seed splits its queries into halves. `adapt` gets the documents and, of
one half, the first queries, as many as `--queries` says (0: the documents alone). Its run and its parent are scored by
exact search for the other half. With the seed 1 the halves of the seed 0 change places, and so on. STS-B dev shows what
is lost elsewhere. FILE has a line for each result, and what is there is not computed again.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from cloze.machine import peak_memory, processor, versions
from cloze.training.adaptation.adapt import adapt
from cloze.training.adaptation.rounds import in_bf16, search_embedders
from cloze.training.evaluation.measures import mean_interval
from cloze.training.evaluation.search import Collection, load_collection, rankings, search_metrics
from cloze.training.evaluation.sts import load_pairs, spearman
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.run_folder import Run

ENCODER: Final = "cloze-mini"
DEV: Final = "senteval/downstream/STS/STSBenchmark/sts-dev.csv"
JUDGED: Final = 300  # queries that judge, at most
TOKENS: Final = 384  # that cloze-mini is served with


def halves(collection: Collection, seed: int) -> tuple[list[int], list[int]]:
    """Queries to learn from, and queries that judge; odd seeds are the other way round."""
    order = np.random.default_rng(seed // 2).permutation(len(collection.queries)).tolist()
    middle = len(order) // 2
    return (order[:middle], order[middle:]) if seed % 2 == 0 else (order[middle:], order[:middle])


def scores(encoder: SentenceEncoder, collection: Collection, queries: Sequence[int]) -> np.ndarray:
    """nDCG@10 x100 of each query, among all documents."""
    embed_queries, embed_documents = search_embedders(encoder)
    own = {number: collection.own[query] for number, query in enumerate(queries) if query in collection.own}
    ranked = rankings(
        embed_queries([collection.queries[query] for query in queries]), embed_documents(collection.documents), own
    )
    return 100 * np.array(search_metrics(ranked, [collection.relevance[query] for query in queries])["nDCG@10"])


def write(folder: Path, collection: Collection, queries: Sequence[int]) -> tuple[Path | None, Path]:
    """The files of pairs and of documents that `adapt` reads."""
    documents, pairs = folder / "documents.jsonl", folder / "pairs.jsonl"
    documents.write_text("".join(json.dumps({"text": text}) + "\n" for text in collection.documents), encoding="utf-8")
    rows = [
        {"query": collection.queries[query], "document": collection.documents[place], "score": grade}
        for query in queries
        for place, grade in collection.relevance[query].items()
    ]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return (pairs if queries else None), documents


def measured(collection: Collection, count: int, seed: int, dev: Any) -> dict[str, Any]:
    """One adaptation, judged."""
    learnt, judging = halves(collection, seed)
    judging = judging[:JUDGED]
    with tempfile.TemporaryDirectory() as folder:
        pairs, documents = write(Path(folder), collection, learnt[:count])
        began, out = time.monotonic(), Path(folder, "run")
        adapt(ENCODER, pairs, (), [documents], (), out, seed)
        seconds = time.monotonic() - began
        held_out = Run(out).provenance()["recipe"]["held_out"]
        adapted = SentenceEncoder.load(str(out), max_tokens=TOKENS)
        parent = SentenceEncoder.load(ENCODER, max_tokens=TOKENS)
        before = scores(parent, collection, judging)
        gains = scores(adapted, collection, judging) - before
        elsewhere = spearman(in_bf16(adapted), dev) - spearman(in_bf16(parent), dev)
    return {
        "collection": collection.name,
        "documents": len(collection.documents),
        "queries": len(learnt[:count]),
        "seed": seed,
        "judging": len(judging),
        "before": round(float(before.mean()), 2),
        "gain": round(float(gains.mean()), 2),
        "interval": [round(bound, 2) for bound in mean_interval(gains)],
        "sts-b dev": round(elsewhere, 2),
        "said": held_out,
        "seconds": round(seconds),
        "memory": peak_memory(),
        "machine": processor(),
        "versions": versions(["torch", "transformers"]),
        "gains": [round(float(gain), 1) for gain in gains],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("collections", nargs="+", type=Path, help="folders in BEIR's layout")
    parser.add_argument("--queries", nargs="+", type=int, default=[0, 100], help="how many to learn from")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--data", type=Path, required=True, help="SentEval's layout, for STS-B dev")
    parser.add_argument("--out", type=Path, required=True, help="json lines")
    options = parser.parse_args()
    done = set()
    if options.out.is_file():
        rows = [json.loads(line) for line in options.out.read_text(encoding="utf-8").splitlines()]
        done = {(row["collection"], row["asked"], row["seed"]) for row in rows}
    dev = load_pairs(options.data / DEV)
    for count in options.queries:
        for seed in options.seeds:
            for folder in options.collections:
                if (folder.name, count, seed) not in done:
                    row = {"asked": count} | measured(load_collection(folder), count, seed, dev)
                    with options.out.open("a", encoding="utf-8") as out:
                        out.write(json.dumps(row) + "\n")
                    shown = {
                        key: value
                        for key, value in row.items()
                        if key not in ("gains", "machine", "memory", "versions")
                    }
                    print(json.dumps(shown), flush=True)


if __name__ == "__main__":
    main()
