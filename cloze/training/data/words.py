"""The words of a text, in any script."""

from typing import Final
from unicodedata import normalize

import regex  # type: ignore[import-untyped]

WORD: Final = regex.compile(r"[\w\p{N}]+")  # `re` leaves out the vowel signs of Devanagari, Tamil and other scripts


def words_of(text: str) -> list[str]:
    """The words without punctuation, with letters and their marks composed (NFC)."""
    words: list[str] = WORD.findall(normalize("NFC", text))
    return words


def lower_words(text: str) -> list[str]:
    """The words in lower case."""
    return words_of(text.casefold())
