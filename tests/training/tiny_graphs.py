"""Traced graphs of the tiny encoders. Tracing takes seconds, and tests of all workers start from the same graphs."""

from functools import partial
from hashlib import sha256
from pathlib import Path

import onnx
import pytest
from made_once import made_once
from onnx import ModelProto

from cloze.training.export import bundle as exporting
from cloze.training.export.graph import trace
from cloze.training.export.layers import Form
from cloze.training.export.parity import Difference
from cloze.training.model.encoder import SentenceEncoder


def traced(encoder: SentenceEncoder, folder: Path, form: Form) -> ModelProto:
    """The graph of an encoder that has the weights of `folder`, without a head or a continuous template."""
    config = encoder.config
    parts = [config.template, config.pooling]
    if config.denoising:  # only then does the graph have a bias for each length
        parts += [f"{config.max_tokens} {config.final_period}"]
    name = sha256("\n".join(parts).encode()).hexdigest()[:16]
    path = folder.with_name(f"{folder.name}-{form}-{name}.onnx")
    return onnx.load(made_once(path, partial(_save, encoder, form)))


def export_graphs_of(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Let exports write the graphs of `folder`, whatever the weights: for tests of what else a bundle holds."""

    def remembered(encoder: SentenceEncoder, form: Form) -> ModelProto:
        own = SentenceEncoder.load(str(folder), **encoder.config.model_dump())  # other tests need its very weights
        return traced(own, folder, form)

    patch.setattr(exporting, "trace", remembered)
    patch.setattr(exporting, "difference", lambda *_: Difference(0.0, 1.0, 1.0))


def _save(encoder: SentenceEncoder, form: Form, path: Path) -> None:
    onnx.save(trace(encoder, form), path)
