"""Texts to vectors: tokenise, look up the cache, batch, run the graph, put the vectors back in order."""

import asyncio
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from time import perf_counter
from typing import Final, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from encoding.errors import TextTooLong
from encoding.text import Direction, TextEncoder, Tokens
from service.errors import BackendFailed, too_many
from service.inference.admission import Admission
from service.inference.batcher import Batcher, Failed
from service.inference.cache import Cache
from service.inference.session import Session
from service.inference.threads import Executors
from service.monitoring.metrics import ModelMetrics
from service.settings import Settings

Inputs = Sequence[str] | Sequence[Sequence[int]]


class Part(NamedTuple):
    """Inputs of a request that share a template: the one of this name, or the bundle's own."""

    inputs: Inputs
    template: str | None = None


MAX_TEXT_CHARACTERS: Final = 1_000_000  # or token ids, of one text: a longer one would occupy a thread for seconds
SLICE_TEXTS: Final = 256  # tokenised at once; other requests run between two slices
SLICE_SIZE: Final = 65_536  # characters, or token ids
SMALL: Final = 256  # characters, or token ids, that are tokenised in a fraction of a millisecond
EACH: Final = 32  # added per text, so that many short texts are not small


class _Item(NamedTuple):
    """One text on its way to a batch; texts with the same `key` have the same vector."""

    key: bytes
    ids: list[int]
    since: float


class _Row(NamedTuple):
    """One text's vector, when its batch began, and the seconds that the batch ran."""

    vector: NDArray[np.float32]
    started: float
    ran: float


class Timing(NamedTuple):
    """Seconds: tokenising the request, its texts' mean wait for a batch, and the mean time of those batches."""

    tokenize: float
    queue: float
    inference: float


class Embeddings(NamedTuple):
    """One request's vectors, float32 (dimension,) per text, not normalised, and their cost."""

    rows: list[NDArray[np.float32]]
    tokens: int  # of all sequences, templates included
    characters: int  # of all texts; 0 for token ids
    truncated: int  # texts
    timing: Timing


@dataclass(eq=False)
class Embedder:
    """Embeds texts with one graph. `start` begins to take requests, `stop` finishes those that were accepted.

    `text_encoders` has the bundle's own template under None, and its named templates.
    """

    text_encoders: Mapping[str | None, TextEncoder]
    session: Session
    graph: str  # sha256 of its file, in hex
    settings: Settings
    executors: Executors
    admission: Admission
    cache: Cache

    def __post_init__(self) -> None:
        session, settings = self.session, self.settings
        self._metrics: ModelMetrics
        self.parallel = self.executors.threads.batches if session.provider == "cpu" else 1  # batches that run at once
        self.max_batch_tokens = settings.max_batch_tokens or session.batch_tokens
        self.batcher: Batcher[_Item, _Row] = Batcher(
            self._run,
            lambda item: len(item.ids),
            self.max_batch_tokens,
            session.batch_padding,
            settings.queue_seconds,
            key=lambda item: item.key,
            parallel=self.parallel,
        )
        self._requests = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def start(self, metrics: ModelMetrics) -> None:
        """Begin to take requests; needs a running loop."""
        self._metrics = metrics
        metrics.queue_age_seconds.set_function(lambda: self.batcher.age)
        metrics.queue_texts.set_function(lambda: self.batcher.waiting_items)
        metrics.queue_tokens.set_function(lambda: self.batcher.waiting)
        self.batcher.start()

    async def stop(self) -> None:
        """Finish every request that has begun; the caller lets no other request begin."""
        await self._idle.wait()
        await self.batcher.drain()

    async def embed(self, *parts: Part, truncate: bool, direction: Direction, client: str) -> Embeddings:
        """Return one vector per text, or per list of the text's own token ids, of all parts in order.

        Raises ValidationFailed, TextError, Overloaded, Unavailable, DeadlineExceeded or BackendFailed; then none of the
        texts is embedded.
        """
        self.check_lengths([each for part in parts for each in part.inputs])
        self._requests += 1
        self._idle.clear()
        try:
            return await self._embed(parts, truncate, direction, client)
        finally:
            self._requests -= 1
            if not self._requests:
                self._idle.set()

    def check_lengths(self, inputs: Sequence[Sequence[object]]) -> None:
        """Raise ValidationFailed for too many texts, and TextTooLong for one that would occupy a thread for seconds."""
        limit = self.settings.max_client_batch_size
        if len(inputs) > limit:
            raise too_many(len(inputs), "texts", limit)
        for position, each in enumerate(inputs):
            if len(each) > MAX_TEXT_CHARACTERS:
                unit = "characters" if isinstance(each, str) else "token ids"
                raise TextTooLong(
                    f" has {len(each)} {unit}; at most {MAX_TEXT_CHARACTERS} are allowed: shorten it", position=position
                )

    async def _embed(self, parts: Sequence[Part], truncate: bool, direction: Direction, client: str) -> Embeddings:
        started = perf_counter()
        tokens, keys = await self._tokenize(parts, truncate, direction)
        now = perf_counter()
        vectors = [self.cache.get(key) for key in keys]
        missing = [position for position, vector in enumerate(vectors) if vector is None]
        items = [_Item(keys[position], tokens[position].ids, now) for position in missing]
        rows = await self._compute(items, missing, client)
        for position, row in zip(missing, rows, strict=True):
            vectors[position] = row.vector
            if self.cache.maxsize:
                self.cache.add(keys[position], row.vector)
        found = cast(list[NDArray[np.float32]], vectors)
        cut, total = [each.cut for each in tokens], sum(len(each.ids) for each in tokens)
        metrics = self._metrics
        metrics.tokenize_seconds.observe(now - started)
        metrics.texts.inc(len(tokens))
        metrics.tokens.inc(total)
        truncated = sum(lost > 0 for lost in cut)
        metrics.truncations.inc(truncated)
        metrics.cache_hits.inc(len(tokens) - len(missing))
        metrics.drift.observe(found, [each.ids for each in tokens], cut)
        waits = [max(0.0, row.started - now) for row in rows]  # 0 where the text joined a running batch
        timing = Timing(now - started, _mean(waits), _mean([row.ran for row in rows]))
        characters = sum(len(text) for part in parts for text in part.inputs if isinstance(text, str))
        return Embeddings(found, total, characters, truncated, timing)

    async def _tokenize(
        self, parts: Sequence[Part], truncate: bool, direction: Direction
    ) -> tuple[list[Tokens], Sequence[bytes]]:
        """Return each text's tokens, and the key of its vector."""
        tokens, keys = list[Tokens](), list[bytes]()
        for part in _slices(parts):
            encode = partial(self._encode, len(tokens), part, truncate, direction)
            if sum(len(each) + EACH for each in part.inputs) <= SMALL:  # a thread would take longer
                encoded = encode()
            else:
                encoded = await asyncio.get_running_loop().run_in_executor(self.executors.workers, encode)
            tokens += [each for each, _ in encoded]
            keys += [key for _, key in encoded]
        return tokens, keys

    def _encode(self, first: int, part: Part, truncate: bool, direction: Direction) -> list[tuple[Tokens, bytes]]:
        inputs, encoder = part.inputs, self.text_encoders[part.template]
        if isinstance(inputs[0], str):
            found = encoder.encode(cast(Sequence[str], inputs), truncate=truncate, direction=direction, first=first)
        else:
            ids = cast(Sequence[Sequence[int]], inputs)
            found = encoder.encode_ids(ids, truncate=truncate, direction=direction, first=first)
        return [(tokens, _key(self.graph, tokens.ids)) for tokens in found]

    async def _compute(self, items: list[_Item], positions: list[int], client: str) -> list[_Row]:
        """Run the texts that are not cached; `positions` are their indices in the request."""
        if not items:
            return []
        try:
            with self.admission.tokens(sum(len(item.ids) for item in items), client):
                return await self.batcher.submit(items, client)
        except Failed as failed:
            error = failed.__cause__
            if not isinstance(error, BackendFailed):
                raise
            raise BackendFailed(f": {error}", position=positions[failed.place]) from error.__cause__

    async def _run(self, items: list[_Item]) -> list[_Row]:
        metrics, sequences = self._metrics, [item.ids for item in items]
        try:
            vectors, started, ran = await asyncio.get_running_loop().run_in_executor(
                self.executors.graphs, self._forward, sequences
            )
        except Exception:
            metrics.inference_failures.inc()
            raise
        tokens, padded = sum(map(len, sequences)), max(map(len, sequences)) * len(items)
        for item in items:
            metrics.queue_seconds.observe(started - item.since)
        metrics.batch_texts.observe(len(items))
        metrics.batch_tokens.observe(padded)
        metrics.padding_tokens.inc(padded - tokens)
        metrics.inference_seconds.observe(ran)
        return [_Row(vector, started, ran) for vector in vectors]

    def _forward(self, sequences: Sequence[Sequence[int]]) -> tuple[NDArray[np.float32], float, float]:
        """Return the vectors of one batch, when it began, and the seconds it ran."""
        started = perf_counter()  # in the thread: other batches may have come first
        vectors = self.session.run(self.text_encoders[None].pad(sequences))
        return vectors, started, perf_counter() - started


def _key(graph: str, ids: Sequence[int]) -> bytes:
    """Hash what determines a vector: the graph's sha256, in hex, and the token ids, the template's included."""
    return blake2b(array("q", ids).tobytes(), key=bytes.fromhex(graph), digest_size=32).digest()


def _slices(parts: Iterable[Part]) -> Iterator[Part]:
    """Cut the parts into slices to tokenise at once."""
    for inputs, template in parts:
        first, size = 0, 0
        for position, each in enumerate(inputs):
            if position > first and (position - first == SLICE_TEXTS or size + len(each) > SLICE_SIZE):
                yield Part(inputs[first:position], template)
                first, size = position, 0
            size += len(each)
        if inputs:
            yield Part(inputs[first:], template)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
