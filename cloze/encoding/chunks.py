"""Cut a long text into chunks. Each fits into the template, and ends with a word, if possible with a sentence."""

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple
from unicodedata import category

from cloze.encoding.text import TextEncoder

SENTENCE_END: Final = re.compile(r"""[.!?…]["'”’»)\]]*\s+|[。！？]|\n\s*""")

UNSPACED: Final = re.compile(  # Thai, Lao, Tibetan, Burmese, Khmer, kana and Chinese characters
    "[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)


class Chunk(NamedTuple):
    """`text[start:stop]` of a text, in characters."""

    start: int
    stop: int


def least_tokens(encoder: TextEncoder) -> int:
    """Return the number of tokens of the shortest chunk: one, plus the period that the encoder may add."""
    return 1 + encoder.final_period


def chunked(encoder: TextEncoder, text: str, tokens: int, overlap: int = 0) -> Iterator[Chunk]:
    """Cut a text into chunks of at most `tokens` tokens, each of which overlaps the previous one by up to `overlap`.

    `tokens` is `least_tokens` to `encoder.text_tokens`, and `overlap` at most half of it. A chunk ends with the last
    sentence that ends in its second half, otherwise with a word. A word of more tokens is cut between two characters. A
    text without tokens is one chunk. No chunk is truncated when it is encoded on its own. Raises TextError.
    """
    assert tokens >= least_tokens(encoder), "no chunk is so short. This is a bug."
    spans = encoder.spans(text)
    if not spans:
        yield Chunk(0, 0)
    elif len(spans) <= tokens and _tokens(encoder, text, spans) <= tokens:  # also if it needs no period
        yield Chunk(spans[0][0], spans[-1][1])
        return
    cuts, room = _Cuts(text, [start for start, _ in spans]), tokens - encoder.final_period
    begin, end = -1, 0  # of the last chunk, in tokens
    while end < len(spans):
        first = cuts.word(max(end - overlap, begin + 1), end)
        last = cuts.end(first, first + room, end)
        if last is None or _tokens(encoder, text, spans[first:last]) > tokens:  # a word is cut, and there is no overlap
            first, last = end, min(end + room, len(spans))
            while last > first + 1 and _tokens(encoder, text, spans[first:last]) > tokens:
                last -= 1
            letter = last  # a vowel sign stays with its letter, if there is room
            while first < letter < len(spans) and category(text[spans[letter][0]]).startswith("M"):
                letter -= 1
            last = letter if letter > first else last
        if not end or spans[last - 1][1] > spans[end - 1][1]:  # else only more tokens of its last character
            yield Chunk(spans[first][0], spans[last - 1][1])
        begin, end = first, last


def _tokens(encoder: TextEncoder, text: str, spans: Sequence[tuple[int, int]]) -> int:
    """Return the number of tokens of this part on its own: the rest of a cut word may have more than in the text."""
    return encoder.count(text[spans[0][0] : spans[-1][1]])


def _begins_word(text: str, start: int) -> bool:
    """Whether a word may begin with this character. In a script without blanks, it may unless it is a mark."""
    if start == 0 or text[start - 1].isspace():
        return True
    return UNSPACED.match(text[start]) is not None and not category(text[start]).startswith("M")


class _Cuts:
    """Where a text may be cut: the indices of the tokens that begin a word, and of those that begin a sentence."""

    def __init__(self, text: str, starts: list[int]) -> None:
        self.count = len(starts)
        self.words = [index for index, start in enumerate(starts) if _begins_word(text, start)]
        self.sentences = [bisect_left(starts, match.end()) for match in SENTENCE_END.finditer(text)]

    def word(self, first: int, last: int) -> int:
        """Return the first token from `first` on that begins a word, or `last` if there is none before it."""
        index = bisect_left(self.words, first)
        return min(self.words[index], last) if index < len(self.words) else last

    def end(self, first: int, last: int, former: int) -> int | None:
        """Return the best end of a chunk that begins with the token `first`: after `former`, and at most `last`."""
        if last >= self.count:
            return self.count
        for starts, lowest in ((self.sentences, max(former, (first + last) // 2)), (self.words, former)):
            index = bisect_left(starts, last + 1) - 1
            if index >= 0 and starts[index] > lowest:
                return starts[index]
        return None
