"""A sentence encoder as an ONNX graph: tracing, fusion, conversion to fp16.

The inputs are `input_ids` and `attention_mask`, int64 (batch, length); the output is `sentence_embedding`, float32
(batch, dimension). The graph contains the pooling and the denoising, which is a table of the template's biases, indexed
by the text's length. `quantise` makes int8, and `bundle` decides which graph is shipped.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal

import torch
from onnx import ModelProto, NodeProto, helper
from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST
from onnxruntime.transformers.fusion_options import FusionOptions
from onnxruntime.transformers.onnx_model import OnnxModel
from onnxruntime.transformers.optimizer import optimize_by_fusion
from torch import Tensor, nn
from transformers import AttentionInterface

from cloze.encoding.bundle import INPUTS, OUTPUT
from cloze.training.errors import ExportError
from cloze.training.export.layers import BLOCKED, Form, WrittenOut, divided_attention, writable
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.pooling import ONE_TOKEN, pool

ATTENTION: Final = "cloze_export"
OPSETS: Final = {"rows": 23, "exact": 23, "fusible": 18, "plain": 18}  # 23 has Attention; the fusions need 18
SUMMED: Final = ("Div", "ReduceSum", "Sqrt")  # the operators of a mean
EXAMPLE: Final = ("one", "two or three", "a somewhat longer text, so that both axes differ")
HARMLESS: Final = (
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",  # from torch itself
    r"While compiling, we found certain side effects",  # transformers, about hidden states
)


def tidy(model: ModelProto) -> ModelProto:
    """Remove what a runtime does not read (traces, paths, inferred shapes, unused weights). Name axes and domains."""
    graph = model.graph
    model.doc_string = graph.doc_string = ""
    used = {name for node in graph.node for name in node.input}
    initializers = [tensor for tensor in graph.initializer if tensor.name in used]
    for field in (model.metadata_props, graph.metadata_props, graph.value_info, graph.initializer):
        del field[:]
    graph.initializer.extend(initializers)
    for item in (*graph.node, *graph.input, *graph.output, *graph.initializer):
        item.doc_string = ""
        del item.metadata_props[:]
    for value in (*graph.input, *graph.output):
        shape = value.type.tensor_type.shape.dim
        shape[0].dim_param = "batch"
        if value.name in INPUTS:
            shape[1].dim_param = "length"
    declared = {opset.domain for opset in model.opset_import}
    domains = {node.domain for node in graph.node} - declared - {""}
    model.opset_import.extend(helper.make_opsetid(domain, 1) for domain in sorted(domains))
    return model


def trace(encoder: SentenceEncoder, form: Form | Literal["plain"] = "rows") -> ModelProto:
    """`encoder.forward` in evaluation mode as a graph of standard operators.

    `form` is one of the forms of `layers`, or `plain`: transformers' own layers, with all rows of the last one.
    An architecture unlike BERT's is always traced as `plain`. Raises ExportError if tracing fails.
    """
    if not writable(encoder.backbone):
        form = "plain"
    was_training, device = encoder.training, encoder.device
    encoder.eval().cpu()
    batch = encoder.text_encoder.batch(EXAMPLE)
    axes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    try:
        module = _Traced(encoder, form).eval()
        with _plain_attention(encoder), _quiet(), torch.no_grad():
            program = torch.onnx.export(
                module,
                tuple(map(torch.from_numpy, batch)),
                dynamo=True,
                input_names=INPUTS,
                output_names=(OUTPUT,),
                dynamic_shapes=dict.fromkeys(INPUTS, axes),
                opset_version=OPSETS[form],
                verbose=False,
            )
    except (torch.onnx.OnnxExporterError, ValueError, TypeError) as error:
        model_type = encoder.backbone.config.model_type
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise ExportError(
            f"a {model_type!r} encoder cannot be traced ({reason}); choose a BERT or RoBERTa model"
        ) from error
    finally:
        encoder.train(was_training).to(device)
    assert program is not None, "torch.onnx.export returns a program if dynamo is on. This is a bug."
    return tidy(program.model_proto)


def fuse(model: ModelProto, encoder: SentenceEncoder) -> ModelProto:
    """Fuse the operators of a `fusible` graph into ONNX Runtime's own: attention, skip + layer norm, bias + GELU.

    The last layer's attention is not fused if only one row is read. Raises ExportError unless everything else is fused.
    """
    config = encoder.backbone.config
    copy = ModelProto()
    copy.CopyFrom(model)
    _split_unsqueeze(copy)
    with _quiet():
        fused = optimize_by_fusion(copy, "bert", config.num_attention_heads, config.hidden_size, FusionOptions("bert"))
    fused.prune_graph()
    layers = config.num_hidden_layers
    fused_layers = layers - 1 if encoder.config.pooling in ONE_TOKEN else layers
    expected = {"Attention": fused_layers, "SkipLayerNormalization": 2 * layers, "BiasGelu": layers}
    counts = {name: len(fused.get_nodes_by_op_type(name)) for name in expected}
    if counts != expected:
        raise ExportError(f"fusion is incomplete: found {counts}, expected {expected}")
    return tidy(fused.model)


def halve(model: ModelProto) -> ModelProto:
    """`model` in fp16, for GPUs; inputs and outputs keep their types.

    Sums over a text, such as a mean's, stay in fp32: fp16 ends at 65,504, and the positions of 362 tokens exceed that.
    """
    halved = ModelProto()
    halved.CopyFrom(model)
    wrapped = OnnxModel(halved)
    with _quiet():
        wrapped.convert_float_to_float16(keep_io_types=True, op_block_list=[*DEFAULT_OP_BLOCK_LIST, *SUMMED])
        wrapped.topological_sort()
    return tidy(wrapped.model)


class _Traced(nn.Module):
    """`SentenceEncoder.forward` in a form that exports well: the mask is added, the template's biases are a table."""

    bias: Tensor  # (text tokens + 1, d)

    def __init__(self, encoder: SentenceEncoder, form: Form | Literal["plain"]) -> None:
        super().__init__()
        # the only module that holds the encoder, so that each weight has one name
        self.read = _Plain(encoder) if form == "plain" else WrittenOut(encoder, form)
        if encoder.config.denoising:
            lengths = torch.arange(encoder.text_encoder.text_tokens + 1)
            with torch.no_grad():
                self.register_buffer("bias", encoder.template_bias(lengths, encoder.text_encoder))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        encoder = self.read.encoder
        vectors = self.read(input_ids, attention_mask)
        lengths = attention_mask.sum(1) - encoder.text_encoder.template_tokens
        return encoder.finish(vectors, self.bias[lengths] if encoder.config.denoising else None)


class _Plain(nn.Module):
    """`SentenceEncoder.pooled` with transformers' own layers."""

    def __init__(self, encoder: SentenceEncoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        encoder = self.encoder
        if not writable(encoder.backbone):
            return encoder.pooled(input_ids, attention_mask, encoder.text_encoder)
        blocked = (1.0 - attention_mask.unsqueeze(1).unsqueeze(2).float()) * BLOCKED  # (n, 1, 1, L)
        states = encoder.hidden(encoder.words(input_ids, attention_mask, encoder.text_encoder), blocked)
        mask_index, weights = encoder.text_encoder.mask_index, encoder.weights_of(input_ids)
        return pool(states, attention_mask, encoder.config.pooling, mask_index, weights)


@contextmanager
def _plain_attention(encoder: SentenceEncoder) -> Iterator[None]:
    """Attention in standard operators: in the form that fusion recognises, or eager for another architecture."""
    AttentionInterface.register(ATTENTION, divided_attention)
    backbone = encoder.backbone
    former, traced = backbone.config._attn_implementation, ATTENTION if writable(backbone) else "eager"
    if former != traced:
        backbone.set_attn_implementation(traced)
    try:
        yield
    finally:
        if former != traced:
            backbone.set_attn_implementation(former)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporters' warnings about their own code. Other warnings still appear."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "fusion_base", "onnx_model", "root")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        for message in HARMLESS:
            warnings.filterwarnings("ignore", message)
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _split_unsqueeze(model: ModelProto) -> None:
    """Split the mask's Unsqueeze node in two: the exporter merges two nodes that attention fusion looks for."""
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        if node.op_type != "Unsqueeze" or node.input[0] != INPUTS[1]:
            nodes.append(node)
            continue
        middle = f"{node.output[0]}.first"
        for axis, source, target in ((1, node.input[0], middle), (2, middle, node.output[0])):
            model.graph.initializer.append(helper.make_tensor(f"{target}.axis", 7, [1], [axis]))
            nodes.append(helper.make_node("Unsqueeze", [source, f"{target}.axis"], [target], name=target))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
