"""One job on Ray Data: read the missing parts, and embed and write each one in an actor.

Ray places the actors on the nodes, restarts lost ones and pauses the readers while the actors are busy. A part that Ray
runs twice is written twice under the same name.
"""

import logging
import os
import pickle
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Final

# Ray reads each of these once, at import.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # otherwise Ray sends usage data to its vendor
os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # Ray's own logs have the faults that it recovers from

import numpy as np
import ray
from ray.data import ActorPoolStrategy, DataContext, TaskPoolStrategy
from ray.exceptions import RayError

from cloze.encoding.errors import ClozeError
from cloze.service.bulk.embed import Embed
from cloze.service.bulk.output import Output
from cloze.service.bulk.progress import Progress
from cloze.service.bulk.source import Failure, Part, Source
from cloze.service.bulk.workers import Resources

STORE: Final = 2**29  # bytes of Ray's object store on one machine, which holds the texts that wait for an actor
READERS: Final = 4  # files that are read at once
CONNECT_SECONDS: Final = 10
AT_ONCE: Final = 2  # parts of one actor: one is tokenised while the other one runs

Batch = dict[str, Any]


class JobError(ClozeError):
    """The job ended before its last part."""


class _Embedder:
    """An actor: embeds parts and writes them."""

    def __init__(self, make: Callable[[], Embed], source: Source, output: Output) -> None:
        self._source, self._output = source, output
        self._refusal: ClozeError | None = None
        try:
            self._embed = make()
        except ClozeError as error:  # Ray would restart the actor again and again, and keep only a traceback's text
            self._refusal = error

    def __call__(self, batch: Batch) -> Batch:
        if self._refusal:
            raise self._refusal
        parts = [pickle.loads(part) for part in batch["part"]]  # noqa: S301, the job's own bytes
        return {"progress": _objects([pickle.dumps(self._complete(part)) for part in parts])}

    def _complete(self, part: Part) -> Progress:
        started = perf_counter()
        table = self._embed(part.table)
        errors = enumerate(table.column("error").to_pylist())
        failed = [Failure(self._source.row_id(table, row), reason) for row, reason in errors if reason is not None]
        counts = self._output.write(part.file, part.number, table, [*part.failures, *failed])
        return Progress(part.bytes, counts, perf_counter() - started)


@contextmanager
def connection(address: str | None) -> Iterator[None]:
    """Start Ray on this machine, or connect to a cluster, until the end of the block. Raises JobError."""
    _check_reachable(address)
    local = {} if address else {"include_dashboard": False, "object_store_memory": STORE}
    if not address:  # otherwise Ray writes a token to the home folder, and clusters started there later require it
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    try:
        ray.init(address or "local", log_to_driver=False, logging_level="error", **local)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        advice = "; if the cluster was started with a token, set RAY_AUTH_MODE=token here" if address else ""
        raise JobError(f"Ray cannot be reached at {address or 'this machine'}: {error}{advice}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_reachable(address: str | None) -> None:
    """Check that a port answers, because Ray itself would try for minutes. Raises JobError."""
    host, _, port = (address or "").rpartition("://")[2].rpartition(":")
    if not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise JobError(f"Ray cannot be reached at {address}: {error}; is the cluster running?") from error


def run(
    make: Callable[[], Embed],
    source: Source,
    output: Output,
    allocation: Resources,
    complete: Iterable[tuple[int, int]],
) -> Iterator[Progress]:
    """Embed all parts except the `complete` ones, given by file and number. Yield the progress of each finished part.

    Raises the error of the part that cannot be completed; the complete parts are kept.
    """
    numbers: dict[int, set[int]] = {}
    for file, number in complete:
        numbers.setdefault(file, set()).add(number)

    def read(batch: Batch) -> Iterator[Batch]:
        for file in map(int, batch["item"]):
            for part in source.parts(file, numbers.get(file, set()).__contains__):
                yield {"part": _objects([pickle.dumps(part)])}

    context = DataContext.get_current()
    context.target_max_block_size = 1  # so that Ray Data does not join parts
    context.enable_progress_bars = False
    context.raise_original_map_exception = True
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # an error that ends the job is raised as well
    files = ray.data.from_items(list(range(len(source.files))), override_num_blocks=len(source.files))
    parts = files.map_batches(read, batch_size=1, num_cpus=0, compute=TaskPoolStrategy(min(READERS, len(source.files))))
    finished = parts.map_batches(
        _Embedder,
        fn_constructor_args=(make, source, output),
        batch_size=1,
        num_cpus=allocation.cpus,
        num_gpus=allocation.gpus or None,
        compute=ActorPoolStrategy(
            min_size=allocation.actors,
            max_size=allocation.max_actors,
            max_tasks_in_flight_per_actor=2 * AT_ONCE,
            max_concurrent_calls_per_actor=AT_ONCE,
            enable_true_multi_threading=True,
        ),
    )
    try:
        for batch in finished.iter_batches(batch_size=None, prefetch_batches=0):
            yield from (pickle.loads(progress) for progress in batch["progress"])  # noqa: S301
    except Exception as error:
        raise _cause(error) from error


def _objects(values: list[bytes]) -> Any:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def _cause(error: BaseException) -> Exception:
    """Return a JobError for the ClozeError that Ray has wrapped in its own errors, or for any other error."""
    cause: BaseException | None = error
    while cause is not None:
        inner = getattr(cause, "cause", None)  # Ray's errors have this attribute
        if inner is None and isinstance(cause, ClozeError):
            return JobError(str(cause).partition("\n")[0])  # Ray adds advice for its own users
        cause = inner or cause.__cause__
    return JobError(f"the job ended: {error}; start it again to continue with the next part")
