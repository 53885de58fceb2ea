"""The session: what it chooses, what it refuses, and what its vectors are."""

import os
from collections.abc import Callable
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
from cloze.service.errors import BackendFailed, SessionError
from cloze.service.inference import session as module
from cloze.service.inference.session import PROFILES, Session

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
    assert [(session.batch_tokens, session.batch_padding) for session in found] == [(256, 16), (768, 48)]


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


def test_every_precision_has_its_place_in_every_profile() -> None:
    assert all(set(profile.precisions) == {"fp32", "fp16", "int8"} for profile in PROFILES.values())


@pytest.mark.skipif(has_cuda(), reason="CUDA is here")
def test_cuda_asked_for_and_absent_is_an_error(loaded: Bundle) -> None:
    with pytest.raises(SessionError, match="provider is cuda, and ONNX Runtime cannot use CUDA here"):
        Session.load(loaded, provider="cuda")


class FakeRuntime:
    """ONNX Runtime with CUDA installed; `gives` is what a new session says it runs on, or the error it raises."""

    def __init__(self, gives: list[str] | Exception) -> None:
        self.gives = gives
        self.asked: list[Any] = []

    def open(self, path: Path, options: Any, providers: list[Any], **kwargs: Any) -> Any:
        self.asked.append(providers[0])
        if providers[0][0] == "CPUExecutionProvider":
            return REAL(path, options, providers=providers, **kwargs)
        if isinstance(self.gives, Exception):
            raise self.gives
        real = REAL(path, options, providers=["CPUExecutionProvider"])
        real.get_providers = lambda: self.gives
        return real


REAL = ort.InferenceSession


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str] | Exception], FakeRuntime]:
    def install(gives: list[str] | Exception) -> FakeRuntime:
        fake = FakeRuntime(gives)
        monkeypatch.setattr(ort, "InferenceSession", fake.open)
        monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])
        monkeypatch.setattr(ort, "preload_dlls", lambda: None)
        return fake

    return install


def test_cuda_is_taken_where_it_is(cuda: Any, make_bundle: MakeBundle) -> None:
    fake = cuda(["CUDAExecutionProvider", "CPUExecutionProvider"])
    session = Session.load(Bundle.load(make_bundle(precisions=("fp32", "fp16"))))
    assert (session.provider, session.precision) == ("cuda", "fp16")
    assert fake.asked[0][1]["arena_extend_strategy"] == "kSameAsRequested"


@pytest.mark.parametrize("gives", [["CPUExecutionProvider"], RuntimeError("no CUDA-capable device is detected")])
def test_a_silent_fall_back_from_cuda_is_noticed(cuda: Any, gives: Any, loaded: Bundle) -> None:
    cuda(gives)
    assert Session.load(loaded).provider == "cpu"
    with pytest.raises(SessionError, match="provider is cuda"):
        Session.load(loaded, provider="cuda")


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
        (graph(output="last_hidden_state"), "gives .*last_hidden_state.*, not sentence_embedding as float32"),
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
