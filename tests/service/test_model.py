"""A model: texts in, vectors out, in order, off the loop."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
from harness import samples_of, until
from numpy.typing import NDArray
from patience import PATIENCE
from tiny_bundle import DIMENSION, MAX_TOKENS, sequence, vector

from cloze.encoding.bundle import Bundle
from cloze.encoding.errors import TextError, TextTooLong
from cloze.encoding.text import Batch
from cloze.service.client import Client
from cloze.service.errors import BackendFailed, Overloaded, SessionError, Unavailable, ValidationFailed
from cloze.service.inference.admission import Admission
from cloze.service.inference.model import SLICE_TEXTS, Cache, Model, Part
from cloze.service.inference.threads import Executors, Threads
from cloze.service.monitoring.metrics import Metrics
from cloze.service.settings import Settings

A, B = Client("a"), Client("b")

pytestmark = pytest.mark.anyio

TEXTS = ["a man plays the guitar", "", "two dogs run", "a " * 30, "a", "this sentence"]
KEPT = MAX_TOKENS - len(sequence(""))
EXPECTED = np.stack([vector(sequence(text)) for text in ("a " * KEPT if len(text) > 50 else text for text in TEXTS)])


@pytest.fixture
async def executors() -> AsyncIterator[Executors]:
    made = Executors(Threads(1, 1))
    yield made
    assert await made.close(60)


@pytest.fixture
def cold(settings: Settings, executors: Executors) -> Callable[..., Model]:
    """A model that has not started."""

    def make(**changes: object) -> Model:
        changed = settings.model_copy(update=changes)
        return Model(
            Bundle.load(settings.bundle),
            changed,
            executors,
            Admission(1024, changed.max_tokens_in_flight, changed.max_bytes_in_flight),
            Cache(changed.cache_mb * 2**20),
        )

    return make


@pytest.fixture
async def model(cold: Callable[..., Model]) -> AsyncIterator[Model]:
    made = cold(max_batch_tokens=48)
    made.start(Metrics())
    yield made
    await made.stop()


async def embed(model: Model, inputs: list[str] | list[list[int]], *, truncate: bool = True) -> NDArray[np.float32]:
    found = await model.embed(Part(inputs), truncate=truncate, direction="right", client=A)
    return found.vectors


async def test_vectors_are_the_graphs_and_in_order(model: Model) -> None:
    np.testing.assert_allclose(await embed(model, TEXTS), EXPECTED, atol=1e-6)


async def test_many_callers_at_once_get_their_own(model: Model) -> None:
    alone = [await embed(model, [text]) for text in TEXTS]
    together = await asyncio.gather(*(embed(model, [text, text]) for text in TEXTS * 10))
    for position, vectors in enumerate(together):
        expected = np.repeat(alone[position % len(TEXTS)], 2, axis=0)
        np.testing.assert_allclose(vectors, expected, atol=1e-6)


async def test_what_each_text_took(model: Model) -> None:
    template = len(sequence(""))
    found = await model.embed(Part(["", "a man", "a " * 100]), truncate=True, direction="left", client=A)
    assert found.tokens == template + template + 2 + MAX_TOKENS
    assert found.characters == 0 + 5 + 200
    assert found.vectors.shape == (3, DIMENSION)
    assert all(seconds > 0 for seconds in found.timing)


async def test_token_ids_are_texts(model: Model) -> None:
    words = [sequence(text, "[X]")[1:-1] for text in TEXTS]
    np.testing.assert_allclose(await embed(model, words), EXPECTED, atol=1e-6)
    found = await model.embed(Part(words[:1]), truncate=True, direction="right", client=A)
    assert (found.characters, found.tokens) == (0, len(sequence(TEXTS[0])))
    with pytest.raises(TextError, match=r"text 1, place 2: id 99999 is outside"):
        await embed(model, [[5], [5, 6, 99999]])
    with pytest.raises(TextTooLong, match="text 300 has 100 tokens"):
        await embed(model, [*[[5]] * 300, [5] * 100], truncate=False)


async def test_the_side_that_is_cut(model: Model) -> None:
    text = "man " + "a " * 100 + "dogs"
    for direction, kept in (("right", "man " + "a " * (KEPT - 1)), ("left", "a " * (KEPT - 1) + "dogs")):
        found = await model.embed(Part([text]), truncate=True, direction=direction, client=A)
        np.testing.assert_allclose(found.vectors[0], vector(sequence(kept)), atol=1e-6)


async def test_a_text_too_long_is_refused_where_cutting_is(model: Model) -> None:
    with pytest.raises(TextTooLong, match="text 1 has 100 tokens"):
        await embed(model, ["a", "a " * 100], truncate=False)
    with pytest.raises(TextTooLong, match="text 700 has 100 tokens"):  # tokenised in slices
        await embed(model, [*["a"] * 700, "a " * 100], truncate=False)


async def test_too_many_texts_are_refused(cold: Callable[..., Model]) -> None:
    with pytest.raises(ValidationFailed, match="3 texts in one request; at most 2 are allowed"):
        await embed(cold(max_client_batch_size=2), ["a"] * 3)
    with pytest.raises(TextTooLong, match="text 1 has 1000001 characters; at most 1000000 are allowed"):
        await embed(cold(), ["a", "b" * 1_000_001])


async def test_what_is_admitted_is_let_go(cold: Callable[..., Model]) -> None:
    """Whether a request succeeds, fails or is given up."""
    model = cold(max_tokens_in_flight=50)
    model.start(Metrics())
    await embed(model, ["a"])
    with pytest.raises(BackendFailed):
        await embed(model, ["poison"])
    task = asyncio.create_task(embed(model, ["a"] * 5))
    while not model.admission.tokens_in_flight:
        await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="the limit is 45"):
        await embed(model, ["a"] * 5)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert model.admission.tokens_in_flight == model.batcher.waiting == 0
    await model.stop()


async def test_what_does_not_fit_is_refused_before_the_rest_is_tokenised(
    cold: Callable[..., Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenised = cold(max_tokens_in_flight=20_000), list[int]()
    model.start(Metrics())
    encode = model._encode

    def counted(first: int, *rest: Any) -> Any:
        tokenised.append(first)
        return encode(first, *rest)

    monkeypatch.setattr(model, "_encode", counted)
    with model.admission.tokens(B) as hold:
        hold(10)
        with pytest.raises(Overloaded, match="the limit is 20000"):
            await embed(model, ["a"] * SLICE_TEXTS * 40)
        assert model.admission.tokens_in_flight == 10
    assert len(tokenised) < 10
    await model.stop()


async def test_a_bad_text_fails_its_own_request_only(model: Model) -> None:
    calls = [embed(model, [text]) for text in ("a", "poison", "dogs", "a man")]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [isinstance(result, BackendFailed) for result in results] == [False, True, False, False]


async def test_health_tries_the_model_after_a_failure(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    await model.check()
    with pytest.raises(BackendFailed):
        await embed(model, ["poison"])
    await model.check()

    def broken(batch: Batch) -> NDArray[np.float32]:
        raise BackendFailed("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(model.session, "_infer", broken)
        with pytest.raises(BackendFailed):
            await embed(model, ["a"])
        with pytest.raises(Unavailable, match="device lost"):
            await model.check()
    await model.check()


async def test_the_session_runs_in_one_thread_that_is_not_the_loops(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, run = set(), model.session._infer

    def watched(batch: Batch) -> NDArray[np.float32]:
        threads.add(threading.current_thread().name)
        return run(batch)

    monkeypatch.setattr(model.session, "_infer", watched)
    await asyncio.gather(*(embed(model, [text]) for text in TEXTS * 5))
    assert len(threads) == 1
    assert threads.pop().startswith("graphs")


async def test_the_time_in_the_graph_begins_when_another_models_batch_has_left_it(
    cold: Callable[..., Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("cloze.service.inference.model.perf_counter", lambda: now)
    other, model = cold(), cold()
    begun, free, run = threading.Event(), threading.Event(), other.session._infer

    def held(batch: Batch) -> NDArray[np.float32]:
        begun.set()
        assert free.wait(PATIENCE)
        return run(batch)

    monkeypatch.setattr(other.session, "_infer", held)
    for each in (other, model):
        each.start(Metrics())
    before = asyncio.create_task(embed(other, ["a"]))
    await until(begun.is_set)
    after = asyncio.create_task(model.embed(Part(["a"]), truncate=True, direction="right", client=A))
    await until(lambda: model.admission.tokens_in_flight and not model.batcher.waiting)
    now += 7
    free.set()
    assert (await after).timing == (0, 7, 0)
    await before
    for each in (other, model):
        await each.stop()


async def test_warm_up_runs_the_largest_shape_first(
    cold: Callable[..., Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = cold(max_batch_tokens=100)
    shapes: list[tuple[int, ...]] = []
    run: Callable[[Batch], NDArray[np.float32]] = model.session._infer
    monkeypatch.setattr(model.session, "_infer", lambda batch: shapes.append(batch.input_ids.shape) or run(batch))
    model.warm_up()
    assert shapes == [(4, MAX_TOKENS), (1, model.bundle.text_encoder.template_tokens)]


async def test_a_warm_up_that_fails_says_what_to_do(
    cold: Callable[..., Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = cold()

    def broken(batch: Batch) -> NDArray[np.float32]:
        raise BackendFailed("out of memory")

    monkeypatch.setattr(model.session, "_infer", broken)
    with pytest.raises(SessionError, match=r"8 texts of 32 tokens: out of memory; lower max_batch_tokens"):
        model.warm_up()


async def test_a_batch_beyond_memory_is_told(cold: Callable[..., Model], monkeypatch: pytest.MonkeyPatch) -> None:
    model = cold(max_batch_tokens=10**15)
    monkeypatch.setattr(model.session, "_infer", lambda batch: pytest.fail("there is no such batch"))
    with pytest.raises(SessionError, match=f"max_batch_tokens, {10**15}, does not fit into memory; lower"):
        model.warm_up()


async def test_equal_texts_are_computed_once_if_vectors_are_kept(
    cold: Callable[..., Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that the tokenizer makes equal."""
    model = cold(cache_mb=1)
    model.start(Metrics())
    run, rows = model.session._infer, list[int]()

    def counted(batch: Batch) -> NDArray[np.float32]:
        rows.append(len(batch.input_ids))
        return run(batch)

    monkeypatch.setattr(model.session, "_infer", counted)
    vectors = await embed(model, ["two dogs run", "a", "two  dogs run"])
    assert sum(rows) == 2
    assert np.array_equal(vectors[0], vectors[2])
    np.testing.assert_allclose(vectors, EXPECTED[[2, 4, 2]], atol=1e-6)
    await model.stop()


async def test_what_is_kept_is_not_computed_again(cold: Callable[..., Model], monkeypatch: pytest.MonkeyPatch) -> None:
    model, metrics = cold(cache_mb=1, max_tokens_in_flight=20), Metrics()
    model.start(metrics)
    first = await embed(model, ["two dogs run", "a"])

    def never(batch: Batch) -> NDArray[np.float32]:
        raise AssertionError

    with monkeypatch.context() as patch:
        patch.setattr(model.session, "_infer", never)
        found = await model.embed(Part(["a", "two dogs run"] * 30), truncate=True, direction="right", client=A)
    assert np.array_equal(found.vectors, np.tile(first[::-1], (30, 1)))
    assert (found.timing.queue, found.timing.inference) == (0, 0)
    counts = samples_of(metrics.text().decode())
    assert (counts["cloze_texts_total{model=tiny}"], counts["cloze_cache_hits_total{model=tiny}"]) == (62, 60)
    assert counts["cloze_batch_texts_sum{model=tiny}"] == 2
    with pytest.raises(BackendFailed, match="text 2: "):  # its place in the request, not among those computed
        await embed(model, ["a", "two dogs run", "poison"])
    await model.stop()


async def test_batches_and_texts_are_counted(cold: Callable[..., Model]) -> None:
    model, metrics = cold(max_batch_tokens=1000), Metrics()
    model.start(metrics)
    texts = ["a", "a man plays", "a " * 100]
    lengths = [len(sequence("a")), len(sequence("a man plays")), MAX_TOKENS]
    await embed(model, texts)
    with pytest.raises(BackendFailed):
        await embed(model, ["poison"])
    found = {name.removesuffix("{model=tiny}"): value for name, value in samples_of(metrics.text().decode()).items()}
    assert (found["cloze_texts_total"], found["cloze_tokens_total"]) == (3, sum(lengths))
    assert (found["cloze_truncations_total"], found["cloze_cache_hits_total"]) == (1, 0)
    assert (found["cloze_batch_texts_sum"], found["cloze_queue_seconds_count"]) == (3, 1)
    assert found["cloze_batch_tokens_sum"] == sum(lengths) + found["cloze_padding_tokens_total"]
    assert found["cloze_inference_seconds_count"] == found["cloze_batch_texts_count"] > 0
    assert found["cloze_inference_failures_total"] == 1
    assert found["cloze_tokenize_seconds_count"] == 1
    assert found["cloze_space_texts"] == 3
    await model.stop()


async def test_a_model_stops_at_the_end_of_its_last_lease(cold: Callable[..., Model]) -> None:
    """Also where a lease has not embedded anything yet: it may be waiting for its text to be cut into chunks."""
    model = cold(max_batch_tokens=48)
    model.start(Metrics())
    gate = asyncio.Event()

    async def lease(text: str) -> NDArray[np.float32]:
        with model:
            await gate.wait()
            return await embed(model, [text] * 20)

    tasks = [asyncio.create_task(lease(text)) for text in TEXTS]
    await asyncio.sleep(0)
    stopping = asyncio.create_task(model.stop())
    await asyncio.sleep(0)
    assert not stopping.done()
    gate.set()
    await stopping
    for task, expected in zip(tasks, EXPECTED, strict=True):
        np.testing.assert_allclose(await task, [expected] * 20, atol=1e-6)
    with pytest.raises(Unavailable):
        await embed(model, ["a"])
