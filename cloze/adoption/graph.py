"""The ONNX graph of a sentence-transformers repository as a bundle's: pooling and the modules behind it are added.

Its inputs become `input_ids` and `attention_mask`, its output `sentence_embedding`, not normalised. What is added has
one form in every opset from 11 on, the axes of reductions apart.
"""

from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

from cloze.adoption.modules import AdoptionError, Module
from cloze.encoding.bundle import GRAPHS, INPUTS, OUTPUT
from cloze.encoding.template import PoolingMode

__all__ = [
    "EPSILONS",
    "NEEDS_TORCH",
    "STATES",
    "TOKEN_TYPES",
    "Weights",
    "activation_of",
    "repository_graph",
    "with_pooling",
]

NEEDS_TORCH: Final = "pip install 'cloze[train]' brings torch, which makes a bundle of any model that Cloze serves"
TOKEN_TYPES: Final = "token_type_ids"  # noqa: S105
STATES: Final = ("last_hidden_state", "token_embeddings")  # (n, L, d), as optimum names them
LEAST_OPSET: Final = 11
AXES_AS_INPUT: Final = {"ReduceSum": 13, "ReduceMax": 18, "ReduceMean": 18}  # the opset from which on
LARGEST: Final = 2**31 - 2**20  # bytes of a graph in one file: protobuf's limit, and room for what is added
EPSILONS: Final = {"LayerNorm": 1e-5, "Normalize": 1e-12}  # torch's

Weights = dict[str, NDArray[Any]]


def activation_of(config: Mapping[str, Any]) -> str:
    """The name of a Dense's activation function in torch."""
    return str(config.get("activation_function", "torch.nn.Tanh")).rpartition(".")[2]


def repository_graph(folder: Path, source: str) -> ModelProto:
    """The graph in a model's folder, with its weights. Raises AdoptionError."""
    path = folder / GRAPHS["fp32"]
    if not path.is_file():
        raise AdoptionError(
            f"{source!r} has no {GRAPHS['fp32']}, of which a bundle is made without torch; {NEEDS_TORCH}"
        )
    size = sum(each.stat().st_size for each in path.parent.glob(f"{path.name}*"))
    if size > LARGEST:
        raise AdoptionError(f"{source!r} has a graph of {size / 1e9:.1f} GB; a bundle's graph has at most 2.1 GB")
    try:
        model = onnx.load(path)
    except Exception as error:  # protobuf and onnx have no error in common
        raise AdoptionError(f"{path} cannot be read as a graph ({error}); get the model again") from error
    inputs, outputs = ([value.name for value in values] for values in (model.graph.input, model.graph.output))
    if _opset(model) < LEAST_OPSET:
        raise AdoptionError(f"{path} has opset {_opset(model)}, {LEAST_OPSET} is the least; {NEEDS_TORCH}")
    if not set(INPUTS) <= set(inputs) <= {*INPUTS, TOKEN_TYPES}:
        raise AdoptionError(
            f"{path} has the inputs {', '.join(inputs)}; {', '.join(INPUTS)} are expected, and perhaps {TOKEN_TYPES}; "
            f"{NEEDS_TORCH}"
        )
    if not set(STATES) & set(outputs):
        raise AdoptionError(
            f"{path} has the outputs {', '.join(outputs)}; {' or '.join(STATES)} is expected; {NEEDS_TORCH}"
        )
    return model


def with_pooling(
    model: ModelProto, pooling: PoolingMode, behind: Sequence[tuple[Module, Weights]], dimension: int
) -> ModelProto:
    """A repository's graph with its pooling and the modules behind it, whose vectors have `dimension` numbers."""
    made = ModelProto()
    made.CopyFrom(model)
    graph = made.graph
    for node in graph.node:  # a graph that pools already has such a tensor
        for names in (node.input, node.output):
            names[:] = [f"repository.{name}" if name == OUTPUT else name for name in names]
    parts = _Parts(made)
    if any(value.name == TOKEN_TYPES for value in graph.input):
        zero = helper.make_tensor("zero", TensorProto.INT64, [1], [0])
        nodes = (
            helper.make_node("Shape", [INPUTS[0]], [f"{TOKEN_TYPES}.shape"]),
            helper.make_node("ConstantOfShape", [f"{TOKEN_TYPES}.shape"], [TOKEN_TYPES], value=zero),
        )
        for place, node in enumerate(nodes):
            graph.node.insert(place, node)
    states = next(value.name for value in graph.output if value.name in STATES)
    vectors = _pooled(parts, parts.cast(states, TensorProto.FLOAT), pooling)
    for module, weights in behind:
        vectors = _BEHIND[module.kind](parts, vectors, module.config or {}, weights)
    graph.node.append(helper.make_node("Identity", [vectors], [OUTPUT]))
    del graph.input[:], graph.output[:]
    graph.input.extend(helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "length"]) for name in INPUTS)
    graph.output.append(helper.make_tensor_value_info(OUTPUT, TensorProto.FLOAT, ["batch", dimension]))
    return made


class _Parts:
    """Adds nodes and constants to a graph."""

    def __init__(self, model: ModelProto) -> None:
        self.graph = model.graph
        self.opset = _opset(model)
        self.count = 0

    def add(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add a node, and return the name of what it gives."""
        output = self._name(kind)
        self.graph.node.append(helper.make_node(kind, inputs, [output], name=output, **attributes))
        return output

    def constant(self, value: Any, dtype: type[np.generic] = np.float32) -> str:
        name = self._name("constant")
        self.graph.initializer.append(numpy_helper.from_array(np.array(value, dtype=dtype), name))
        return name

    def cast(self, tensor: str, kind: int) -> str:
        return self.add("Cast", tensor, to=kind)

    def reduce(self, kind: str, tensor: str, axis: int, *, keepdims: bool) -> str:
        if self.opset >= AXES_AS_INPUT[kind]:
            return self.add(kind, tensor, self.constant([axis], np.int64), keepdims=int(keepdims))
        return self.add(kind, tensor, axes=[axis], keepdims=int(keepdims))

    def _name(self, kind: str) -> str:
        self.count += 1
        return f"cloze.{kind}.{self.count}"


def _pooled(parts: _Parts, states: str, mode: PoolingMode) -> str:
    """States (n, L, d) -> vectors (n, d), as `cloze.training.model.pooling` reads them; padding is on the right."""
    if mode == "cls":
        return parts.add("Gather", states, parts.constant(0, np.int64), axis=1)
    mask = parts.cast(INPUTS[1], TensorProto.FLOAT)  # (n, L)
    weights = parts.add("Reshape", mask, parts.constant([0, -1, 1], np.int64))  # (n, L, 1)
    if mode == "max":
        seen = parts.cast(weights, TensorProto.BOOL)
        return parts.reduce("ReduceMax", parts.add("Where", seen, states, parts.constant(-np.inf)), 1, keepdims=False)
    places = parts.add("CumSum", weights, parts.constant(1, np.int64))  # of the tokens from 1 on, (n, L, 1)
    if mode == "lasttoken":
        length = parts.reduce("ReduceSum", weights, 1, keepdims=True)  # (n, 1, 1)
        last = parts.cast(parts.add("Equal", places, length), TensorProto.FLOAT)  # and the padding behind it
        return parts.reduce("ReduceSum", parts.add("Mul", states, parts.add("Mul", last, weights)), 1, keepdims=False)
    if mode == "weightedmean":
        weights = parts.add("Mul", weights, places)
    total = parts.reduce("ReduceSum", parts.add("Mul", states, weights), 1, keepdims=False)  # (n, d)
    divisor = parts.reduce("ReduceSum", weights, 1, keepdims=False)  # (n, 1)
    return parts.add("Div", total, parts.add("Sqrt", divisor) if mode == "mean_sqrt_len_tokens" else divisor)


def _dense(parts: _Parts, vectors: str, config: dict[str, Any], weights: Weights) -> str:
    made = parts.add("MatMul", vectors, parts.constant(weights["linear.weight"].T))
    if "linear.bias" in weights:
        made = parts.add("Add", made, parts.constant(weights["linear.bias"]))
    made = _activated(parts, made, activation_of(config))
    if not config.get("use_residual"):
        return made
    if "residual.weight" in weights:
        vectors = parts.add("MatMul", vectors, parts.constant(weights["residual.weight"].T))
    return parts.add("Add", made, vectors)


def _activated(parts: _Parts, vectors: str, name: str) -> str:
    if name == "Identity":
        return vectors
    if name == "GELU":
        error = parts.add("Erf", parts.add("Mul", vectors, parts.constant(1 / sqrt(2))))
        half = parts.add("Mul", vectors, parts.constant(0.5))
        return parts.add("Mul", half, parts.add("Add", error, parts.constant(1)))
    return parts.add({"ReLU": "Relu"}.get(name, name), vectors)


def _layer_norm(parts: _Parts, vectors: str, config: dict[str, Any], weights: Weights) -> str:
    centred = parts.add("Sub", vectors, parts.reduce("ReduceMean", vectors, 1, keepdims=True))
    variance = parts.reduce("ReduceMean", parts.add("Mul", centred, centred), 1, keepdims=True)
    deviation = parts.add("Sqrt", parts.add("Add", variance, parts.constant(EPSILONS["LayerNorm"])))
    scaled = parts.add("Mul", parts.add("Div", centred, deviation), parts.constant(weights["norm.weight"]))
    return parts.add("Add", scaled, parts.constant(weights["norm.bias"]))


def _normalize(parts: _Parts, vectors: str, config: dict[str, Any], weights: Weights) -> str:
    squares = parts.reduce("ReduceSum", parts.add("Mul", vectors, vectors), 1, keepdims=True)
    length = parts.add("Max", parts.add("Sqrt", squares), parts.constant(EPSILONS["Normalize"]))
    return parts.add("Div", vectors, length)


_BEHIND: Final = {"Dense": _dense, "LayerNorm": _layer_norm, "Normalize": _normalize}


def _opset(model: ModelProto) -> int:
    """The version of the standard operators."""
    return int(next(opset.version for opset in model.opset_import if opset.domain in ("", "ai.onnx")))
