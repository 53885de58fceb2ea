"""Unsupervised PromptBERT (arXiv:2201.04337 section 4.3): [MASK] vectors of one sentence in templates.

Three modes, the rows of the paper's Table 8: `same` template twice (dropout tells the views apart), `different`
templates, and `denoised`: different templates, each less the vector that the template alone gives.
"""

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from encoding.errors import TemplateError
from encoding.template import Template
from training.corpus import Row
from training.encoder import SentenceEncoder
from training.losses import info_nce
from training.objective import Objective, View, projection, view
from training.recipe import Recipe

__all__ = ["PromptBERT", "PromptBERTRecipe"]


class PromptBERTRecipe(Recipe):
    """The keys of `method = "promptbert"`."""

    method: Literal["promptbert"]
    read_out: Literal["mask"] = Field("mask", description="where the vector is read: PromptBERT reads the mask")
    mode: Literal["same", "different", "denoised"] = Field(
        "denoised", description="the two views: same, different or denoised"
    )
    second_template: str | None = Field(
        None, description="the second view's template, in the modes different and denoised"
    )
    temperature: Annotated[float, Field(gt=0)] = Field(0.05, description="divides the cosines in the loss")

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


class PromptBERT(Objective):
    """Equation 4. The tanh head follows the denoising and is used in training only, as is the denoising itself."""

    Recipe = PromptBERTRecipe

    def __init__(self, encoder: SentenceEncoder, recipe: PromptBERTRecipe) -> None:
        super().__init__(encoder, recipe)
        self.head = projection(encoder)
        templates = (recipe.template, recipe.second_template or recipe.template)
        denoising = recipe.mode == "denoised"
        self.prompts = [encoder.make_prompt(template, recipe.max_tokens, denoising) for template in templates]

    def views(self, rows: Sequence[Row]) -> dict[str, View]:
        texts = [text for (text,) in rows]
        first, second = (view(prompt, texts) for prompt in self.prompts)
        return {"first": first, "second": second}

    def forward(self, first: View, second: View) -> dict[str, Tensor]:
        anchors = self.head(self.encoder(**first, prompt=self.prompts[0]))  # (n, d)
        positives = self.head(self.encoder(**second, prompt=self.prompts[1]))
        return {"loss": info_nce(anchors, positives, self.recipe.temperature)}
