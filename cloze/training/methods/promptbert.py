"""PromptBERT (arXiv:2201.04337 section 4.3): [MASK] vectors of sentences in templates.

Three modes put one sentence into two templates, as in the rows of the paper's Table 8: the `same` template twice, where
dropout tells the views apart; `different` templates; and `denoised`: different templates, each minus the vector of the
template alone. `supervised` takes pairs, with or without a hard negative, in one template, denoised.
"""

from collections.abc import Hashable, Mapping, Sequence

from torch import Tensor

from cloze.training.data.corpus import Row
from cloze.training.methods.contrastive import VIEWS, FromPairs, loss_head
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.views import View, view
from cloze.training.recipes.methods import PromptBERTRecipe

__all__ = ["PromptBERT"]


class PromptBERT(FromPairs):
    """Equation 4, or with hard negatives SimCSE's equation 5, of vectors that are denoised before the tanh head.

    Without supervision, denoising and the projection head are used in training only. With supervision both are served.
    """

    recipe: PromptBERTRecipe

    def __init__(self, encoder: SentenceEncoder, recipe: PromptBERTRecipe) -> None:
        super().__init__(encoder, recipe)
        self.head = loss_head(encoder, recipe)
        self.denoised = recipe.mode in ("denoised", "supervised")
        self.text_encoders = dict.fromkeys(VIEWS[: max(2, len(recipe.columns))], self.text_encoder)
        if recipe.second_template:
            self.text_encoders["second"] = encoder.make_text_encoder(recipe.second_template, recipe.max_tokens)
        if recipe.mode == "supervised":
            encoder.reconfigure(encoder.config.model_copy(update={"denoising": True}))

    def views(self, rows: Sequence[Row]) -> dict[str, View]:
        columns = list(zip(*rows, strict=True))
        if self.recipe.mode == "same":
            views = dict.fromkeys(self.text_encoders, view(self.text_encoder, columns[0]))  # only dropout differs
        else:
            texts_by_view = zip(self.text_encoders.items(), columns * 2 if len(columns) == 1 else columns, strict=True)
            views = {name: view(text_encoder, texts) for (name, text_encoder), texts in texts_by_view}
        return self.guided(views, columns)

    def reads(self, name: str) -> Hashable:
        return self.text_encoders[name]

    def encode(self, name: str, view: View) -> Tensor:
        return self.encoder.pooled(view["input_ids"], view["attention_mask"], self.text_encoders[name])  # (n, d)

    def loss(self, vectors: Mapping[str, Tensor], views: Mapping[str, View]) -> dict[str, Tensor]:
        finished = [self.encoder.finish(vectors[name], self._bias(name, views[name])) for name in self.text_encoders]
        return self.pairs_loss(finished, views)

    def _bias(self, name: str, view: View) -> Tensor | None:
        """The vectors of the template alone for the view's texts, (n, d); texts of one length share a dropout mask."""
        if not self.denoised:
            return None
        text_encoder = self.text_encoders[name]
        lengths = view["attention_mask"].sum(1) - text_encoder.template_tokens
        return self.encoder.template_bias(lengths, text_encoder)
