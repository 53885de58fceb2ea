"""Losses: tensors in, scalar out, or a value per token. No model, no data, no optimiser.

n is the number of rows and d the dimension. Each docstring names the paper's equation.
"""

from training.methods.losses.corrected_words import corrected_words
from training.methods.losses.distillation import cosine_distance, similarity_divergence, uniformity
from training.methods.losses.edit_detection import edit_detection
from training.methods.losses.false_negatives import false_negatives
from training.methods.losses.info_nce import cosine_matrix, info_nce
from training.methods.losses.score_ranking import PAIR_SIMILARITIES, angle_similarity, cosent
from training.methods.losses.self_guided import SELF_GUIDED, parameter_drift

__all__ = [
    "PAIR_SIMILARITIES",
    "SELF_GUIDED",
    "angle_similarity",
    "corrected_words",
    "cosent",
    "cosine_distance",
    "cosine_matrix",
    "edit_detection",
    "false_negatives",
    "info_nce",
    "parameter_drift",
    "similarity_divergence",
    "uniformity",
]
