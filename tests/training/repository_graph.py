"""The `onnx/model.onnx` of a repository on the hub, as optimum writes it."""

import warnings
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModel

OUTPUT = "last_hidden_state"


class _States(nn.Module):
    """Token ids and their mask (n, L), and for BERT token types, to the last layer's states (n, L, d)."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        states: Tensor = self.backbone(input_ids=input_ids, attention_mask=attention_mask, **types).last_hidden_state
        return states


def write_repository_graph(folder: Path, *, types: bool = True, opset: int = 14) -> None:
    """Write the graph of the transformers model in `folder`, by the exporter that needs no tracing of each layer."""
    backbone = AutoModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    names = ["input_ids", "attention_mask", "token_type_ids"][: 3 if types else 2]
    axes = {0: "batch", 1: "length"}
    (folder / "onnx").mkdir()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the exporter's notes about itself
        torch.onnx.export(
            _States(backbone),
            tuple(torch.ones(2, 8, dtype=torch.int64) for _ in names),
            str(folder / "onnx" / "model.onnx"),
            dynamo=False,
            input_names=names,
            output_names=[OUTPUT],
            dynamic_axes=dict.fromkeys([*names, OUTPUT], axes),
            opset_version=opset,
        )
