"""How well documents fit the words of a query: BM25 (Robertson et al., TREC-3, 1994), with the library bm25s."""

import sys
from collections.abc import Sequence
from typing import Final

import bm25s
import numpy as np
from numpy.typing import NDArray

from cloze.training.bar import bar
from cloze.training.data.words import lower_words

NO_WORD: Final = ""  # the only word of a document without words
FLAT: Final = 1e-9  # least standard deviation of BM25, which is 0 if no document has a word of the query


class Lexical:
    """A BM25 index of the documents' words in lower case."""

    def __init__(self, documents: Sequence[str]) -> None:
        shown = bar(documents, desc="indexing", unit=" documents")
        words = [lower_words(document) or [NO_WORD] for document in shown]
        self.count, self._known = len(documents), {word for document_words in words for word in document_words}
        self._index = bm25s.BM25(method="lucene", k1=1.2, b=0.75)
        self._index.index(words, show_progress=sys.stderr.isatty())

    def scores(self, query: str) -> NDArray[np.float32]:
        """BM25 of each document, (n)."""
        words = [word for word in lower_words(query) if word in self._known]  # bm25s takes only these, and at least one
        scores: NDArray[np.float32] = self._index.get_scores(words) if words else np.zeros(self.count, np.float32)
        return scores


def beside(cosines: NDArray[np.float32], words: NDArray[np.float32], weight: float) -> NDArray[np.float32]:
    """A query's cosines (n) plus `weight` times its standardised BM25 (n), scaled to the cosines' deviation."""
    fit = (words - words.mean()) / max(words.std(), FLAT)
    return cosines + weight * cosines.std() * fit  # type: ignore[no-any-return]
