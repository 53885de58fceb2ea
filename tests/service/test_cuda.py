"""A real CUDA device: its vectors are those of the formula and of the CPU, and the log and /info name it."""

import numpy as np
import onnx
import pytest
from harness import MakeBundle, has_cuda, open_client
from onnx import TensorProto, helper, numpy_helper
from tiny_bundle import graph, sequence, vector

from cloze.encoding.bundle import Bundle, Precision
from cloze.service.app import create_app
from cloze.service.errors import BackendFailed
from cloze.service.inference.session import Session
from cloze.service.settings import Settings

pytestmark = pytest.mark.skipif(not has_cuda(), reason="ONNX Runtime finds no CUDA device here")

TEXTS = ["a man", "two dogs run", "", "a man plays the guitar"]
EXPECTED = np.stack([vector(sequence(text)) for text in TEXTS])


def half() -> onnx.ModelProto:
    """The tiny graph in float16, but for its output."""
    model = graph()
    for weight in model.graph.initializer:
        value = numpy_helper.to_array(weight)
        if value.dtype == np.float32:
            weight.CopyFrom(numpy_helper.from_array(value.astype(np.float16), weight.name))
    for node in model.graph.node:
        if node.op_type == "Cast":
            node.attribute[0].i = TensorProto.FLOAT16
    last = model.graph.node[-1]  # Identity
    last.op_type = "Cast"
    last.attribute.append(helper.make_attribute("to", TensorProto.FLOAT))
    return model


@pytest.mark.parametrize(("precision", "model", "atol"), [("fp32", graph(), 1e-5), ("fp16", half(), 5e-3)])
def test_vectors_are_right(make_bundle: MakeBundle, precision: Precision, model: onnx.ModelProto, atol: float) -> None:
    bundle = Bundle.load(make_bundle(model=model, precisions=(precision,)))
    batch = bundle.text_encoder.batch(TEXTS)
    device, cpu = (Session.load(bundle, provider=provider) for provider in ("cuda", "cpu"))
    assert (device.provider, device.precision) == ("cuda", precision)
    vectors = device.run(batch)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, EXPECTED, rtol=0, atol=atol)
    np.testing.assert_allclose(vectors, cpu.run(batch), rtol=0, atol=atol)
    with pytest.raises(BackendFailed, match=f"not finite .{precision} on cuda"):
        device.run(bundle.text_encoder.batch(["a man", "poison"]))


@pytest.mark.anyio
async def test_the_service_takes_it_by_itself_and_says_so(make_bundle: MakeBundle) -> None:
    bundle = make_bundle(precisions=("fp32", "fp16"))
    async with open_client(create_app(Settings(bundle=bundle))) as http:
        info = (await http.get("/info")).json()
        answer = await http.post("/embed", json={"inputs": TEXTS, "normalize": False})
    assert (info["provider"], info["model_dtype"]) == ("cuda", "float16")
    assert answer.headers["x-compute-type"] == "cuda"
    np.testing.assert_allclose(answer.json(), EXPECTED, rtol=0, atol=1e-5)  # the tiny bundle's fp16 graph is its fp32
