"""The session: what it chooses, what it refuses, and what its vectors are."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from harness import MakeBundle, has_cuda
from tiny_bundle import DIMENSION, graph

from cloze.encoding.bundle import Bundle
from cloze.encoding.errors import BundleError
from cloze.encoding.text import Batch
from cloze.service.errors import BackendFailed, SessionError
from cloze.service.inference import session as module
from cloze.service.inference.session import PROFILES, Session
from cloze.service.settings import PrecisionChoice, ProviderChoice

TEXTS = ["a man plays the guitar", "dogs", "", "two dogs run " * 20]


@pytest.fixture(scope="module")
def loaded(bundle: Path) -> Bundle:
    return Bundle.load(bundle)


def test_vectors_are_float32_and_finite(loaded: Bundle) -> None:
    vectors = Session.load(loaded).run(loaded.text_encoder.batch(TEXTS))
    assert vectors.shape == (4, DIMENSION)
    assert vectors.dtype == np.float32
    assert np.isfinite(vectors).all()


def test_one_by_one_is_batched(loaded: Bundle) -> None:
    session, encoder = Session.load(loaded), loaded.text_encoder
    alone = np.concatenate([session.run(encoder.batch([text])) for text in TEXTS])
    np.testing.assert_allclose(session.run(encoder.batch(TEXTS)), alone, atol=1e-6)


def test_threads_are_those_asked_for(loaded: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Session.load(loaded, threads=3).threads == 3
    monkeypatch.setattr(module, "available_cpus", lambda: 5)
    assert Session.load(loaded).threads == 5


def test_a_batch_grows_with_the_threads(loaded: Bundle) -> None:
    found = [Session.load(loaded, provider="cpu", threads=threads) for threads in (1, 3)]
    assert [session.batches for session in found] == [(256, 16), (768, 48)]


@pytest.mark.parametrize(
    ("overhead", "token", "expected"),
    [
        (
            0.002,
            1e-7,
            (131_072, 20_000),
        ),  # a fast device: 160,000 tokens would be nine parts of work to one of overhead
        (0.001, 1e-7, (80_000, 10_000)),
        (0.001, 1e-5, (32_768, 100)),
        (0.0, 1e-6, (32_768, 1)),
        (0.05, 1e-9, (131_072, 32_768)),
    ],
)
def test_batch_sizes_follow_from_two_times(
    overhead: float, token: float, expected: tuple[int, int], loaded: Bundle
) -> None:
    """Of a device on which n tokens last overhead + n × token; the first run of a shape lasts longer."""
    now, seen = 0.0, set[tuple[int, ...]]()

    def run(batch: Batch) -> None:
        nonlocal now
        now += overhead + token * batch.input_ids.size
        now += batch.input_ids.shape not in seen
        seen.add(batch.input_ids.shape)

    sizes = module.batch_sizes(run, loaded.text_encoder, clock=lambda: now)
    assert sizes == pytest.approx(expected, rel=0.01)
    assert len(seen) == 2
    if token > 1e-8:  # the same from a batch that the operator allows
        assert module.batch_sizes(run, loaded.text_encoder, 2000, lambda: now) == pytest.approx(expected, rel=0.01)
        assert max(rows * length for rows, length in seen) >= module.SAMPLE_TOKENS
        assert sorted(rows * length for rows, length in seen)[1] < 2100


@pytest.mark.parametrize(("there", "chosen"), [(("fp32",), "fp32"), (("int8",), "int8"), (("fp16", "int8"), "int8")])
def test_cpu_takes_the_only_precision_that_suits_it(
    make_bundle: MakeBundle, there: tuple[str, ...], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "fastest", None)  # no race of one
    session = Session.load(Bundle.load(make_bundle(precisions=there)), provider="cpu")
    assert (session.provider, session.precision) == ("cpu", chosen)


@pytest.mark.parametrize("winner", ["fp32", "int8"])
def test_cpu_takes_the_fastest_of_fp32_and_int8(
    make_bundle: MakeBundle, winner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fastest(sessions: list[Session], *_: object) -> Session:
        assert [session.precision for session in sessions] == ["fp32", "int8"]
        return next(session for session in sessions if session.precision == winner)

    monkeypatch.setattr(module, "fastest", fastest)
    loaded = Bundle.load(make_bundle(precisions=("fp32", "fp16", "int8")))
    assert Session.load(loaded, provider="cpu").precision == winner


def test_a_precision_asked_for_is_the_one_run(make_bundle: MakeBundle) -> None:
    loaded = Bundle.load(make_bundle(precisions=("fp32", "int8")))
    assert Session.load(loaded, precision="int8").precision == "int8"
    with pytest.raises(BundleError, match="has no fp16 graph, only fp32, int8"):
        Session.load(loaded, precision="fp16")


def test_every_precision_has_its_place() -> None:
    assert {name: set(profile.precisions) for name, profile in PROFILES.items()} == {
        "cpu": {"fp32", "fp16", "int8"},
        "cuda": {"fp32", "fp16"},
    }


@pytest.mark.skipif(has_cuda(), reason="CUDA is here")
def test_cuda_asked_for_and_absent_is_an_error(loaded: Bundle) -> None:
    with pytest.raises(SessionError, match="provider is cuda, but this ONNX Runtime has no CUDA"):
        Session.load(loaded, provider="cuda")


class FakeRuntime:
    """ONNX Runtime with CUDA installed.

    `gives` is what a new session says it runs on, or the error it raises; `left` are operators that stay on the CPU.
    """

    def __init__(self, gives: list[str] | Exception, left: list[str]) -> None:
        self.gives, self.left = gives, left
        self.asked: list[Any] = []

    def open(self, path: Path, options: Any, providers: list[Any], **kwargs: Any) -> Any:
        self.asked.append(providers[0])
        if providers[0][0] == "CPUExecutionProvider":
            return REAL(path, options, providers=providers, **kwargs)
        if isinstance(self.gives, Exception):
            raise self.gives
        real = REAL(path, options, providers=["CPUExecutionProvider"])
        real.get_providers = lambda: self.gives
        ours = SimpleNamespace(ep_name="CUDAExecutionProvider", get_nodes=lambda: [SimpleNamespace(op_type="MatMul")])
        theirs = [SimpleNamespace(op_type=name) for name in self.left]
        cpu = SimpleNamespace(ep_name="CPUExecutionProvider", get_nodes=lambda: theirs)
        real.get_provider_graph_assignment_info = lambda: [ours, cpu]
        return real


REAL = ort.InferenceSession
CUDA = ["CUDAExecutionProvider", "CPUExecutionProvider"]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeRuntime]:
    def install(gives: list[str] | Exception, left: Sequence[str] = ("Shape", "Gather")) -> FakeRuntime:
        fake = FakeRuntime(gives, list(left))
        monkeypatch.setattr(ort, "InferenceSession", fake.open)
        monkeypatch.setattr(ort, "get_available_providers", lambda: CUDA)
        monkeypatch.setattr(ort, "preload_dlls", lambda: None)
        return fake

    return install


def test_cuda_is_taken_where_it_is(cuda: Any, make_bundle: MakeBundle) -> None:
    fake = cuda(CUDA)
    session = Session.load(Bundle.load(make_bundle(precisions=("fp32", "fp16"))))
    assert (session.provider, session.precision) == ("cuda", "fp16")
    assert fake.asked[0][1]["arena_extend_strategy"] == "kSameAsRequested"


@pytest.mark.parametrize(("limit", "asked"), [(0, None), (2 * 10**9, "2000000000")])
def test_the_memory_of_a_gpu_is_limited_where_it_is_asked_for(
    limit: int, asked: str | None, cuda: Any, loaded: Bundle
) -> None:
    fake = cuda(CUDA)
    Session.load(loaded, gpu_mem_limit=limit)
    Session.load(loaded, provider="cpu", gpu_mem_limit=limit)
    device, cpu = fake.asked
    assert (device[0], device[1].get("gpu_mem_limit")) == ("CUDAExecutionProvider", asked)
    assert cpu == ("CPUExecutionProvider", {})


@pytest.mark.parametrize(
    ("gives", "said"),
    [
        (["CPUExecutionProvider"], "CUDA is installed but cannot be started: its libraries or the driver are missing"),
        (RuntimeError("CUDA failure 100: no CUDA-capable device is detected"), "CUDA is installed but finds no device"),
        (RuntimeError("CUDA failure 35: CUDA driver version is insufficient"), "CUDA is installed but finds no device"),
    ],
)
def test_auto_takes_the_cpu_where_no_device_is(
    cuda: Any, gives: Any, said: str, loaded: Bundle, caplog: pytest.LogCaptureFixture
) -> None:
    cuda(gives)
    assert Session.load(loaded).provider == "cpu"
    assert f"model tiny is served on the CPU: {said}" in caplog.text
    with pytest.raises(SessionError, match=said):
        Session.load(loaded, provider="cuda")


@pytest.mark.parametrize("provider", ["auto", "cuda"])
def test_too_little_memory_is_an_error_of_its_own(cuda: Any, provider: ProviderChoice, loaded: Bundle) -> None:
    cuda(RuntimeError("Failed to allocate memory for requested buffer of size 8192"))
    with pytest.raises(SessionError, match=r"cannot be loaded on the GPU: Failed to allocate .* free its memory"):
        Session.load(loaded, provider=provider)


@pytest.mark.parametrize("precision", ["auto", "int8"])
def test_cuda_does_not_take_int8(
    cuda: Any, precision: PrecisionChoice, make_bundle: MakeBundle, caplog: pytest.LogCaptureFixture
) -> None:
    """Its products would run on the CPU, with copies between, while /info says cuda."""
    cuda(CUDA)
    bundle = Bundle.load(make_bundle(precisions=("int8",)))
    said = "CUDA has no kernel for the matrix products of int8; make a bundle in fp16 and serve it: `cloze export"
    with pytest.raises(SessionError, match=said):
        Session.load(bundle, precision=precision, provider="cuda")
    session = Session.load(bundle, precision=precision)
    assert (session.provider, session.precision) == ("cpu", "int8")
    assert said in caplog.text


def test_a_graph_that_cuda_runs_in_part_is_refused(cuda: Any, loaded: Bundle) -> None:
    cuda(CUDA, ["Shape", "Gelu", "MatMul", "MatMul"])
    with pytest.raises(SessionError, match="CUDA has no kernel for 1 Gelu, 2 MatMul, which would run on the CPU"):
        Session.load(loaded, provider="cuda")


def test_where_the_nodes_of_a_graph_run_is_known(loaded: Bundle) -> None:
    """By a session of ONNX Runtime's own, on the CPU."""
    options = ort.SessionOptions()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session = ort.InferenceSession(loaded.graph("fp32"), options, providers=["CPUExecutionProvider"])
    with pytest.raises(SessionError, match=r"model\.onnx: CUDA has no kernel for .*MatMul"):
        module._check_placement(session, loaded.graph("fp32"))


def test_sessions_share_the_memory_of_their_batches(loaded: Bundle) -> None:
    """A second one takes less for a large batch than any tensor of it needs, and gives what the first gave."""
    first, second = (Session.load(loaded, provider="cpu") for _ in range(2))
    large = loaded.text_encoder.batch(["two dogs run " * 9] * 30_000)
    expected = first.run(large)
    before = resident()
    vectors = second.run(large)
    assert resident() - before < 30_000 * 31 * DIMENSION * 4
    assert np.array_equal(vectors, expected)


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_vector_that_is_not_finite_is_an_error(loaded: Bundle) -> None:
    with pytest.raises(BackendFailed, match="not finite"):
        Session.load(loaded).run(loaded.text_encoder.batch(["a man", "poison"]))


def test_a_graph_that_throws_is_an_error_without_its_details(loaded: Bundle) -> None:
    batch = loaded.text_encoder.batch(["a man"])
    with pytest.raises(BackendFailed, match="the model failed on this input") as caught:
        Session.load(loaded, provider="cpu").run(batch._replace(input_ids=batch.input_ids + 10**6))
    assert "Gather" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (graph(output="last_hidden_state"), "has the outputs .*last_hidden_state.*, not sentence_embedding as float32"),
        (graph(dimension=DIMENSION + 1), f"not sentence_embedding as float32 .batch, {DIMENSION}."),
    ],
)
def test_a_graph_that_breaks_the_contract_is_refused(make_bundle: MakeBundle, model: Any, message: str) -> None:
    with pytest.raises(SessionError, match=message):
        Session.load(Bundle.load(make_bundle(model=model)))


def test_a_file_that_is_no_graph_is_refused(make_bundle: MakeBundle) -> None:
    path = make_bundle()
    loaded = Bundle.load(path)
    (path / "onnx/model.onnx").write_bytes(b"no graph")
    with pytest.raises(SessionError, match=r"model\.onnx cannot be loaded"):
        Session.load(loaded)


def test_the_wrong_shape_is_a_bug(loaded: Bundle) -> None:
    session = Session.load(loaded, provider="cpu")
    session._session = SimpleNamespace(run=lambda *_: [np.zeros((1, 2), dtype=np.float32)])
    with pytest.raises(BackendFailed, match="This is a bug"):
        session.run(loaded.text_encoder.batch(["a"]))


def test_a_batch_that_succeeds_while_the_failure_is_read_is_no_error(loaded: Bundle) -> None:
    """Threads that run batches reset the time of the failure at any moment, also between two reads of it."""
    times = iter([100.0, None, None])

    class Reset(Session):
        _failed_at = property(lambda self: next(times), lambda self, value: None)  # type: ignore[assignment]

    session = Session.load(loaded)
    session.__class__ = Reset
    assert session.failing_for > 0
    assert session.failing_for == 0
