"""Search: exact search by cosine in folders of BEIR's layout (`cloze.training.evaluation.search`).

A query that is itself a document of the collection does not find itself. Queries and documents are embedded with the
model's templates `query` and `document`, if it has them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from cloze.training.evaluation.search import Collection, find_collections, load_collection, rankings, search_metrics
from cloze.training.evaluation.task import Score, Subject, Task, measured


def tasks(data: Path | None, own: Sequence[Path]) -> list[Task]:
    """The collections in the folder `retrieval` of the data, and own ones. Raises CorpusError."""
    folders = [*(find_collections(data) if data else ()), *own]
    return [RetrievalTask(folder.resolve().name, load_collection(folder)) for folder in folders]


@dataclass(frozen=True)
class RetrievalTask(Task):
    suite: ClassVar[str] = "retrieval"
    collection: Collection

    def run(self, subject: Subject) -> list[Score]:
        queries = subject.embed_queries(self.collection.queries)
        ranked = rankings(queries, subject.documents(self.collection.documents), self.collection.own)
        metrics = search_metrics(ranked, self.collection.relevance)
        counts = {"documents": len(self.collection.documents), "queries": len(queries)}
        return [
            measured(self.suite, self.name, name, "mean", values, counts=counts) for name, values in metrics.items()
        ]
