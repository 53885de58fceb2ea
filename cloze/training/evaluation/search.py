"""Retrieval collections, and how well a model's cosines rank their documents, by trec_eval's metrics (pytrec_eval).

A collection is a folder in BEIR's layout: `corpus.jsonl` with `_id`, `title` (optional) and `text`, `queries.jsonl`
with `_id` and `text`, and `qrels.tsv`, or BEIR's own `qrels/test.tsv`, with the columns `query-id`, `corpus-id` and
`score`. If they exist, training uses `qrels/train.tsv` and the choice of checkpoints `qrels/dev.tsv`. A document's text
is its title, a blank and its text. nDCG@10 and recall@k are as in BEIR (arXiv:2104.08663), MRR and MAP over the first
1,000 documents.

BEIR removes a document from the results of a query with the same id, for collections whose queries are documents. Here
the text must be the same too, because many collections number both from 1.
"""

import sys
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytrec_eval
from numpy.typing import NDArray

from cloze.training.data.corpus import read_records
from cloze.training.errors import CorpusError
from cloze.training.evaluation.measures import Embed, nearest, units

DEPTH: Final = 1000  # documents that are ranked
LARGEST_GRADE: Final = 1000  # a larger number is an id in the wrong column
METRICS: Final = {  # our name -> trec_eval's
    "nDCG@10": "ndcg_cut_10",
    "MRR": "recip_rank",
    "MAP": "map",
    "recall@1": "recall_1",
    "recall@10": "recall_10",
    "recall@100": "recall_100",
}
QRELS: Final = ("qrels.tsv", "qrels/test.tsv")
COLUMNS: Final = ("query-id", "corpus-id", "score")


@dataclass(frozen=True)
class Collection:
    """`relevance[i]` maps a document's index to its grade for query i. Every query has at least one grade above 0.

    `own` maps a query that is itself a document of the collection to that document, which is removed from its results.
    """

    name: str
    documents: list[str]
    queries: list[str]
    relevance: list[dict[int, int]]
    own: dict[int, int] = field(default_factory=dict)


def check_grade(grade: float, where: str) -> None:
    """Raises CorpusError for a number that is too large for a grade."""
    if abs(grade) > LARGEST_GRADE:
        raise CorpusError(
            f"{where}: score {grade:.12g} is not a grade: the largest is {LARGEST_GRADE}; write 1 for a "
            "document that answers the query"
        )


def find_collections(data: str | Path) -> list[Path]:
    """The folders in `data`/retrieval that hold a corpus.jsonl, by name; none if there is no such folder."""
    return sorted(path.parent for path in Path(data, "retrieval").glob("*/corpus.jsonl"))


def load_collection(folder: str | Path, split: str = "test") -> Collection:
    """Read one folder, with the judgements of `split` if it has several. Raises CorpusError, with file and line."""
    folder = Path(folder)
    documents = _records(folder / "corpus.jsonl")
    queries = {query: record["text"].strip() for query, record in _records(folder / "queries.jsonl").items()}
    grades = _grades(folder, split, documents, queries)
    query_ids = [query for query in queries if any(grade > 0 for grade in grades.get(query, {}).values())]
    if not query_ids:
        raise CorpusError(f"{folder} has no query with a relevant document; give a collection with judgements")
    places = {document: place for place, document in enumerate(documents)}
    return Collection(
        folder.name,
        [f"{record.get('title') or ''} {record['text']}".strip() for record in documents.values()],
        [queries[query] for query in query_ids],
        [{places[document]: grade for document, grade in grades[query].items()} for query in query_ids],
        {
            number: places[query]
            for number, query in enumerate(query_ids)
            if query in documents and documents[query]["text"].split() == queries[query].split()
        },
    )


def search_score(queries: Embed, documents: Embed, collection: Collection) -> float:
    """nDCG@10 x100 of exact search by cosine, averaged over queries; `queries` and `documents` embed the two sides."""
    ranked = rankings(queries(collection.queries), documents(collection.documents), collection.own)
    return float(100 * np.mean(search_metrics(ranked, collection.relevance)["nDCG@10"]))


def rankings(
    queries: NDArray[np.floating], documents: NDArray[np.floating], own: Mapping[int, int] | None = None
) -> list[NDArray[np.intp]]:
    """For each query the indices of its `DEPTH` nearest documents, nearest first, without its `own` document.

    Documents with equal cosines stay in the order of the corpus.
    """
    own = own or {}
    neighbours = nearest(units(queries), units(documents), DEPTH + 1)
    return [ranking[ranking != own.get(query, -1)][:DEPTH] for query, (_, ranking) in enumerate(neighbours)]


def search_metrics(ranked: Sequence[NDArray[np.intp]], relevance: Sequence[dict[int, int]]) -> dict[str, list[float]]:
    """Metric -> its value in [0, 1] for each query."""
    judged = {
        str(query): {str(document): grade for document, grade in grades.items()}
        for query, grades in enumerate(relevance)
    }
    # The score is the number of documents ranked after it: trec_eval orders equal scores by name.
    run = {
        str(query): {str(document): float(len(ranking) - place) for place, document in enumerate(ranking)}
        for query, ranking in enumerate(ranked)
    }
    results = pytrec_eval.RelevanceEvaluator(judged, {"ndcg_cut.10", "recip_rank", "map", "recall.1,10,100"})
    by_query = results.evaluate(run)
    return {name: [by_query[query][theirs] for query in judged] for name, theirs in METRICS.items()}


def _records(path: Path) -> dict[str, dict[str, Any]]:
    """Id -> record. Every record has a text."""
    if not path.is_file():
        raise CorpusError(f"{path} is missing; give a BEIR folder: corpus.jsonl, queries.jsonl and qrels.tsv")
    records: dict[str, dict[str, Any]] = {}
    for number, record in read_records(path):
        where = f"{path}, line {number}"
        record_id = _text(record, "_id", where)
        if record_id in records:
            raise CorpusError(
                f"{where}: the id {record_id!r} also occurs in another line; give each text an id of its own"
            )
        _text(record, "text", where)
        records[record_id] = record
    return records


def _grades(folder: Path, split: str, documents: Container[str], queries: Container[str]) -> dict[str, dict[str, int]]:
    """Query -> document -> grade."""
    names = QRELS if split == "test" else (f"qrels/{split}.tsv", *QRELS)
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        raise CorpusError(f"{folder / QRELS[0]} is missing; it says which documents answer a query")
    grades: dict[str, dict[str, int]] = {}
    others: dict[str, None] = {}  # queries of other splits, which the file may also judge
    for number, record in read_records(path):
        where = f"{path}, line {number}"
        query, document, score = (_text(record, column, where) for column in COLUMNS)
        if query not in queries:
            others[query] = None
            continue
        if document not in documents:
            raise CorpusError(
                f"{where}: document {document!r} is not in {folder / 'corpus.jsonl'}; add it there or remove this line"
            )
        try:
            grade = int(score)
        except ValueError as error:
            raise CorpusError(f"{where}: score {score!r} is not a whole number; write one such as 1") from error
        check_grade(grade, where)
        grades.setdefault(query, {})[document] = grade
    if others and not grades:
        other = next(iter(others))
        raise CorpusError(
            f"{path} judges no query of {folder / 'queries.jsonl'} (it has {other!r}); give both the same ids"
        )
    if others:
        print(f"skipped {len(others)} queries that {path} judges but queries.jsonl lacks", file=sys.stderr)
    return grades


def _text(record: dict[str, Any], key: str, where: str) -> str:
    if not isinstance(record.get(key), str):
        contents = f"it has {', '.join(map(str, record))}" if key not in record else f"it is {record[key]!r}"
        raise CorpusError(f"{where}: no text under {key!r} ({contents}); give a BEIR folder")
    return str(record[key])
