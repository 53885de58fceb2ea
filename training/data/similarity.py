"""Cosines of vectors, and the rank correlation with a gold score."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

__all__ = ["cosines", "rank_correlation", "units"]


def cosines(left: NDArray[np.floating], right: NDArray[np.floating]) -> NDArray[np.float64]:
    """Two arrays (n, d) -> (n), in float64; 0 if a vector is zero or not finite."""
    left, right = left.astype(np.float64), right.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        cosine: NDArray[np.float64] = (left * right).sum(1) / (
            np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
        )
    cosine[~np.isfinite(cosine)] = 0.0
    return cosine


def rank_correlation(
    predicted: Sequence[float] | NDArray[np.floating], gold: Sequence[float] | NDArray[np.floating]
) -> float:
    """Spearman's rho x100: Pearson's correlation of ranks, ties at their average rank; 0 if one side is constant."""
    ranks = np.stack([rankdata(predicted), rankdata(gold)])
    centred = ranks - ranks.mean(1, keepdims=True)
    norms = np.linalg.norm(centred, axis=1)
    return float(100 * centred[0] @ centred[1] / norms.prod()) if norms.all() else 0.0


def units(vectors: NDArray[np.floating]) -> NDArray[np.float64]:
    """Vectors (n, d) divided by their lengths, in float64; a vector of zeros stays."""
    wide = vectors.astype(np.float64)
    lengths = np.linalg.norm(wide, axis=1, keepdims=True)
    return wide / np.where(lengths > 0, lengths, 1)
