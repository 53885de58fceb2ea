"""What holds for any text whatever, with word pieces, bytes, pieces of a unigram, and words."""

import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, note
from hypothesis import strategies as some
from test_text import load
from tokenizers import Tokenizer
from tokenizers.models import Unigram, WordLevel
from tokenizers.pre_tokenizers import Metaspace, WhitespaceSplit

from cloze.encoding.chunks import chunked, least_tokens
from cloze.encoding.template import Template
from cloze.encoding.text import Direction, SpecialTokens, TextEncoder

ODD = ["a", "dogs", " ", "\n", ".", "!", '"', "[MASK]", "[SEP]", "<mask>", "</s>", "é", "e\u0301", "क्षि", "狗", "😀"]
ODD += ["\u200b", "\u00a0", "\x00", "ﬁ", "İ", "ß"]
TEXTS = some.text(some.characters(exclude_categories=["Cs"]), max_size=30) | some.lists(
    some.sampled_from(ODD), max_size=30
).map("".join)
DIRECTIONS = some.sampled_from(["left", "right"])
SOURCES = ["[X] means [MASK].", '[MASK] is "[X]"', "[X]"]
Make = Callable[[str, bool], TextEncoder]


def of_words(source: str, final_period: bool) -> TextEncoder:
    words = {
        word: place for place, word in enumerate(["[CLS]", "[SEP]", "[PAD]", "[MASK]", "[UNK]", *ODD, "means", "is"])
    }
    tokenizer = Tokenizer(WordLevel(words, "[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return made(tokenizer, source, final_period)


def of_pieces(source: str, final_period: bool) -> TextEncoder:
    special = [(piece, 0.0) for piece in ("<s>", "</s>", "<pad>", "<mask>", "<unk>")]
    pieces = [(piece, -3.0) for piece in ("▁", *dict.fromkeys("".join(ODD)), "means", "dogs")]
    tokenizer = Tokenizer(Unigram([*special, *pieces], unk_id=4))
    tokenizer.pre_tokenizer = Metaspace()
    tokenizer.add_special_tokens([piece for piece, _ in special])
    return made(tokenizer, source, final_period)


def made(tokenizer: Tokenizer, source: str, final_period: bool) -> TextEncoder:
    template = Template.parse(source, "mask" if "[MASK]" in source else "mean")
    return TextEncoder(tokenizer, SpecialTokens(0, 1, 2, 3), template, 24, final_period)


@pytest.fixture(params=["word pieces", "bytes", "words", "pieces"])
def make(request: pytest.FixtureRequest, tiny_bert: Path, tiny_roberta: Path) -> Make:
    if request.param in ("words", "pieces"):
        return {"words": of_words, "pieces": of_pieces}[request.param]
    folder = tiny_bert if request.param == "word pieces" else tiny_roberta
    return lambda source, final_period: load(folder, source, 24, final_period)


@pytest.fixture
def encoders(make: Make) -> list[TextEncoder]:
    return [make(source, final_period) for source in SOURCES for final_period in (False, True)]


@given(text=TEXTS, direction=DIRECTIONS)
def test_a_sequence_is_the_template_around_a_part_of_the_text(
    encoders: list[TextEncoder], text: str, direction: Direction
) -> None:
    for encoder in encoders:
        note(f"{encoder.template}, final period: {encoder.final_period}")
        [tokens] = encoder.encode([text], direction=direction)
        prefix, suffix = len(encoder.prefix_ids), len(encoder.suffix_ids)
        inner = tokens.ids[prefix : len(tokens.ids) - suffix]
        assert [*encoder.prefix_ids, *inner, *encoder.suffix_ids] == tokens.ids
        assert len(inner) + tokens.cut == encoder.count(text)
        assert len(tokens.ids) <= 24
        assert not any(token in encoder.special for token in inner)
        assert encoder.encode([text.strip()], direction=direction) == [tokens]
        assert encoder.encode(["dogs", text], direction=direction)[1] == tokens


@given(text=TEXTS, direction=DIRECTIONS, most=some.none() | some.integers(1, 30))
def test_explain_shows_what_encode_gives(
    encoders: list[TextEncoder], text: str, direction: Direction, most: int | None
) -> None:
    for encoder in encoders:
        note(f"{encoder.template}, final period: {encoder.final_period}")
        explained, [tokens] = encoder.explain(text, direction=direction), encoder.encode([text], direction=direction)
        assert [token.id for token in explained if not token.cut] == tokens.ids
        assert sum(token.cut for token in explained) == tokens.cut
        assert [token.id for token in explained if token.template] == encoder.shortest
        assert not any(token.cut or token.start is not None for token in explained if token.template)
        assert all(token.special == (token.id in encoder.special) for token in explained)
        whole = [token.id for token in explained if not token.template]
        assert encoder.encode_ids([whole], direction=direction) == [tokens]
        [fewer] = encoder.encode([text], direction=direction, max_text_tokens=most)
        kept = len(fewer.ids) - encoder.template_tokens
        assert kept == min(len(whole), encoder.text_tokens, most or len(whole))
        at = fewer.ids[len(encoder.prefix_ids) : len(encoder.prefix_ids) + kept]
        assert at == (whole[len(whole) - kept :] if direction == "left" else whole[:kept])


@given(text=TEXTS)
def test_spans_are_within_the_text_and_in_order(encoders: list[TextEncoder], text: str) -> None:
    """No character that a tokenizer keeps is outside, and no span begins with a combining mark."""
    for encoder in encoders:
        note(f"{encoder.template}, final period: {encoder.final_period}")
        spans = encoder.spans(text)
        assert all(0 <= start <= stop <= len(text) for start, stop in spans)
        assert spans == sorted(spans)
        for start, stop in spans:
            assert not text[start:stop].startswith(" ")
            assert (
                stop == len(text)
                or not unicodedata.category(text[stop]).startswith("M")
                or any(begin <= stop < end for begin, end in spans)
            )


@given(text=TEXTS, tokens=some.integers(1, 8), overlap=some.integers(0, 4))
def test_chunks_are_not_truncated_and_cover_what_tokens_do(
    encoders: list[TextEncoder], text: str, tokens: int, overlap: int
) -> None:
    for encoder in encoders:
        note(f"{encoder.template}, final period: {encoder.final_period}")
        most = max(tokens, least_tokens(encoder))
        chunks = list(chunked(encoder, text, most, min(overlap, most // 2)))
        assert all(start < stop for start, stop in chunks) or chunks == [(0, 0)]
        assert [stop for _, stop in chunks] == sorted({stop for _, stop in chunks})
        covered = {place for start, stop in chunks for place in range(start, stop)}
        assert all(place in covered for start, stop in encoder.spans(text) for place in range(start, stop))
