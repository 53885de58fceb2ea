"""A sample of the vectors of recent traffic, so that embedding drift can be seen.

It holds raw vectors and hashes of token ids, never a text.
"""

from collections.abc import Sequence
from random import Random
from statistics import fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

PER_REQUEST = 4  # so that one request with ten thousand texts does not fill the sample


class Shape(NamedTuple):
    """Statistics of the sample."""

    mean_cosine: float  # of all pairs of vectors; 1 if all have the same direction
    mean_norm: float  # before normalisation
    truncated: float  # share of the texts that were truncated


class DriftSample:
    """At most `capacity` distinct texts that were embedded recently.

    Every request contributes up to PER_REQUEST of its vectors, chosen at random, until the sample is full. Then only a
    `share` of the requests contributes, and each of their vectors replaces the oldest, so the sample covers about
    capacity / (share × PER_REQUEST) requests. A text whose token ids are already in the sample is skipped, so that a
    health check that always embeds the same text does not look like drift.

    Not thread-safe: `observe` and `shape` belong to the event loop.
    """

    def __init__(self, *, capacity: int = 256, share: float = 0.125) -> None:
        self.capacity = capacity
        self.share = share
        self._random = Random(0)
        self._texts: dict[int, tuple[NDArray[np.float32], bool]] = {}  # vector and whether cut, by hash; oldest first

    def __len__(self) -> int:
        return len(self._texts)

    def observe(self, vectors: NDArray[np.float32], ids: Sequence[Sequence[int]], cut: Sequence[int]) -> None:
        """Sample one request: its texts' raw vectors (texts, dimension), token ids, and how many tokens each lost."""
        if len(self) == self.capacity and self._random.random() >= self.share:
            return
        for row in self._random.sample(range(len(ids)), min(len(ids), PER_REQUEST)):
            key = hash(tuple(ids[row]))
            if key in self._texts:
                continue
            if len(self) == self.capacity:
                del self._texts[next(iter(self._texts))]
            self._texts[key] = (vectors[row].copy(), cut[row] > 0)  # a view would keep its whole request in memory

    def shape(self) -> Shape | None:
        """Return the statistics, None until there are two vectors.

        The mean over all pairs needs only the sum: for n unit rows u, |Σu|² = n + Σ of the cosines of all n (n - 1)
        ordered pairs.
        """
        vectors = [vector.astype(np.float64) for vector, _ in self._texts.values()]
        norms = [float(np.linalg.norm(vector)) for vector in vectors]
        units = [vector / norm for vector, norm in zip(vectors, norms, strict=True) if norm > 0]  # 0 has no direction
        count = len(units)
        if count < 2:
            return None
        total = np.sum(units, axis=0)
        cosine = (float(total @ total) - count) / (count * (count - 1))
        return Shape(cosine, fmean(norms), fmean(cut for _, cut in self._texts.values()))
