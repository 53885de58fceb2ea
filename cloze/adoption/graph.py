"""Turn the ONNX graph of a sentence-transformers repository into a bundle's: add pooling and the modules after it.

Its inputs become `input_ids` and `attention_mask`, its output `sentence_embedding`, not normalised. The added nodes are
the same in every opset from 11 on, except for the axes of reductions.
"""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

from cloze.adoption.modules import NEEDS_TORCH, AdoptionError, Module, graph_file
from cloze.encoding.bundle import INPUTS, OUTPUT
from cloze.encoding.template import PoolingMode

TOKEN_TYPES: Final = "token_type_ids"  # noqa: S105
STATES: Final = ("last_hidden_state", "token_embeddings")  # (n, L, d), as optimum names them
LEAST_OPSET: Final = 11
AXES_AS_INPUT: Final = {"ReduceSum": 13, "ReduceMax": 18, "ReduceMean": 18}  # since this opset
LARGEST: Final = 2**31 - 2**20  # bytes of a graph in one file: protobuf's limit, less room for the added nodes
EPSILONS: Final = {"LayerNorm": 1e-5, "Normalize": 1e-12}  # torch's

Weights = dict[str, NDArray[Any]]


def activation_of(config: Mapping[str, Any]) -> str:
    """The torch name of a Dense module's activation function."""
    return str(config.get("activation_function", "torch.nn.Tanh")).rpartition(".")[2]


def repository_graph(folder: Path, source: str) -> ModelProto:
    """The graph in a model's folder, with its weights. Raises AdoptionError."""
    path = graph_file(folder, source)
    files = list(path.parent.glob(f"{path.name}*"))  # with external data
    size = sum(file.stat().st_size for file in files)
    if size > LARGEST:
        raise AdoptionError(
            f"{source!r} has a graph of {size / 1e9:.1f} GB; a bundle's graph has at most 2.1 GB: choose a "
            "smaller model"
        )
    try:
        model = _loaded(path, files)
    except Exception as error:  # the errors of protobuf and onnx have no common base class
        raise AdoptionError(f"{path} cannot be read as a graph ({error}); get the model again") from error
    inputs, outputs = ([value.name for value in values] for values in (model.graph.input, model.graph.output))
    if _opset(model) < LEAST_OPSET:
        raise AdoptionError(f"{path} has opset {_opset(model)}; Cloze requires {LEAST_OPSET} or later; {NEEDS_TORCH}")
    if not set(INPUTS) <= set(inputs) <= {*INPUTS, TOKEN_TYPES}:
        raise AdoptionError(
            f"{path} has the inputs {', '.join(inputs)}; Cloze expects {', '.join(INPUTS)} and, optionally, "
            f"{TOKEN_TYPES}; {NEEDS_TORCH}"
        )
    if not set(STATES) & set(outputs):
        raise AdoptionError(
            f"{path} has the outputs {', '.join(outputs)}; Cloze expects {' or '.join(STATES)}; {NEEDS_TORCH}"
        )
    return model


def _loaded(path: Path, files: Sequence[Path]) -> ModelProto:
    """Load a graph. onnx refuses external data that is a link, as in the cache of the hub's files: it is copied."""
    if len(files) == 1 or not any(file.is_symlink() for file in files):
        return onnx.load(path)
    with tempfile.TemporaryDirectory() as copies:
        for file in files:
            shutil.copyfile(file, Path(copies, file.name))
        return onnx.load(Path(copies, path.name))


def with_pooling(
    model: ModelProto, pooling: PoolingMode, behind: Sequence[tuple[Module, Weights]], dimension: int
) -> ModelProto:
    """A repository's graph with its pooling and the modules after it. Its vectors have `dimension` numbers."""
    pooled = ModelProto()
    pooled.CopyFrom(model)
    graph = pooled.graph
    for node in graph.node:  # a graph that already pools has a tensor of this name
        for names in (node.input, node.output):
            names[:] = [f"repository.{name}" if name == OUTPUT else name for name in names]
    builder = _GraphBuilder(pooled)
    if any(value.name == TOKEN_TYPES for value in graph.input):
        zero = helper.make_tensor("zero", TensorProto.INT64, [1], [0])
        nodes = (
            helper.make_node("Shape", [INPUTS[0]], [f"{TOKEN_TYPES}.shape"]),
            helper.make_node("ConstantOfShape", [f"{TOKEN_TYPES}.shape"], [TOKEN_TYPES], value=zero),
        )
        for index, node in enumerate(nodes):
            graph.node.insert(index, node)
    states = next(value.name for value in graph.output if value.name in STATES)
    vectors = _pooled(builder, builder.cast(states, TensorProto.FLOAT), pooling)
    for module, weights in behind:
        vectors = _BEHIND[module.kind](builder, vectors, module.config or {}, weights)
    graph.node.append(helper.make_node("Identity", [vectors], [OUTPUT]))
    del graph.input[:], graph.output[:]
    graph.input.extend(helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "length"]) for name in INPUTS)
    graph.output.append(helper.make_tensor_value_info(OUTPUT, TensorProto.FLOAT, ["batch", dimension]))
    return pooled


class _GraphBuilder:
    """Adds nodes and constants to a graph."""

    def __init__(self, model: ModelProto) -> None:
        self.graph = model.graph
        self.opset = _opset(model)
        self.count = 0

    def add(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        """Add a node, and return the name of its output."""
        output = self._name(op_type)
        self.graph.node.append(helper.make_node(op_type, inputs, [output], name=output, **attributes))
        return output

    def constant(self, value: Any, dtype: type[np.generic] = np.float32) -> str:
        name = self._name("constant")
        self.graph.initializer.append(numpy_helper.from_array(np.array(value, dtype=dtype), name))
        return name

    def cast(self, tensor: str, dtype: int) -> str:
        return self.add("Cast", tensor, to=dtype)

    def reduce(self, op_type: str, tensor: str, axis: int, *, keepdims: bool) -> str:
        if self.opset >= AXES_AS_INPUT[op_type]:
            return self.add(op_type, tensor, self.constant([axis], np.int64), keepdims=int(keepdims))
        return self.add(op_type, tensor, axes=[axis], keepdims=int(keepdims))

    def _name(self, kind: str) -> str:
        self.count += 1
        return f"cloze.{kind}.{self.count}"


def _pooled(builder: _GraphBuilder, states: str, mode: PoolingMode) -> str:
    """States (n, L, d) -> vectors (n, d), as `cloze.training.model.pooling` pools them; padding is on the right."""
    if mode == "cls":
        return builder.add("Gather", states, builder.constant(0, np.int64), axis=1)
    mask = builder.cast(INPUTS[1], TensorProto.FLOAT)  # (n, L)
    weights = builder.add("Reshape", mask, builder.constant([0, -1, 1], np.int64))  # (n, L, 1)
    if mode == "max":
        attended = builder.cast(weights, TensorProto.BOOL)
        return builder.reduce(
            "ReduceMax", builder.add("Where", attended, states, builder.constant(-np.inf)), 1, keepdims=False
        )
    positions = builder.add("CumSum", weights, builder.constant(1, np.int64))  # of the tokens, starting at 1, (n, L, 1)
    if mode == "lasttoken":
        length = builder.reduce("ReduceSum", weights, 1, keepdims=True)  # (n, 1, 1)
        last = builder.cast(builder.add("Equal", positions, length), TensorProto.FLOAT)  # and the padding after it
        return builder.reduce(
            "ReduceSum", builder.add("Mul", states, builder.add("Mul", last, weights)), 1, keepdims=False
        )
    if mode == "weightedmean":
        weights = builder.add("Mul", weights, positions)
    total = builder.reduce("ReduceSum", builder.add("Mul", states, weights), 1, keepdims=False)  # (n, d)
    divisor = builder.reduce("ReduceSum", weights, 1, keepdims=False)  # (n, 1)
    return builder.add("Div", total, builder.add("Sqrt", divisor) if mode == "mean_sqrt_len_tokens" else divisor)


def _dense(builder: _GraphBuilder, vectors: str, config: dict[str, Any], weights: Weights) -> str:
    output = builder.add("MatMul", vectors, builder.constant(weights["linear.weight"].T))
    if "linear.bias" in weights:
        output = builder.add("Add", output, builder.constant(weights["linear.bias"]))
    output = _activated(builder, output, activation_of(config))
    if not config.get("use_residual"):
        return output
    if "residual.weight" in weights:
        vectors = builder.add("MatMul", vectors, builder.constant(weights["residual.weight"].T))
    return builder.add("Add", output, vectors)


def _activated(builder: _GraphBuilder, vectors: str, name: str) -> str:
    if name == "Identity":
        return vectors
    if name == "GELU":
        error = builder.add("Erf", builder.add("Mul", vectors, builder.constant(1 / sqrt(2))))
        half = builder.add("Mul", vectors, builder.constant(0.5))
        return builder.add("Mul", half, builder.add("Add", error, builder.constant(1)))
    return builder.add({"ReLU": "Relu"}.get(name, name), vectors)


def _layer_norm(builder: _GraphBuilder, vectors: str, config: dict[str, Any], weights: Weights) -> str:
    centred = builder.add("Sub", vectors, builder.reduce("ReduceMean", vectors, 1, keepdims=True))
    variance = builder.reduce("ReduceMean", builder.add("Mul", centred, centred), 1, keepdims=True)
    deviation = builder.add("Sqrt", builder.add("Add", variance, builder.constant(EPSILONS["LayerNorm"])))
    scaled = builder.add("Mul", builder.add("Div", centred, deviation), builder.constant(weights["norm.weight"]))
    return builder.add("Add", scaled, builder.constant(weights["norm.bias"]))


def _normalize(builder: _GraphBuilder, vectors: str, config: dict[str, Any], weights: Weights) -> str:
    squares = builder.reduce("ReduceSum", builder.add("Mul", vectors, vectors), 1, keepdims=True)
    length = builder.add("Max", builder.add("Sqrt", squares), builder.constant(EPSILONS["Normalize"]))
    return builder.add("Div", vectors, length)


_BEHIND: Final = {"Dense": _dense, "LayerNorm": _layer_norm, "Normalize": _normalize}


def _opset(model: ModelProto) -> int:
    """The opset of the standard operators."""
    return int(next(opset.version for opset in model.opset_import if opset.domain in ("", "ai.onnx")))
