"""POST /explain over HTTP: against a loop over /similarity, its limits, and texts with few words or none."""

import asyncio
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import httpx
import live
import pytest
from harness import LIMITS, PATIENCE, Hold, MakeApp, MakeClient, open_client, services, until
from tiny_bundle import MAX_TOKENS, sequence, write_bundle

from cloze.service.app import create_app
from cloze.service.http.explain import WORD, Word, without
from cloze.service.settings import Settings

FIRST = "Two dogs run, and the man plays the guitar."
SECOND = "a man doesn't run"
LONG = " ".join(["man", *["dogs"] * MAX_TOKENS, "guitar"])  # is truncated, also without one of its words


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a server over a real socket."""
    folder = tmp_path_factory.mktemp("bundle") / "tiny"
    write_bundle(folder)
    with (
        live.served(create_app(Settings(bundle=folder, provider="cpu", threads=1, **LIMITS))) as url,
        httpx.Client(base_url=url, timeout=PATIENCE) as http,
    ):
        yield http


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(
    ("first", "second", "direction"),
    [(FIRST, SECOND, "right"), (FIRST, FIRST, "right"), (LONG, SECOND, "left"), (LONG, SECOND, "right")],
)
def test_the_changes_are_those_of_a_loop_over_similarity(
    http: httpx.Client, first: str, second: str, direction: str
) -> None:
    """One request for each word, whose text is split at blanks and joined again without it."""
    options = {"truncation_direction": direction}

    @cache
    def cosine(left: str, right: str) -> float:
        inputs = {"source_sentence": left, "sentences": [right]}
        [value] = post(http, "/similarity", inputs=inputs, parameters=options)
        return float(value)

    found = post(http, "/explain", inputs=[first, second], **options)
    assert found["cosine"] == pytest.approx(cosine(first, second), abs=1e-6)
    for text, other, words in zip((first, second), (second, first), found["texts"], strict=True):
        pieces = text.split()
        assert [word["word"] for word in words] == [piece.strip(",.") for piece in pieces]
        assert [text[word["start"] : word["stop"]] for word in words] == [word["word"] for word in words]
        for place, word in enumerate(words):
            mark = pieces[place].removeprefix(word["word"])  # stays, behind the word before
            rest = " ".join([" ".join(pieces[:place]) + mark, *pieces[place + 1 :]]).strip()
            assert word["change"] == pytest.approx(cosine(rest, other) - cosine(first, second), abs=1e-6)


def test_a_text_of_one_word_or_of_none(http: httpx.Client, subtests: pytest.Subtests) -> None:
    """Without its only word nothing is left to compare, so that word has no change; the other text's words have."""
    for alone in ["guitar", " Guitar! ", "", "  ", "?!"]:
        with subtests.test(alone=alone):
            one, other = post(http, "/explain", inputs=[alone, SECOND])["texts"]
            assert [(word["word"], word["change"]) for word in one] == [
                (word, None) for word in re.findall(r"\w+", alone)
            ]
            assert all(isinstance(word["change"], float) for word in other)


@pytest.mark.anyio
async def test_admission_counts_the_tokens_of_every_text(make_app: MakeApp, hold: Hold) -> None:
    app = make_app()
    texts = ["two dogs run", "a man", "dogs run", "two run", "two dogs", "man", "a"]
    async with open_client(app) as http:
        with hold():
            asked = asyncio.create_task(http.post("/explain", json={"inputs": texts[:2]}))
            await until(lambda: services(app).admission.tokens_in_flight)
            in_flight = services(app).admission.tokens_in_flight
        response = await asked
    assert in_flight == sum(len(sequence(text)) for text in texts)
    assert response.headers["x-compute-tokens"] == str(in_flight)


def test_words_are_found_in_any_text(subtests: pytest.Subtests) -> None:
    for text, words in [
        ("A man's e-mail costs $3.50, or 1,000 yen.", ["A", "man's", "e-mail", "costs", "3.50", "or", "1,000", "yen"]),
        ("“Don’t!” — he said…", ["Don’t", "he", "said"]),
        ("¿Qué? हिन्दी है। [MASK]\nnext", ["Qué", "हिन्दी", "है", "MASK", "next"]),
        ("👩‍👩‍👧 plays", ["👩‍👩‍👧", "plays"]),
        ("", []),
    ]:
        with subtests.test(text=text):
            assert WORD.findall(text) == words


def test_a_word_is_left_out_with_its_white_space(subtests: pytest.Subtests) -> None:
    for text, word, rest in [
        ("two dogs run", "dogs", "two run"),
        ("two dogs run", "two", "dogs run"),
        ("two dogs.", "dogs", "two."),
        ("(two dogs)", "two", "(dogs)"),
        ("two,dogs", "dogs", "two,"),
        ("two\n dogs\trun ", "dogs", "two\n run "),
        ("two dogs ", "dogs", "two"),
    ]:
        with subtests.test(text=text):
            start = text.index(word)
            assert without(text, Word(start, start + len(word))) == rest


@pytest.mark.anyio
async def test_limits_are_named(client: MakeClient) -> None:
    async with client() as http:
        for body, words in (
            ({"inputs": ["dogs " * 200, "man " * 57]}, "257 words; at most 256 are explained: shorten them"),
            ({"inputs": ["d" * 2**14, "a"]}, "16385 characters; at most 16384 are explained: shorten them"),
            ({"inputs": ["two dogs", "a " * 100], "truncate": False}, "inputs[1] has 100 tokens"),
        ):
            response = await http.post("/explain", json=body)
            assert (response.status_code, response.json()["error_type"]) == (422, "Validation")
            assert words in response.json()["error"]
        failed = await http.post("/explain", json={"inputs": ["a man", "two poison dogs"]})
        assert failed.status_code == 424
        assert "inputs[1]" in failed.json()["error"]
        assert (await http.post("/explain", json={"inputs": ["dogs " * 200, "man " * 56]})).status_code == 200
    async with client(max_client_batch_size=8) as http:
        response = await http.post("/explain", json={"inputs": ["a man plays", "two dogs run away"]})
        assert "7 words; at most 6 are explained" in response.json()["error"]
