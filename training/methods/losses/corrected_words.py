"""The loss of a language model that restores the original words of an edited sentence."""

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["corrected_words"]


def corrected_words(scores: Tensor, copied: Tensor, seen: Tensor, answers: Tensor) -> Tensor:
    """-log of the probability of each original word in `answers` (m), given the edited sentence's words `seen` (m).

    A token is copied with the probability sigmoid(copied), (m), and otherwise drawn from the softmax of its scores
    (m, vocabulary). This is the copy mechanism of ELECTRA's all-tokens MLM (arXiv:2003.10555 section 3.4), which
    COCO-LM's corrective language modelling (arXiv:2102.08473) starts from. DiffCSE Table 3 (arXiv:2204.10298) names the
    task and does not say more.
    """
    drawn = F.logsigmoid(-copied) - F.cross_entropy(scores, answers, reduction="none")
    both = torch.logaddexp(F.logsigmoid(copied), drawn)
    return -torch.where(seen == answers, both, drawn)
