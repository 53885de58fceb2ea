"""SimCSE (arXiv:2104.08821) and S-SimCSE (arXiv:2111.11750): positives from another dropout mask, or from pairs.

One column is unsupervised; two are pairs; each further one is a hard negative of the first. An optional second loss
guesses masked words, so that the encoder forgets less of its language.

S-SimCSE draws the dropout rates anew for each pass. The paper gives neither the distribution's parameters, nor whether
attention probabilities count, nor a rescaling. Here a rate is uniform in [0, 0.2] (the mean is SimCSE's 0.1), attention
probabilities count, and a row is scaled by its own 1 / (1 - rate).
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from encoding.bundle import SEARCH_NAMES
from encoding.errors import TemplateError
from training.data.corpus import Row
from training.errors import RecipeError
from training.methods.contrastive import VIEWS, FromPairs
from training.methods.parts.loss_head import loss_head
from training.methods.parts.masked_word_loss import MaskedWordLoss
from training.methods.parts.sampled_dropout import Dropouts, draw_rates
from training.model.encoder import SentenceEncoder
from training.model.pooling import Pooling
from training.model.views import Pass, View, view
from training.recipes.methods import SimCSERecipe, SSimCSERecipe

__all__ = ["SSimCSE", "SimCSE"]


class SimCSE(FromPairs):
    """Equation 1, or with hard negatives equation 5; the head is used in training only, or kept."""

    def __init__(self, encoder: SentenceEncoder, recipe: SimCSERecipe | SSimCSERecipe) -> None:
        super().__init__(encoder, recipe)
        self.poolings = _poolings(encoder, recipe)
        self.head = loss_head(encoder, recipe)
        self.masked_word_loss = MaskedWordLoss(encoder, recipe) if recipe.mlm_weight else None

    def views(self, rows: Sequence[Row]) -> dict[str, View]:
        first, others = self.poolings
        columns = list(zip(*rows, strict=True))
        views = [view(others if at else first, texts) for at, texts in enumerate(columns)]
        if len(views) == 1:
            views *= 2  # only dropout tells them apart
        return self.guided(dict(zip(VIEWS, views, strict=False)), columns)

    def draw(self, views: dict[str, View]) -> dict[str, View]:
        if self.masked_word_loss is None:
            return views
        return {name: self.masked_word_loss.draw(view) for name, view in views.items()}

    def encode(self, name: str, view: View) -> Tensor:
        return self.encoder.vectors(view, self.pooling)  # (n, d)

    def passes(self) -> dict[str, Pass]:
        if self.masked_word_loss is None:
            return super().passes()
        return super().passes() | {"masked_words": self.guess}

    def guess(self, name: str, view: View) -> Tensor:
        """The masked-word loss of each row, (n)."""
        assert self.masked_word_loss is not None, "only `passes` of an objective with this loss leads here"
        losses: Tensor = self.masked_word_loss(view)
        return losses

    def loss(
        self,
        vectors: Mapping[str, Tensor],
        views: Mapping[str, View],
        masked_words: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        parts = self.pairs_loss(vectors.values(), views)
        if self.masked_word_loss is None or masked_words is None:
            return parts
        contrast, guessing = parts["loss"], self.masked_word_loss.mean(masked_words, views)
        loss = contrast + self.recipe.mlm_weight * guessing
        return parts | {"loss": loss, "contrast": contrast.detach(), "guessing": guessing.detach()}


class SSimCSE(SimCSE):
    """Section 3: `pass` and `op` are the paper's "w/o sd", `sentence` (section 3.2) and `sentence-op` its "w/ sd"."""

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
        """A rate for each row and operation of a pass, (n, operations)."""
        scope, ids = self.recipe.scope, view["input_ids"]
        rows = len(ids) if scope.startswith("sentence") else 1
        operations = len(self.dropouts) if scope.endswith("op") else 1
        rates = draw_rates(self.recipe.distribution, self.recipe.rates, (rows, operations))
        return rates.to(ids.device).expand(len(ids), len(self.dropouts))


def _poolings(encoder: SentenceEncoder, recipe: SimCSERecipe | SSimCSERecipe) -> tuple[Pooling, ...]:
    """Of the first column and of all others; the encoder keeps their templates, and those that it had.

    Raises RecipeError.
    """
    kept = encoder.config.templates | recipe.templates
    encoder.reconfigure(encoder.config.model_copy(update={"templates": kept}))
    try:
        encoder.config.named_encoders(encoder.pooling.text_encoder)
    except TemplateError as error:
        raise RecipeError(str(error)) from error
    templates = (recipe.templates.get(name, recipe.template) for name in SEARCH_NAMES)
    return tuple(encoder.make_pooling(template, recipe.max_tokens) for template in templates)
