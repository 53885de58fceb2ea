"""InfoNCE: each row against all other rows of the batch."""

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["cosine_matrix", "info_nce", "unit_rows"]


def cosine_matrix(left: Tensor, right: Tensor) -> Tensor:
    """Cosines of every row of `left` (n, d) with every row of `right` (m, d): (n, m)."""
    with torch.autocast(left.device.type, enabled=False):  # bf16 has 3 digits; a temperature of 0.05 needs more
        wide = torch.promote_types(left.dtype, torch.float32)
        return unit_rows(left.to(wide)) @ unit_rows(right.to(wide)).T


def info_nce(
    anchors: Tensor,
    positives: Tensor,
    temperature: float,
    negatives: Tensor | None = None,
    negative_weight: float = 0.0,
    left_out: Tensor | None = None,
) -> Tensor:
    """-log of the softmax of row i's own positive among all positives and hard negatives, averaged; all (n, d).

    With k hard negatives a row, `negatives` is (k·n, d): the first of each row, then the second of each, and so on.

    SimCSE equations 1 and 5 (arXiv:2104.08821), PromptBERT equation 4 (arXiv:2201.04337): one direction only.
    `negative_weight` is added to the logit of a row's own hard negative: the paper's alpha is its exponential.
    `left_out`, (n, n) or (n, n + k·n), is True for what a row is not compared with.
    """
    logits = cosine_matrix(anchors, positives) / temperature  # (n, n)
    own = torch.arange(len(logits), device=logits.device)
    if negatives is not None:
        hard = cosine_matrix(anchors, negatives) / temperature  # (n, k·n)
        weights = negative_weight * torch.eye(len(hard), dtype=hard.dtype, device=hard.device)  # (n, n)
        logits = torch.cat([logits, hard + weights.repeat(1, len(negatives) // len(anchors))], dim=1)
    if left_out is not None:
        logits = logits.masked_fill(left_out, -torch.inf)
    return F.cross_entropy(logits, own)


def unit_rows(rows: Tensor) -> Tensor:
    """Rows (n, d) of length 1. A row of zeros stays zero and has no gradient, which would be unbounded."""
    return F.normalize(rows.masked_fill((rows == 0).all(dim=-1, keepdim=True), 0.0), dim=-1)
