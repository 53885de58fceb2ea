"""Search: exact search by cosine in folders of BEIR's layout, with trec_eval's metrics (pytrec_eval).

nDCG@10 and recall@k as in BEIR (arXiv:2104.08663), MRR and MAP over the first 1,000 documents. Documents with equal
cosines stay in the order of the corpus. A query that is itself a document of the collection does not find itself.
Queries and documents are embedded with the model's templates `query` and `document`, if it has them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

import numpy as np
import pytrec_eval
from numpy.typing import NDArray

from training.data.search_collection import Collection, find_collections, load_collection
from training.data.similarity import units
from training.evaluate.measures import Score, measured
from training.evaluate.subject import Subject
from training.evaluate.task import Task

__all__ = ["DEPTH", "METRICS", "RetrievalTask", "rankings", "search_metrics", "tasks"]

DEPTH: Final = 1000  # documents that are ranked
QUERIES: Final = 256  # whose scores are held at once
METRICS: Final = {  # our name -> trec_eval's
    "nDCG@10": "ndcg_cut_10",
    "MRR": "recip_rank",
    "MAP": "map",
    "recall@1": "recall_1",
    "recall@10": "recall_10",
    "recall@100": "recall_100",
}


def tasks(data: Path | None, own: Sequence[Path]) -> list[Task]:
    """The collections in the folder `retrieval` of the data, and own ones. Raises CorpusError."""
    folders = [*(find_collections(data) if data else ()), *own]
    return [RetrievalTask(folder.name, load_collection(folder)) for folder in folders]


@dataclass(frozen=True)
class RetrievalTask(Task):
    suite: ClassVar[str] = "retrieval"
    collection: Collection

    def run(self, subject: Subject) -> list[Score]:
        queries = subject.embed_queries(self.collection.queries)
        found = rankings(queries, subject.documents(self.collection.documents), self.collection.own)
        metrics = search_metrics(found, self.collection.relevance)
        counts = {"documents": len(self.collection.documents), "queries": len(queries)}
        return [
            measured(self.suite, self.name, name, "mean", values, counts=counts) for name, values in metrics.items()
        ]


def rankings(
    queries: NDArray[np.floating], documents: NDArray[np.floating], own: Mapping[int, int] | None = None
) -> list[NDArray[np.intp]]:
    """For each query the indices of its `DEPTH` nearest documents, nearest first, without its `own` document."""
    queries, transposed = units(queries), units(documents).T
    found: list[NDArray[np.intp]] = []
    for start in range(0, len(queries), QUERIES):
        cosines = queries[start : start + QUERIES] @ transposed
        found += list(np.argsort(-cosines, axis=1, kind="stable")[:, : DEPTH + 1])
    own = own or {}
    return [ranking[ranking != own.get(query, -1)][:DEPTH] for query, ranking in enumerate(found)]


def search_metrics(found: Sequence[NDArray[np.intp]], relevance: Sequence[dict[int, int]]) -> dict[str, list[float]]:
    """Metric -> its value in [0, 1] for each query."""
    judged = {
        str(query): {str(document): grade for document, grade in grades.items()}
        for query, grades in enumerate(relevance)
    }
    # The score is the number of documents behind: trec_eval orders equal scores by name.
    ranked = {
        str(query): {str(document): float(len(ranking) - place) for place, document in enumerate(ranking)}
        for query, ranking in enumerate(found)
    }
    results = pytrec_eval.RelevanceEvaluator(judged, {"ndcg_cut.10", "recip_rank", "map", "recall.1,10,100"})
    by_query = results.evaluate(ranked)
    return {name: [by_query[query][theirs] for query in judged] for name, theirs in METRICS.items()}
