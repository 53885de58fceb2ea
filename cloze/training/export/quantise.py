"""An fp32 graph to int8: a quarter of the size, and more than twice as fast on any CPU.

Each matrix product becomes a product of integers, with one scale per column of the weights. Its activations have one
scale per channel if they come from a layer norm and a single scale if they come from attention, both fixed at export.
Other activations have one scale per row, computed when the graph runs, because the range of a GELU changes from word to
word. In each case a row's result depends on that row alone, so a text has the same vector in any batch; dynamic
quantisation by tensor does not have that property. Sums of integers are exact on every CPU. This requires weights of 7
bits: on AVX2 and SSE, pairs of products of unsigned and signed 8 bits are added in 16 bits, which 8-bit weights would
overflow. Unsigned weights do not overflow but take half as long again.

Between the products, numbers are fp32. The order of ONNX Runtime's sums, and whether multiplications are fused, depends
on the CPU's vector extensions. A difference in the last bit can move a code to the next integer, which changes later
codes. So a layer norm becomes an instance norm, the only norm that is computed in the same way on every CPU, and
attention has the form `exact` of `cloze.training.export.layers`. docs/int8.md has the measurements.
"""

import random
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper
from onnxruntime import InferenceSession
from scipy.linalg import solve_triangular

from cloze.encoding.text import TextEncoder
from cloze.training.bar import bar
from cloze.training.export.graph import tidy
from cloze.training.model.graph_encoder import session

LENGTHS: Final = (1, 2, 4, 8, 16, 32, 64, 128)  # tokens per text
TEXTS: Final = 8  # of each length
TOGETHER: Final = 8  # texts whose activations are multiplied at once

Feed = Mapping[str, NDArray[np.generic]]

DOMAIN: Final = "com.microsoft"
WEIGHT_LEVELS: Final = 63  # codes of a weight run from -63 to 63
WORD_LEVELS: Final = 127  # word embeddings are looked up, not multiplied
ZERO: Final = 128  # the code of 0.0 in activations, whose codes are 1 to 255
GELU_ZERO: Final = 6  # the same after a GELU, which gives little below 0
GELU_LEAST: Final = 0.17  # x · Φ(x) is never below -0.17
TINY: Final = 1e-30  # divides a row of zeros
MARGIN: Final = 1.1  # a fixed scale leaves this room above the largest activation seen; beyond it, codes saturate
DAMPING: Final = 0.3  # added to the channels' squares, as a share of their mean
BLOCK: Final = 128  # channels whose errors are passed to later channels in one product
SHARE: Final = 0.65  # SmoothQuant's alpha: the share of a channel's size in its step; the weights take the rest
NORM: Final = "LayerNormalization"
CONTEXTS: Final = ("Attention", "Div")  # operators that give attention's output; Div divides by the sum of weights
UNMOVED: Final = ("Reshape", "Transpose")  # operators that do not change the numbers

Tensors = dict[str, NDArray[Any]]


class Channels(NamedTuple):
    """Statistics of activations (..., k): each channel's largest magnitude, (k), and the sums of products, (k, k)."""

    largest: NDArray[np.float32]
    products: NDArray[np.float64]


def vocabulary_feeds(text_encoder: TextEncoder) -> list[Feed]:
    """Texts of random tokens, always the same ones, in the template.

    Most encoders do not need a corpus to measure the activations: with layer norms the extreme values are in a few
    channels, and they come from the template and the special tokens more than from the words.
    """
    rng = random.Random(0)
    tokens = [token for token in text_encoder.id_range if text_encoder.knows(token)]
    texts = [text_encoder.decode(rng.choices(tokens, k=length)) for length in LENGTHS for _ in range(TEXTS)]
    return feeds_of(text_encoder, texts)


def feeds_of(text_encoder: TextEncoder, texts: Sequence[str]) -> list[Feed]:
    """Each text in the template as its own batch, so that there is no padding."""
    return [text_encoder.batch([text])._asdict() for text in texts]


def observe(model: ModelProto, names: Sequence[str], feeds: Sequence[Feed]) -> dict[str, Channels]:
    """The channels of the activations (..., k) called `names`."""
    runner = _showing(model, names)
    channels: dict[str, Channels] = {}
    for first in bar(range(0, len(feeds), TOGETHER), desc="measuring activations", unit=" parts"):
        runs = [runner.run(names, dict(feed)) for feed in feeds[first : first + TOGETHER]]
        for name, parts in zip(names, zip(*runs, strict=True), strict=True):
            rows = np.concatenate([part.reshape(-1, part.shape[-1]) for part in parts])
            largest, products = np.abs(rows).max(0), (rows.T @ rows).astype(np.float64)
            if name in channels:
                largest, products = np.maximum(channels[name].largest, largest), channels[name].products + products
            channels[name] = Channels(largest, products)
    return channels


def shapes(model: ModelProto, names: Sequence[str], feed: Feed) -> dict[str, tuple[int, ...]]:
    """The shapes of the activations called `names` for one batch."""
    arrays = _showing(model, names).run(names, dict(feed)) if names else []  # an empty list would mean every output
    return {name: array.shape for name, array in zip(names, arrays, strict=True)}


def _showing(model: ModelProto, names: Sequence[str]) -> InferenceSession:
    """A session of the model whose outputs include the activations called `names`."""
    shown = ModelProto()
    shown.CopyFrom(model)
    shown.graph.output.extend(helper.make_tensor_value_info(name, 1, None) for name in names)
    return session(shown.SerializeToString())


def quantise(model: ModelProto, feeds: Sequence[Feed], excluded: Sequence[str] = ()) -> ModelProto:
    """A copy of `model` whose constant matrix products and word embeddings are int8.

    This changes a Gemm with a constant matrix (n, k), a MatMul with one (k, n), and a Gather of `input_ids` from a
    constant table, except for matrices whose names contain one of `excluded`. Scales and codes fit the activations of
    `feeds`.
    """
    quantised = ModelProto()
    quantised.CopyFrom(model)
    graph = quantised.graph
    quantiser = _Quantiser(graph, excluded, _alone(model, feeds[0]))
    nodes, tensors = quantiser.run(observe(model, list(quantiser.products), feeds))
    graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in tensors.items())
    del graph.node[:]
    graph.node.extend(nodes)
    return tidy(quantised)


def _alone(model: ModelProto, feed: Feed) -> set[str]:
    """The inputs of layer norms that have the shape (rows, 1, d). A text has more than one token, template included."""
    names = [node.input[0] for node in model.graph.node if node.op_type == NORM]
    return {name for name, shape in shapes(model, names, feed).items() if shape[1:-1] == (1,)}


def codes(matrix: NDArray[np.float32], levels: int, axis: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """A matrix -> codes from -levels to levels of the same shape, and the scales along `axis`, which has length 1."""
    scales = np.abs(matrix).max(axis, keepdims=True) / np.float32(levels)
    scales[scales == 0] = 1
    return np.rint(matrix / scales).astype(np.int8), scales


def fitted_codes(
    matrix: NDArray[np.float32], products: NDArray[np.float64]
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """`codes` of weights (k, n) by column. Later channels compensate for the rounding error of each channel.

    `products` (k, k) are the products of the activations that the matrix multiplies: channels that vary together can
    compensate for each other. This is GPTQ (arXiv:2210.17323, algorithm 1), the largest channels first, in blocks.
    """
    scales = np.abs(matrix).max(0) / WEIGHT_LEVELS
    scales[scales == 0] = 1
    order = np.argsort(-products.diagonal())
    damped = products[np.ix_(order, order)] + np.eye(len(order)) * (DAMPING * products.diagonal().mean() or 1)
    root = np.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]  # upper, (k, k): damped = root @ root.T
    factor = solve_triangular(root, np.eye(len(order)))  # upper: the inverse of damped = factor.T @ factor
    remaining = matrix[order].astype(np.float64)
    integers = np.empty(matrix.shape, np.int8)
    for first in range(0, len(order), BLOCK):
        end = min(first + BLOCK, len(order))
        errors = np.empty((end - first, len(scales)))
        for place in range(first, end):
            code = integers[order[place]] = np.clip(np.rint(remaining[place] / scales), -WEIGHT_LEVELS, WEIGHT_LEVELS)
            errors[place - first] = (remaining[place] - code * scales) / factor[place, place]
            remaining[place + 1 : end] -= np.outer(factor[place, place + 1 : end], errors[place - first])
        remaining[end:] -= factor[first:end, end:].T @ errors
    return integers, scales.astype(np.float32)


def channel_steps(activations: NDArray[np.float32], weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """The step of each channel, (k), from the largest magnitudes of its activations and of its weights, both (k).

    A channel with large activations gets a large step, and its weights are multiplied by that step: both share the
    difficulty (SmoothQuant, arXiv:2211.10438, equation 4).
    """
    factors = np.maximum(activations, TINY) ** SHARE / np.maximum(weights, TINY) ** (1 - SHARE)
    steps: NDArray[np.float32] = factors * ((activations / factors).max() * MARGIN / (255 - ZERO) or 1)
    return steps.astype(np.float32)


class _Quantiser:
    """Walks a graph once; activations that several products share are quantised once."""

    def __init__(self, graph: GraphProto, excluded: Sequence[str], alone: Container[str]) -> None:
        self.excluded = excluded
        self.alone = alone  # activations (rows, 1, d)
        self.nodes = list(graph.node)
        self.weights = {tensor.name: tensor for tensor in graph.initializer}
        self.makers = {output: node for node in self.nodes for output in node.output}
        self.outputs = {value.name for value in graph.output}
        self.readers: dict[str, list[NodeProto]] = {}
        for node in self.nodes:
            for name in node.input:
                self.readers.setdefault(name, []).append(node)
        self.products: dict[str, list[NodeProto]] = {}  # the products of each activation
        for node in self.nodes:
            if self._multiplies(node):
                self.products.setdefault(node.input[0], []).append(node)
        self.norms = {name for name in map(self._origin, self.products) if self._operator(name) == NORM}
        self.fixed = [name for name in self.products if self._source(name) in (NORM, *CONTEXTS)]
        self.steps: dict[str, NDArray[np.float32]] = {}  # constant steps of the activations in `fixed`, (k)
        self.replaced: set[str] = set()  # sums that a product now computes
        self.tensors: Tensors = {
            "rows.axis": np.array([-1], np.int64),
            "rows.tiny": np.array(TINY, np.float32),
            "rows.step": np.array(1 / (255 - ZERO), np.float32),
            "gelu.least": np.array(GELU_LEAST * (255 - GELU_ZERO) / GELU_ZERO, np.float32),
            "gelu.step": np.array(1 / (255 - GELU_ZERO), np.float32),
            "gelu.zero": np.array(GELU_ZERO, np.uint8),
            "rows.zero": np.array(ZERO, np.uint8),
            "weight.zero": np.array(0, np.int8),
            "one": np.array(1, np.float32),
        }

    def run(self, channels: dict[str, Channels]) -> tuple[list[NodeProto], Tensors]:
        """The nodes and new constants of the quantised graph, given the statistics of each product's activations."""
        nodes: list[NodeProto] = []
        coded: set[str] = set()  # activations that have codes
        for node in bar(self.nodes, desc="quantising", unit=" nodes"):
            if node.output[0] in self.replaced:
                continue
            if self._multiplies(node):
                name = node.input[0]
                if name not in coded:
                    coded.add(name)
                    nodes += self._fixed(name, channels[name].largest) if name in self.fixed else self._by_row(name)
                nodes += self._product(node, channels[name].products)
            elif node.output[0] in self.norms:
                nodes += self._norm(node)
            elif self._looks_up(node):
                nodes += self._lookup(node)
            else:
                nodes.append(node)
        return nodes, self.tensors

    def _looks_up(self, node: NodeProto) -> bool:
        """Whether a node looks up word embeddings by the token ids. Token weights, single numbers, do not count."""
        table = self.weights.get(node.input[0]) if node.op_type == "Gather" else None
        return table is not None and table.dims[-1] > 1 and node.input[1] == "input_ids"

    def _multiplies(self, node: NodeProto) -> bool:
        """Whether a node is a product with a constant matrix that is to be quantised."""
        return (
            node.op_type in ("Gemm", "MatMul")
            and node.input[1] in self.weights
            and not any(part in node.input[1] for part in self.excluded)
        )

    def _origin(self, name: str) -> str:
        """The activation with the same numbers before any reshaping."""
        while self._operator(name) in UNMOVED:
            name = self.makers[name].input[0]
        return name

    def _operator(self, name: str) -> str:
        return self.makers[name].op_type if name in self.makers else ""

    def _source(self, name: str) -> str:
        """The operator that computed an activation."""
        return self._operator(self._origin(name))

    def _matrix(self, node: NodeProto) -> NDArray[np.float32]:
        """The constant (k, n) of a product."""
        matrix: NDArray[np.float32] = numpy_helper.to_array(self.weights[node.input[1]])
        return matrix.T if any(attribute.name == "transB" and attribute.i for attribute in node.attribute) else matrix

    def _norm(self, node: NodeProto) -> Iterator[NodeProto]:
        """A layer norm of activations (..., d), with each row as an instance of one channel: (rows, 1, d)."""
        (states, gamma, *beta), [name] = node.input, node.output
        width = self.weights[gamma].dims[0]
        epsilon = next((attribute.f for attribute in node.attribute if attribute.name == "epsilon"), 1e-5)
        self.tensors |= {"norm.one": np.ones(1, np.float32), "norm.zero": np.zeros(1, np.float32)}
        rows, units = (states, f"{name}.units") if states in self.alone else (f"{name}.rows", f"{name}.normal")
        if states not in self.alone:
            self.tensors[f"norm.{width}"] = np.array([-1, 1, width], np.int64)
            yield _node("Shape", [states], f"{name}.shape")
            yield _node("Reshape", [states, f"norm.{width}"], rows)
        yield _node("InstanceNormalization", [rows, "norm.one", "norm.zero"], units, epsilon=epsilon)
        if states not in self.alone:
            yield _node("Reshape", [units, f"{name}.shape"], f"{name}.units")
        yield _node("Mul", [f"{name}.units", gamma], f"{name}.scaled_units" if beta else name)
        if beta:
            yield _node("Add", [f"{name}.scaled_units", *beta], name)

    def _fixed(self, name: str, largest: NDArray[np.float32]) -> Iterator[NodeProto]:
        """Codes of activations (..., k) with constant steps."""
        if self._source(name) == NORM:
            weights = np.max([np.abs(self._matrix(node)).max(1) for node in self.products[name]], axis=0)
            self.steps[name] = channel_steps(largest, weights)
            self.tensors[f"{name}.inverse"] = 1 / self.steps[name]
            yield _node("Mul", [name, f"{name}.inverse"], f"{name}.scaled")
            yield _node("QuantizeLinear", [f"{name}.scaled", "one", "rows.zero"], f"{name}.codes")
        else:
            step = np.array(largest.max() * MARGIN / (255 - ZERO) or 1, np.float32)
            self.steps[name] = np.full(largest.shape, step)
            self.tensors[f"{name}.step"] = step
            yield _node("QuantizeLinear", [name, f"{name}.step", "rows.zero"], f"{name}.codes")

    def _by_row(self, name: str) -> Iterator[NodeProto]:
        """Codes with one scale per row: its largest magnitude, (..., 1), times a constant step."""
        kind, largest = self._kind(name), f"{name}.largest"
        yield _node("ReduceMax", [name, "rows.axis"], f"{name}.highest", keepdims=1)
        if kind == "gelu":
            yield _node("Max", [f"{name}.highest", "gelu.least"], largest)
        else:
            yield _node("ReduceMin", [name, "rows.axis"], f"{name}.lowest", keepdims=1)
            yield _node("Neg", [f"{name}.lowest"], f"{name}.depth")
            yield _node("Max", [f"{name}.highest", f"{name}.depth", "rows.tiny"], largest)
        yield _node("Div", [name, largest], f"{name}.shares")
        yield _node("QuantizeLinear", [f"{name}.shares", f"{kind}.step", f"{kind}.zero"], f"{name}.codes")

    def _kind(self, name: str) -> str:
        return "gelu" if self._source(name) == "Gelu" else "rows"

    def _product(self, node: NodeProto, products: NDArray[np.float64]) -> Iterator[NodeProto]:
        """activations (..., k) @ matrix (k, n), plus a bias (n) if there is one."""
        rows, name, kind = node.input[0], node.output[0], self._kind(node.input[0])
        matrix, bias = self._matrix(node), list(node.input[2:])
        fixed = rows in self.steps
        steps = self.steps[rows][:, None] if fixed else np.ones((len(matrix), 1), np.float32)  # (k, 1)
        integers, scales = fitted_codes(matrix * steps, products / (steps @ steps.T))
        self.tensors[f"{name}.codes"] = integers  # (k, n)
        self.tensors[f"{name}.scales"] = scales if fixed else scales * self.tensors[f"{kind}.step"]  # (n)
        scale = "one" if fixed else f"{rows}.largest"
        inputs = [f"{rows}.codes", f"{name}.codes", scale, f"{name}.scales", f"{kind}.zero", "weight.zero"]
        if fixed:
            output, bias = self._with_summands(name, bias)
            yield _node("MatMulIntegerToFloat", [*inputs, *bias], output, domain=DOMAIN)
        elif bias:  # the row's scale would multiply the operator's own bias, so the bias is added later
            yield _node("MatMulIntegerToFloat", inputs, f"{name}.product", domain=DOMAIN)
            yield _node("Add", [f"{name}.product", *bias], name)
        else:
            yield _node("MatMulIntegerToFloat", inputs, name, domain=DOMAIN)

    def _with_summands(self, name: str, bias: list[str]) -> tuple[str, list[str]]:
        """Merge the additions of constants that follow a product into its bias; return the last output and the bias."""
        output, constants = name, list(bias)
        while output not in self.outputs and len(readers := self.readers.get(output, [])) == 1:
            [add] = readers
            if add.op_type != "Add" or add.input[1] not in self.weights:
                break
            self.replaced.add(output := add.output[0])
            constants.append(add.input[1])
        if output == name:
            return name, bias
        arrays = np.broadcast_arrays(*(numpy_helper.to_array(self.weights[constant]) for constant in constants))
        summand = np.sum(arrays, axis=0, dtype=np.float32)
        self.tensors[f"{name}.bias"] = np.broadcast_to(summand, self.tensors[f"{name}.scales"].shape)
        return output, [f"{name}.bias"]

    def _lookup(self, node: NodeProto) -> Iterator[NodeProto]:
        """table (n, d)[ids] as int8 rows times one scale per row."""
        (table, ids), [name] = node.input, node.output
        integers, scales = codes(numpy_helper.to_array(self.weights[table]), WORD_LEVELS, axis=1)
        stored, factors = f"{name}.codes", f"{name}.scales"
        self.tensors |= {stored: integers, factors: scales}  # (n, d), (n, 1)
        yield _node("Gather", [stored, ids], f"{name}.integers")
        yield _node("Cast", [f"{name}.integers"], f"{name}.floats", to=1)
        yield _node("Gather", [factors, ids], f"{name}.factors")
        yield _node("Mul", [f"{name}.floats", f"{name}.factors"], name)


def _node(operator: str, inputs: Sequence[str], output: str, **attributes: Any) -> NodeProto:
    return helper.make_node(operator, inputs, [output], name=output, **attributes)
