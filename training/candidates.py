"""Which graph is shipped for a precision: fp32 the faster of two, fp16 the fused one, int8 the quantised plain one."""

import time
from typing import Final

import numpy as np
from onnx import ModelProto
from rich.console import Console

from encoding.bundle import INPUTS, Precision
from training.encoder import SentenceEncoder
from training.errors import ExportError
from training.graph import fuse, halve
from training.quantise import quantise
from training.runner import provider, session

__all__ = ["make_graph", "race"]

SHAPES: Final = ((1, 16), (16, 32))  # texts and tokens on which two graphs race
ROUNDS: Final = 8


def make_graph(
    precision: Precision, plain: ModelProto, encoder: SentenceEncoder, console: Console
) -> tuple[ModelProto, str]:
    """A graph, and in a few words what it is."""
    if precision == "int8":
        return quantise(plain), "weights in blocks of 8 bits"
    try:
        fused = fuse(plain, encoder)
    except ExportError as error:
        console.print(f"{precision}: kept plain; {error}")
        return (plain, "plain") if precision == "fp32" else (halve(plain), "plain")
    if precision == "fp16":
        return halve(fused), "fused"
    ratio = race(plain, fused)
    name = "fused" if ratio > 1 else "plain"
    console.print(f"fp32: the fused graph runs at {ratio:.2f} of the plain one's speed on {provider()}; {name} is kept")
    return (fused if ratio > 1 else plain), name


def race(first: ModelProto, second: ModelProto) -> float:
    """How many times faster the second graph is: best times, taken in turn, over a small and a large batch."""
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
