"""The embedder: texts in, vectors out, in order, off the loop."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_bundle import DIMENSION, MAX_TOKENS

from encoding.bundle import Bundle
from encoding.errors import TextTooLong
from encoding.text import Batch
from service.embedder import Embedder
from service.errors import BackendFailed, Invalid, SessionError, Unavailable
from service.metrics import Metrics
from service.session import Session
from service.settings import Settings

pytestmark = pytest.mark.anyio

TEXTS = ["a man plays the guitar", "", "two dogs run", "x" * 40, "a", "[MASK] [SEP]"]


@pytest.fixture
async def embedder(settings: Settings) -> AsyncIterator[Embedder]:
    made = Embedder.load(settings.model_copy(update={"max_batch_tokens": 48}), Metrics())
    made.start()
    yield made
    await made.stop()


async def embed(embedder: Embedder, texts: list[str], *, truncate: bool = True) -> NDArray[np.float32]:
    return (await embedder.embed(texts, truncate=truncate, direction="right")).vectors


async def test_vectors_are_the_graphs_and_in_order(embedder: Embedder, bundle: Path) -> None:
    loaded = Bundle.load(bundle)
    expected = Session.load(loaded).run(loaded.text_encoder.batch(TEXTS))
    np.testing.assert_allclose(await embed(embedder, TEXTS), expected, atol=1e-6)


async def test_many_callers_at_once_get_their_own(embedder: Embedder) -> None:
    alone = [await embed(embedder, [text]) for text in TEXTS]
    together = await asyncio.gather(*(embed(embedder, [text, text]) for text in TEXTS * 10))
    for position, vectors in enumerate(together):
        expected = np.repeat(alone[position % len(TEXTS)], 2, axis=0)
        np.testing.assert_allclose(vectors, expected, atol=1e-6)


async def test_tokens_and_truncations_are_counted(embedder: Embedder) -> None:
    template = embedder.bundle.text_encoder.template_tokens
    found = await embedder.embed(["", "a man", "a " * 100], truncate=True, direction="left")
    assert found.tokens == [template, template + 2, MAX_TOKENS]
    assert found.cut == 1
    assert found.vectors.shape == (3, DIMENSION)
    assert "cloze_truncations_total 1.0" in embedder.metrics.text().decode()


async def test_the_side_that_is_cut(embedder: Embedder) -> None:
    text = "man " + "a " * 100 + "dogs"
    right = await embedder.embed([text, "man " + "a " * 100], truncate=True, direction="right")
    left = await embedder.embed([text, "a " * 100 + "dogs"], truncate=True, direction="left")
    np.testing.assert_allclose(right.vectors[0], right.vectors[1], atol=1e-6)
    np.testing.assert_allclose(left.vectors[0], left.vectors[1], atol=1e-6)
    assert not np.allclose(left.vectors[0], right.vectors[0])


async def test_a_text_too_long_is_refused_where_cutting_is(embedder: Embedder) -> None:
    with pytest.raises(TextTooLong, match="text 1 has 100 tokens"):
        await embed(embedder, ["a", "a " * 100], truncate=False)


async def test_too_many_texts_are_refused(embedder: Embedder) -> None:
    embedder.max_inputs = 2
    with pytest.raises(Invalid, match="3 texts in one request; at most 2 are allowed"):
        await embed(embedder, ["a"] * 3)


async def test_a_bad_text_fails_its_own_request_only(embedder: Embedder) -> None:
    calls = [embed(embedder, [text]) for text in ("a", "poison", "dogs", "a man")]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [isinstance(result, BackendFailed) for result in results] == [False, True, False, False]


async def test_health_tries_the_model_after_a_failure(embedder: Embedder, monkeypatch: pytest.MonkeyPatch) -> None:
    await embedder.check()
    with pytest.raises(BackendFailed):
        await embed(embedder, ["poison"])
    await embedder.check()

    def broken(batch: Batch) -> NDArray[np.float32]:
        raise BackendFailed("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(embedder.session, "run", broken)
        with pytest.raises(BackendFailed):
            await embed(embedder, ["a"])
        with pytest.raises(Unavailable, match="device lost"):
            await embedder.check()
    await embedder.check()


async def test_the_session_runs_in_one_thread_that_is_not_the_loops(
    embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, run = set(), embedder.session.run

    def watched(batch: Batch) -> NDArray[np.float32]:
        threads.add(threading.current_thread().name)
        return run(batch)

    monkeypatch.setattr(embedder.session, "run", watched)
    await asyncio.gather(*(embed(embedder, [text]) for text in TEXTS * 5))
    assert len(threads) == 1
    assert threads.pop().startswith("session")


def cold(settings: Settings, **changes: object) -> Embedder:
    loaded = Bundle.load(settings.bundle)
    return Embedder(loaded, Session.load(loaded), settings.model_copy(update=changes), Metrics())


def test_warm_up_runs_the_largest_shape_first(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    embedder = cold(settings, max_batch_tokens=100)
    shapes: list[tuple[int, ...]] = []
    run: Callable[[Batch], NDArray[np.float32]] = embedder.session.run
    monkeypatch.setattr(embedder.session, "run", lambda batch: shapes.append(batch.input_ids.shape) or run(batch))
    embedder.warm_up()
    assert shapes == [(3, MAX_TOKENS), (1, embedder.bundle.text_encoder.template_tokens)]


def test_a_warm_up_that_fails_says_what_to_do(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    embedder = cold(settings)

    def broken(batch: Batch) -> NDArray[np.float32]:
        raise BackendFailed("out of memory")

    monkeypatch.setattr(embedder.session, "run", broken)
    with pytest.raises(SessionError, match=r"128 texts of 32 tokens: out of memory; lower max_batch_tokens"):
        embedder.warm_up()


async def test_stopping_refuses_what_comes(settings: Settings) -> None:
    embedder = Embedder.load(settings, Metrics())
    embedder.start()
    await embedder.stop()
    with pytest.raises(Unavailable):
        await embed(embedder, ["a"])
