"""An fp32 graph to int8: a quarter of the size, and about twice as fast on any CPU.

Each matrix product becomes one of integers. A weight matrix has one scale an output column; the activations have one
scale a row, found as the graph runs. So a row's result depends on that row alone, and a text has the same vector in any
batch; dynamic quantisation by tensor has not that property. Sums of integers are exact on every CPU. For that the
weights keep to 7 bits: products of unsigned by signed 8 bits, added in pairs, overflow the 16 bits that AVX2 and SSE
have for them; unsigned weights do not, and take half as long again. docs/int8.md has the measurements.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper

from training.graph import tidy

__all__ = ["WEIGHT_LEVELS", "codes", "quantise"]

DOMAIN: Final = "com.microsoft"
WEIGHT_LEVELS: Final = 63  # codes of a weight run from -63 to 63
WORD_LEVELS: Final = 127  # a word's embedding is looked up, never multiplied
ZERO: Final = 128  # the code of 0.0 in a row of activations: from 1 to 255
GELU_ZERO: Final = 6  # the same behind a GELU, which gives hardly anything below 0
GELU_LEAST: Final = 0.17  # x · Φ(x) is never below -0.17
TINY: Final = 1e-30  # a row of zeros is divided by this

Tensors = dict[str, NDArray[np.generic]]


def quantise(model: ModelProto, kept: Sequence[str] = ()) -> ModelProto:
    """A copy of `model` whose constant matrix products and word embeddings are int8.

    Changed are a Gemm with a constant matrix (n, k), a MatMul with one (k, n), and a Gather of `input_ids` from a
    constant table; but for a matrix in whose name one of `kept` stands.
    """
    quantised = ModelProto()
    quantised.CopyFrom(model)
    graph = quantised.graph
    nodes, tensors = _Quantiser(graph, kept).run()
    graph.initializer.extend(numpy_helper.from_array(np.asarray(array), name) for name, array in tensors.items())
    del graph.node[:]
    graph.node.extend(nodes)
    return tidy(quantised)


def codes(matrix: NDArray[np.float32], levels: int, axis: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """A matrix -> codes from -levels to levels of the same shape, and the scales along `axis`, which has length 1."""
    scales = np.abs(matrix).max(axis, keepdims=True) / np.float32(levels)
    scales[scales == 0] = 1
    return np.rint(matrix / scales).astype(np.int8), scales


class _Quantiser:
    """Walks a graph once; rows that several products share are quantised once."""

    def __init__(self, graph: GraphProto, kept: Sequence[str]) -> None:
        self.kept = kept
        self.nodes = list(graph.node)
        self.weights = {tensor.name: tensor for tensor in graph.initializer}
        self.makers = {output: node for node in self.nodes for output in node.output}
        self.readers: dict[str, list[NodeProto]] = {}
        for node in self.nodes:
            for name in node.input:
                self.readers.setdefault(name, []).append(node)
        self.tensors: Tensors = {
            "rows.axis": np.array([-1], np.int64),
            "rows.tiny": np.float32(TINY),
            "rows.zero": np.uint8(ZERO),
            "rows.step": np.float32(1 / (255 - ZERO)),
            "gelu.least": np.float32(GELU_LEAST * (255 - GELU_ZERO) / GELU_ZERO),
            "gelu.zero": np.uint8(GELU_ZERO),
            "gelu.step": np.float32(1 / (255 - GELU_ZERO)),
            "weight.zero": np.int8(0),
        }
        self.quantised: set[str] = set()

    def run(self) -> tuple[list[NodeProto], Tensors]:
        nodes: list[NodeProto] = []
        joined: set[str] = set()  # outputs of GELUs that stand in a product's last node
        for node in self.nodes:
            if node.output[0] in joined:
                continue
            matrix = self._matrix(node)
            if matrix is not None:
                nodes += self._product(node, matrix)
                joined.add(nodes[-1].output[0])
            elif node.op_type == "Gather" and node.input[0] in self.weights and node.input[1] == "input_ids":
                nodes += self._lookup(node)
            else:
                nodes.append(node)
        return nodes, self.tensors

    def _matrix(self, node: NodeProto) -> NDArray[np.float32] | None:
        """The constant (k, n) that a node multiplies by; None where it is no such product."""
        if node.op_type not in ("Gemm", "MatMul") or node.input[1] not in self.weights:
            return None
        if any(part in node.input[1] for part in self.kept):
            return None
        matrix: NDArray[np.float32] = numpy_helper.to_array(self.weights[node.input[1]])
        return matrix.T if any(each.name == "transB" and each.i for each in node.attribute) else matrix

    def _product(self, node: NodeProto, matrix: NDArray[np.float32]) -> Iterator[NodeProto]:
        """rows (…, k) @ matrix (k, n), plus a bias (n) where there is one."""
        rows, name = node.input[0], node.output[0]
        if rows not in self.quantised:
            self.quantised.add(rows)
            yield from self._rows(rows)
        kind = self._kind(rows)
        integers, scales = codes(matrix, WEIGHT_LEVELS, axis=0)
        self.tensors[f"{name}.codes"] = integers  # (k, n)
        self.tensors[f"{name}.scales"] = scales[0] * self.tensors[f"{kind}.step"]  # (n)
        inputs = [f"{rows}.codes", f"{name}.codes", f"{rows}.largest", f"{name}.scales", f"{kind}.zero", "weight.zero"]
        bias = node.input[2:]
        product = f"{name}.product" if bias else name
        yield helper.make_node("MatMulIntegerToFloat", inputs, [product], name=f"{name}.product", domain=DOMAIN)
        if not bias:
            return
        match self.readers.get(name):
            case [gelu] if gelu.op_type == "Gelu":
                yield helper.make_node("BiasGelu", [product, *bias], list(gelu.output), name=name, domain=DOMAIN)
            case _:
                yield helper.make_node("Add", [product, *bias], [name], name=name)

    def _rows(self, rows: str) -> Iterator[NodeProto]:
        """Codes of each row by its largest magnitude, (…, 1): the row's scale, but for the constant step."""
        kind, largest = self._kind(rows), f"{rows}.largest"

        def node(operator: str, inputs: list[str], output: str, **attributes: int) -> NodeProto:
            return helper.make_node(operator, inputs, [output], name=output, **attributes)

        yield node("ReduceMax", [rows, "rows.axis"], f"{rows}.highest", keepdims=1)
        if kind == "gelu":
            yield node("Max", [f"{rows}.highest", "gelu.least"], largest)
        else:
            yield node("ReduceMin", [rows, "rows.axis"], f"{rows}.lowest", keepdims=1)
            yield node("Neg", [f"{rows}.lowest"], f"{rows}.depth")
            yield node("Max", [f"{rows}.highest", f"{rows}.depth", "rows.tiny"], largest)
        yield node("Div", [rows, largest], f"{rows}.shares")
        yield node("QuantizeLinear", [f"{rows}.shares", f"{kind}.step", f"{kind}.zero"], f"{rows}.codes")

    def _kind(self, rows: str) -> str:
        maker = self.makers.get(rows)
        return "gelu" if maker is not None and maker.op_type == "Gelu" else "rows"

    def _lookup(self, node: NodeProto) -> Iterator[NodeProto]:
        """table (n, d)[ids] as int8 rows times one scale a row."""
        (table, ids), [name] = node.input, node.output
        integers, scales = codes(numpy_helper.to_array(self.weights[table]), WORD_LEVELS, axis=1)
        stored, factors = f"{name}.codes", f"{name}.scales"
        self.tensors |= {stored: integers, factors: scales}  # (n, d), (n, 1)
        yield helper.make_node("Gather", [stored, ids], [f"{name}.integers"], name=f"{name}.gather")
        yield helper.make_node("Cast", [f"{name}.integers"], [f"{name}.floats"], name=f"{name}.cast", to=1)
        yield helper.make_node("Gather", [factors, ids], [f"{name}.factors"], name=f"{name}.gather_scales")
        yield helper.make_node("Mul", [f"{name}.floats", f"{name}.factors"], [name], name=f"{name}.scale")
