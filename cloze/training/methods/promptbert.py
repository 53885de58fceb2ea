"""PromptBERT (arXiv:2201.04337 section 4.3): [MASK] vectors of sentences in templates.

Three modes put one sentence into two templates, as in the rows of the paper's Table 8: the `same` template twice, so
that the views differ only by dropout; `different` templates; and `denoised`: different templates, and the vector of the
template alone is subtracted. `supervised` takes pairs, with or without a hard negative, in one template, denoised.
"""

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from cloze.training.data.stored_rows import Row
from cloze.training.methods.contrastive import VIEWS, FromPairs, loss_head
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.views import View, view
from cloze.training.recipes.methods import PromptBERTRecipe


class PromptBERT(FromPairs):
    """Equation 4, or SimCSE's equation 5 with hard negatives, on vectors that are denoised before the tanh head.

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
        biases = self._biases(views) if self.denoised else {}
        finished = [self.encoder.finish(vectors[name], biases.get(name)) for name in self.text_encoders]
        return self.pairs_loss(finished, views)

    def _biases(self, views: Mapping[str, View]) -> dict[str, Tensor]:
        """The vectors of each view's template alone, (n, d).

        Texts of the same length and template share a dropout mask, across all columns.
        """
        biases = dict[str, Tensor]()
        for text_encoder in dict.fromkeys(self.text_encoders.values()):
            names = [name for name, other in self.text_encoders.items() if other is text_encoder]
            lengths = [views[name]["attention_mask"].sum(1) - text_encoder.template_tokens for name in names]
            rows = self.encoder.template_bias(torch.cat(lengths), text_encoder)
            biases |= zip(names, rows.split([len(each) for each in lengths]), strict=True)
        return biases
