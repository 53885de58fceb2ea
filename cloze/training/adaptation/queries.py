"""Synthetic queries from documents: a sentence, some consecutive words, or words that are specific to the document."""

import random
import re
from collections.abc import Sequence
from typing import Final

import numpy as np
from scipy.sparse import csr_matrix
from sklearn.feature_extraction.text import TfidfVectorizer  # type: ignore[import-untyped]

from cloze.training.data.words import lower_words, spaced_words
from cloze.training.texts import query_of

ENDS: Final = re.compile(r"(?<=[.!?;:])\s+|(?<=[。！？；：])")
FEWEST_WORDS: Final = 4  # of a sentence; a shorter one is a heading or a list's number
MOST_WORDS: Final = 40  # of a query
SENTENCE_SHARE, FRAGMENT_SHARE = 0.4, 0.3  # of the queries; the others are keywords
KEYWORDS: Final = (2, 5)  # fewest and most words of such a query
RAREST: Final = 12  # words of a document, by tf-idf, from which they are drawn
COMMON: Final = 0.2  # a word in a larger share of the documents is not specific


class QueryMaker:
    """Makes queries from `documents`, a new one in each call; the same ones for the same seed."""

    def __init__(self, documents: Sequence[str], seed: int) -> None:
        self.documents = documents
        self.rng = random.Random(seed)
        common = COMMON if len(documents) * COMMON > 1 else 1.0
        vectorizer = TfidfVectorizer(tokenizer=lower_words, token_pattern=None, lowercase=False, max_df=common)
        try:
            self.weights = vectorizer.fit_transform(documents).tocsr()
        except ValueError:  # no word is rare enough, or there are no words: no keyword queries
            self.weights, self.words = csr_matrix((len(documents), 0)), []
        else:
            self.words = vectorizer.get_feature_names_out()

    def __call__(self, place: int) -> str:
        """A query for the document at `place`."""
        sentence, draw = self.rng.choice(sentences_of(self.documents[place])), self.rng.random()
        if draw < SENTENCE_SHARE:
            return "".join(spaced_words(sentence)[:MOST_WORDS]).strip()
        row = self.weights[place]
        if draw < SENTENCE_SHARE + FRAGMENT_SHARE or row.nnz < KEYWORDS[1]:
            return query_of(sentence, self.rng, FEWEST_WORDS)
        rarest = np.argsort(-row.data, kind="stable")[:RAREST].tolist()
        chosen = self.rng.sample(rarest, self.rng.randint(*KEYWORDS))
        return " ".join(self.words[row.indices[word]] for word in chosen)


def sentences_of(document: str) -> list[str]:
    """A document's sentences of enough words; the complete document if it has none."""
    return [sentence for sentence in ENDS.split(document) if len(spaced_words(sentence)) >= FEWEST_WORDS] or [document]
