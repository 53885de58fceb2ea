"""A served model: a bundle and its session, which turn texts into vectors, from loading to the end of the last lease.

Embedding means tokenising, looking up the cache, batching, running the graph, and putting the vectors back in order.
"""

import asyncio
import logging
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from itertools import chain
from threading import BoundedSemaphore
from time import perf_counter
from typing import Final, NamedTuple, Self, cast

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from cloze.encoding.bridge import Bridge, BridgeError
from cloze.encoding.bundle import GRAPHS, Bundle
from cloze.encoding.errors import TextTooLong
from cloze.encoding.text import Direction, TextEncoder, Tokens
from cloze.service import VERSION
from cloze.service.client import Client
from cloze.service.errors import BackendFailed, SessionError, Unavailable, too_many
from cloze.service.inference.admission import Admission
from cloze.service.inference.batcher import Batcher, Failed, Share
from cloze.service.inference.session import Session, most_texts, run_largest
from cloze.service.inference.threads import SMALL_SIZE, Executors
from cloze.service.monitoring.metrics import Metrics, ModelMetrics
from cloze.service.settings import Settings

Vector = NDArray[np.float32]
Inputs = Sequence[str] | Sequence[Sequence[int]]

MAX_TEXT_CHARACTERS: Final = 1_000_000  # or token ids, of one text: a longer one would occupy a thread for seconds
SLICE_TEXTS: Final = 256  # tokenised at once; other requests run between two slices
SLICE_BATCHES: Final = 64  # batches whose vectors are put in order at once
SMALL: Final = 256  # characters, or token ids, that are tokenised in a fraction of a millisecond
EACH: Final = 32  # added per text, so that many short texts are not small
OVERHEAD: Final = 512  # bytes of a cached vector besides its numbers; 470 measured

logger = logging.getLogger(__name__)


class Part(NamedTuple):
    """Inputs of a request that share a template: the named one, or the bundle's own.

    At most `max_text_tokens` tokens of a text are used; None means as many as fit.
    """

    inputs: Inputs
    template: str | None = None
    max_text_tokens: int | None = None


class Timing(NamedTuple):
    """Seconds: tokenising the request, the mean wait of its texts for a batch, and the mean time of their batches."""

    tokenize: float
    queue: float
    inference: float


class Embeddings(NamedTuple):
    """One request's vectors, float32 (texts, dimension), not normalised, and their cost."""

    vectors: Vector
    tokens: int  # of all sequences, templates included
    characters: int  # of all texts; 0 for token ids
    truncated: int  # texts
    timing: Timing


class _Batch(NamedTuple):
    """The vectors of a batch, when it began, and the seconds that it ran."""

    vectors: Vector
    started: float
    ran: float


class Cache(LRUCache[bytes, Vector]):
    """Vectors of texts, bounded in bytes and shared by all models; with a limit of 0 bytes it stays empty.

    A vector does not depend on its batch, so a cached vector is the one that the graph would compute again. Not
    thread-safe: it belongs to the event loop.
    """

    @staticmethod
    def getsizeof(vector: Vector) -> int:
        return vector.nbytes + OVERHEAD

    def add(self, key: bytes, vector: Vector) -> None:
        """Store a copy: the vector itself is a view that would keep its whole request in memory."""
        if self.getsizeof(vector) <= self.maxsize:
            self[key] = vector.copy()


class Model:
    """One bundle, served under its name. It accepts texts after `start`, and stops at the end of its last lease.

    A lease is a block `with model`.
    """

    def __init__(
        self,
        bundle: Bundle,
        settings: Settings,
        executors: Executors,
        admission: Admission,
        cache: Cache,
        bridge: Bridge | None = None,
    ) -> None:
        """Load the bundle's graph. With a bridge, the vectors are in the bridge's old space.

        Raises BundleError, BridgeError or SessionError.
        """
        started, spec = perf_counter(), bundle.spec
        self.name, self.bundle, self.bridge = bundle.name, bundle, bridge
        self.space, self.dimension = spec.space, spec.dimension
        if bridge:
            width, self.dimension = bridge.matrix.shape
            if width != spec.dimension:
                raise BridgeError(
                    f"the bridge takes {width} dimensions, but {bundle.path} has {spec.dimension}; make a bridge for "
                    "it with `cloze bridge OLD NEW OUT`"
                )
            self.space = bridge.about.old
        self.session = session = Session.load(
            bundle,
            precision=settings.precision,
            provider=settings.provider,
            threads=executors.threads.per_batch,
            max_batch_tokens=settings.max_batch_tokens,
            gpu_mem_limit=settings.gpu_mem_limit,
        )
        self.graph = spec.files[GRAPHS[session.precision]]  # sha256, in hex
        self._decides = self.graph + (bridge.sha256 if bridge else "")  # what determines the vector of a sequence
        self.calibration = None if bridge else bundle.calibration  # it fits the bundle's own space only
        self.heads = {} if bridge else bundle.heads  # and so do the heads
        self.text_encoders: dict[str | None, TextEncoder] = {None: bundle.text_encoder}
        self.text_encoders.update(bundle.named.items())
        self.admission = admission
        self._settings, self._executors, self._cache = settings, executors, cache
        threads = executors.threads.batches
        self._parallel = threads if session.provider == "cpu" else 1  # batches that run at once
        self._turns = BoundedSemaphore(self._parallel)
        self.max_batch_tokens = settings.max_batch_tokens or session.batches.tokens
        self.batcher: Batcher[Sequence[int], _Batch] = Batcher(
            self._run,
            len,
            self.max_batch_tokens,
            session.batches.padding,
            settings.queue_seconds,
            parallel=self._parallel,
            ahead=min(1, threads - self._parallel),
        )
        self.load_seconds = perf_counter() - started  # `warm_up` adds its own
        self._metrics: ModelMetrics
        self._probe: asyncio.Task[Exception | None] | None = None
        self._leases = 0
        self._free = asyncio.Event()  # set while there is no lease
        self._free.set()

    def warm_up(self) -> None:
        """Run as many of the largest batch as run at once, so that memory is allocated once, then the smallest batch.

        Raises SessionError if the graph cannot run them.
        """
        started, encoder = perf_counter(), self.bundle.text_encoder
        texts = most_texts(encoder, self.max_batch_tokens)
        try:
            run_largest(self.session, encoder, self.max_batch_tokens, self._parallel)
            self.session.run(encoder.pad([encoder.shortest]))
        except BackendFailed as error:
            raise SessionError(
                f"{self.bundle.path}: the graph fails on {texts} texts of {encoder.max_tokens} tokens: "
                f"{error.__cause__ or error}; lower max_batch_tokens, or export the bundle again"
            ) from error
        except MemoryError as error:
            raise SessionError(
                f"{self.bundle.path}: a batch of max_batch_tokens, {self.max_batch_tokens}, does not fit into "
                "memory; lower max_batch_tokens"
            ) from error
        self.load_seconds += perf_counter() - started

    def start(self, metrics: Metrics) -> None:
        """Begin to accept and count texts; needs a running event loop."""
        spec, session, batcher = self.bundle.spec, self.session, self.batcher
        facts = {
            "provider": session.provider,
            "precision": session.precision,
            "version": VERSION,
            "pooling": spec.pooling,
            "dimension": str(self.dimension),
            "sha256": self.graph,
            "space": self.space,
        }
        session.running = self._executors.running  # not before: only a batch of a served model stalls the service
        self._metrics = series = metrics.serve(self.name, self.load_seconds, facts)
        series.queue_age_seconds.set_function(lambda: batcher.age)
        series.queue_texts.set_function(lambda: batcher.waiting_items)
        series.queue_tokens.set_function(lambda: batcher.waiting)
        batcher.start()
        threads = {"parallel_batches": self._parallel, "threads_per_batch": session.threads}
        fields = {
            "template": spec.template,
            "pooling": spec.pooling,
            **facts,
            **threads,
            "max_batch_tokens": self.max_batch_tokens,
        }
        message = "model %s was loaded and warmed up in %.2f s"
        logger.info(message, self.name, self.load_seconds, extra={"fields": fields})

    def __enter__(self) -> Self:
        """Lease the model for the block: it does not stop before the end of its last lease."""
        self._leases += 1
        self._free.clear()
        return self

    def __exit__(self, *error: object) -> None:
        self._leases -= 1
        if not self._leases:
            self._free.set()

    async def stop(self) -> None:
        """Stop at the end of the last lease. The caller ensures that no other lease begins."""
        await self._free.wait()
        await self.batcher.stop()

    @property
    def failing_for(self) -> float:
        """Return the seconds since the first failure after the last success; 0.0 after a success."""
        return self.session.failing_for

    async def check(self) -> None:
        """Raise Unavailable if the graph fails. After a failed batch, the template alone is tried."""
        if not self.failing_for:
            return
        if self._probe is None:
            self._probe = asyncio.create_task(self._try())
        if error := await asyncio.shield(self._probe):
            raise Unavailable(f"model {self.name}: the last batch failed, and so does a test: {error}") from error

    async def _try(self) -> Exception | None:
        encoder = self.bundle.text_encoder
        batch = encoder.pad([encoder.shortest])
        try:
            await asyncio.get_running_loop().run_in_executor(self._executors.graphs, self.session.run, batch)
        except Exception as error:
            self._metrics.inference_failures.inc()
            return error
        finally:
            self._probe = None
        return None

    async def embed(self, *parts: Part, truncate: bool, direction: Direction, client: Client) -> Embeddings:
        """Return one vector per text, or per list of a text's own token ids, for all parts in order.

        Needs a lease. Raises ValidationFailed, TextError, Overloaded, Unavailable, DeadlineExceeded or BackendFailed;
        then none of the texts is embedded.
        """
        self.check_lengths([item for part in parts for item in part.inputs])
        started, metrics = perf_counter(), self._metrics
        with self.admission.tokens(client) as hold:
            tokens, keys = await self._tokenize(parts, truncate, direction, client, hold)
            now = perf_counter()
            ids, cut = [sequence.ids for sequence in tokens], [sequence.cut for sequence in tokens]
            vectors, total = np.empty((len(ids), self.dimension), np.float32), sum(map(len, ids))
            missing = self._recall(keys, vectors) if keys else list(range(len(ids)))
            sequences = [ids[place] for place in missing]
            if keys:  # cached vectors are not computed
                hold(sum(map(len, sequences)) - total)
            await _turn(len(ids))
            shares = await self._compute(sequences, missing, client)
        waits = rans = 0.0  # sums over the texts
        for number, (places, batch, rows) in enumerate(shares):
            if len(places) == 1:  # an index array would release Python's lock, and a short text would wait for it
                vectors[missing[places[0]]] = batch.vectors[rows.start]
            else:
                vectors[[missing[place] for place in places]] = batch.vectors[rows]
            waits += len(places) * max(0.0, batch.started - now)
            rans += len(places) * batch.ran
            if number % SLICE_BATCHES == SLICE_BATCHES - 1:
                await asyncio.sleep(0)
        if keys:
            self._remember(keys, vectors, missing)
        await _turn(len(ids))
        truncated, computed = sum(map(bool, cut)), max(1, len(missing))
        timing = Timing(now - started, waits / computed, rans / computed)
        metrics.tokenize_seconds.observe(timing.tokenize)
        metrics.queue_seconds.observe(timing.queue)
        metrics.texts.inc(len(ids))
        metrics.tokens.inc(total)
        metrics.truncations.inc(truncated)
        metrics.cache_hits.inc(len(ids) - len(missing))
        metrics.drift.observe(vectors, ids, cut)
        characters = sum(len(text) for part in parts for text in part.inputs if isinstance(text, str))
        return Embeddings(vectors, total, characters, truncated, timing)

    def _recall(self, keys: Sequence[bytes], vectors: Vector) -> list[int]:
        """Write the cached vectors to their rows, and return the other rows; of equal texts, only the first."""
        missing = dict[bytes, int]()
        for row, key in enumerate(keys):
            vector = self._cache.get(key)
            if vector is None:
                missing.setdefault(key, row)
            else:
                vectors[row] = vector
        return list(missing.values())

    def _remember(self, keys: Sequence[bytes], vectors: Vector, computed: list[int]) -> None:
        """Cache the vectors of the rows `computed`, and write them to the rows of equal texts."""
        row_of = {keys[row]: row for row in computed}
        for key, row in row_of.items():
            self._cache.add(key, vectors[row])
        for row, key in enumerate(keys):
            if (first := row_of.get(key, row)) != row:
                vectors[row] = vectors[first]

    def check_lengths(self, inputs: Sequence[Sequence[object]]) -> None:
        """Raise ValidationFailed for too many texts, and TextTooLong for one that would occupy a thread for seconds."""
        limit = self._settings.max_client_batch_size
        if len(inputs) > limit:
            raise too_many(len(inputs), "texts", limit)
        for position, item in enumerate(inputs):
            if len(item) > MAX_TEXT_CHARACTERS:
                unit = "characters" if isinstance(item, str) else "token ids"
                raise TextTooLong(
                    f" has {len(item)} {unit}; at most {MAX_TEXT_CHARACTERS} are allowed: shorten it", position=position
                )

    async def _tokenize(
        self,
        parts: Sequence[Part],
        truncate: bool,
        direction: Direction,
        client: Client,
        hold: Callable[[int], None],
    ) -> tuple[list[Tokens], Sequence[bytes]]:
        """Return each text's tokens, and the key of its vector in the cache; no keys if the cache is off.

        `hold` counts the tokens of each slice, or raises Overloaded, before the next one is tokenised.
        """
        tasks, first = list[tuple[Callable[[], tuple[list[Tokens], Sequence[bytes]]], int]](), 0
        for part in slices(parts):
            tasks.append((partial(self._encode, first, part, truncate, direction), sum(map(len, part.inputs))))
            first += len(part.inputs)
        small = len(tasks) == 1 and tasks[0][1] + first * EACH <= SMALL  # a thread would take longer
        workers, encoded = self._executors.workers, list[tuple[list[Tokens], Sequence[bytes]]]()
        for start in range(0, len(tasks), workers.threads):  # lets slices of its client's other requests in between
            some = tasks[start : start + workers.threads]
            if small:
                encoded += [encode() for encode, _ in some]
            else:
                encoded += await asyncio.gather(*(workers.run(client, encode, size) for encode, size in some))
            hold(sum(len(sequence.ids) for tokens, _ in encoded[start:] for sequence in tokens))
        return list(chain.from_iterable(tokens for tokens, _ in encoded)), [key for _, keys in encoded for key in keys]

    def _encode(
        self, first: int, part: Part, truncate: bool, direction: Direction
    ) -> tuple[list[Tokens], Sequence[bytes]]:
        inputs, encoder = part.inputs, self.text_encoders[part.template]
        if isinstance(inputs[0], str):
            texts = cast(Sequence[str], inputs)
            tokens = encoder.encode(
                texts, truncate=truncate, direction=direction, first=first, max_text_tokens=part.max_text_tokens
            )
        else:
            ids = cast(Sequence[Sequence[int]], inputs)
            tokens = encoder.encode_ids(ids, truncate=truncate, direction=direction, first=first)
        return tokens, [_key(self._decides, sequence.ids) for sequence in tokens] if self._cache.maxsize else ()

    async def _compute(self, sequences: list[list[int]], positions: list[int], client: Client) -> list[Share[_Batch]]:
        """Run the texts that are not cached; `positions` are their indices in the request."""
        if not sequences:
            return []
        try:
            return await self.batcher.submit(sequences, client)
        except Failed as failed:
            error = failed.__cause__
            if not isinstance(error, BackendFailed):
                raise
            raise BackendFailed(f": {error}", position=positions[failed.place]) from error.__cause__

    async def _run(self, sequences: list[Sequence[int]]) -> _Batch:
        metrics = self._metrics
        try:
            batch = await asyncio.get_running_loop().run_in_executor(self._executors.graphs, self._forward, sequences)
        except Exception:
            metrics.inference_failures.inc()
            raise
        lengths = list(map(len, sequences))
        padded = max(lengths) * len(lengths)
        metrics.batch_texts.observe(len(lengths))
        metrics.batch_tokens.observe(padded)
        metrics.padding_tokens.inc(padded - sum(lengths))
        metrics.inference_seconds.observe(batch.ran)
        return batch

    def _forward(self, sequences: Sequence[Sequence[int]]) -> _Batch:
        """Prepare a batch in a thread of its own, and run it when its turn comes."""
        padded = self.text_encoders[None].pad(sequences)
        with self._turns:
            started = perf_counter()
            vectors = self.session.run(padded)
            ran = perf_counter() - started
        return _Batch(self.bridge(vectors) if self.bridge else vectors, started, ran)


async def _turn(count: int) -> None:
    """Give other requests their turn between two steps over `count` texts, each of which takes milliseconds."""
    if count > SLICE_TEXTS:
        await asyncio.sleep(0)


def _key(model: str, ids: Sequence[int]) -> bytes:
    """Hash what determines a vector: the sha256 of graph and bridge, in hex, and the token ids with the template's."""
    return blake2b(array("q", ids).tobytes(), key=bytes.fromhex(model), digest_size=32).digest()


def slices(parts: Iterable[Part]) -> Iterator[Part]:
    """Cut the parts into slices to tokenise at once."""
    for part in parts:
        first, size = 0, 0
        for position, item in enumerate(part.inputs):
            if position > first and (position - first == SLICE_TEXTS or size + len(item) > SMALL_SIZE):
                yield part._replace(inputs=part.inputs[first:position])
                first, size = position, 0
            size += len(item)
        if part.inputs:
            yield part._replace(inputs=part.inputs[first:])
