"""The words of a text, in any script."""

from typing import Final
from unicodedata import normalize

import regex  # type: ignore[import-untyped]

from cloze.encoding.chunks import UNSPACED

WORD: Final = regex.compile(r"[\w\p{N}]+")  # `re` leaves out the vowel signs of Devanagari, Tamil and other scripts

SPACED_WORD: Final = regex.compile(rf"{UNSPACED.pattern}\s*|[^\s{UNSPACED.pattern[1:-1]}]+\s*")


def words_of(text: str) -> list[str]:
    """The words without punctuation, with letters and their marks composed (NFC)."""
    words: list[str] = WORD.findall(normalize("NFC", text))
    return words


def lower_words(text: str) -> list[str]:
    """The words in lower case."""
    return words_of(text.casefold())


def spaced_words(text: str) -> list[str]:
    """The words with their punctuation, each followed by a blank. In a script without blanks, each letter is a word."""
    words: list[str] = SPACED_WORD.findall(" ".join(text.split()) + " ")
    return words
