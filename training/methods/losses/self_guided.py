"""Losses of self-guided contrastive learning (arXiv:2106.07345): sentence vectors against views of a frozen encoder."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from training.methods.losses.info_nce import cosine_matrix, info_nce

__all__ = ["SELF_GUIDED", "opt1", "opt2", "opt3", "parameter_drift", "two_sided"]


def two_sided(sentences: Tensor, views: Tensor, temperature: float) -> Tensor:
    """L_base, section 3.1: NT-Xent. Each of the 2b vectors picks its partner among the 2b - 1 others; both (b, d)."""
    everyone = torch.cat([sentences, views])  # (2b, d)
    partner = torch.arange(len(everyone), device=everyone.device).roll(len(sentences))
    return F.cross_entropy(_without_self(cosine_matrix(everyone, everyone) / temperature), partner)


def opt1(sentences: Tensor, views: Tensor, temperature: float) -> Tensor:
    """L_opt1, section 3.2: sentence i picks its view among all views and all other sentences; both (b, d)."""
    to_views = cosine_matrix(sentences, views) / temperature  # (b, b)
    to_sentences = _without_self(cosine_matrix(sentences, sentences) / temperature)  # (b, b)
    own = torch.arange(len(sentences), device=sentences.device)
    return F.cross_entropy(torch.cat([to_views, to_sentences], dim=1), own)


def opt2(sentences: Tensor, views: Tensor, temperature: float) -> Tensor:
    """L_opt2, section 3.2: sentence i picks its view among all views; both (b, d)."""
    return info_nce(sentences, views, temperature)


def opt3(sentences: Tensor, views: Tensor, temperature: float) -> Tensor:
    """L_opt3, section 3.2: sentences (b, d), views (b, v, d), averaged over sentences i and views k.

    Sentence i picks its view k among that and all views of the other sentences; its own other views are left out.
    """
    count, layers = views.shape[:2]
    logits = cosine_matrix(sentences, views.flatten(0, 1)).view(count, count, layers) / temperature
    own = torch.eye(count, dtype=torch.bool, device=logits.device)
    others = logits.masked_fill(own.unsqueeze(-1), -torch.inf).flatten(1).logsumexp(1)  # (b)
    return F.softplus(others.unsqueeze(1) - logits[own]).mean()  # -log(e^p / (e^p + e^o)) = softplus(o - p)


SELF_GUIDED = {"base": two_sided, "opt1": opt1, "opt2": opt2, "opt3": opt3}  # by the paper's superscripts


def parameter_drift(parameters: Iterable[Tensor], anchors: Iterable[Tensor]) -> Tensor:
    """L_reg, section 3.1: the sum of squared differences of all parameters, without a square root."""
    pairs = zip(parameters, anchors, strict=True)
    return torch.stack([(parameter - anchor).square().sum() for parameter, anchor in pairs]).sum()


def _without_self(logits: Tensor) -> Tensor:
    """Logits (n, n) with a diagonal of -inf."""
    return logits.masked_fill(torch.eye(len(logits), dtype=torch.bool, device=logits.device), -torch.inf)
