"""Distillation: match the sentence vectors of one teacher, or of several that saw the texts beforehand.

The loss is `cosine_weight` x (1 - cosine with the teacher's vector of the same text) + `divergence_weight` x KL
divergence between the teacher's and the student's distributions of similarity over the batch + `spread_weight` x the
uniformity of the student's vectors. An ensemble teaches better than each of its members (arXiv:1805.04770).
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from encoding.bundle import Bundle, located
from encoding.template import PoolingMode
from evaluation.measures import units
from training.data.corpus import Row
from training.data.teacher_vectors import TeacherVectors
from training.errors import RecipeError
from training.methods.gather import gather, rank_and_count
from training.methods.losses import cosine_distance, similarity_divergence, uniformity
from training.methods.objective import Objective
from training.model.encoder import SentenceEncoder, saved_config
from training.model.pooling import Pooling
from training.model.views import View, encode_trimmed, view
from training.recipes.methods import DistillRecipe
from training.run_folder import kind_of, model_folder

__all__ = ["Distill"]

TEXTS: Final = 8192  # looked up at once


class Distill(Objective):
    """Teachers are frozen, in evaluation mode, and not part of a checkpoint. The student has no dropout."""

    def __init__(self, encoder: SentenceEncoder, recipe: DistillRecipe) -> None:
        super().__init__(encoder, recipe)
        self._taught = _teacher_vectors(encoder, recipe) if recipe.teacher_vectors else None
        # in a tuple, so that the teacher's modules do not belong to this one
        self._teacher: tuple[SentenceEncoder, ...] = () if self._taught else (_teacher(encoder, recipe),)
        if not torch.cuda.is_available():  # in bf16 its gradient takes half the time of the fused kernel's on a CPU
            encoder.backbone.set_attn_implementation("eager")
        for teacher in self._teacher:
            config = teacher.config
            self.teacher_pooling = teacher.make_pooling(
                config.template, min(recipe.max_tokens, config.max_tokens), config.denoising
            )

    def begin(self, rows: Iterable[Row]) -> None:
        """Raises CorpusError if a text has no vector of every teacher."""
        texts = (text for (text,) in rows)
        while self._taught and (some := list(islice(texts, TEXTS))):
            self._taught.find(some)

    def views(self, rows: Sequence[Row]) -> dict[str, View]:
        """What student and teacher see; with teacher_vectors the student's view has the `target` instead."""
        texts = [text for (text,) in rows]
        student = view(self.pooling, texts)
        if self._taught:
            return {"student": student | {"target": torch.from_numpy(self._taught.of(texts))}}
        return {"student": student, "teacher": view(self.teacher_pooling, texts)}

    def forward(self, student: View, teacher: View | None = None) -> dict[str, Tensor]:
        self.encoder.eval()
        vectors = self._encode(self.encoder, self.pooling, student)  # (n, d)
        targets = student["target"] if teacher is None else self._targets(teacher, vectors)
        vectors, targets = gather(vectors), gather(targets)  # the batch is that of all processes
        parts: dict[str, Tensor] = {}
        if self.recipe.cosine_weight:
            parts["cosine_distance"] = cosine_distance(vectors, targets)
        if self.recipe.divergence_weight:
            parts["divergence"] = similarity_divergence(vectors, targets, self.recipe.temperature)
        if self.recipe.spread_weight:
            parts["uniformity"] = uniformity(vectors)
        weights = {
            "cosine_distance": self.recipe.cosine_weight,
            "divergence": self.recipe.divergence_weight,
            "uniformity": self.recipe.spread_weight,
        }
        loss = torch.stack([weights[name] * part for name, part in parts.items()]).sum()
        return {"loss": loss} | {name: part.detach() for name, part in parts.items()}

    @torch.no_grad()
    def _targets(self, teacher: View, like: Tensor) -> Tensor:
        """The teacher's vectors, (n, teacher's d)."""
        return self._encode(self._teacher[0].to(like.device), self.teacher_pooling, teacher)

    @staticmethod
    def _encode(encoder: SentenceEncoder, pooling: Pooling, view: View) -> Tensor:
        return encode_trimmed(lambda part: encoder.vectors(part, pooling), view)


def _teacher(encoder: SentenceEncoder, recipe: DistillRecipe) -> SentenceEncoder:
    """Raises RecipeError if the student cannot give its vectors."""
    assert recipe.teacher is not None
    source = model_folder(recipe.teacher)
    template, pooling = _as_trained(source)
    teacher = SentenceEncoder.load(
        source, template=recipe.teacher_template or template, pooling=recipe.teacher_pooling or pooling
    )
    if recipe.cosine_weight and teacher.dimension != encoder.dimension:
        raise RecipeError(
            f"teacher {recipe.teacher!r} has {teacher.dimension} dimensions and the encoder {encoder.dimension}; "
            "choose a teacher of the same width, or cosine_weight = 0, or give its vectors as teacher_vectors"
        )
    return teacher.eval().requires_grad_(False)


def _as_trained(teacher: str) -> tuple[str | None, PoolingMode | None]:
    """Template and pooling of a teacher; None for those that its own configuration has."""
    if saved_config(Path(teacher)) is not None:
        return None, None
    if kind_of(teacher) == "bundle":
        spec = Bundle.load(located(teacher)).spec
        return spec.template, spec.pooling
    return "[X]", "mean"


def _teacher_vectors(encoder: SentenceEncoder, recipe: DistillRecipe) -> TeacherVectors:
    """The vectors of all teachers, in the student's width. Raises CorpusError.

    One teacher's vectors of this width stay as they are. Others are projected to their principal axes, so that their
    products change least, and turned to the student's own vectors of some texts (orthogonal Procrustes).
    """
    column = recipe.columns[0] if recipe.columns else "text"
    weights = recipe.teacher_weights or (1.0,) * len(recipe.teacher_vectors)
    found, width = TeacherVectors.read(recipe.teacher_vectors, weights, column), encoder.dimension
    if len(recipe.teacher_vectors) > 1 or found.vectors.shape[1] != width:
        axes, kept = found.principal(width)
        own = encoder.embed(found.sample)  # (n, d)
        left, _, right = np.linalg.svd((found.of(found.sample) @ axes).T @ units(own), full_matrices=False)
        found = found.projected((axes @ left @ right).astype(np.float32))
        console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False, quiet=rank_and_count()[0] > 0)
        console.print(f"teacher vectors: {kept:.1%} of their squares are in {axes.shape[1]} principal axes")
    return found
