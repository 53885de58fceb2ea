"""Collections to search, and how well a model's cosines rank their documents: nDCG@10, as BEIR computes it.

A collection is a folder in BEIR's layout: `corpus.jsonl` with `_id`, `title` (optional) and `text`, `queries.jsonl`
with `_id` and `text`, and `qrels.tsv`, or BEIR's own `qrels/test.tsv`, with the columns `query-id`, `corpus-id` and
`score`. A document's text is its title, a blank and its text.

BEIR leaves a document out of the results of a query with the same id, for collections whose queries are documents. Here
the text has to be the same too, because many collections number both from 1.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from training.data.corpus import read_records
from training.data.similarity import units
from training.errors import CorpusError
from training.model.pooling import Embed

__all__ = ["DEPTH", "Collection", "find_collections", "load_collection", "ndcg", "search_score"]

DEPTH: Final = 10
QRELS: Final = ("qrels.tsv", "qrels/test.tsv")
COLUMNS: Final = ("query-id", "corpus-id", "score")


@dataclass(frozen=True)
class Collection:
    """`relevance[i]` maps a document's index to its grade for query i; every query has at least one above 0.

    `own` maps a query that is a document of the collection to that document, which it is not to find.
    """

    name: str
    documents: list[str]
    queries: list[str]
    relevance: list[dict[int, int]]
    own: dict[int, int] = field(default_factory=dict)


def find_collections(data: str | Path) -> list[Path]:
    """The folders in `data`/retrieval that hold a corpus.jsonl, by name; none if there is no such folder."""
    return sorted(path.parent for path in Path(data, "retrieval").glob("*/corpus.jsonl"))


def load_collection(folder: str | Path) -> Collection:
    """Read one folder. Raises CorpusError, which names the file and the line."""
    folder = Path(folder)
    documents = _records(folder / "corpus.jsonl")
    queries = {query: record["text"].strip() for query, record in _records(folder / "queries.jsonl").items()}
    grades = _grades(folder, documents, queries)
    asked = [query for query in queries if any(grade > 0 for grade in grades.get(query, {}).values())]
    if not asked:
        raise CorpusError(f"{folder} has no query with a relevant document; give a collection with judgements")
    places = {document: place for place, document in enumerate(documents)}
    return Collection(
        folder.name,
        [f"{record.get('title') or ''} {record['text']}".strip() for record in documents.values()],
        [queries[query] for query in asked],
        [{places[document]: grade for document, grade in grades[query].items()} for query in asked],
        {
            number: places[query]
            for number, query in enumerate(asked)
            if query in documents and documents[query]["text"].split() == queries[query].split()
        },
    )


def search_score(embed: Embed, collection: Collection) -> float:
    """nDCG@10 x100 of exact search by cosine, averaged over queries, with two decimals."""
    documents, queries = units(embed(collection.documents)), units(embed(collection.queries))
    scores = []
    for number, (query, relevance) in enumerate(zip(queries, collection.relevance, strict=True)):
        ranking = np.argsort(-(documents @ query), kind="stable")[: DEPTH + 1]
        scores.append(ndcg(ranking[ranking != collection.own.get(number, -1)][:DEPTH], relevance))
    return round(100 * float(np.mean(scores)), 2)


def ndcg(ranking: Sequence[int] | NDArray[np.integer], relevance: dict[int, int]) -> float:
    """The discounted gain of the documents found, in [0, 1], relative to that of the best order: nDCG@len(ranking).

    A document's gain is its grade divided by log2(1 + its rank), as in trec_eval and BEIR.
    """
    found = [relevance.get(int(document), 0) for document in ranking]
    best = sorted(relevance.values(), reverse=True)[:DEPTH]
    return _gain(found) / _gain(best)


def _gain(grades: Sequence[int]) -> float:
    return sum(max(grade, 0) / float(np.log2(rank + 1)) for rank, grade in enumerate(grades, 1))


def _records(path: Path) -> dict[str, dict[str, Any]]:
    """Id -> the record, which has a text."""
    if not path.is_file():
        raise CorpusError(f"{path} is missing; give a BEIR folder: corpus.jsonl, queries.jsonl and qrels.tsv")
    records: dict[str, dict[str, Any]] = {}
    for number, record in read_records(path):
        where = f"{path}, line {number}"
        found = _text(record, "_id", where)
        if found in records:
            raise CorpusError(f"{where}: the id {found!r} is that of another line too; give each text an id of its own")
        _text(record, "text", where)
        records[found] = record
    return records


def _grades(folder: Path, documents: Container[str], queries: Container[str]) -> dict[str, dict[str, int]]:
    """Query -> document -> grade."""
    path = next((folder / name for name in QRELS if (folder / name).is_file()), None)
    if path is None:
        raise CorpusError(f"{folder / QRELS[0]} is missing; it says which documents answer a query")
    grades: dict[str, dict[str, int]] = {}
    other = None
    for number, record in read_records(path):
        where = f"{path}, line {number}"
        query, document, score = (_text(record, column, where) for column in COLUMNS)
        if query not in queries:  # the file may judge queries of other splits too
            other = query
            continue
        if document not in documents:
            raise CorpusError(f"{where}: document {document!r} is not in {folder / 'corpus.jsonl'}; get it again")
        try:
            grades.setdefault(query, {})[document] = int(score)
        except ValueError as error:
            raise CorpusError(f"{where}: score {score!r} is not a whole number") from error
    if other and not grades:
        raise CorpusError(
            f"{path} judges no query of {folder / 'queries.jsonl'} (it has {other!r}); give both the same ids"
        )
    return grades


def _text(record: dict[str, Any], key: str, where: str) -> str:
    if not isinstance(record.get(key), str):
        found = f"it has {', '.join(map(str, record))}" if key not in record else f"it is {record[key]!r}"
        raise CorpusError(f"{where}: no text under {key!r} ({found}); give a BEIR folder")
    return str(record[key])
