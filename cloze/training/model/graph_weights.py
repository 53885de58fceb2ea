"""Read an encoder's weights back from the graph of its bundle, so that a bundle can be trained further.

The graph of a BERT or a RoBERTa has all that its vectors depend on: named weights, and matrix products in the order of
the layers. The biases of keys and values are missing: the former do not change any vector, and the latter are part of
the bias that follows (training/export/layers.py). int8 codes times their scales are the weights to 7 bits.
"""

from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import NodeProto, numpy_helper
from torch import Tensor
from transformers import PretrainedConfig

from cloze.encoding.bundle import GRAPHS, Bundle, Precision
from cloze.training.errors import EncoderError
from cloze.training.model.pretrained import BERTS

ORIGIN: Final = "give the run or the encoder that it came from"
READABLE: Final[tuple[Precision, ...]] = ("fp32", "int8")  # in order of preference
PREFIX: Final = "read.encoder.backbone."
TOKEN_WEIGHTS: Final = "read.encoder.token_weights.table"  # noqa: S105 - no password
WORDS: Final = "embeddings.word_embeddings.weight"
CODED: Final = "MatMulIntegerToFloat"
QUERY, KEY, VALUE, DENSE, *_ = PARTS = (  # the linear layers of a layer, in the order of their products
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "intermediate.dense",
    "output.dense",
)

ATTENTION: Final = (QUERY, KEY, VALUE)

Arrays = dict[str, NDArray[Any]]
_Product: TypeAlias = tuple[NDArray[np.float32], NDArray[np.float32]]  # a matrix (k, n) and a bias (n)


def graph_weights(
    bundle: Bundle, config: PretrainedConfig
) -> tuple[Precision, dict[str, Tensor], NDArray[np.float32] | None]:
    """A readable graph's precision, the state of its backbone (whose configuration is `config`), and any token weights.

    Raises EncoderError if no graph of the bundle holds all of these.
    """
    layers, failed = int(config.num_hidden_layers), None
    readable = [name for name in READABLE if name in bundle.precisions and config.model_type in BERTS]
    for precision in readable:
        try:
            graph = _Graph(bundle, precision)
            arrays = graph.weights(layers)
        except (KeyError, StopIteration, ValueError) as error:  # a fused or plain graph has different products
            failed = error
        else:
            state = {name: torch.from_numpy(np.array(array, np.float32)) for name, array in arrays.items()}
            return precision, state, graph.arrays.get(TOKEN_WEIGHTS)
    raise EncoderError(
        f"{bundle.path} has no graph from which weights can be read; only fp32 and int8 graphs of BERT and RoBERTa "
        f"models are supported, as cloze export writes them for the CPU: {ORIGIN}"
    ) from failed


class _Graph:
    """A graph in the form `rows` or, in int8, `exact` of training.export.layers."""

    def __init__(self, bundle: Bundle, precision: Precision) -> None:
        graph = onnx.load(bundle.path / GRAPHS[precision]).graph
        self.nodes = list(graph.node)
        self.arrays: Arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
        self.makers = {name: node for node in self.nodes for name in node.output}
        self.readers = {name: node for node in self.nodes for name in node.input}  # the last reader of each

    def weights(self, layers: int) -> Arrays:
        """Every weight by its name in the backbone. Raises KeyError, StopIteration."""
        state = {
            name.removeprefix(PREFIX): array
            for name, array in self.arrays.items()
            if name.startswith(PREFIX) and array.dtype == np.float32
        }
        if WORDS not in state:
            state[WORDS] = self._words()
        products = self._products()
        for number in range(layers):
            together: list[_Product] = []  # the parts that remain of one product for several parts of attention
            for part in PARTS:
                name = f"encoder.layer.{number}.{part}"
                if f"{name}.weight" not in state:
                    together = together or (_split(next(products)) if part in ATTENTION else [next(products)])
                    matrix, bias = together.pop(0)
                    state = {f"{name}.bias": bias} | state | {f"{name}.weight": matrix.T}
            for part in (KEY, VALUE):
                name = f"encoder.layer.{number}.{part}"
                state.setdefault(f"{name}.bias", np.zeros(len(state[f"{name}.weight"])))
            if (joined := f"read.bias_{number}") in self.arrays:
                state[f"encoder.layer.{number}.{DENSE}.bias"] = self.arrays[joined]
        return state

    def _words(self) -> NDArray[np.float32]:
        """The table whose int8 rows and scales are looked up by the token ids."""
        names = [node.input[0] for node in self.nodes if node.input[1:] == ["input_ids"]]
        codes, scales = (self.arrays[name] for name in names if name != TOKEN_WEIGHTS)
        return codes * scales

    def _products(self) -> Iterator[_Product]:
        """The matrix (k, n) and the bias (n) of each product with a constant that is not named as in the backbone."""
        for node in self.nodes:
            matrix = node.input[1] if len(node.input) > 1 else ""
            if matrix in self.arrays and not matrix.startswith(PREFIX):
                if node.op_type == CODED:
                    yield self._decoded(node)
                elif node.op_type == "MatMul":
                    yield self.arrays[matrix], np.zeros(self.arrays[matrix].shape[1], np.float32)

    def _decoded(self, node: NodeProto) -> _Product:
        """codes · scales. Activations are codes times a step, which is one for each channel or one for all."""
        rows, codes, _, scales, _, _, *bias = node.input
        quantise = self.makers[rows]
        matrix = self.arrays[codes] * self.arrays[scales]
        scaled = self.makers.get(quantise.input[0])
        if scaled is not None and scaled.op_type == "Mul":  # multiplied by the inverse of the channels' steps
            matrix *= self.arrays[scaled.input[1]][:, None]
        else:
            matrix /= self.arrays[quantise.input[1]]
        return matrix, self._bias(node, bias)

    def _bias(self, node: NodeProto, bias: list[str]) -> NDArray[np.float32]:
        """The bias without the number that the next node subtracts again, which only serves to round."""
        values: NDArray[np.float32] = self.arrays[bias[0]] if bias else np.zeros_like(self.arrays[node.input[3]])
        reader = self.readers[node.output[0]]
        return values - self.arrays[reader.input[1]] if reader.op_type == "Sub" else values


def _split(product: _Product) -> list[_Product]:
    """Split one product (d, parts·d) into the parts of attention. Raises ValueError for another shape."""
    matrix, bias = product
    parts, remainder = divmod(matrix.shape[1], matrix.shape[0])
    if remainder or not parts:
        raise ValueError(f"{matrix.shape} is not a product of attention")
    return list(zip(np.split(matrix, parts, axis=1), np.split(bias, parts), strict=True))
