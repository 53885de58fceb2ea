"""Texts to vectors: tokenise off the event loop, batch, run the session in its own thread, put back in order."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from encoding.bundle import Bundle
from encoding.errors import ClozeError, TextError
from encoding.text import Direction, Tokens
from service.batcher import Batcher
from service.cpu import available_cpus
from service.errors import BackendFailed, Invalid, SessionError, Unavailable
from service.metrics import Metrics
from service.session import PROFILES, Session
from service.settings import Settings

__all__ = ["Embedder", "Embeddings"]

T = TypeVar("T")

logger = logging.getLogger(__name__)


class _Item(NamedTuple):
    """One text on its way to a batch."""

    ids: list[int]
    since: float


@dataclass(frozen=True)
class Embeddings:
    """The graph's vectors for one request, float32 (texts, dimension), not normalised, and each text's tokens."""

    vectors: NDArray[np.float32]
    tokens: list[int]
    cut: int  # texts that lost something


class Embedder:
    """One bundle at work: `start` begins to serve, `stop` finishes what has been accepted."""

    def __init__(self, bundle: Bundle, session: Session, settings: Settings, metrics: Metrics) -> None:
        self.bundle = bundle
        self.session = session
        self.metrics = metrics
        self.max_inputs = settings.max_inputs
        self.max_batch_tokens = settings.max_batch_tokens or PROFILES[session.provider].max_batch_tokens
        self.tokenizer_threads = settings.tokenizer_threads or min(4, max(1, available_cpus() // 2))
        self.batcher: Batcher[_Item, NDArray[np.float32]] = Batcher(
            self._run, lambda item: len(item.ids), self.max_batch_tokens, settings.max_waiting_tokens
        )
        self._workers = ThreadPoolExecutor(self.tokenizer_threads, thread_name_prefix="worker")
        self._runner = ThreadPoolExecutor(1, thread_name_prefix="session")
        self._failed = False  # the last batch, whatever the reason

    @classmethod
    def load(cls, settings: Settings, metrics: Metrics) -> Self:
        """Load the bundle and its graph, and warm it up. Raises BundleError or SessionError."""
        bundle = Bundle.load(settings.bundle)
        session = Session.load(
            bundle, precision=settings.precision, provider=settings.provider, threads=settings.threads
        )
        embedder = cls(bundle, session, settings, metrics)
        embedder.warm_up()
        return embedder

    def warm_up(self) -> None:
        """Run the largest batch, so that memory is taken once, then the smallest.

        Raises SessionError where the graph cannot.
        """
        started, longest = perf_counter(), self._longest
        texts = max(1, self.max_batch_tokens // len(longest))
        try:
            self._forward([longest] * texts)
            self._forward([self._shortest])
        except BackendFailed as error:
            raise SessionError(
                f"the graph fails on {texts} texts of {len(longest)} tokens: {error.__cause__ or error}; lower "
                "max_batch_tokens, or export the bundle again"
            ) from error
        logger.info("warmed up in %.2f s", perf_counter() - started)

    def start(self) -> None:
        """Begin to take requests; needs a running loop."""
        self.batcher.start()

    async def stop(self) -> None:
        finished = await self.batcher.drain()
        self._workers.shutdown()
        self._runner.shutdown()
        logger.info("batcher drained requests=%d", finished)

    async def embed(self, texts: Sequence[str], *, truncate: bool, direction: Direction) -> Embeddings:
        """Raises Invalid, TextError, Overloaded, Unavailable or BackendFailed; then none of the texts is embedded."""
        if len(texts) > self.max_inputs:
            raise Invalid(f"{len(texts)} texts in one request; at most {self.max_inputs} are allowed: split it")
        self.batcher.admit()
        started = perf_counter()
        tokens = await self.work(lambda: self._encode(texts, truncate, direction))
        now = perf_counter()
        self.metrics.tokenize_seconds.observe(now - started)
        rows = await self.batcher.submit([_Item(each.ids, now) for each in tokens])
        counts, cut = [len(each.ids) for each in tokens], sum(each.cut > 0 for each in tokens)
        self.metrics.texts.inc(len(texts))
        self.metrics.tokens.inc(sum(counts))
        self.metrics.truncations.inc(cut)
        return Embeddings(await self.work(lambda: np.stack(rows)), counts, cut)

    async def work(self, task: Callable[[], T]) -> T:
        """Do something that takes long outside the event loop."""
        return await self._in(self._workers, task)

    async def check(self) -> None:
        """Raise Unavailable where the graph does not work: after a failed batch, one is tried on the template alone."""
        if not self._failed:
            return
        try:
            await self._in(self._runner, lambda: self._forward([self._shortest]))
        except BackendFailed as error:
            raise Unavailable(f"the last batch failed, and so does a test: {error}") from error
        self._failed = False

    @property
    def _shortest(self) -> list[int]:
        return [*self.bundle.text_encoder.prefix_ids, *self.bundle.text_encoder.suffix_ids]

    @property
    def _longest(self) -> list[int]:
        encoder = self.bundle.text_encoder
        return [*encoder.prefix_ids, *[encoder.special.sep] * encoder.text_tokens, *encoder.suffix_ids]

    def _encode(self, texts: Sequence[str], truncate: bool, direction: Direction) -> list[Tokens]:
        try:
            return self.bundle.text_encoder.encode(texts, truncate=truncate, direction=direction)
        except ClozeError:
            raise
        except Exception as error:  # tokenizers raises plain Exception
            raise TextError(f"the tokenizer cannot take this input ({type(error).__name__})") from error

    def _forward(self, sequences: Sequence[list[int]]) -> NDArray[np.float32]:
        return self.session.run(self.bundle.text_encoder.pad(sequences))

    async def _run(self, items: list[_Item]) -> list[NDArray[np.float32]]:
        started = perf_counter()
        try:
            vectors = await self._in(self._runner, lambda: self._forward([item.ids for item in items]))
        except Exception:
            self._failed = True
            raise
        self._failed = False
        lengths = [len(item.ids) for item in items]
        self.metrics.batch(
            [started - item.since for item in items], sum(lengths), max(lengths) * len(items), perf_counter() - started
        )
        return list(vectors)

    async def _in(self, pool: ThreadPoolExecutor, task: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool, task)
