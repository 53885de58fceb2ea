"""Losses against a teacher's vectors, and one that spreads the student's."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from training.methods.losses.info_nce import cosine_matrix

__all__ = ["cosine_distance", "similarity_divergence", "uniformity"]


def cosine_distance(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean over rows of 1 - cosine; both (n, d)."""
    return (1 - F.cosine_similarity(student, teacher)).mean()


def similarity_divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Mean over rows of KL(teacher || student) between the softmaxes of a text's cosines with the others; both (n, d).

    A text's cosine with itself is left out: it is 1 for both.
    """
    others = ~torch.eye(len(student), dtype=torch.bool, device=student.device)

    def log_shares(vectors: Tensor) -> Tensor:
        cosines = cosine_matrix(vectors, vectors)[others].view(len(vectors), -1)  # (n, n - 1)
        return F.log_softmax(cosines / temperature, dim=-1)

    return F.kl_div(log_shares(student), log_shares(teacher), log_target=True, reduction="batchmean")


def uniformity(vectors: Tensor) -> Tensor:
    """log mean exp(-2 |x - y|^2) over every two of the rows (n, d) at unit length (arXiv:2005.10242, equation 2)."""
    above = torch.ones(len(vectors), len(vectors), dtype=torch.bool, device=vectors.device).triu(1)
    distances = 2 - 2 * cosine_matrix(vectors, vectors)[above]  # squared, (n (n - 1) / 2)
    return torch.logsumexp(-2 * distances, dim=0) - math.log(len(distances))
