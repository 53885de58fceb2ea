"""A graph runs where it is exact: on the CPU, or on a GPU without TF32."""

from pathlib import Path

import onnxruntime
import pytest

from cloze.training.model import graph_encoder


@pytest.mark.parametrize(
    ("there", "opened"),
    [
        (["CPUExecutionProvider"], ["CPUExecutionProvider"]),
        (
            ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"],
            [("CUDAExecutionProvider", {"use_tf32": "0"}), "CPUExecutionProvider"],
        ),
    ],
)
def test_a_gpu_computes_without_tf32(there: list[str], opened: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: there)
    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda *_, providers: asked.extend(providers))
    graph_encoder.session(Path("model.onnx"))
    assert asked == opened
