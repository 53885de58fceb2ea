"""How well an encoder ranks the documents of queries that it was not trained on.

The documents that are ranked are the same for all queries of a round: for each query those that answer it, those that
the encoder ranks first before training, and those that fit its words best (BM25). Embedding all documents again for
every candidate would take longer than training.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cloze.training.adaptation.pairs import Judgements
from cloze.training.bar import bar
from cloze.training.data.lexical import Lexical, beside
from cloze.training.evaluation.measures import Embed, nearest
from cloze.training.evaluation.search import rankings, search_metrics

NEAREST: Final = 10  # documents per query by cosine, and as many by BM25
LEXICAL_WEIGHTS: Final = (0.2, 0.1, 0.3, 0.5)  # on a tie the first wins


@dataclass(frozen=True)
class HeldOutQueries:
    """Held-out queries of `judged`, and the documents (`pool`) that are ranked for them, both by their indices."""

    judged: Judgements
    queries: list[int]
    pool: list[int]

    @classmethod
    def among_nearest(
        cls, judged: Judgements, queries: list[int], vectors: NDArray[np.float32], query_vectors: NDArray[np.float32]
    ) -> "HeldOutQueries":
        """Choose the pool with the unit vectors of all documents (m, d) and of the queries (n, d)."""
        lexical, pool = Lexical(judged.documents), dict[int, None]()
        neighbours = bar(
            nearest(query_vectors, vectors, NEAREST), total=len(queries), desc="searching", unit=" queries"
        )
        for query, (_, places) in zip(queries, neighbours, strict=True):
            by_words = np.argsort(-lexical.scores(judged.queries[query]), kind="stable")[:NEAREST]
            pool |= dict.fromkeys([*judged.grades[query], *places.tolist(), *by_words.tolist()])
        return cls(judged, queries, sorted(pool))

    def scores(self, embed_queries: Embed, embed_documents: Embed) -> NDArray[np.float64]:
        """nDCG@10 of each query x100, (n)."""
        texts = [self.judged.queries[query] for query in self.queries]
        documents = [self.judged.documents[place] for place in self.pool]
        places = {document: place for place, document in enumerate(self.pool)}
        own = {number: places[place] for number, place in _own(self.judged, self.queries).items() if place in places}
        relevance = [
            {places[document]: grade for document, grade in grades.items()}
            for grades in _relevance(self.judged, self.queries)
        ]
        ranked = rankings(embed_queries(texts), embed_documents(documents), own)
        return 100 * np.array(search_metrics(ranked, relevance)["nDCG@10"])


def best_lexical_weight(
    judged: Judgements,
    queries: Sequence[int],
    vectors: NDArray[np.float32],
    query_vectors: NDArray[np.float32],
    lexical: Lexical,
) -> float:
    """The weight of BM25, added to the cosine, with which `queries` have the highest nDCG@10 among all documents.

    `vectors` (m, d) and `lexical` are of all documents, `query_vectors` (n, d) of the queries. Vectors have length 1.
    """
    own = _own(judged, queries)
    ranked_by_weight: dict[float, list[NDArray[np.intp]]] = {weight: [] for weight in LEXICAL_WEIGHTS}
    shown = bar(queries, desc="searching", unit=" queries")
    for number, (query, vector) in enumerate(zip(shown, query_vectors, strict=True)):
        cosines, words = vectors @ vector, lexical.scores(judged.queries[query])
        for weight, ranked in ranked_by_weight.items():
            first = np.argsort(-beside(cosines, words, weight), kind="stable")[: NEAREST + 1]
            ranked.append(first[first != own.get(number, -1)][:NEAREST])
    relevance = _relevance(judged, queries)
    means = {
        weight: np.mean(search_metrics(ranked, relevance)["nDCG@10"]) for weight, ranked in ranked_by_weight.items()
    }
    return max(means, key=means.__getitem__)


def _relevance(judged: Judgements, queries: Sequence[int]) -> list[dict[int, int]]:
    """The documents that answer each query, with their grades."""
    return [
        {place: max(1, round(judged.grades[query][place])) for place in judged.relevant(query)} for query in queries
    ]


def _own(judged: Judgements, queries: Sequence[int]) -> dict[int, int]:
    """Query -> the same text among the documents, as with texts of a class. A query is not to find itself."""
    documents = {text: place for place, text in enumerate(judged.documents)}
    places = ((number, documents.get(judged.queries[query])) for number, query in enumerate(queries))
    return {number: place for number, place in places if place is not None}
