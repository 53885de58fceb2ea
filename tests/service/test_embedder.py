"""The embedder: texts in, vectors out, in order, off the loop."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest
from harness import samples_of, until
from numpy.typing import NDArray
from tiny_bundle import DIMENSION, MAX_TOKENS, sequence, vector

from encoding.bundle import Bundle
from encoding.errors import TextError, TextTooLong
from encoding.text import Batch
from service.admission import Admission
from service.cache import Cache
from service.device import Device
from service.embedder import Embedder
from service.errors import BackendFailed, Invalid, Overloaded, SessionError, Unavailable
from service.metrics import Metrics
from service.settings import Settings

pytestmark = pytest.mark.anyio

TEXTS = ["a man plays the guitar", "", "two dogs run", "a " * 30, "a", "this sentence"]
KEPT = MAX_TOKENS - len(sequence(""))
EXPECTED = np.stack([vector(sequence(text)) for text in ("a " * KEPT if len(text) > 50 else text for text in TEXTS)])


@pytest.fixture
async def device() -> AsyncIterator[Device]:
    made = Device(2)
    yield made
    assert await made.close(60)


@pytest.fixture
def cold(settings: Settings, device: Device) -> Callable[..., Embedder]:
    """An embedder that is not at work."""

    def make(**changes: object) -> Embedder:
        changed = settings.model_copy(update=changes)
        return Embedder.load(
            Bundle.load(settings.bundle),
            changed,
            device,
            Admission(changed.max_tokens_in_flight),
            Cache(changed.cache_mb * 2**20),
        )

    return make


@pytest.fixture
async def embedder(cold: Callable[..., Embedder]) -> AsyncIterator[Embedder]:
    made = cold(max_batch_tokens=48)
    made.start(Metrics())
    yield made
    await made.stop()


async def embed(
    embedder: Embedder, inputs: list[str] | list[list[int]], *, truncate: bool = True
) -> NDArray[np.float32]:
    return (await embedder.embed(inputs, truncate=truncate, direction="right", client="")).vectors


async def test_vectors_are_the_graphs_and_in_order(embedder: Embedder) -> None:
    np.testing.assert_allclose(await embed(embedder, TEXTS), EXPECTED, atol=1e-6)


async def test_many_callers_at_once_get_their_own(embedder: Embedder) -> None:
    alone = [await embed(embedder, [text]) for text in TEXTS]
    together = await asyncio.gather(*(embed(embedder, [text, text]) for text in TEXTS * 10))
    for position, vectors in enumerate(together):
        expected = np.repeat(alone[position % len(TEXTS)], 2, axis=0)
        np.testing.assert_allclose(vectors, expected, atol=1e-6)


async def test_what_each_text_took(embedder: Embedder) -> None:
    template = len(sequence(""))
    found = await embedder.embed(["", "a man", "a " * 100], truncate=True, direction="left", client="")
    assert found.tokens == template + template + 2 + MAX_TOKENS
    assert found.characters == 0 + 5 + 200
    assert found.vectors.shape == (3, DIMENSION)
    assert all(seconds > 0 for seconds in found.timing)


async def test_token_ids_are_texts(embedder: Embedder) -> None:
    words = [sequence(text, "[X]")[1:-1] for text in TEXTS]
    np.testing.assert_allclose(await embed(embedder, words), EXPECTED, atol=1e-6)
    found = await embedder.embed(words[:1], truncate=True, direction="right", client="")
    assert (found.characters, found.tokens) == (0, len(sequence(TEXTS[0])))
    with pytest.raises(TextError, match=r"text 1, place 2: id 99999 is outside"):
        await embed(embedder, [[5], [5, 6, 99999]])
    with pytest.raises(TextTooLong, match="text 300 has 100 tokens"):
        await embed(embedder, [*[[5]] * 300, [5] * 100], truncate=False)


async def test_the_side_that_is_cut(embedder: Embedder) -> None:
    text = "man " + "a " * 100 + "dogs"
    for direction, kept in (("right", "man " + "a " * (KEPT - 1)), ("left", "a " * (KEPT - 1) + "dogs")):
        found = await embedder.embed([text], truncate=True, direction=direction, client="")
        np.testing.assert_allclose(found.vectors[0], vector(sequence(kept)), atol=1e-6)


async def test_a_text_too_long_is_refused_where_cutting_is(embedder: Embedder) -> None:
    with pytest.raises(TextTooLong, match="text 1 has 100 tokens"):
        await embed(embedder, ["a", "a " * 100], truncate=False)
    with pytest.raises(TextTooLong, match="text 700 has 100 tokens"):  # tokenised in slices
        await embed(embedder, [*["a"] * 700, "a " * 100], truncate=False)


async def test_too_many_texts_are_refused(cold: Callable[..., Embedder]) -> None:
    with pytest.raises(Invalid, match="3 texts in one request; at most 2 are allowed"):
        await embed(cold(max_inputs=2), ["a"] * 3)
    with pytest.raises(TextTooLong, match="text 1 has 1001 characters; at most 1000 are allowed"):
        await embed(cold(max_text_characters=1000), ["a", "b" * 1001])


async def test_what_is_admitted_is_let_go(cold: Callable[..., Embedder]) -> None:
    """Whether a request succeeds, fails or is given up."""
    embedder = cold(max_tokens_in_flight=50)
    embedder.start(Metrics())
    await embed(embedder, ["a"])
    with pytest.raises(BackendFailed):
        await embed(embedder, ["poison"])
    task = asyncio.create_task(embed(embedder, ["a"] * 5))
    while not embedder._admission.tokens:
        await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="at most 45 may be"):
        await embed(embedder, ["a"] * 5)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert embedder._admission.tokens == embedder.batcher.waiting == 0
    await embedder.stop()


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
    assert threads.pop().startswith("graphs")


async def test_the_time_in_the_graph_begins_when_another_models_batch_has_left_it(
    cold: Callable[..., Embedder], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("service.embedder.perf_counter", lambda: now)
    other, embedder = cold(), cold()
    begun, free, run = threading.Event(), threading.Event(), other.session.run

    def held(batch: Batch) -> NDArray[np.float32]:
        begun.set()
        assert free.wait(60)
        return run(batch)

    monkeypatch.setattr(other.session, "run", held)
    for each in (other, embedder):
        each.start(Metrics())
    before = asyncio.create_task(embed(other, ["a"]))
    await until(begun.is_set)
    after = asyncio.create_task(embedder.embed(["a"], truncate=True, direction="right", client=""))
    await until(lambda: embedder._admission.tokens and not embedder.batcher.waiting)
    now += 7
    free.set()
    assert (await after).timing == (0, 7, 0)
    await before
    for each in (other, embedder):
        await each.stop()


async def test_warm_up_runs_the_largest_shape_first(
    cold: Callable[..., Embedder], monkeypatch: pytest.MonkeyPatch
) -> None:
    embedder = cold(max_batch_tokens=100)
    shapes: list[tuple[int, ...]] = []
    run: Callable[[Batch], NDArray[np.float32]] = embedder.session.run
    monkeypatch.setattr(embedder.session, "run", lambda batch: shapes.append(batch.input_ids.shape) or run(batch))
    embedder.warm_up()
    assert shapes == [(4, MAX_TOKENS), (1, embedder.bundle.text_encoder.template_tokens)]


async def test_a_warm_up_that_fails_says_what_to_do(
    cold: Callable[..., Embedder], monkeypatch: pytest.MonkeyPatch
) -> None:
    embedder = cold()

    def broken(batch: Batch) -> NDArray[np.float32]:
        raise BackendFailed("out of memory")

    monkeypatch.setattr(embedder.session, "run", broken)
    with pytest.raises(SessionError, match=r"8 texts of 32 tokens: out of memory; lower max_batch_tokens"):
        embedder.warm_up()


async def test_a_batch_beyond_memory_is_told(cold: Callable[..., Embedder], monkeypatch: pytest.MonkeyPatch) -> None:
    embedder = cold(max_batch_tokens=10**15)
    monkeypatch.setattr(embedder.session, "run", lambda batch: pytest.fail("there is no such batch"))
    with pytest.raises(SessionError, match=f"max_batch_tokens, {10**15}, does not fit into memory; lower"):
        embedder.warm_up()


async def test_equal_texts_are_computed_once(embedder: Embedder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that the tokenizer makes equal."""
    run, rows = embedder.session.run, list[int]()

    def counted(batch: Batch) -> NDArray[np.float32]:
        rows.append(len(batch.input_ids))
        return run(batch)

    monkeypatch.setattr(embedder.session, "run", counted)
    vectors = await embed(embedder, ["two dogs run", "a", "two  dogs run"])
    assert sum(rows) == 2
    assert np.array_equal(vectors[0], vectors[2])
    np.testing.assert_allclose(vectors, EXPECTED[[2, 4, 2]], atol=1e-6)


async def test_what_is_kept_is_not_computed_again(
    cold: Callable[..., Embedder], monkeypatch: pytest.MonkeyPatch
) -> None:
    embedder, metrics = cold(cache_mb=1, max_tokens_in_flight=20), Metrics()
    embedder.start(metrics)
    first = await embed(embedder, ["two dogs run", "a"])

    def never(batch: Batch) -> NDArray[np.float32]:
        raise AssertionError

    with monkeypatch.context() as patch:
        patch.setattr(embedder.session, "run", never)
        found = await embedder.embed(["a", "two dogs run"] * 30, truncate=True, direction="right", client="")
    assert np.array_equal(found.vectors, np.tile(first[::-1], (30, 1)))
    assert (found.timing.queue, found.timing.inference) == (0, 0)
    counts = samples_of(metrics.text().decode())
    assert (counts["cloze_texts_total{model=tiny}"], counts["cloze_cache_hits_total{model=tiny}"]) == (62, 60)
    assert counts["cloze_batch_texts_sum{model=tiny}"] == 2
    with pytest.raises(BackendFailed, match="text 2: "):  # its place in the request, not among those computed
        await embed(embedder, ["a", "two dogs run", "poison"])
    await embedder.stop()


async def test_stopping_finishes_what_has_begun(cold: Callable[..., Embedder]) -> None:
    embedder = cold(max_batch_tokens=48)
    embedder.start(Metrics())
    tasks = [asyncio.create_task(embed(embedder, [text] * 20)) for text in TEXTS]
    await asyncio.sleep(0)  # each has begun, none is tokenised
    await embedder.stop()
    for task, expected in zip(tasks, EXPECTED, strict=True):
        np.testing.assert_allclose(task.result(), [expected] * 20, atol=1e-6)
    with pytest.raises(Unavailable):
        await embed(embedder, ["a"])
