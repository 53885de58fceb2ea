"""A served model: a bundle, its session and its embedder; loading, warming up, starting, checking and stopping it."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

from encoding.bundle import GRAPHS, Bundle
from encoding.text import TextEncoder
from service import VERSION
from service.errors import BackendFailed, SessionError, Unavailable
from service.inference.admission import Admission
from service.inference.cache import Cache
from service.inference.embedder import Embedder
from service.inference.session import Session
from service.inference.threads import Executors
from service.monitoring.metrics import Metrics, ModelMetrics
from service.settings import Settings

logger = logging.getLogger(__name__)


class Model:
    """One bundle, ready to serve under its name."""

    def __init__(
        self, bundle: Bundle, settings: Settings, executors: Executors, admission: Admission, cache: Cache
    ) -> None:
        """Load the bundle's graph. Raises BundleError or SessionError."""
        started = perf_counter()
        self.name = bundle.name
        self.bundle = bundle
        self.session = Session.load(
            bundle, precision=settings.precision, provider=settings.provider, threads=executors.threads.per_batch
        )
        self.session.running = executors.running
        self.graph = bundle.spec.files[GRAPHS[self.session.precision]]  # sha256
        self._executors = executors
        self.text_encoders: dict[str | None, TextEncoder] = {None: bundle.text_encoder}
        self.text_encoders.update(bundle.named.items())
        self.space = bundle.spec.space
        self.embedder = Embedder(self.text_encoders, self.session, self.graph, settings, executors, admission, cache)
        self.load_seconds = perf_counter() - started  # `warm_up` adds its own
        self._metrics: ModelMetrics
        self._probe: asyncio.Task[BackendFailed | None] | None = None

    def warm_up(self) -> None:
        """Run as many of the largest batch as run at once, so that memory is taken once, then the smallest batch.

        Raises SessionError where the graph cannot.
        """
        started, encoder, embedder = perf_counter(), self.bundle.text_encoder, self.embedder
        texts = -(-embedder.max_batch_tokens // len(encoder.longest))  # rounded up: no batch is larger
        try:
            largest = encoder.pad([encoder.longest] * texts)
            with ThreadPoolExecutor(embedder.parallel) as pool:
                list(pool.map(self.session.run, [largest] * embedder.parallel))
            self.session.run(encoder.pad([encoder.shortest]))
        except BackendFailed as error:
            raise SessionError(
                f"{self.bundle.path}: the graph fails on {texts} texts of {len(encoder.longest)} tokens: "
                f"{error.__cause__ or error}; lower max_batch_tokens, or export the bundle again"
            ) from error
        except MemoryError as error:
            raise SessionError(
                f"{self.bundle.path}: a batch of max_batch_tokens, {embedder.max_batch_tokens}, does not fit into "
                "memory; lower max_batch_tokens"
            ) from error
        self.load_seconds += perf_counter() - started

    def start(self, metrics: Metrics) -> None:
        """Begin to take requests and to count them; needs a running loop."""
        spec, session = self.bundle.spec, self.session
        facts = {
            "provider": session.provider,
            "precision": session.precision,
            "version": VERSION,
            "pooling": spec.pooling,
            "dimension": str(spec.dimension),
            "sha256": self.graph,
            "space": self.space,
        }
        self._metrics = metrics.serve(self.name, self.load_seconds, facts)
        self.embedder.start(self._metrics)
        threads = {"parallel_batches": self.embedder.parallel, "threads_per_batch": session.threads}
        fields = {"template": spec.template, **facts, **threads, "max_batch_tokens": self.embedder.max_batch_tokens}
        message = "model %s was loaded and warmed up in %.2f s"
        logger.info(message, self.name, self.load_seconds, extra={"fields": fields})

    async def stop(self) -> None:
        """Finish every request that has begun; the caller lets no other request begin."""
        await self.embedder.stop()
        logger.debug("model %s drained", self.name)

    @property
    def failing_for(self) -> float:
        """Return the seconds since the first failure after the last success; 0.0 after a success."""
        return self.session.failing_for

    async def check(self) -> None:
        """Raise Unavailable where the graph fails. After a failed batch, the template alone is tried."""
        if not self.failing_for:
            return
        if self._probe is None:
            self._probe = asyncio.create_task(self._try())
        if error := await asyncio.shield(self._probe):
            raise Unavailable(f"model {self.name}: the last batch failed, and so does a test: {error}") from error

    async def _try(self) -> BackendFailed | None:
        encoder = self.bundle.text_encoder
        batch = encoder.pad([encoder.shortest])
        try:
            await asyncio.get_running_loop().run_in_executor(self._executors.graphs, self.session.run, batch)
        except BackendFailed as error:
            self._metrics.inference_failures.inc()
            return error
        finally:
            self._probe = None
        return None
