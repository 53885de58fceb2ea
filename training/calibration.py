"""How large a graph's activations grow, by channel, found on texts made of the vocabulary's own tokens.

No corpus is needed: in an encoder with layer norms the extremes stand in a few channels, and come from the template's
and the special tokens more than from the words.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, helper

from encoding.text import TextEncoder
from training.runner import session

__all__ = ["Feed", "largest_magnitudes", "vocabulary_feeds"]

LENGTHS: Final = (1, 2, 4, 8, 16, 32, 64, 128)  # tokens of a text
TEXTS: Final = 8  # of each length

Feed = Mapping[str, NDArray[np.generic]]


def vocabulary_feeds(text_encoder: TextEncoder) -> list[Feed]:
    """Texts of random tokens, always the same ones, each in its template and in a batch of its own: no padding."""
    chance = random.Random(0)
    tokens = range(text_encoder.vocabulary_size)
    texts = [text_encoder.decode(chance.choices(tokens, k=length)) for length in LENGTHS for _ in range(TEXTS)]
    return [text_encoder.batch([text])._asdict() for text in texts]


def largest_magnitudes(
    model: ModelProto, names: Sequence[str], feeds: Iterable[Feed]
) -> dict[str, NDArray[np.float32]]:
    """The largest |x| of each channel, (d), of the activations (..., d) called `names`."""
    shown = ModelProto()
    shown.CopyFrom(model)
    shown.graph.output.extend(helper.make_tensor_value_info(name, 1, None) for name in names)
    runner = session(shown.SerializeToString())
    largest: dict[str, NDArray[np.float32]] = {}
    for feed in feeds:
        for name, found in zip(names, runner.run(names, dict(feed)), strict=True):
            highest = np.abs(found).reshape(-1, found.shape[-1]).max(0)
            largest[name] = np.maximum(largest.get(name, highest), highest)
    return largest
