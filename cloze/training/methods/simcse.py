"""SimCSE (arXiv:2104.08821): positives from another dropout mask, or from pairs.

One column is unsupervised; two are pairs; each further one is a hard negative of the first. An optional second loss
guesses masked words, so that the encoder forgets less of its language.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cloze.encoding.bundle import SEARCH_NAMES
from cloze.encoding.errors import TemplateError
from cloze.encoding.text import TextEncoder
from cloze.training.data.masking import mask_tokens, maskable_tokens
from cloze.training.data.stored_rows import Row
from cloze.training.errors import EncoderError, RecipeError
from cloze.training.methods.contrastive import VIEWS, FromPairs, loss_head
from cloze.training.methods.gather import totals
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.masked_words import MaskedHead
from cloze.training.model.views import Pass, View, view
from cloze.training.recipes.methods import DropoutRecipe


class MaskedWordLoss(nn.Module):
    """The mean cross entropy of the masked words of all views: the auxiliary objective of SimCSE, arXiv:2104.08821."""

    def __init__(self, encoder: SentenceEncoder, recipe: DropoutRecipe) -> None:
        super().__init__()
        if encoder.tokenizer.mask_token_id is None:
            raise EncoderError(f"{recipe.encoder!r}: its tokenizer has no mask token; write mlm_weight = 0")
        self._encoder = (encoder,)  # in a tuple, so that it is not a submodule
        self.share = recipe.masked_share
        self.head = MaskedHead.begun(recipe.encoder, encoder.backbone.config)  # as the paper's code does

    def draw(self, view: View) -> View:
        """The view with `masked_ids` and `answers` added, both (n, L); `answers` is -100 where no word is masked."""
        (encoder,) = self._encoder
        ids, tokenizer = view["input_ids"], encoder.tokenizer
        maskable = maskable_tokens(ids, tokenizer)
        masked, chosen = mask_tokens(ids, maskable, self.share, tokenizer.mask_token_id, encoder.vocabulary)
        return view | {"masked_ids": masked, "answers": ids.where(chosen, -100)}

    def forward(self, view: View) -> Tensor:
        """A view with `draw` applied -> the sum of the cross entropies of each row's masked words, (n)."""
        (encoder,) = self._encoder
        chosen = view["answers"] >= 0
        hidden = encoder.hidden(view["masked_ids"], view["attention_mask"])[chosen]  # (m, d)
        scores = self.head(hidden, encoder.word_embeddings.weight).float()
        losses = F.cross_entropy(scores, view["answers"][chosen], reduction="none")  # (m)
        return losses.new_zeros(len(chosen)).index_add(0, chosen.nonzero()[:, 0], losses)

    def mean(self, sums: Mapping[str, Tensor], views: Mapping[str, View]) -> Tensor:
        """The results of `forward` by view -> the mean over the masked words of all views and processes."""
        counts = torch.stack([(views[name]["answers"] >= 0).sum(1) for name in sums])  # (views, n)
        total_loss, words = totals(torch.stack(list(sums.values())), counts)
        return total_loss / words.clamp(min=1)


class SimCSE(FromPairs):
    """Equation 1, or with hard negatives equation 5; the head is used in training only, or kept."""

    recipe: DropoutRecipe

    tokenwise = ("masked_ids", "answers")

    def __init__(self, encoder: SentenceEncoder, recipe: DropoutRecipe) -> None:
        super().__init__(encoder, recipe)
        self.text_encoders = _text_encoders(encoder, recipe)
        self.head = loss_head(encoder, recipe)
        self.masked_word_loss = MaskedWordLoss(encoder, recipe) if recipe.mlm_weight else None

    def views(self, rows: Sequence[Row]) -> dict[str, View]:
        first, others = self.text_encoders
        columns = list(zip(*rows, strict=True))
        views = [view(others if number else first, texts) for number, texts in enumerate(columns)]
        if len(views) == 1:
            views *= 2  # they differ only by dropout
        return self.guided(dict(zip(VIEWS, views, strict=False)), columns)

    def draw(self, views: dict[str, View]) -> dict[str, View]:
        if self.masked_word_loss is None:
            return views
        return {name: self.masked_word_loss.draw(view) for name, view in views.items()}

    def examples(self, views: dict[str, View]) -> Iterator[tuple[str, Tensor, Tensor]]:
        yield from super().examples(views)
        if self.masked_word_loss is not None:
            for name, view in self.draw(views).items():
                yield f"drawn {name}, masked", view["masked_ids"], view["attention_mask"]

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


def _text_encoders(encoder: SentenceEncoder, recipe: DropoutRecipe) -> tuple[TextEncoder, ...]:
    """The text encoders of the first column and of all others. The encoder keeps their templates and those it had.

    Raises RecipeError.
    """
    kept_templates = encoder.config.templates | recipe.templates
    if encoder.continuous is not None and kept_templates:
        raise RecipeError(
            f"trained vectors replace the words of this encoder's template, so it cannot have other templates, for "
            f"{', '.join(kept_templates)}; omit them, or choose another encoder"
        )
    encoder.reconfigure(encoder.config.model_copy(update={"templates": kept_templates}))
    try:
        encoder.config.named_encoders(encoder.text_encoder)
    except TemplateError as error:
        raise RecipeError(str(error)) from error
    trained = kept_templates if len(recipe.columns) > 1 else recipe.templates
    templates = (trained.get(name, recipe.template) for name in SEARCH_NAMES)
    return tuple(encoder.make_text_encoder(template, recipe.max_tokens) for template in templates)
