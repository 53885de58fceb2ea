"""Chunks: they cover the text, fit, and end where words and sentences end."""

import random
from itertools import pairwise

import pytest
from tiny_bundle import TEMPLATE, tokenizer, vocabulary
from tokenizers import Tokenizer, models, pre_tokenizers

from cloze.encoding.chunks import Chunk, chunked
from cloze.encoding.template import Template
from cloze.encoding.text import SpecialTokens, TextEncoder

SENTENCES = (
    "A man plays the guitar. Two dogs run! The man means a sentence of the guitar? A man. Two dogs run of a man."
)


@pytest.fixture(scope="module")
def encoder() -> TextEncoder:
    special = SpecialTokens(*(vocabulary()[token] for token in ("[CLS]", "[SEP]", "[PAD]", "[MASK]")))
    return TextEncoder(tokenizer(), special, Template.parse(TEMPLATE, "mask"), 32)


def texts(text: str, chunks: list[Chunk]) -> list[str]:
    return [text[chunk.start : chunk.stop] for chunk in chunks]


def characters(text: str, final_period: bool = False) -> TextEncoder:
    """An encoder of which each character of the text is a token."""
    listed = ["<s>", "</s>", "<pad>", "<mask>", *sorted(set(text))]
    by_characters = Tokenizer(models.BPE({token: number for number, token in enumerate(listed)}, []))
    return TextEncoder(by_characters, SpecialTokens(0, 1, 2, 3), Template.parse("[X]", "mean"), 32, final_period)


def test_a_short_text_is_one_chunk(encoder: TextEncoder) -> None:
    assert list(chunked(encoder, "  two dogs run ", 10)) == [Chunk(2, 14)]
    assert list(chunked(encoder, "", 10)) == list(chunked(encoder, "  \n ", 10)) == [Chunk(0, 0)]


def test_chunks_end_with_sentences_where_these_end_late_enough(encoder: TextEncoder) -> None:
    assert texts(SENTENCES, chunked(encoder, SENTENCES, 12)) == [
        "A man plays the guitar. Two dogs run!",
        "The man means a sentence of the guitar? A man.",
        "Two dogs run of a man.",
    ]


def test_a_sentence_that_ends_too_early_is_not_the_end(encoder: TextEncoder) -> None:
    text = "A man. Two dogs run the guitar of the man plays a sentence of the man."
    first, second, *_ = texts(text, chunked(encoder, text, 10))
    assert first == "A man. Two dogs run the guitar of the"
    assert second.startswith("man plays")


def test_a_word_of_too_many_tokens_is_cut(encoder: TextEncoder) -> None:
    text = "two xylophonequartets run"
    found = texts(text, chunked(encoder, text, 6))
    assert "".join(found).replace(" ", "") == text.replace(" ", "")
    assert all(encoder.count(part) <= 6 for part in found)


def test_an_overlap_begins_with_a_word_before_the_last_end(encoder: TextEncoder) -> None:
    text = " ".join(["two", "dogs", "run", "a", "man"] * 8)
    found = list(chunked(encoder, text, 10, overlap=3))
    assert all(text[chunk.start - 1 : chunk.start] in ("", " ") for chunk in found)
    assert all(encoder.count(text[second.start : first.stop]) == 3 for first, second in pairwise(found))


@pytest.mark.parametrize("final_period", [False, True])
def test_chunks_of_any_text_cover_it_and_fit(encoder: TextEncoder, final_period: bool) -> None:
    encoder = TextEncoder(tokenizer(), encoder.special, encoder.template, 32, final_period)
    chance = random.Random(7)
    pieces = [
        "two",
        "dogs",
        " ",
        " ",
        ". ",
        "\n",
        "xylophone",
        "!",
        "東京",
        "?\n\n",
        "[MASK]",
        "é",
        "…",
        "\u200b",
        "e\u0301",
        "\u0301",
        '."',
    ]
    for _ in range(300):
        text = "".join(chance.choices(pieces, k=chance.randint(0, 60)))
        tokens = chance.randint(1 + final_period, encoder.text_tokens)
        overlap = chance.randint(0, tokens // 2)
        found = list(chunked(encoder, text, tokens, overlap))
        assert all(encoder.encode([part], truncate=False) for part in texts(text, found)), (text, tokens)
        assert all(encoder.count(part) <= tokens for part in texts(text, found)), (text, tokens)
        covered = set[int]().union(*(range(chunk.start, chunk.stop) for chunk in found))
        assert all(set(range(start, stop)) <= covered for start, stop in encoder.spans(text)), (text, tokens)
        assert all(first.start < second.start and first.stop < second.stop for first, second in pairwise(found))
        if not overlap:
            assert all(first.stop <= second.start for first, second in pairwise(found))


@pytest.mark.parametrize("text", ["cafe\u0301 cafe\u0301", "नमस्ते दुनिया", "e\u0301\u0323 a\u0300"])
def test_a_mark_belongs_to_the_letter_before_it(encoder: TextEncoder, text: str) -> None:
    """The tokenizer strips accents, so they are in no token."""
    parts = texts(text, list(chunked(encoder, text, encoder.text_tokens, 0)))
    assert parts == [text]
    words = text.split()
    tokens = max(map(encoder.count, words))
    assert texts(text, list(chunked(encoder, text, tokens, 0))) == words


def test_a_tokenizer_may_count_the_blank_before_a_word_to_it(encoder: TextEncoder) -> None:
    """As the byte-level one of ModernBERT does, and DeBERTa's, which marks the beginnings of words."""
    words = [f"▁{word}" for word in ("A", "man", "plays", "the", "guitar", "Two", "dogs", "run")]
    listed = [*("<s>", "</s>", "<pad>", "<mask>", "<unk>"), "▁", *words, *".!?", *"abcdefghijklmnopqrstuvwxyzAT"]
    marked = Tokenizer(models.Unigram([(token, -2.0 if token in words else -9.0) for token in listed], 4, False))
    marked.pre_tokenizer = pre_tokenizers.Metaspace()
    special = SpecialTokens(0, 1, 2, 3)
    blanks = TextEncoder(marked, special, Template.parse("[X]", "mean"), 32)
    text = "A man plays the guitar. Two dogs run! The man plays."
    assert any(marked.encode(text).offsets[place][0] == 1 for place in range(3)), "the blank is part of the token"
    for overlap in (0, 3):
        found = list(chunked(blanks, text, 9, overlap))
        assert all(text[chunk.start - 1 : chunk.start] in ("", " ") for chunk in found)
        assert not any(text[chunk.start].isspace() for chunk in found)
        assert any(one.stop > other.start for one, other in pairwise(found)) == bool(overlap)
    assert [token.text for token in blanks.explain("a man")][:1] == ["<s>"]


def test_text_without_blanks_overlaps_too() -> None:
    """Each character is a token."""
    encoder = characters("今日天气很好我们去公园")
    chunks = list(chunked(encoder, "今日天气很好我们去公园", 4, 2))
    assert chunks[:3] == [(0, 4), (2, 6), (4, 8)]


def test_a_text_that_fits_with_its_own_period_is_one_chunk() -> None:
    encoder = characters("今日.", final_period=True)
    assert list(chunked(encoder, "今日今.", 4)) == [(0, 4)]
    assert list(chunked(encoder, "今日今日", 4)) == [(0, 3), (3, 4)]  # the period is a token of its own


def test_a_vowel_sign_that_is_a_token_stays_with_its_letter() -> None:
    word = "दुनिया"
    encoder = characters(word)
    assert encoder.count(word) == 6
    for tokens in (2, 3):
        assert texts(word, list(chunked(encoder, word, tokens))) == ["दु", "नि", "या"]
    assert len(list(chunked(encoder, word, 1))) == 6  # a letter and its mark do not fit together
    marks = "द" + "ा" * 30  # a letter with more of them than a chunk takes
    assert len(list(chunked(encoder, marks, 8))) == 4


def test_no_character_of_several_tokens_is_cut() -> None:
    letters = pre_tokenizers.ByteLevel.alphabet()
    listed = ["<s>", "</s>", "<pad>", "<mask>", *sorted(letters)]
    by_bytes = Tokenizer(models.BPE({token: number for number, token in enumerate(listed)}, []))
    by_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder = TextEncoder(by_bytes, SpecialTokens(0, 1, 2, 3), Template.parse("[X]", "mean"), 32)
    assert encoder.count("🎸") == 4
    for tokens in (1, 2, 3):
        assert list(chunked(encoder, "🎸🎸a", tokens)) == [Chunk(0, 1), Chunk(1, 2), Chunk(2, 3)]
