"""Whitening (arXiv:2103.15316): vectors whose dimensions are uncorrelated and vary equally."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["whiten"]

SMALLEST: Final = 1e-12  # singular value, relative to the largest, of a direction that is kept


def whiten(vectors: NDArray[np.floating]) -> NDArray[np.float64]:
    """Vectors (n, d) with mean 0 and the identity as covariance, in the directions in which they differ."""
    centred = vectors.astype(np.float64) - vectors.mean(0, dtype=np.float64)
    directions, sizes, _ = np.linalg.svd(np.cov(centred.T))
    kept = sizes > SMALLEST * sizes[0]
    whitened: NDArray[np.float64] = centred @ directions[:, kept] / np.sqrt(sizes[kept])
    return whitened
