"""Distillation: match a teacher's sentence vectors, so that a good sentence encoder learns to speak at [MASK].

The loss is `cosine_weight` x (1 - cosine with the teacher's vector of the same text) + `divergence_weight` x KL
between teacher's and student's distributions of similarity over the batch. Signs carry little of a sentence's meaning
and sway a vector all the same: a teacher that sees words only, and a student that sees some texts without signs, learn
the vector of what is said.
"""

import re
import zlib
from collections.abc import Sequence
from typing import Annotated, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from encoding.errors import TemplateError
from encoding.template import ReadOut, Template
from training.corpus import Row
from training.encoder import SentenceEncoder
from training.errors import RecipeError
from training.gather import gather
from training.losses import cosine_distance, similarity_divergence
from training.objective import Objective, View, view
from training.recipe import Recipe

__all__ = ["Distill", "DistillRecipe"]

Weight = Annotated[float, Field(ge=0)]


class DistillRecipe(Recipe):
    """The keys of `method = "distill"`."""

    method: Literal["distill"]
    teacher: str = Field(description="encoder to match: a local folder or a hub name")
    teacher_template: str = Field("[X]", description="words around the teacher's text")
    teacher_read_out: ReadOut = Field("mean", description="where the teacher's vector is read: mask, cls or mean")
    cosine_weight: Weight = Field(5.0, description="weight of 1 - cosine with the teacher's vector")
    divergence_weight: Weight = Field(1.0, description="weight of the KL divergence of the batch's similarities")
    temperature: Annotated[float, Field(gt=0)] = Field(0.05, description="divides the cosines in the KL divergence")
    teacher_words_only: bool = Field(False, description="show the teacher a text's words and a period, no other signs")
    words_only_share: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="share of the texts of which the student, too, sees the words only, and no period"
    )

    @model_validator(mode="after")
    def _weights(self) -> Self:
        if self.cosine_weight == self.divergence_weight == 0:
            raise ValueError("cosine_weight and divergence_weight are both 0; write one above 0")
        try:
            Template.parse(self.teacher_template, self.teacher_read_out)
        except TemplateError as error:
            raise ValueError(f"teacher_template: {error}") from error
        return self


class Distill(Objective):
    """The teacher is frozen, in evaluation mode, and no part of a checkpoint. The student has no dropout."""

    Recipe = DistillRecipe

    def __init__(self, encoder: SentenceEncoder, recipe: DistillRecipe) -> None:
        super().__init__(encoder, recipe)
        teacher = SentenceEncoder.load(
            recipe.teacher, template=recipe.teacher_template, read_out=recipe.teacher_read_out, denoising=False
        )
        if recipe.cosine_weight and teacher.dimension != encoder.dimension:
            raise RecipeError(
                f"teacher {recipe.teacher!r} has {teacher.dimension} dimensions and the encoder {encoder.dimension}; "
                "choose a teacher of the same width, or cosine_weight = 0"
            )
        self._teacher = (teacher.eval().requires_grad_(False),)  # in a tuple, so that it is no submodule
        self.teacher_prompt = teacher.make_prompt(
            recipe.teacher_template, min(recipe.max_tokens, teacher.reading.max_tokens)
        )

    def views(self, rows: Sequence[Row]) -> dict[str, View]:
        texts = [text for (text,) in rows]
        seen = [words_only(text) if _share(text) < self.recipe.words_only_share else text for text in texts]
        taught = [f"{words_only(text)}." for text in texts] if self.recipe.teacher_words_only else texts
        return {"student": view(self.prompt, seen), "teacher": view(self.teacher_prompt, taught)}

    def forward(self, student: View, teacher: View) -> dict[str, Tensor]:
        self.encoder.eval()
        vectors = self.encoder(**student, prompt=self.prompt)  # (n, d)
        with torch.no_grad(), torch.autocast(vectors.device.type, enabled=False):
            targets = self._teacher[0].to(vectors.device)(**teacher, prompt=self.teacher_prompt)
        vectors, targets = gather(vectors), gather(targets)  # the batch is that of all processes
        parts: dict[str, Tensor] = {}
        if self.recipe.cosine_weight:
            parts["cosine_distance"] = cosine_distance(vectors, targets)
        if self.recipe.divergence_weight:
            parts["divergence"] = similarity_divergence(vectors, targets, self.recipe.temperature)
        weights = {"cosine_distance": self.recipe.cosine_weight, "divergence": self.recipe.divergence_weight}
        loss = torch.stack([weights[name] * part for name, part in parts.items()]).sum()
        return {"loss": loss} | {name: part.detach() for name, part in parts.items()}


def words_only(text: str) -> str:
    """The words without punctuation and other signs; a text that has no words stays as it is."""
    return " ".join(re.findall(r"\w+", text)) or text


def _share(text: str) -> float:
    """A number in [0, 1) that belongs to the text, so that a resumed run makes the same choices."""
    return zlib.crc32(text.encode()) / 2**32
