"""One graph under ONNX Runtime: a batch of token ids in, float32 vectors (texts, dimension) out.

Several threads may run it at once. A session records since when it has been failing.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import get_ident
from time import monotonic, perf_counter
from typing import Final, Literal, NamedTuple

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from cloze.encoding.bundle import INPUTS, OUTPUT, Bundle, Precision
from cloze.encoding.canaries import TOLERANCES
from cloze.encoding.errors import OptionError
from cloze.encoding.text import Batch, TextEncoder
from cloze.machine import available_cpus, trim_memory
from cloze.service.errors import BackendFailed, SessionError
from cloze.service.settings import PrecisionChoice, ProviderChoice

Provider = Literal["cuda", "cpu"]
SAME_AS_REQUESTED: Final = 1  # onnxruntime's ArenaExtendStrategy
SHAPES: Final = ((1, 16), (8, 32))  # texts and tokens of the batches that `fastest` times
ROUNDS: Final = 5  # the best round counts; the first warms up
NO_DEVICE: Final = ("no CUDA-capable device", "driver version is insufficient")  # in CUDA's errors
# operators that take nearly all of the time; ONNX Runtime itself leaves shape operators to the CPU
COMPUTING: Final = frozenset(
    (
        *("Attention", "BiasGelu", "Erf", "FastGelu", "FusedMatMul", "Gelu", "Gemm", "InstanceNormalization"),
        *("LayerNormalization", "MatMul", "MatMulInteger", "MatMulIntegerToFloat", "MultiHeadAttention"),
        *("SkipLayerNormalization", "Softmax", "Tanh"),
    )
)

logger = logging.getLogger(__name__)


class BatchSizes(NamedTuple):
    """A batch of more than `tokens` tokens, padding included, does not run faster per token.

    `padding` is the overhead of a batch, in tokens: more padding than that costs more than another batch would.
    """

    tokens: int
    padding: int


@dataclass(frozen=True)
class Profile:
    """The settings for one provider: its name in ONNX Runtime, and its precisions in order of preference.

    The fastest of the `raced` precisions is preferred to the others.
    """

    name: str
    precisions: tuple[Precision, ...]
    raced: tuple[Precision, ...] = ()
    options: tuple[tuple[str, str], ...] = ()


CPU_BATCHES: Final = BatchSizes(256, 16)  # per thread
SAMPLE_TOKENS: Final = 32_768  # of the larger of the two batches that measure the batch sizes of a GPU
OVERHEADS: Final = 8  # tokens of a batch as a multiple of its overhead, so that a ninth of its time is overhead
MOST_TOKENS: Final = 131_072  # of a batch: attention of BERT-base over 512 tokens takes 2 GB by then

PROFILES: Final[dict[Provider, Profile]] = {
    "cuda": Profile(
        "CUDAExecutionProvider",
        precisions=("fp16", "fp32"),  # CUDA has no kernel for int8 products
        options=(
            ("arena_extend_strategy", "kSameAsRequested"),  # the warm-up runs the largest batch
            ("use_tf32", "0"),  # fp32 means fp32
        ),
    ),
    "cpu": Profile(
        "CPUExecutionProvider",
        precisions=("fp32", "int8", "fp16"),
        raced=("fp32", "int8"),
    ),
}


class _NotOnCUDA(SessionError):
    """CUDA is not installed, has no device, or cannot run any graph of the bundle."""


class Session:
    """A loaded graph, checked against its bundle's contract."""

    def __init__(self, session: ort.InferenceSession, provider: Provider, precision: Precision, dimension: int) -> None:
        self._session = session
        self.provider: Provider = provider
        self.precision: Precision = precision
        self.dimension = dimension
        self.threads: int = session.get_session_options().intra_op_num_threads
        self.batches = BatchSizes(*(self.threads * tokens for tokens in CPU_BATCHES))
        self.running: dict[int, float] = {}  # thread that runs a batch → when the batch began, by `time.monotonic`
        self._failed_at: float | None = None

    @classmethod
    def load(
        cls,
        bundle: Bundle,
        *,
        precision: PrecisionChoice = "auto",
        provider: ProviderChoice = "auto",
        threads: int = 0,
        max_batch_tokens: int = 0,
        gpu_mem_limit: int = 0,
    ) -> "Session":
        """Load the graph that suits the hardware, or exactly the one that is asked for.

        The batch sizes of a GPU are measured, with batches of at most `max_batch_tokens` tokens if it is above 0. On a
        GPU, ONNX Runtime takes at most `gpu_mem_limit` bytes for the session if it is above 0.

        `auto` chooses the CPU if CUDA is not installed, has no device or cannot run a graph of the bundle. Raises
        SessionError for any other error of CUDA, such as too little memory, and if the graph breaks the contract or
        gives other vectors than at export for the bundle's canary texts. Raises BundleError if the bundle has no graph
        of that precision.
        """
        if provider not in ("auto", *PROFILES):
            raise OptionError(f"provider is {provider!r}; write auto, {' or '.join(PROFILES)}")
        if provider == "auto":
            try:
                return cls._load(bundle, "cuda", precision, threads, max_batch_tokens, gpu_mem_limit)
            except _NotOnCUDA as error:
                if PROFILES["cuda"].name in ort.get_available_providers():
                    logger.warning("model %s is served on the CPU: %s", bundle.name, error)
        chosen: Provider = "cpu" if provider == "auto" else provider
        return cls._load(bundle, chosen, precision, threads, max_batch_tokens, gpu_mem_limit)

    @classmethod
    def _load(
        cls,
        bundle: Bundle,
        provider: Provider,
        precision: PrecisionChoice,
        threads: int,
        max_batch_tokens: int,
        gpu_mem_limit: int,
    ) -> "Session":
        choices = suitable(bundle, provider) if precision == "auto" else (precision,)
        if provider == "cuda":
            _check_cuda(bundle, choices)
        threads = threads or available_cpus()
        opened = [(choice, _open(bundle, provider, choice, threads, gpu_mem_limit)) for choice in choices]
        sessions = [cls(session, provider, choice, bundle.spec.dimension) for choice, session in opened]
        chosen = sessions[0] if len(sessions) == 1 else _raced(sessions, bundle)
        _check_canaries(chosen, bundle)
        if provider == "cuda":
            chosen.batches = _measured(chosen, bundle, max_batch_tokens or SAMPLE_TOKENS)
        return chosen

    @property
    def failing_for(self) -> float:
        """Return the seconds since the first failure after the last success; 0.0 after a success."""
        failed_at = self._failed_at  # read once: a thread that runs a batch may reset it
        return 0.0 if failed_at is None else monotonic() - failed_at

    def run(self, batch: Batch) -> NDArray[np.float32]:
        """Run one batch. Raises BackendFailed if the graph fails or gives a vector that is not finite."""
        thread = get_ident()
        self.running[thread] = monotonic()
        try:
            vectors = self._infer(batch)
        except BaseException:
            self._failed_at = self._failed_at or monotonic()
            raise
        finally:
            del self.running[thread]
        self._failed_at = None
        return vectors

    def _infer(self, batch: Batch) -> NDArray[np.float32]:
        try:
            vectors = self._forward(batch)
        except Exception as error:  # ONNX Runtime's errors have no common base class
            raise BackendFailed("the model failed on this input; see the service's log") from error
        if vectors.shape != (len(batch.input_ids), self.dimension):
            raise BackendFailed(f"the model gave an array of shape {vectors.shape}. This is a bug.")
        if not np.isfinite(vectors).all():
            raise BackendFailed(f"the model gave a vector that is not finite ({self.precision} on {self.provider})")
        return vectors

    def _forward(self, batch: Batch) -> NDArray[np.float32]:
        (vectors,) = self._session.run([OUTPUT], batch._asdict())
        return vectors.copy()  # type: ignore[no-any-return]  # otherwise they stay in the arena and fragment it


def fastest(
    sessions: Sequence[Session], encoder: TextEncoder, name: str, clock: Callable[[], float] = perf_counter
) -> Session:
    """Return the session with the least geometric mean time over SHAPES, and log the relative speeds.

    Vectors of two precisions are close but not the same, so with several machines an operator should name one instead.
    """

    def seconds(session: Session, batch: Batch) -> float:
        started = clock()
        session.run(batch)
        return max(clock() - started, 1e-9)

    speeds = np.ones(len(sessions))  # relative to the first
    for texts, length in SHAPES:
        batch = encoder.pad([encoder.longest[:length]] * texts)
        rounds = [[seconds(session, batch) for session in sessions] for _ in range(ROUNDS)]  # alternating: same load
        best = np.min(rounds, axis=0)
        speeds *= (best[0] / best) ** (1 / len(SHAPES))
    chosen = sessions[int(speeds.argmax())]
    ratios = ", ".join(f"{session.precision} {speed:.2f}" for session, speed in zip(sessions, speeds, strict=True))
    logger.info(
        "model %s: relative speeds on this machine: %s; precision=auto chooses %s", name, ratios, chosen.precision
    )
    return chosen


def _raced(sessions: Sequence[Session], bundle: Bundle) -> Session:
    """Return the fastest session. Raises SessionError if a graph fails."""
    try:
        return fastest(sessions, bundle.text_encoder, bundle.name)
    except BackendFailed as error:
        precisions = " or ".join(session.precision for session in sessions)
        raise SessionError(
            f"{bundle.path}: a graph fails: {error.__cause__ or error}; name the precision that works, "
            f"{precisions}, or export the bundle again"
        ) from error


def batch_sizes(
    run: Callable[[Batch], object],
    encoder: TextEncoder,
    sample: int = SAMPLE_TOKENS,
    clock: Callable[[], float] = perf_counter,
) -> BatchSizes:
    """Measure a device's batch sizes, from the least times of a small batch and of one of about `sample` tokens.

    A batch of n tokens is assumed to take overhead + n × the time per token.
    """

    def least(batch: Batch) -> float:
        seconds = []
        for _ in range(ROUNDS):
            started = clock()
            run(batch)
            seconds.append(clock() - started)
        return min(seconds)

    small = encoder.pad([encoder.shortest])
    large = encoder.pad([encoder.longest] * most_texts(encoder, min(sample, SAMPLE_TOKENS)))
    tokens = small.input_ids.size, large.input_ids.size
    seconds = least(small), least(large)
    token_seconds = max((seconds[1] - seconds[0]) / (tokens[1] - tokens[0]), 1e-12)
    overhead = max(1, round(seconds[0] / token_seconds) - tokens[0])
    return BatchSizes(min(max(OVERHEADS * overhead, SAMPLE_TOKENS), MOST_TOKENS), min(overhead, SAMPLE_TOKENS))


def _measured(session: Session, bundle: Bundle, sample: int) -> BatchSizes:
    """Return the batch sizes of a GPU. Raises SessionError if the large batch fails."""
    try:
        sizes = batch_sizes(session.run, bundle.text_encoder, sample)
    except BackendFailed as error:
        raise SessionError(
            f"{bundle.path}: a batch of {min(sample, SAMPLE_TOKENS)} tokens fails on the GPU: "
            f"{error.__cause__ or error}; free its memory, raise gpu_mem_limit if it is set, lower max_batch_tokens, "
            "or choose the provider cpu"
        ) from error
    logger.info(
        "model %s: on this machine, the overhead of a batch equals the cost of %d tokens", bundle.name, sizes.padding
    )
    return sizes


def suitable(bundle: Bundle, provider: Provider) -> tuple[Precision, ...]:
    """Return the precisions whose speeds are to be compared, or the preferred one."""
    profile = PROFILES[provider]
    available = tuple(precision for precision in profile.precisions if precision in bundle.precisions)
    return tuple(precision for precision in available if precision in profile.raced) or available[:1]


def most_texts(encoder: TextEncoder, batch_tokens: int) -> int:
    """Return how many texts of the greatest length the largest batch has."""
    return -(-batch_tokens // encoder.max_tokens)  # rounded up


def run_largest(session: Session, encoder: TextEncoder, batch_tokens: int, parallel: int) -> None:
    """Run `parallel` copies of the largest batch concurrently. Raises BackendFailed."""
    largest = encoder.pad([encoder.longest] * most_texts(encoder, batch_tokens))
    with ThreadPoolExecutor(parallel) as pool:
        list(pool.map(session.run, [largest] * parallel))


def _check_cuda(bundle: Bundle, choices: Sequence[Precision]) -> None:
    """Raise _NotOnCUDA if the package has no CUDA, or if none of the chosen graphs can run there."""
    offered = ort.get_available_providers()
    if PROFILES["cuda"].name not in offered:
        raise _NotOnCUDA(
            f"provider is cuda, but this ONNX Runtime has no CUDA (it offers {', '.join(offered)}); install "
            "the extra `gpu`, or choose the provider auto or cpu"
        )
    if not set(choices) & set(PROFILES["cuda"].precisions):
        precisions = ", ".join(choices or bundle.precisions)
        raise _NotOnCUDA(
            f"{bundle.path}: CUDA has no kernel for the matrix products of {precisions}; make a bundle in fp16 and "
            f"serve it: `cloze export {bundle.path} OUT --precision fp16`"
        )


def _open(
    bundle: Bundle, provider: Provider, precision: Precision, threads: int, gpu_mem_limit: int
) -> ort.InferenceSession:
    """Raise _NotOnCUDA if there is no device, and SessionError if the graph cannot be loaded.

    ONNX Runtime itself would fall back to the CPU with only a warning, entirely or for some operators.
    """
    profile, path = PROFILES[provider], bundle.graph(precision)
    options = dict(profile.options)
    if provider == "cuda":
        ort.preload_dlls()  # the libraries that came as Python packages
        options |= {"gpu_mem_limit": str(gpu_mem_limit)} if gpu_mem_limit else {}
    else:
        _register_arena()
    try:
        session = ort.InferenceSession(
            path, _options(threads, provider), providers=[(profile.name, options)], enable_fallback=0
        )
    except Exception as error:
        if provider == "cpu":
            raise SessionError(
                f"{path} cannot be loaded by ONNX Runtime {ort.__version__}: {error}; install a newer one, or export "
                "the bundle again"
            ) from error
        if any(words in str(error) for words in NO_DEVICE):
            raise _NotOnCUDA(f"CUDA is installed but finds no device ({error}); check `nvidia-smi`") from error
        raise SessionError(
            f"{path} cannot be loaded on the GPU: {error}; free its memory, raise gpu_mem_limit if it is set, check "
            "the versions of driver, CUDA and cuDNN, or choose the provider cpu"
        ) from error
    trim_memory()  # loading frees a third of the graph's size in small blocks, which glibc would keep
    session.disable_fallback()
    if session.get_providers()[0] != profile.name:
        raise _NotOnCUDA(
            "CUDA is installed but cannot be started: its libraries or the driver are missing; install the extra `gpu` "
            "where there is an NVIDIA driver, or choose the provider auto or cpu"
        )
    if provider == "cuda":
        _check_placement(session, path)
    _check(session, bundle, precision)
    return session


def _check_placement(session: ort.InferenceSession, path: Path) -> None:
    """Raise SessionError if CUDA leaves a part of the computation to the CPU, with copies before and after it."""
    partitions = [part for part in session.get_provider_graph_assignment_info() if part.ep_name == PROFILES["cpu"].name]
    operators = Counter(node.op_type for part in partitions for node in part.get_nodes() if node.op_type in COMPUTING)
    if operators:
        names = ", ".join(f"{count} {name}" for name, count in sorted(operators.items()))
        raise SessionError(
            f"{path}: CUDA has no kernel for {names}, which would run on the CPU; export the bundle again in fp16"
        )


@cache
def _register_arena() -> None:
    """Register one CPU memory arena for the batches of all models, once per process.

    The arena grows by what a tensor needs, not to the next power of two, so the warm-up with the largest batches gives
    it its final size. Without an arena, a batch of 512 tokens takes a tenth longer.
    """
    memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(memory, ort.OrtArenaCfg({"arena_extend_strategy": SAME_AS_REQUESTED}))


def _options(threads: int, provider: Provider) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.enable_mem_pattern = False  # it would keep a plan for every shape, without limit
    options.log_severity_level = 3
    options.add_session_config_entry("session.force_spinning_stop", "1")  # tokenising needs the cores in between
    if provider == "cuda":
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    else:
        options.add_session_config_entry("session.use_env_allocators", "1")
        options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")  # not in the arena
    return options


def _check(session: ort.InferenceSession, bundle: Bundle, precision: Precision) -> None:
    """Check the graph against the contract: names, types and the dimension."""
    path, dimension = bundle.graph(precision), bundle.spec.dimension
    inputs = {node.name: (node.type, len(node.shape)) for node in session.get_inputs()}
    if inputs != dict.fromkeys(INPUTS, ("tensor(int64)", 2)):
        raise SessionError(
            f"{path} has the inputs {inputs}, not {', '.join(INPUTS)} as int64 (batch, length); export the bundle again"
        )
    outputs = {node.name: (node.type, node.shape) for node in session.get_outputs()}
    output_type, shape = outputs.get(OUTPUT, ("", []))
    width = shape[1] if len(shape) == 2 else dimension  # a name or None if the graph leaves it open
    if output_type != "tensor(float)" or (isinstance(width, int) and width != dimension):
        raise SessionError(
            f"{path} has the outputs {outputs}, not {OUTPUT} as float32 (batch, {dimension}); export the bundle again"
        )


def _check_canaries(session: Session, bundle: Bundle) -> None:
    """Check that the graph gives the vectors that it gave when it was exported."""
    canaries = bundle.canaries
    if canaries is None:
        logger.warning("model %s: the bundle has an older format without canary texts; export it again", bundle.name)
        return
    encoder, precision = bundle.text_encoder, session.precision
    *short, longest = [tokens.ids for tokens in encoder.encode(canaries.texts)]  # in one batch, most would be padding
    try:
        vectors = np.concatenate([session.run(encoder.pad(part)) for part in (short, [longest]) if part])
    except BackendFailed as error:
        raise SessionError(
            f"{bundle.graph(precision)} fails on a canary text: {error.__cause__ or error}; export the bundle again"
        ) from error
    difference, text = canaries.difference(precision, vectors)
    if not difference <= TOLERANCES[precision]:
        raise SessionError(
            f"{bundle.graph(precision)} no longer gives the vectors that it was exported with: they differ by "
            f"{difference:.1e} for the text {text[:40]!r}; at most {TOLERANCES[precision]:.0e} is allowed. The "
            "file was altered, or this machine computes it wrongly: restore the bundle or export it again"
        )
