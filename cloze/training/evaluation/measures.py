"""Cosines of vectors, and how well they agree with gold scores. Suites and the choice of a checkpoint share them.

scipy and scikit-learn take a second or two to import, so commands that only compare vectors do not import them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cloze.training.errors import EncoderError

Embed: TypeAlias = Callable[[Sequence[str]], NDArray[np.float32]]
"""Texts (n) -> vectors (n, d)."""

RESAMPLES: Final = 2000
COSINES: Final = 2**23  # cosines of queries with all texts in memory at once: 64 MB

Numbers: TypeAlias = Sequence[float] | NDArray[np.floating]


@dataclass(frozen=True)
class Pairs:
    """`gold[i]` is the similarity of `left[i]` and `right[i]`, on any scale that grows with similarity."""

    left: list[str]
    right: list[str]
    gold: list[float]

    def __len__(self) -> int:
        return len(self.gold)

    def __add__(self, other: Self) -> "Pairs":
        return Pairs(self.left + other.left, self.right + other.right, self.gold + other.gold)


def cosines(left: NDArray[np.floating], right: NDArray[np.floating]) -> NDArray[np.float64]:
    """Two arrays (n, d) -> (n), in float64; 0 if a vector is zero or not finite."""
    left, right = left.astype(np.float64), right.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        cosine: NDArray[np.float64] = (left * right).sum(1) / (
            np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
        )
    cosine[~np.isfinite(cosine)] = 0.0
    return cosine


def rank_correlation(predicted: Numbers, gold: Numbers) -> float:
    """Spearman's rho x100: Pearson's correlation of ranks, ties at their average rank; 0 if one side is constant."""
    from scipy.stats import rankdata

    ranks = np.stack([rankdata(predicted), rankdata(gold)])
    centred = ranks - ranks.mean(1, keepdims=True)
    norms = np.linalg.norm(centred, axis=1)
    return float(100 * centred[0] @ centred[1] / norms.prod()) if norms.all() else 0.0


def in_columns(embed: Embed, *columns: Sequence[str]) -> list[NDArray[np.float32]]:
    """The vectors (n, d) of the texts of each column; each distinct text is embedded once."""
    texts = sorted(set(chain.from_iterable(columns)))
    places = {text: place for place, text in enumerate(texts)}
    vectors = embed(texts)
    return [vectors[[places[text] for text in column]] for column in columns]


def cosines_of(embed: Embed, pairs: Pairs) -> NDArray[np.float64]:
    """The cosine of each pair (n)."""
    return cosines(*in_columns(embed, pairs.left, pairs.right))


def average_precision(predicted: Numbers, gold: Numbers) -> float:
    """Average precision x100 of ranking the items whose gold is 1 above those whose gold is 0; 0 if none is 1."""
    from sklearn.metrics import average_precision_score  # type: ignore[import-untyped]

    return float(100 * average_precision_score(gold, predicted)) if np.any(gold) else 0.0


def alignment(left: NDArray[np.floating], right: NDArray[np.floating]) -> NDArray[np.float64]:
    """Squared distances (n) of the unit vectors of positive pairs (n, d); their mean is the figure of the papers.

    Alignment and uniformity are those of Wang and Isola (arXiv:2005.10242).
    """
    distances: NDArray[np.float64] = np.square(units(left) - units(right)).sum(1)
    return distances


def uniformity(vectors: NDArray[np.floating]) -> float:
    """log mean exp(-2 |x - y|^2) over all pairs of the unit vectors (n, d); lower is more uniform."""
    from scipy.spatial.distance import pdist

    return float(np.log(np.mean(np.exp(-2 * pdist(units(vectors), "sqeuclidean")))))


def mean_interval(values: NDArray[np.float64], seed: int = 0) -> tuple[float, float]:
    """The 95 % bootstrap interval of the mean of `values` (n)."""
    from scipy.stats import bootstrap

    bounds = bootstrap(
        (values,), np.mean, n_resamples=RESAMPLES, method="percentile", rng=np.random.default_rng(seed), batch=100
    ).confidence_interval
    return float(bounds.low), float(bounds.high)


def nearest(
    queries: NDArray[np.floating], texts: NDArray[np.floating], depth: int
) -> Iterator[tuple[NDArray[np.floating], NDArray[np.intp]]]:
    """Cosines and indices of each query's `depth` nearest texts, nearest first; both sides have unit vectors.

    Texts with equal cosines stay in their order. The memory does not depend on the number of queries.
    """
    size = max(1, COSINES // max(1, len(texts)))
    for start in range(0, len(queries), size):
        for row in queries[start : start + size] @ texts.T:
            chosen = _largest(row, depth)
            best = chosen[np.argsort(-row[chosen], kind="stable")]
            yield row[best], best


def _largest(row: NDArray[np.floating], count: int) -> NDArray[np.intp]:
    """The places of the `count` largest numbers, in order. Among equal numbers the first ones count."""
    if count >= len(row):
        return np.arange(len(row))
    threshold = np.partition(row, len(row) - count)[len(row) - count]
    above = row > threshold
    equal = np.flatnonzero(row == threshold)[: count - above.sum()]
    above[equal] = True
    return np.flatnonzero(above)


def units(vectors: NDArray[np.floating]) -> NDArray[np.float64]:
    """Vectors (n, d) divided by their lengths, in float64; zeros stay zeros. Raises EncoderError for NaN."""
    wide = vectors.astype(np.float64)
    if not np.isfinite(wide).all():
        raise EncoderError("the vectors are not finite: the weights are damaged; train or get the model again")
    lengths = np.linalg.norm(wide, axis=1, keepdims=True)
    return wide / np.where(lengths > 0, lengths, 1)
