"""Which texts of a batch a guide takes for positives: GISTEmbed (arXiv:2402.16829)."""

from typing import Final

import torch
from torch import Tensor

from training.methods.losses.info_nce import cosine_matrix

__all__ = ["false_negatives"]

ROUNDING: Final = 1e-6  # of a cosine in fp32


def false_negatives(anchors: Tensor, positives: Tensor, margin: float, negatives: Tensor | None = None) -> Tensor:
    """True for each negative of a row whose cosine with the anchor is that of its positive less `margin`, or higher.

    (n, n + k·n) for a guide's vectors of the rows, (n, d), and of their hard negatives, (k·n, d): the columns are those
    of `info_nce`. The paper has no margin, and its loss also compares texts within a column. A text that equals the
    positive counts as a false negative, whatever rounding does to its cosine.
    """
    candidates = positives if negatives is None else torch.cat([positives, negatives])
    cosines = cosine_matrix(anchors, candidates)
    close = cosines > (cosines.diagonal() - margin - ROUNDING).unsqueeze(1)
    return close & ~torch.eye(*close.shape, dtype=torch.bool, device=close.device)
