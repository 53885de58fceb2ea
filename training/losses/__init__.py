"""Losses: tensors in, scalar out. No model, no data, no optimiser.

n rows, d dimensions; `log_softmax` and cosines follow the papers' equations, named in each docstring.
"""

from training.losses.contrastive import cosine_matrix, info_nce
from training.losses.distillation import cosine_distance, similarity_divergence

__all__ = ["cosine_distance", "cosine_matrix", "info_nce", "similarity_divergence"]
