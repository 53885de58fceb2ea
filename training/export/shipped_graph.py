"""The graph that is shipped for a precision: the faster of two for fp32, fused for fp16, quantised for int8."""

import time
from collections.abc import Callable
from typing import Final, Literal

import numpy as np
from onnx import ModelProto
from rich.console import Console

from encoding.bundle import INPUTS, Precision
from training.errors import ExportError
from training.export.calibration import vocabulary_feeds
from training.export.graph import fuse, halve
from training.export.layers import Form, one_row, writable
from training.export.quantise import quantise
from training.model.encoder import SentenceEncoder
from training.model.graph_encoder import provider, session

__all__ = ["make_graph", "race"]

SHAPES: Final = ((1, 16), (16, 32))  # texts and tokens on which two graphs race
ROUNDS: Final = 8

Traced = Callable[[Form | Literal["plain"]], ModelProto]


def make_graph(
    precision: Precision, traced: Traced, encoder: SentenceEncoder, console: Console
) -> tuple[ModelProto, str]:
    """A graph and its short description; `traced` gives the encoder's graph in a form of `training.export.layers`."""
    written = writable(encoder.backbone)
    if precision == "int8":
        # one row per text costs almost nothing in fp32, and the last layer causes a third of the loss
        feeds = vocabulary_feeds(encoder.pooling.text_encoder)
        model = quantise(traced("exact" if written else "plain"), feeds, one_row(encoder))
        return model, "weights in 7 bits by column, activations in 8 bits"
    if not written:
        plain = traced("plain")
        return (plain if precision == "fp32" else halve(plain)), "plain"
    try:
        fused = fuse(traced("fusible"), encoder)
    except ExportError as error:
        console.print(f"{precision}: not fused; {error}")
        return (traced("rows"), "rows") if precision == "fp32" else (halve(traced("fusible")), "plain")
    if precision == "fp16":
        return halve(fused), "fused"
    rows = traced("rows")
    ratio = race(fused, rows)
    name = "rows" if ratio > 1 else "fused"
    console.print(
        f"fp32: the graph of rows runs at {ratio:.2f} times the speed of the fused one on {provider()}; {name} is kept"
    )
    return (rows if ratio > 1 else fused), name


def race(first: ModelProto, second: ModelProto) -> float:
    """How many times faster the second graph is: best times of alternating runs, for a small and a large batch."""
    runners = [session(model.SerializeToString()) for model in (first, second)]
    logarithms = []
    for texts, length in SHAPES:
        ones = np.ones((texts, length), dtype=np.int64)
        batch = dict(zip(INPUTS, (ones, ones), strict=True))
        best = [float("inf")] * 2
        for _ in range(ROUNDS):
            for index, runner in enumerate(runners):
                began = time.perf_counter()
                runner.run(None, batch)
                best[index] = min(best[index], time.perf_counter() - began)
        logarithms.append(np.log(best[0] / best[1]))
    return float(np.exp(np.mean(logarithms)))
