"""Losses of scored pairs: a pair with a higher score has to be more similar than one with a lower score."""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from training.methods.losses.info_nce import unit_rows

__all__ = ["PAIR_SIMILARITIES", "angle_similarity", "cosent", "cosine_similarity"]


def cosent(similarities: Tensor, scores: Tensor, scale: float) -> Tensor:
    """log(1 + sum of exp(scale (s_j - s_i)) over all i, j where pair i has a higher score than pair j); both (n).

    CoSENT (Huang et al., 2024, doi:10.1109/TASLP.2024.3402087). Equal scores are not compared, so a batch in which all
    are equal costs 0.
    """
    gaps = scale * (similarities.unsqueeze(0) - similarities.unsqueeze(1))  # (n, n): s_j - s_i in row i, column j
    compared = gaps[scores.unsqueeze(1) > scores.unsqueeze(0)]
    return torch.cat([gaps.new_zeros(1), compared]).logsumexp(0)  # e^0 = 1


def cosine_similarity(first: Tensor, second: Tensor) -> Tensor:
    """Cosines (n) of the rows of two tensors (n, d)."""
    return (unit_rows(first) * unit_rows(second)).sum(1)


def angle_similarity(first: Tensor, second: Tensor) -> Tensor:
    """AnglE's similarity (n) of rows (n, d), each read as d / 2 complex numbers: real parts first, then imaginary ones.

    |Re q + Im q|, where q is the sum of z conj(w) over the numbers z and w of two rows of length 1 (arXiv:2309.12871,
    as its authors' code computes it). Near 1 and -1 the gradient of a cosine disappears, and that of Im q does not.
    """
    first, second = unit_rows(first), unit_rows(second)
    real, imaginary = first.chunk(2, dim=1)
    other_real, other_imaginary = second.chunk(2, dim=1)
    cosines = (first * second).sum(1)
    sines = (imaginary * other_real - real * other_imaginary).sum(1)
    return (cosines + sines).abs()


PAIR_SIMILARITIES: Final[dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "cosent": cosine_similarity,
    "angle": angle_similarity,
}
"""What each loss ranks."""
