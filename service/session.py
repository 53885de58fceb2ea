"""One graph under ONNX Runtime: a batch of token ids in, float32 vectors (texts, dimension) out.

Several threads may run it at once.
"""

import logging
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal, Self

import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped]
from numpy.typing import NDArray

from encoding.bundle import INPUTS, OUTPUT, Bundle, Precision
from encoding.text import Batch
from service.cpu import available_cpus
from service.errors import BackendFailed, SessionError
from service.race import fastest
from service.settings import PrecisionChoice, ProviderChoice

__all__ = ["PROFILES", "Profile", "Provider", "Session"]

Provider = Literal["cuda", "cpu"]
SAME_AS_REQUESTED: Final = 1  # onnxruntime's ArenaExtendStrategy

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Profile:
    """What suits one provider: its name in ONNX Runtime, its precisions, best first, and its batch.

    Of `raced` precisions the fastest here is the best; the others follow in order.
    `batch_tokens` is the size, padding included, from which on a larger batch is no faster. `batch_padding` is what a
    batch costs beside its tokens, in tokens: more padding costs more than one more batch. On the CPU both are for each
    thread.
    """

    name: str
    precisions: tuple[Precision, ...]
    batch_tokens: int
    batch_padding: int
    raced: tuple[Precision, ...] = ()
    options: tuple[tuple[str, str], ...] = ()


PROFILES: Final[dict[Provider, Profile]] = {
    "cuda": Profile(
        "CUDAExecutionProvider",
        precisions=("fp16", "fp32", "int8"),
        batch_tokens=32_768,
        batch_padding=4_096,  # an estimate: no GPU has measured it
        options=(
            ("arena_extend_strategy", "kSameAsRequested"),  # the largest batch is warmed first: no growth by doubling
            ("use_tf32", "0"),  # whoever asks for fp32 gets it
        ),
    ),
    "cpu": Profile(
        "CPUExecutionProvider",
        precisions=("fp32", "int8", "fp16"),
        batch_tokens=256,
        batch_padding=16,
        raced=("fp32", "int8"),
    ),
}


class Session:
    """A loaded graph, checked against its bundle's contract."""

    def __init__(self, session: ort.InferenceSession, provider: Provider, precision: Precision, dimension: int) -> None:
        self._session = session
        self.provider: Provider = provider
        self.precision: Precision = precision
        self.dimension = dimension
        self.threads: int = session.get_session_options().intra_op_num_threads
        parallel = self.threads if provider == "cpu" else 1
        self.batch_tokens = PROFILES[provider].batch_tokens * parallel
        self.batch_padding = PROFILES[provider].batch_padding * parallel

    @classmethod
    def load(
        cls,
        bundle: Bundle,
        *,
        precision: PrecisionChoice = "auto",
        provider: ProviderChoice = "auto",
        threads: int = 0,
    ) -> Self:
        """Load the graph that suits the hardware, or exactly the one asked for.

        Raises SessionError where the provider is not there or the graph breaks the contract, BundleError where
        the bundle has no graph of that precision.
        """
        for candidate in _candidates(provider):
            choices = _choices(bundle, candidate) if precision == "auto" else (precision,)
            found = [cls._load(bundle, candidate, choice, threads or available_cpus()) for choice in choices]
            sessions = [session for session in found if session is not None]
            if sessions:
                return sessions[0] if len(sessions) == 1 else fastest(sessions, bundle.text_encoder, bundle.name)
        raise SessionError(
            "provider is cuda, and ONNX Runtime cannot use CUDA here "
            f"(it offers {', '.join(ort.get_available_providers())}); install `cloze[gpu]` where there is an "
            "NVIDIA driver, or choose the provider auto or cpu"
        )

    @classmethod
    def _load(cls, bundle: Bundle, provider: Provider, precision: Precision, threads: int) -> Self | None:
        """None where the provider is not there."""
        session = _open(bundle, provider, precision, threads)
        if session is None:
            return None
        _check(session, bundle, precision)
        return cls(session, provider, precision, bundle.spec.dimension)

    def run(self, batch: Batch) -> NDArray[np.float32]:
        """Raises BackendFailed where the graph fails or gives a vector that is not finite."""
        forward = self._bound if self.provider == "cuda" else self._plain
        try:
            vectors = forward(batch)
        except Exception as error:  # ONNX Runtime's errors share no base class
            raise BackendFailed("the model failed on this input; the service's log says more") from error
        if vectors.shape != (len(batch.input_ids), self.dimension):
            raise BackendFailed(f"the model gave an array of shape {vectors.shape}. This is a bug.")
        if not np.isfinite(vectors).all():
            raise BackendFailed(f"the model gave a vector that is not finite ({self.precision} on {self.provider})")
        return vectors

    def _plain(self, batch: Batch) -> NDArray[np.float32]:
        (vectors,) = self._session.run([OUTPUT], batch._asdict())
        return vectors.copy()  # type: ignore[no-any-return]  # else they stay in the arena, and the next finds holes

    def _bound(self, batch: Batch) -> NDArray[np.float32]:
        """Only (texts, dimension) comes back from the device."""
        binding = self._session.io_binding()
        for name, array in batch._asdict().items():
            binding.bind_cpu_input(name, array)
        binding.bind_output(OUTPUT, "cuda")
        self._session.run_with_iobinding(binding)
        (vectors,) = binding.copy_outputs_to_cpu()
        return vectors  # type: ignore[no-any-return]


def _candidates(provider: ProviderChoice) -> tuple[Provider, ...]:
    return ("cuda", "cpu") if provider == "auto" else (provider,)


def _choices(bundle: Bundle, provider: Provider) -> tuple[Precision, ...]:
    """The precisions to choose among by a race, or the best one."""
    profile = PROFILES[provider]
    there = tuple(precision for precision in profile.precisions if precision in bundle.precisions)
    return tuple(precision for precision in there if precision in profile.raced) or there[:1]


def _open(bundle: Bundle, provider: Provider, precision: Precision, threads: int) -> ort.InferenceSession | None:
    """None where the provider is not there; ONNX Runtime itself would fall back and say so in a warning only."""
    profile, path = PROFILES[provider], bundle.graph(precision)
    if profile.name not in ort.get_available_providers():
        return None
    if provider == "cuda":
        ort.preload_dlls()  # the libraries that came as Python packages
    else:
        _register_arena()
    try:
        session = ort.InferenceSession(
            path, _options(threads, provider), providers=[(profile.name, dict(profile.options))], enable_fallback=0
        )
    except Exception as error:
        if provider == "cuda":
            logger.warning("CUDA is installed and cannot be used: %s", error)
            return None
        raise SessionError(f"{path} cannot be loaded: {error}; export the bundle again") from error
    session.disable_fallback()
    if session.get_providers()[0] != profile.name:
        logger.warning("CUDA is installed and found no device")
        return None
    return session


@cache
def _register_arena() -> None:
    """Once a process: the memory of all models' batches on the CPU.

    It takes what a tensor needs, not the next power of two: a warm-up with the largest batches makes it as large as it
    gets.
    Without an arena a batch of 512 tokens costs a tenth more.
    """
    place = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(place, ort.OrtArenaCfg({"arena_extend_strategy": SAME_AS_REQUESTED}))


def _options(threads: int, provider: Provider) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.enable_mem_pattern = False  # one plan is kept for every shape, and shapes are endless
    options.log_severity_level = 3
    options.add_session_config_entry("session.force_spinning_stop", "1")  # between batches the tokenizer has the cores
    if provider == "cpu":
        options.add_session_config_entry("session.use_env_allocators", "1")
        options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")  # not in the arena
    return options


def _check(session: ort.InferenceSession, bundle: Bundle, precision: Precision) -> None:
    """Hold the graph against the contract: names, types and the dimension."""
    path, dimension = bundle.graph(precision), bundle.spec.dimension
    inputs = {node.name: (node.type, len(node.shape)) for node in session.get_inputs()}
    if inputs != dict.fromkeys(INPUTS, ("tensor(int64)", 2)):
        raise SessionError(f"{path} takes {inputs}, not {', '.join(INPUTS)} as int64 (batch, length); export it again")
    outputs = {node.name: (node.type, node.shape) for node in session.get_outputs()}
    kind, shape = outputs.get(OUTPUT, ("", []))
    width = shape[1] if len(shape) == 2 else dimension  # a name or nothing where the graph leaves it open
    if kind != "tensor(float)" or (isinstance(width, int) and width != dimension):
        raise SessionError(f"{path} gives {outputs}, not {OUTPUT} as float32 (batch, {dimension}); export it again")
