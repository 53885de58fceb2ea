"""Losses: tensors in, scalar out. No model, no data, no optimiser.

n rows, d dimensions; `log_softmax` and cosines follow the papers' equations, named in each docstring.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["cosine_distance", "cosine_matrix", "info_nce", "similarity_divergence"]


def cosine_matrix(left: Tensor, right: Tensor) -> Tensor:
    """Cosines of every row of `left` (n, d) with every row of `right` (m, d): (n, m)."""
    with torch.autocast(left.device.type, enabled=False):  # bf16 has 3 digits; a temperature of 0.05 wants more
        wide = torch.promote_types(left.dtype, torch.float32)
        return F.normalize(left.to(wide), dim=-1) @ F.normalize(right.to(wide), dim=-1).T


def info_nce(anchors: Tensor, positives: Tensor, temperature: float) -> Tensor:
    """-log of the share of row i's own positive among all positives, averaged; both (n, d).

    SimCSE equation 1 (arXiv:2104.08821), PromptBERT equation 4 (arXiv:2201.04337): one direction only.
    """
    logits = cosine_matrix(anchors, positives) / temperature  # (n, n)
    return F.cross_entropy(logits, torch.arange(len(logits), device=logits.device))


def cosine_distance(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean over rows of 1 - cosine; both (n, d)."""
    return (1 - F.cosine_similarity(student, teacher)).mean()


def similarity_divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Mean over rows of KL(teacher || student) between the softmaxes of each text's cosines with the others, (n, d).

    A text's cosine with itself is left out: it is 1 for teacher and student alike.
    """
    others = ~torch.eye(len(student), dtype=torch.bool, device=student.device)

    def log_shares(vectors: Tensor) -> Tensor:
        cosines = cosine_matrix(vectors, vectors)[others].view(len(vectors), -1)  # (n, n - 1)
        return F.log_softmax(cosines / temperature, dim=-1)

    return F.kl_div(log_shares(student), log_shares(teacher), log_target=True, reduction="batchmean")
