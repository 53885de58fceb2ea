"""What a student learns from beside whole sentences: passages, search queries, words without punctuation, windows.

A text's own checksum decides what becomes of it, so that a resumed run makes the same choices.
"""

import random
import re
import zlib
from collections.abc import Sequence
from typing import Final

__all__ = ["as_sentence", "query_of", "search_text", "share_of", "windows", "words_only"]

QUERY_WORDS: Final = 9  # of a query made from a sentence, at most
QUESTION_SHARE: Final = 0.25  # of the queries: begin with a question word
BARE_SHARE: Final = 0.25  # of the queries: without the punctuation around them
QUESTIONS: Final = ("what is", "what are", "how does", "how to", "who is", "why is", "where is", "when was")


def search_text(run: Sequence[str], place: int, passage_share: float, query_share: float) -> str:
    """The training text made of the sentence at `place` in a run of consecutive ones: itself, a passage or a query."""
    sentence = run[place]
    chance = random.Random(zlib.crc32(sentence.encode()))
    kind = chance.random()
    if kind < passage_share:
        count = chance.randint(2, max(2, len(run)))
        first = max(0, min(place, len(run) - count))
        return " ".join(run[first : first + count])
    return query_of(sentence, chance) if kind < passage_share + query_share else sentence


def windows(text: str, longest: int) -> list[str]:
    """A text's words in as few parts of at most `longest` words as possible, all of similar size."""
    words = text.split()
    count = max(1, -(-len(words) // longest))
    size = max(1, -(-len(words) // count))
    return [" ".join(words[first : first + size]) for first in range(0, len(words), size)] or [text]


def words_only(text: str) -> str:
    """The words without punctuation and other signs; a text that has no words is not changed."""
    return " ".join(re.findall(r"\w+", text)) or text


def as_sentence(text: str) -> str:
    """The words of `words_only` with a period."""
    return f"{words_only(text)}."


def share_of(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return zlib.crc32(text.encode()) / 2**32


def query_of(sentence: str, chance: random.Random, fewest: int = 1) -> str:
    """A few consecutive words, `fewest` at least, as someone would type them."""
    words = sentence.split()
    count = chance.randint(fewest, QUERY_WORDS)
    first = chance.randrange(max(1, len(words) - count))
    query = " ".join(words[first : first + count])
    form = chance.random()
    if form < QUESTION_SHARE:
        return f"{chance.choice(QUESTIONS)} {query}{chance.choice(('', '?', '?'))}"
    return query.strip(" .,;:\"'()") or query if form < QUESTION_SHARE + BARE_SHARE else query
