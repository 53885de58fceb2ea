"""The difference between a graph's vectors and torch's, on texts that are hard to get right."""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cloze.training.bar import bar
from cloze.training.model.encoder import SHORT, SentenceEncoder
from cloze.training.model.graph_encoder import GraphEncoder

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


class Difference(NamedTuple):
    """A graph's vectors against torch's: largest component difference, relative to torch's longest vector; cosines."""

    largest: float
    mean_cosine: float
    least_cosine: float


def probes(max_tokens: int) -> list[str]:
    """Unusual texts, and texts of growing length up to one that must be cut."""
    lengths, words = [], 1
    while words < max_tokens:
        lengths.append(words)
        words += max(1, words // 2)
    texts = [" ".join(WORDS[(start + step) % len(WORDS)] for step in range(n)) for start, n in enumerate(lengths)]
    return [*ODD, *texts, "word " * (max_tokens + 10)]


def difference(encoder: SentenceEncoder, graph: GraphEncoder, texts: Sequence[str]) -> Difference:
    """Torch runs each text alone. The graph runs each alone, in a batch of similar length, and a few with the longest.

    Cosines leave out texts whose vector is almost 0, such as the empty text with denoising.
    """
    alone = _alone(encoder.embed, texts)  # (n, d)
    few = sorted({0, 1, len(texts) - 1})  # padding all texts to the longest would take long
    padded = graph.embed([texts[row] for row in few], 10**9)
    found = np.concatenate([_alone(graph.embed, texts), graph.embed(texts, 256), padded])  # (2n + few, d)
    expected = np.concatenate([alone, alone, alone[few]])
    lengths = np.linalg.norm(expected, axis=-1)
    longest = lengths.max()
    some = lengths > SHORT * longest
    cosines = (found * expected).sum(-1)[some] / (np.linalg.norm(found[some], axis=-1) * lengths[some])
    return Difference(float(np.abs(found - expected).max() / longest), float(cosines.mean()), float(cosines.min()))


def _alone(embed: Callable[[Sequence[str]], NDArray[np.float32]], texts: Sequence[str]) -> NDArray[np.float32]:
    return np.concatenate([embed([text]) for text in bar(texts, desc="comparing", unit=" texts")])
