"""The soak test: its clients detect wrong answers, and each of its criteria can fail."""

import asyncio
import itertools
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from harness import PATIENCE
from live import served

from benchmarks.soak_report import Run, Sample, criteria, digest, draw, figures, table
from benchmarks.soak_requests import Books, Known, Mix, client
from cloze.service.app import create_app
from cloze.service.settings import Settings

TEXTS = ["a man", "two dogs run", "", "a woman plays the guitar and a man sings " * 4]
ROUTES = {"/embed", "/v1/embeddings", "/similarity", "/search", "/tokenize"}


Seen = Callable[[Books], Iterable[str]]


async def attack(url: str, seen: Seen, spoil: Callable[[Known], None] = lambda known: None) -> Books:
    """Ten clients, until `seen` has every route; `spoil` changes what they take for right."""
    books, seeds = Books(), itertools.count()
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as http:
        known = {name: await Known.make(http, name, TEXTS) for name in ("tiny", "other")}
        for each in known.values():
            spoil(each)
        started = time.monotonic()
        async with asyncio.timeout(PATIENCE):
            while set(seen(books)) != ROUTES:
                mixes = [Mix(known, "tiny", TEXTS, books, next(seeds)) for _ in range(10)]
                until = time.monotonic() + 0.2
                await asyncio.gather(*(client(http, mix, "a key", books, started, until) for mix in mixes))
    return books


def answered(books: Books) -> Iterable[str]:
    """Routes."""
    return (route.split()[0] for _, _, route, _ in books.latencies)


def wrong(books: Books) -> Iterable[str]:
    return (re.split("[ ,]", line)[0] for line in books.wrong)


@pytest.mark.anyio
async def test_right_answers_are_right_and_the_books_balance(two_bundles: Path) -> None:
    with served(create_app(Settings(bundle=two_bundles, model="tiny"))) as url:
        books = await attack(url, answered)
    assert books.wrong == []
    assert books.counts["sent"] == books.counts["answered"] + books.counts["left"]
    assert books.checked > 0


@pytest.mark.anyio
async def test_a_wrong_answer_is_told(two_bundles: Path) -> None:
    """Each route's: the clients take another text's vector and tokens for the right ones."""

    def spoil(known: Known) -> None:
        known.vectors = np.roll(known.vectors, 1, axis=0)
        known.ids = known.ids[1:] + known.ids[:1]

    with served(create_app(Settings(bundle=two_bundles, model="tiny"))) as url:
        books = await attack(url, wrong, spoil)
    assert books.counts["sent"] == books.counts["answered"] + books.counts["left"]


def run(**changes: Any) -> Run:
    """100 sent, of which 90 were answered, 4 refused, 6 left; ten minutes at 500 MB."""
    books = Books(
        counts=Counter(sent=100, answered=90, refused=4, left=6),
        texts=Counter(sent=1000, answered=900, refused=40, left=60),
        checked=10,
        latencies=[(6.0 * n, 0.001 * (n + 1), "/embed float", "1 text") for n in range(90)],
    )
    samples = [Sample(second, 500, waiting=1, texts=second, tokens=20 * second) for second in range(601)]
    whole = Run(books, samples, 600, {"200": 91, "429": 4, "499": 4}, dropped=5, texts=930, tokens=12_000)
    return replace(whole, **changes)


def with_books(**changes: Any) -> Run:
    return run(books=replace(run().books, **changes))


def counts(**changes: int) -> Run:
    return with_books(counts=run().books.counts | Counter(changes))


def growing(share: float) -> Run:
    """By so much between the second minute and the last."""
    return run(samples=[each._replace(rss_mb=500 * (1 + share * (n > 300))) for n, each in enumerate(run().samples)])


def test_each_criterion_can_fail(subtests: pytest.Subtests) -> None:
    for found, status, warnings, failing in [
        (run(), 0, [], []),
        (growing(0.049), 0, [], []),
        (growing(0.051), 0, [], ["RSS grows"]),
        (with_books(wrong=["/embed: a vector is another text's"]), 0, [], ["every answer"]),
        (counts(lost=1, sent=101), 0, [], ["no request is lost"]),
        (run(statuses={"200": 92, "429": 4, "500": 1}, dropped=2), 0, [], ["the server has answered"]),
        (run(statuses={"200": 97, "429": 4}, dropped=0), 0, [], ["the server's answers", "the server has seen"]),
        (run(statuses={"200": 89, "429": 4}, dropped=2), 0, [], ["the server's answers"]),
        (run(statuses={"200": 90, "429": 3}, dropped=2), 0, [], ["the server's refusals"]),
        (run(statuses={"200": 90, "429": 4}, dropped=7), 0, [], ["the server has seen"]),
        (run(texts=899), 0, [], ["the server's texts"]),
        (run(texts=961), 0, [], ["the server's texts"]),
        (run(samples=[each._replace(waiting=n % 15) for n, each in enumerate(run().samples)]), 0, [], ["texts wait"]),
        (run(), 70, [], ["the server ends"]),
        (run(), 0, ["WARNING a batch failed"], ["the server ends"]),
    ]:
        with subtests.test(found=found):
            failed = [name for name, held in criteria(found, status, warnings).items() if not held]
            assert [name for name in failed if not any(name.startswith(each) for each in failing)] == []
            assert len(failed) == len(failing)


def test_the_figures_are_those_of_the_run() -> None:
    found = figures(run())
    assert found["minutes"] == 10
    assert found["requests"] == {"sent": 100, "answered": 90, "refused": 4, "left": 6, "lost": 0}
    assert (found["texts_per_second"], found["tokens_per_second"]) == (1.6, 20)
    assert found["by_route"]["/embed float"] == {
        "requests": 90, "p50": 45.5, "p90": 81.1, "p99": 89.1, "p99.9": 89.9, "max": 90.0,
    }  # fmt: skip
    assert found["over_time"]["rss_mb"] == [500] * 60
    assert set(found["over_time"]["tokens_per_second"]) == {20}
    assert "| vectors, 1 text | 90 | 46 | 81 | 89 | 90 | 90 |" in table(found)


def test_the_chart_is_drawn_and_names_its_figures(tmp_path: Path) -> None:
    found = figures(run())
    draw(found, tmp_path / "soak.svg")
    assert digest(found) in (tmp_path / "soak.svg").read_text(encoding="utf-8")
