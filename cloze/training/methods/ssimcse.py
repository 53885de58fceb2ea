"""S-SimCSE (arXiv:2111.11750): SimCSE with dropout rates drawn from a distribution, one rate per row.

Rates are drawn anew for each view. The paper gives neither the distribution's parameters nor a rescaling. Here a rate
is uniform in [0, 0.2] (the mean is SimCSE's 0.1), and a row is scaled by its own 1 / (1 - rate). Section 3.2 of the
paper leaves attention probabilities out.

A backbone's dropout modules are replaced in place. They have no weights, so checkpoints and exports are not affected;
in evaluation they do nothing.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from torch.distributions import Beta
from torch.special import ndtr, ndtri
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from cloze.training.errors import EncoderError
from cloze.training.methods.gather import of_first
from cloze.training.methods.simcse import SimCSE
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.pretrained import quiet
from cloze.training.model.views import View
from cloze.training.recipes.methods import Distribution, SSimCSERecipe

_HIGHEST: Final = 0.99  # a beta distribution reaches 1, which would drop a complete row
_ATTENTION: Final = "sampled_dropout"


def draw_rates(distribution: Distribution, numbers: Sequence[float], shape: Sequence[int]) -> Tensor:
    """Independent dropout rates, float32 and below 1, on the CPU."""
    match distribution, numbers:
        case "fixed", (rate,):
            rates = torch.full(shape, rate)
        case "uniform", (low, high):
            rates = torch.empty(shape).uniform_(low, high)
        case "beta", (a, b):
            rates = Beta(a, b).sample(torch.Size(shape))
        case "truncnormal", (mean, spread, low, high):
            below, above = ndtr((torch.tensor([low, high], dtype=torch.float64) - mean) / spread).tolist()
            normal = ndtri(torch.empty(shape, dtype=torch.float64).uniform_(below, above))
            rates = (mean + spread * normal).clamp(low, high)
        case "choice", _:
            rates = torch.tensor(numbers)[torch.randint(len(numbers), shape)]
    return rates.float().clamp(max=_HIGHEST)


class SampledDropout(nn.Dropout):
    """Inverted dropout: row i has rate `rates[i]` and is scaled by 1 / (1 - rates[i]). Without rates: nn.Dropout."""

    rates: Tensor | None = None  # (n)

    def forward(self, rows: Tensor) -> Tensor:
        """(n, ...) -> (n, ...)"""
        if not self.training or self.rates is None:
            return super().forward(rows)
        kept_shares = 1 - self.rates.view(-1, *[1] * (rows.dim() - 1))  # (n, 1, ...)
        return rows * torch.empty_like(rows).bernoulli_(kept_shares).div_(kept_shares)


class Dropouts:
    """The sampled dropout operations of a backbone, in the order of its modules."""

    def __init__(self, modules: Sequence[SampledDropout]) -> None:
        self.modules = tuple(modules)

    def __len__(self) -> int:
        return len(self.modules)

    @classmethod
    def install(cls, backbone: PreTrainedModel, attention: bool = True) -> Self:
        """Replace the dropout modules of `backbone`, those of attention probabilities only if `attention` is True.

        Raises EncoderError if the attention modules cannot be found.
        """
        places = [
            (parent, name)
            for parent in backbone.modules()
            for name, child in parent.named_children()
            if isinstance(child, nn.Dropout) and (attention or not _attends(parent))
        ]
        if attention:
            if not any(_attends(parent) for parent, _ in places):
                raise EncoderError(
                    f"the attention dropout of a {backbone.config.model_type!r} model is not supported; "
                    "write attention_dropout = false, or choose a BERT or RoBERTa model"
                )
            with quiet():  # MPNet warns that it has its own attention; its dropout is still a module
                backbone.set_attn_implementation(_ATTENTION)
        for parent, name in places:
            setattr(parent, name, SampledDropout(getattr(parent, name).p))
        return cls([getattr(parent, name) for parent, name in places])

    @contextmanager
    def at(self, rates: Tensor) -> Iterator[None]:
        """Use rates (n, len(self)) within the context: one row per sentence, one column per operation."""
        for module, column in zip(self.modules, rates.unbind(1), strict=True):
            module.rates = column
        try:
            yield
        finally:
            for module in self.modules:
                module.rates = None


def _attends(module: nn.Module) -> bool:
    """Whether a module's dropout is applied to attention probabilities, by its name in BERT, RoBERTa and similar."""
    return type(module).__name__.endswith("SelfAttention")


def _attend(
    module: Any,  # an attention module of transformers with a `dropout`
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **keywords: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention with the module's own dropout on its probabilities (n, heads, L, L). In evaluation mode, sdpa.

    A fused kernel has one rate for all rows; `dropout` is that rate and is not used here.
    """
    if not module.training:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **keywords)
    scores = query @ key.transpose(2, 3) * (query.size(-1) ** -0.5 if scaling is None else scaling)
    if attention_mask is not None:  # True where a token may be attended to
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    probabilities = module.dropout(scores.softmax(dim=-1))
    return (probabilities.to(value.dtype) @ value).transpose(1, 2).contiguous(), probabilities


AttentionInterface.register(_ATTENTION, _attend)
AttentionMaskInterface.register(_ATTENTION, sdpa_mask)


class SSimCSE(SimCSE):
    """Section 3: `pass` and `op` are the paper's "w/o sd", `sentence` (section 3.2) and `sentence-op` its "w/ sd"."""

    recipe: SSimCSERecipe

    def __init__(self, encoder: SentenceEncoder, recipe: SSimCSERecipe) -> None:
        super().__init__(encoder, recipe)
        self.dropouts = Dropouts.install(encoder.backbone, recipe.attention_dropout)

    def draw(self, views: dict[str, View]) -> dict[str, View]:
        return {name: view | {"rates": self._rates(view)} for name, view in super().draw(views).items()}

    def encode(self, name: str, view: View) -> Tensor:
        with self.dropouts.at(view["rates"]):
            return super().encode(name, view)

    def guess(self, name: str, view: View) -> Tensor:
        with self.dropouts.at(view["rates"]):
            return super().guess(name, view)

    def _rates(self, view: View) -> Tensor:
        """A rate for each row of a view and each operation, (n, operations)."""
        scope, ids = self.recipe.scope, view["input_ids"]
        rows = len(ids) if scope.startswith("sentence") else 1
        operations = len(self.dropouts) if scope.endswith("op") else 1
        rates = draw_rates(self.recipe.distribution, self.recipe.rates, (rows, operations))
        rates = rates if scope.startswith("sentence") else of_first(rates, ids.device)
        return rates.to(ids.device).expand(len(ids), len(self.dropouts))
