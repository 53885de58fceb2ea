"""The words of a text, in any script."""

from typing import Final
from unicodedata import normalize

import regex  # type: ignore[import-untyped]

from cloze.encoding.chunks import UNSPACED

WORD: Final = regex.compile(r"[\w\p{N}]+")  # `re` leaves out the vowel signs of Devanagari, Tamil and other scripts

UNIT: Final = regex.compile(rf"{UNSPACED.pattern}\s*|[^\s{UNSPACED.pattern[1:-1]}]+\s*")


def words_of(text: str) -> list[str]:
    """The words without punctuation, with letters and their marks composed (NFC)."""
    words: list[str] = WORD.findall(normalize("NFC", text))
    return words


def lower_words(text: str) -> list[str]:
    """The words in lower case."""
    return words_of(text.casefold())


def units_of(text: str) -> list[str]:
    """The words, each with its punctuation and a blank after it. In a script without blanks, each letter is a word."""
    units: list[str] = UNIT.findall(" ".join(text.split()) + " ")
    return units
