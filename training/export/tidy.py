"""What a runtime does not read is removed from a graph, and the axes of its inputs and outputs are named."""

from onnx import ModelProto, helper

from encoding.bundle import INPUTS

__all__ = ["tidy"]


def tidy(model: ModelProto) -> ModelProto:
    """Remove what a runtime does not read (traces, paths, inferred shapes, unused weights); name axes and domains."""
    graph = model.graph
    model.doc_string = graph.doc_string = ""
    used = {name for node in graph.node for name in node.input}
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    for field in (model.metadata_props, graph.metadata_props, graph.value_info, graph.initializer):
        del field[:]
    graph.initializer.extend(kept)
    for item in (*graph.node, *graph.input, *graph.output, *graph.initializer):
        item.doc_string = ""
        del item.metadata_props[:]
    for value in (*graph.input, *graph.output):
        shape = value.type.tensor_type.shape.dim
        shape[0].dim_param = "batch"
        if value.name in INPUTS:
            shape[1].dim_param = "length"
    known = {opset.domain for opset in model.opset_import}
    domains = {node.domain for node in graph.node} - known - {""}
    model.opset_import.extend(helper.make_opsetid(domain, 1) for domain in sorted(domains))
    return model
