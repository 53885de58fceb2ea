"""Losses: tensors in, scalar out, or a value per token. No model, no data, no optimiser.

n is the number of rows and d the dimension. Each docstring names the paper's equation.
"""

from collections.abc import Callable, Iterable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

ROUNDING: Final = 1e-6  # rounding error of a cosine in fp32


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
    """Mean over rows i of -log softmax of row i's own positive among all positives and hard negatives; all (n, d).

    With k hard negatives per row, `negatives` is (k·n, d): the first of each row, then the second of each, and so on.

    SimCSE equations 1 and 5 (arXiv:2104.08821), PromptBERT equation 4 (arXiv:2201.04337): one direction only.
    `negative_weight` is added to the logit of a row's own hard negative: the paper's alpha is its exponential.
    `left_out`, (n, n) or (n, n + k·n), is True where a row is not compared with a column's text.
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


def false_negatives(anchors: Tensor, positives: Tensor, margin: float, negatives: Tensor | None = None) -> Tensor:
    """Which negatives of a batch are positives according to a guide: GISTEmbed (arXiv:2402.16829).

    The arguments are the guide's vectors of the rows, (n, d), and of their hard negatives, (k·n, d). The result is
    (n, n + k·n), with the columns of `info_nce`. It is True for a negative whose cosine with the anchor is at least the
    positive's cosine minus `margin`. The paper has no margin, and its loss also compares texts within a column. A text
    that equals the positive counts as a false negative, whatever rounding does to its cosine.
    """
    candidates = positives if negatives is None else torch.cat([positives, negatives])
    cosines = cosine_matrix(anchors, candidates)
    close = cosines > (cosines.diagonal() - margin - ROUNDING).unsqueeze(1)
    return close & ~torch.eye(*close.shape, dtype=torch.bool, device=close.device)


def two_sided(sentences: Tensor, views: Tensor, temperature: float) -> Tensor:
    """Self-guided contrastive learning (arXiv:2106.07345): sentence vectors against views of a frozen encoder.

    L_base, section 3.1: NT-Xent. Each of the 2b vectors picks its partner among the 2b - 1 others; both (b, d).
    `opt1`, `opt3` and `parameter_drift` are from the same paper.
    """
    everyone = torch.cat([sentences, views])  # (2b, d)
    partner = torch.arange(len(everyone), device=everyone.device).roll(len(sentences))
    return F.cross_entropy(_without_self(cosine_matrix(everyone, everyone) / temperature), partner)


def opt1(sentences: Tensor, views: Tensor, temperature: float) -> Tensor:
    """L_opt1, section 3.2: sentence i picks its view among all views and all other sentences; both (b, d)."""
    to_views = cosine_matrix(sentences, views) / temperature  # (b, b)
    to_sentences = _without_self(cosine_matrix(sentences, sentences) / temperature)  # (b, b)
    own = torch.arange(len(sentences), device=sentences.device)
    return F.cross_entropy(torch.cat([to_views, to_sentences], dim=1), own)


def opt3(sentences: Tensor, views: Tensor, temperature: float) -> Tensor:
    """L_opt3, section 3.2: sentences (b, d), views (b, v, d), averaged over sentences i and views k.

    Sentence i picks its view k among that and all views of the other sentences; its own other views are left out.
    """
    count, layers = views.shape[:2]
    logits = cosine_matrix(sentences, views.flatten(0, 1)).view(count, count, layers) / temperature
    own = torch.eye(count, dtype=torch.bool, device=logits.device)
    others = logits.masked_fill(own.unsqueeze(-1), -torch.inf).flatten(1).logsumexp(1)  # (b)
    return F.softplus(others.unsqueeze(1) - logits[own]).mean()  # -log(e^p / (e^p + e^o)) = softplus(o - p)


SELF_GUIDED: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {  # by the paper's superscripts
    "base": two_sided,
    "opt1": opt1,
    "opt2": info_nce,
    "opt3": opt3,
}


def parameter_drift(parameters: Iterable[Tensor], anchors: Iterable[Tensor]) -> Tensor:
    """L_reg, section 3.1: the sum of squared differences of all parameters, without a square root."""
    pairs = zip(parameters, anchors, strict=True)
    return torch.stack([(parameter - anchor).square().sum() for parameter, anchor in pairs]).sum()


def _without_self(logits: Tensor) -> Tensor:
    """Logits (n, n) with a diagonal of -inf."""
    return logits.masked_fill(torch.eye(len(logits), dtype=torch.bool, device=logits.device), -torch.inf)


def cosent(similarities: Tensor, scores: Tensor, scale: float) -> Tensor:
    """log(1 + sum of exp(scale (s_j - s_i)) over all i, j where pair i has a higher score than pair j); both (n).

    CoSENT (Huang et al., 2024, doi:10.1109/TASLP.2024.3402087). Pairs with equal scores are not compared, so a batch
    of equal scores has a loss of 0.
    """
    gaps = scale * (similarities.unsqueeze(0) - similarities.unsqueeze(1))  # (n, n): s_j - s_i in row i, column j
    compared = gaps[scores.unsqueeze(1) > scores.unsqueeze(0)]
    return torch.cat([gaps.new_zeros(1), compared]).logsumexp(0)  # e^0 = 1


def cosine_similarity(first: Tensor, second: Tensor) -> Tensor:
    """Cosines (n) of the rows of two tensors (n, d)."""
    return (unit_rows(first) * unit_rows(second)).sum(1)


def cosine_distance(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean over rows of 1 - cosine; both (n, d)."""
    return (1 - F.cosine_similarity(student, teacher)).mean()


def similarity_divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Mean over rows of KL(teacher || student) between the softmaxes of a text's cosines with the others; both (n, d).

    A text's cosine with itself is left out: it is 1 for both.
    """
    off_diagonal = ~torch.eye(len(student), dtype=torch.bool, device=student.device)
    own, taught = (
        cosine_matrix(vectors, vectors)[off_diagonal].view(len(vectors), -1) for vectors in (student, teacher)
    )
    return ranking_divergence(own, taught, temperature)  # both (n, n - 1)


def ranking_divergence(similarities: Tensor, judged: Tensor, temperature: float) -> Tensor:
    """Mean over queries of KL(judge || student) between the softmaxes over m documents of two tables (n, m)."""
    log_shares = F.log_softmax(similarities / temperature, dim=-1)
    return F.kl_div(log_shares, F.log_softmax(judged / temperature, dim=-1), log_target=True, reduction="batchmean")


def edit_detection(scores: Tensor, edited: Tensor) -> Tensor:
    """Cross entropy of scores (..., 2) with labels (...), 0 kept and 1 edited: the detection loss of DiffCSE section 3.

    This is the mean over all positions, padding included, as in the authors' code. The paper (arXiv:2204.10298) writes
    a sum, but its weight of 0.005 applies to the mean.
    """
    return F.cross_entropy(scores.float().flatten(0, -2), edited.flatten())


def corrected_words(scores: Tensor, copied: Tensor, edited_words: Tensor, answers: Tensor) -> Tensor:
    """-log of the probability of each original word in `answers` (m), given the `edited_words` (m).

    A token is copied with the probability sigmoid(copied), (m), and otherwise drawn from the softmax of its scores
    (m, vocabulary). This is the copy mechanism of ELECTRA's all-tokens MLM (arXiv:2003.10555 section 3.4), which
    COCO-LM's corrective language modelling (arXiv:2102.08473) starts from. DiffCSE Table 3 (arXiv:2204.10298) only
    names the task.
    """
    log_drawn = F.logsigmoid(-copied) - F.cross_entropy(scores, answers, reduction="none")
    log_either = torch.logaddexp(F.logsigmoid(copied), log_drawn)
    return -torch.where(edited_words == answers, log_either, log_drawn)
