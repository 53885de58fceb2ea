"""The loss of a discriminator that tells edited tokens from kept ones."""

import torch.nn.functional as F
from torch import Tensor

__all__ = ["edit_detection"]


def edit_detection(scores: Tensor, edited: Tensor) -> Tensor:
    """Cross entropy of scores (..., 2) with labels (...), 0 kept and 1 edited: the detection loss of DiffCSE section 3.

    This is the mean over all positions, padding included, as in the authors' code. The paper (arXiv:2204.10298) writes
    a sum, but its weight of 0.005 is that of the mean.
    """
    return F.cross_entropy(scores.float().flatten(0, -2), edited.flatten())
