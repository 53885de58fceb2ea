"""PromptBERT (arXiv:2201.04337 section 4.3): [MASK] vectors of sentences in templates.

Three modes have one sentence in two templates, the rows of the paper's Table 8: `same` template twice (dropout tells
the views apart), `different` templates, and `denoised`: different templates, each less the vector that the template
alone gives. `supervised` has pairs, with or without a hard negative, in one template, denoised.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from encoding.errors import TemplateError
from encoding.template import Template
from training.contrastive import VIEWS, Contrastive, PairsRecipe
from training.corpus import Row
from training.encoder import SentenceEncoder
from training.objective import View, loss_head, view

__all__ = ["PromptBERT", "PromptBERTRecipe"]

TWO_TEMPLATES = ("different", "denoised")


class PromptBERTRecipe(PairsRecipe):
    """The keys of `method = "promptbert"`."""

    method: Literal["promptbert"]
    pooling: Literal["mask"] = Field("mask", description="where the vector is read: PromptBERT reads the mask")
    mode: Literal["same", "different", "denoised", "supervised"] = Field(
        "denoised", description="the views: same, different or denoised of one column; supervised of two or three"
    )
    second_template: str | None = Field(
        None, description="the second view's template, in the modes different and denoised"
    )

    @model_validator(mode="after")
    def _templates(self) -> Self:
        if self.mode not in TWO_TEMPLATES:
            if self.second_template is not None:
                raise ValueError(
                    f"mode {self.mode!r} has one template; remove second_template or write mode = 'different'"
                )
            return self
        if self.second_template in (None, self.template):
            raise ValueError(f"mode {self.mode!r} needs two templates; write a second_template that is not template")
        try:
            Template.parse(str(self.second_template), "mask")
        except TemplateError as error:
            raise ValueError(f"second_template: {error}") from error
        return self

    @model_validator(mode="after")
    def _supervision(self) -> Self:
        columns = len(self.columns) or 1
        if self.mode == "supervised":
            if columns == 1:
                raise ValueError("mode 'supervised' needs pairs; name two columns, or three with a hard negative")
        elif columns > 1:
            raise ValueError(
                f"mode {self.mode!r} has views of one text and columns names {columns}; name one, or write "
                "mode = 'supervised'"
            )
        elif self.kept_head is not None:
            raise ValueError(f"mode {self.mode!r} serves no head; remove kept_head, or write mode = 'supervised'")
        return self


class PromptBERT(Contrastive):
    """Equation 4, or with hard negatives SimCSE's equation 5, of vectors that are denoised before the tanh head.

    Unsupervised, denoising is of training only, as is the head. Supervised it is served.
    """

    Recipe = PromptBERTRecipe
    columns = (1, 2, 3)

    def __init__(self, encoder: SentenceEncoder, recipe: PromptBERTRecipe) -> None:
        super().__init__(encoder, recipe)
        self.head = loss_head(encoder, recipe)
        self.denoised = recipe.mode in ("denoised", "supervised")
        self.prompts = dict.fromkeys(VIEWS[: max(2, len(recipe.columns))], self.prompt)
        if recipe.second_template:
            self.prompts["second"] = encoder.make_prompt(recipe.second_template, recipe.max_tokens)
        if recipe.mode == "supervised":
            encoder.reconfigure(encoder.config.model_copy(update={"denoising": True}))

    def views(self, rows: Sequence[Row]) -> dict[str, View]:
        columns = list(zip(*rows, strict=True))
        if self.recipe.mode == "same":
            return dict.fromkeys(self.prompts, view(self.prompt, columns[0]))  # dropout alone tells them apart
        if len(columns) == 1:
            columns *= 2
        named = zip(self.prompts.items(), columns, strict=True)
        return {name: view(prompt, texts) for (name, prompt), texts in named}

    def encode(self, name: str, view: View) -> Tensor:
        return self.encoder.read(**view, prompt=self.prompts[name])  # (n, d)

    def loss(self, vectors: Mapping[str, Tensor], views: Mapping[str, View]) -> dict[str, Tensor]:
        finished = [self.encoder.finish(vectors[name], self._bias(name, views[name])) for name in self.prompts]
        return {"loss": self.nested(self.contrast, *finished)}

    def _bias(self, name: str, view: View) -> Tensor | None:
        """What the template alone gives for the lengths of the view's texts, (n, d): one draw of dropout a length."""
        if not self.denoised:
            return None
        prompt = self.prompts[name]
        return self.encoder.template_bias(prompt.lengths(view["attention_mask"]), prompt)
