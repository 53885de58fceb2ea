"""Unsupervised PromptBERT (arXiv:2201.04337 section 4.3): [MASK] vectors of one sentence in templates.

Three modes, the rows of the paper's Table 8: `same` template twice (dropout tells the views apart), `different`
templates, and `denoised`: different templates, each less the vector that the template alone gives.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from encoding.errors import TemplateError
from encoding.template import Template
from training.contrastive import Contrastive, ContrastiveRecipe
from training.corpus import Row
from training.encoder import SentenceEncoder
from training.gather import gather
from training.losses import info_nce
from training.objective import View, projection, view

__all__ = ["PromptBERT", "PromptBERTRecipe"]


class PromptBERTRecipe(ContrastiveRecipe):
    """The keys of `method = "promptbert"`."""

    method: Literal["promptbert"]
    read_out: Literal["mask"] = Field("mask", description="where the vector is read: PromptBERT reads the mask")
    mode: Literal["same", "different", "denoised"] = Field(
        "denoised", description="the two views: same, different or denoised"
    )
    second_template: str | None = Field(
        None, description="the second view's template, in the modes different and denoised"
    )

    @model_validator(mode="after")
    def _templates(self) -> Self:
        if self.mode == "same":
            if self.second_template is not None:
                raise ValueError("mode 'same' has one template; remove second_template or write mode = 'different'")
            return self
        if self.second_template in (None, self.template):
            raise ValueError(f"mode {self.mode!r} needs two templates; write a second_template that is not template")
        try:
            Template.parse(str(self.second_template), "mask")
        except TemplateError as error:
            raise ValueError(f"second_template: {error}") from error
        return self


class PromptBERT(Contrastive):
    """Equation 4. The tanh head follows the denoising and is used in training only, as is the denoising itself."""

    Recipe = PromptBERTRecipe

    def __init__(self, encoder: SentenceEncoder, recipe: PromptBERTRecipe) -> None:
        super().__init__(encoder, recipe)
        self.head = projection(encoder)
        templates = (recipe.template, recipe.second_template or recipe.template)
        self.prompts = {
            name: encoder.make_prompt(template, recipe.max_tokens)
            for name, template in zip(("first", "second"), templates, strict=True)
        }

    def views(self, rows: Sequence[Row]) -> dict[str, View]:
        texts = [text for (text,) in rows]
        return {name: view(prompt, texts) for name, prompt in self.prompts.items()}

    def encode(self, name: str, view: View) -> Tensor:
        return self.encoder(**view, prompt=self.prompts[name])  # (n, d)

    def loss(self, vectors: Mapping[str, Tensor], views: Mapping[str, View]) -> dict[str, Tensor]:
        if self.recipe.mode == "denoised":
            vectors = {name: rows - self._bias(name, views[name]) for name, rows in vectors.items()}
        return {"loss": self.nested(self._contrast, vectors["first"], vectors["second"])}

    def _contrast(self, first: Tensor, second: Tensor) -> Tensor:
        return info_nce(gather(self.head(first)), gather(self.head(second)), self.recipe.temperature)

    def _bias(self, name: str, view: View) -> Tensor:
        """What the template alone gives for the lengths of the view's texts, (n, d): one draw of dropout a length."""
        prompt = self.prompts[name]
        lengths = view["attention_mask"].sum(1) - prompt.text_encoder.template_tokens
        return self.encoder.template_bias(lengths, prompt)
