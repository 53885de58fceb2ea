"""Texts to vectors: tokenise, batch, run the graph in the device's threads, put the vectors back in order."""

import asyncio
import logging
from collections.abc import Iterator, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from time import monotonic, perf_counter
from typing import Final, NamedTuple, Self, cast

import numpy as np
from numpy.typing import NDArray

from encoding.bundle import GRAPHS, Bundle
from encoding.errors import TextTooLong
from encoding.text import Direction, Tokens
from service import VERSION
from service.admission import Admission
from service.batcher import Batcher, Failed
from service.cache import Cache, key_of
from service.device import Device
from service.errors import BackendFailed, SessionError, Unavailable, too_many
from service.metrics import Metrics, ModelMetrics
from service.session import Session
from service.settings import Settings

__all__ = ["Embedder", "Embeddings", "Inputs", "Timing"]

Inputs = Sequence[str] | Sequence[Sequence[int]]

SLICE_TEXTS: Final = 256  # tokenised at once; between two slices other requests get their turn
SLICE_SIZE: Final = 65_536  # characters, or ids
SMALL: Final = 256  # characters, or ids, that are tokenised in a fraction of a millisecond
EACH: Final = 32  # added per text, so that many short texts are not small

logger = logging.getLogger(__name__)


class _Item(NamedTuple):
    """One text on its way to a batch; `key` is the same for texts whose vectors are."""

    key: bytes
    ids: list[int]
    since: float


class _Batch(NamedTuple):
    """One batch's vectors, when its graph began and the seconds that it ran."""

    vectors: NDArray[np.float32]
    started: float
    ran: float


class _Row(NamedTuple):
    """One text's vector, when its batch began and the seconds that it ran."""

    vector: NDArray[np.float32]
    started: float
    ran: float


class Timing(NamedTuple):
    """Seconds: a request's tokenising, its texts' mean wait for their batch, and the mean time of those batches."""

    tokenize: float
    queue: float
    inference: float


@dataclass(frozen=True)
class Embeddings:
    """One request's vectors, a row a text, float32 (dimension,), not normalised; and what they took."""

    rows: list[NDArray[np.float32]]
    tokens: int  # of all sequences, templates included
    characters: int  # of all texts; 0 of token ids
    timing: Timing

    @property
    def numbers(self) -> int:
        """Of all vectors."""
        return sum(row.size for row in self.rows)

    @property
    def vectors(self) -> NDArray[np.float32]:
        """All in one, (texts, dimension): a copy, to be made beside the event loop where it is large."""
        return np.stack(self.rows)


class Embedder:
    """One bundle at work: `start` begins to serve, `stop` finishes what has been accepted."""

    def __init__(
        self,
        bundle: Bundle,
        session: Session,
        settings: Settings,
        device: Device,
        admission: Admission,
        cache: Cache,
    ) -> None:
        self.name = bundle.name
        self.bundle = bundle
        self.session = session
        self.device = device
        self.max_batch_tokens = settings.max_batch_tokens or session.batch_tokens
        self._parallel = device.threads.batches if session.provider == "cpu" else 1  # batches that run at once
        self.batcher: Batcher[_Item, _Row] = Batcher(
            self._run,
            lambda item: len(item.ids),
            self.max_batch_tokens,
            session.batch_padding,
            settings.queue_seconds,
            key=lambda item: item.key,
            parallel=self._parallel,
        )
        self.load_seconds = 0.0  # warming up included
        self._max_inputs = settings.max_inputs
        self._max_characters = settings.max_text_characters
        self._admission = admission
        self._cache = cache
        self._graph = bundle.spec.files[GRAPHS[session.precision]]  # sha256
        self._metrics: ModelMetrics
        self._failed_at: float | None = None
        self._probe: asyncio.Task[BackendFailed | None] | None = None
        self._requests = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @classmethod
    def load(cls, bundle: Bundle, settings: Settings, device: Device, admission: Admission, cache: Cache) -> Self:
        """Load the bundle's graph. Raises BundleError or SessionError."""
        started = perf_counter()
        session = Session.load(
            bundle, precision=settings.precision, provider=settings.provider, threads=device.threads.per_batch
        )
        embedder = cls(bundle, session, settings, device, admission, cache)
        embedder.load_seconds = perf_counter() - started
        return embedder

    def warm_up(self) -> None:
        """Run as many of the largest batch as run at once, so that memory is taken once, then the smallest.

        Raises SessionError where the graph cannot.
        """
        started, encoder = perf_counter(), self.bundle.text_encoder
        texts = -(-self.max_batch_tokens // len(encoder.longest))  # rounded up: no batch is larger
        try:
            with ThreadPoolExecutor(self._parallel) as pool:
                list(pool.map(self._forward, [[encoder.longest] * texts] * self._parallel))
            self._forward([encoder.shortest])
        except BackendFailed as error:
            raise SessionError(
                f"{self.bundle.path}: the graph fails on {texts} texts of {len(encoder.longest)} tokens: "
                f"{error.__cause__ or error}; lower max_batch_tokens, or export the bundle again"
            ) from error
        except MemoryError as error:
            raise SessionError(
                f"{self.bundle.path}: a batch of max_batch_tokens, {self.max_batch_tokens}, does not fit into memory; "
                "lower max_batch_tokens"
            ) from error
        self.load_seconds += perf_counter() - started

    def start(self, metrics: Metrics) -> None:
        """Begin to take requests and to count them; needs a running loop."""
        spec, session = self.bundle.spec, self.session
        self._metrics = metrics.model(
            self.name,
            self.batcher,
            provider=session.provider,
            precision=session.precision,
            version=VERSION,
            pooling=spec.pooling,
            dimension=spec.dimension,
            sha256=self._graph,
            load_seconds=self.load_seconds,
        )
        self.batcher.start()
        logger.info(
            "model %s: template=%r pooling=%s dimension=%d provider=%s precision=%s parallel_batches=%d "
            "threads_per_batch=%d max_batch_tokens=%d, loaded and warmed up in %.2f s",
            self.name,
            spec.template,
            spec.pooling,
            spec.dimension,
            session.provider,
            session.precision,
            self._parallel,
            session.threads,
            self.max_batch_tokens,
            self.load_seconds,
        )

    async def stop(self) -> None:
        """Finish every request that has begun; whoever calls sees to it that none begins any more."""
        await self._idle.wait()
        answered = await self.batcher.drain()
        logger.debug("model %s drained requests=%d", self.name, answered)

    async def embed(self, inputs: Inputs, *, truncate: bool, direction: Direction, client: str) -> Embeddings:
        """One vector a text, or a list of the text's own token ids.

        Raises Invalid, TextError, Overloaded, Unavailable, Late or BackendFailed; then none of the texts is embedded.
        """
        self.check_inputs(inputs)
        self._admission.check(client)
        self._requests += 1
        self._idle.clear()
        try:
            return await self._embed(inputs, truncate, direction, client)
        finally:
            self._requests -= 1
            if not self._requests:
                self._idle.set()

    def check_inputs(self, inputs: Sequence[Sized]) -> None:
        """Raise Invalid where one request has too many, TextTooLong at one that would keep a thread for seconds."""
        if len(inputs) > self._max_inputs:
            raise too_many(len(inputs), "texts", self._max_inputs)
        for place, each in enumerate(inputs):
            if len(each) > self._max_characters:
                unit = "characters" if isinstance(each, str) else "token ids"
                raise TextTooLong(
                    f"text {place} has {len(each)} {unit}; at most {self._max_characters} are allowed: cut it",
                    position=place,
                )

    @property
    def failing_for(self) -> float:
        """Seconds since the first failure after the last success, 0 after a success."""
        return 0.0 if self._failed_at is None else monotonic() - self._failed_at

    async def check(self) -> None:
        """Raise Unavailable where the graph does not work: after a failed batch, the template alone is tried."""
        if self._failed_at is None:
            return
        if self._probe is None:
            self._probe = asyncio.create_task(self._try())
        if error := await asyncio.shield(self._probe):
            raise Unavailable(f"model {self.name}: the last batch failed, and so does a test: {error}") from error

    async def _try(self) -> BackendFailed | None:
        try:
            await self._forward_or_note([self.bundle.text_encoder.shortest])
        except BackendFailed as error:
            return error
        finally:
            self._probe = None
        return None

    async def _embed(self, inputs: Inputs, truncate: bool, direction: Direction, client: str) -> Embeddings:
        started = perf_counter()
        tokens, keys = list[Tokens](), list[bytes]()
        for first, part in _slices(inputs):
            small = sum(len(each) + EACH for each in part) <= SMALL
            encoded = await self.device.work(partial(self._encode, first, part, truncate, direction), small=small)
            tokens += [each for each, _ in encoded]
            keys += [key for _, key in encoded]
        now = perf_counter()
        vectors = [self._cache.get(each) for each in keys]
        missing = [place for place, vector in enumerate(vectors) if vector is None]
        rows = await self._compute([_Item(keys[place], tokens[place].ids, now) for place in missing], missing, client)
        for place, row in zip(missing, rows, strict=True):
            vectors[place] = row.vector
            self._cache.add(keys[place], row.vector)
        found = cast(list[NDArray[np.float32]], vectors)
        total, cut = sum(len(each.ids) for each in tokens), [each.cut for each in tokens]
        self._metrics.tokenized(now - started)
        self._metrics.embedded(len(tokens), total, sum(lost > 0 for lost in cut), len(tokens) - len(missing))
        self._metrics.space.observe(found, [each.ids for each in tokens], cut)
        waits = [max(0.0, row.started - now) for row in rows]  # 0: it joined a batch at work
        timing = Timing(now - started, _mean(waits), _mean([row.ran for row in rows]))
        return Embeddings(found, total, sum(len(text) for text in inputs if isinstance(text, str)), timing)

    async def _compute(self, items: list[_Item], places: list[int], client: str) -> list[_Row]:
        """Run what is not known; `places` are where the items stand in their request."""
        if not items:
            return []
        try:
            with self._admission.admit(sum(len(item.ids) for item in items), client):
                return await self.batcher.submit(items, client)
        except Failed as failed:
            error, place = failed.__cause__, places[failed.place]
            if not isinstance(error, BackendFailed):
                raise
            raise BackendFailed(f"text {place}: {error}", position=place) from error.__cause__

    def _encode(self, first: int, inputs: Inputs, truncate: bool, direction: Direction) -> list[tuple[Tokens, bytes]]:
        """Each text's tokens, and the key of its vector."""
        encoder = self.bundle.text_encoder
        if isinstance(inputs[0], str):
            found = encoder.encode(cast(Sequence[str], inputs), truncate=truncate, direction=direction, first=first)
        else:
            ids = cast(Sequence[Sequence[int]], inputs)
            found = encoder.encode_ids(ids, truncate=truncate, direction=direction, first=first)
        return [(tokens, key_of(self._graph, tokens.ids)) for tokens in found]

    def _forward(self, sequences: Sequence[Sequence[int]]) -> _Batch:
        started = perf_counter()  # in a thread for graphs: other batches may have come first
        vectors = self.session.run(self.bundle.text_encoder.pad(sequences))
        return _Batch(vectors, started, perf_counter() - started)

    async def _forward_or_note(self, sequences: Sequence[Sequence[int]]) -> _Batch:
        """Run the graph; remember since when it fails."""
        try:
            batch = await self.device.run(lambda: self._forward(sequences))
        except Exception:
            self._failed_at = self._failed_at or monotonic()
            self._metrics.failed()
            raise
        self._failed_at = None
        return batch

    async def _run(self, items: list[_Item]) -> list[_Row]:
        vectors, started, ran = await self._forward_or_note([item.ids for item in items])
        lengths = [len(item.ids) for item in items]
        self._metrics.batch([started - item.since for item in items], sum(lengths), max(lengths) * len(items), ran)
        return [_Row(vector, started, ran) for vector in vectors]


def _slices(inputs: Inputs) -> Iterator[tuple[int, Inputs]]:
    """Neighbours to tokenise at once, each slice with the place of its first."""
    first, size = 0, 0
    for place, each in enumerate(inputs):
        if place > first and (place - first == SLICE_TEXTS or size + len(each) > SLICE_SIZE):
            yield first, inputs[first:place]
            first, size = place, 0
        size += len(each)
    if inputs:
        yield first, inputs[first:]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
