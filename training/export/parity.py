"""The difference between a graph's vectors and torch's, on texts that are hard to get right."""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from training.model.encoder import SentenceEncoder
from training.model.graph_encoder import GraphEncoder

__all__ = ["difference", "probes"]

ODD: Final = (
    "",
    "a",
    "a.",
    "[MASK] [SEP] [CLS] [PAD] [UNK]",
    "<mask> </s> <s>",
    'She said "no", and left.',
    "naïve 日本語 🙂 \u200b",
)
WORDS: Final = ("rain", "fell", "on", "the", "old", "city", "while", "two", "dogs", "ran", "across", "a", "field")


def probes(max_tokens: int) -> list[str]:
    """Unusual texts, and texts of growing length up to one that must be cut."""
    lengths, words = [], 1
    while words < max_tokens:
        lengths.append(words)
        words += max(1, words // 2)
    texts = [" ".join(WORDS[(start + step) % len(WORDS)] for step in range(n)) for start, n in enumerate(lengths)]
    return [*ODD, *texts, "word " * (max_tokens + 10)]


def difference(encoder: SentenceEncoder, graph: GraphEncoder, texts: Sequence[str]) -> float:
    """The largest absolute difference from torch, relative to torch's longest vector.

    Torch runs each text alone. The graph runs it alone, in a batch of similar length, and in a batch with the longest.
    """
    expected = _alone(encoder.embed, texts)
    runs = (_alone(graph.embed, texts), graph.embed(texts, 256), graph.embed(texts, 10**9))
    largest = max(np.abs(vectors - expected).max() for vectors in runs)
    return float(largest / np.linalg.norm(expected, axis=1).max())


def _alone(embed: Callable[[Sequence[str]], NDArray[np.float32]], texts: Sequence[str]) -> NDArray[np.float32]:
    return np.concatenate([embed([text]) for text in texts])
