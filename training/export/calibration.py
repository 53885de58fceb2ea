"""Statistics of a graph's activations by channel, measured on texts of the vocabulary's own tokens.

No corpus is needed: in an encoder with layer norms a few channels have the extreme values, and these come from the
template and the special tokens more than from the words.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, helper
from onnxruntime import InferenceSession  # type: ignore[import-untyped]

from encoding.text import TextEncoder
from training.model.graph_encoder import session

__all__ = ["Channels", "Feed", "observe", "shapes", "vocabulary_feeds"]

LENGTHS: Final = (1, 2, 4, 8, 16, 32, 64, 128)  # tokens per text
TEXTS: Final = 8  # of each length
TOGETHER: Final = 8  # texts whose activations are multiplied in one product

Feed = Mapping[str, NDArray[np.generic]]


class Channels(NamedTuple):
    """Of activations (..., k): the largest magnitude of each channel, (k), and the sums of all products, (k, k)."""

    largest: NDArray[np.float32]
    products: NDArray[np.float64]


def vocabulary_feeds(text_encoder: TextEncoder) -> list[Feed]:
    """Texts of random tokens, always the same ones, in the template. Each is its own batch, so there is no padding."""
    chance = random.Random(0)
    tokens = range(text_encoder.vocabulary_size)
    texts = [text_encoder.decode(chance.choices(tokens, k=length)) for length in LENGTHS for _ in range(TEXTS)]
    return [text_encoder.batch([text])._asdict() for text in texts]


def observe(model: ModelProto, names: Sequence[str], feeds: Sequence[Feed]) -> dict[str, Channels]:
    """The channels of the activations (..., k) called `names`."""
    runner = _showing(model, names)
    channels: dict[str, Channels] = {}
    for first in range(0, len(feeds), TOGETHER):
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
    found = _showing(model, names).run(names, dict(feed)) if names else []  # no name means every output
    return {name: array.shape for name, array in zip(names, found, strict=True)}


def _showing(model: ModelProto, names: Sequence[str]) -> InferenceSession:
    """A session of the model whose outputs include the activations called `names`."""
    shown = ModelProto()
    shown.CopyFrom(model)
    shown.graph.output.extend(helper.make_tensor_value_info(name, 1, None) for name in names)
    return session(shown.SerializeToString())
