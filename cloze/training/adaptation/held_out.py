"""How well an encoder ranks the documents of queries that it was not trained on.

Ranked are the documents that answer a query, those that the encoder before training ranks first for it, and those that
fit its words best (BM25), of all queries of a round together: embedding all documents again for every candidate would
take longer than training.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cloze.training.adaptation.pairs import Judgements
from cloze.training.data.lexical import Lexical
from cloze.training.evaluation.compare import INTERVAL, draws
from cloze.training.evaluation.measures import Embed, nearest
from cloze.training.evaluation.search import rankings, search_metrics
from cloze.training.evaluation.task import Items

__all__ = ["HeldOutQueries", "interval"]

NEAREST: Final = 10  # documents of a query by cosine, and as many by its words
RESAMPLES: Final = 2000


@dataclass(frozen=True)
class HeldOutQueries:
    """Queries of `judged` that are not trained on, and the documents among which they are ranked, by their indices."""

    judged: Judgements
    queries: list[int]
    pool: list[int]

    @classmethod
    def among_nearest(
        cls, judged: Judgements, queries: list[int], vectors: NDArray[np.float32], asked: NDArray[np.float32]
    ) -> "HeldOutQueries":
        """`vectors` (m, d) are those of all documents and `asked` (n, d) of the queries, of length 1."""
        lexical, pool = Lexical(judged.documents), dict[int, None]()
        for query, (_, places) in zip(queries, nearest(asked, vectors, NEAREST), strict=True):
            by_words = np.argsort(-lexical.scores(judged.queries[query]), kind="stable")[:NEAREST]
            pool |= dict.fromkeys([*judged.grades[query], *places.tolist(), *by_words.tolist()])
        return cls(judged, queries, sorted(pool))

    def scores(self, embed: Embed) -> NDArray[np.float64]:
        """nDCG@10 of each query x100, (n)."""
        places = {document: place for place, document in enumerate(self.pool)}
        relevance = [
            {
                places[document]: max(1, round(self.judged.grades[query][document]))
                for document in self.judged.relevant(query)
            }
            for query in self.queries
        ]
        texts = [self.judged.queries[query] for query in self.queries]
        found = rankings(embed(texts), embed([self.judged.documents[place] for place in self.pool]), self._own(places))
        return 100 * np.array(search_metrics(found, relevance)["nDCG@10"])

    def _own(self, places: dict[int, int]) -> dict[int, int]:
        """A query that is itself a document, as a text among texts of its class: it is not to find itself."""
        documents = {text: place for place, text in enumerate(self.judged.documents)}
        found = ((number, documents.get(self.judged.queries[query])) for number, query in enumerate(self.queries))
        return {number: places[place] for number, place in found if place in places}


def interval(gains: NDArray[np.float64]) -> tuple[float, float]:
    """The middle 95 % of the mean of `gains` (n), by a paired bootstrap."""
    low, high = np.percentile(draws(Items("plain mean", gains.tolist()), RESAMPLES, seed=0), INTERVAL)
    return float(low), float(high)
