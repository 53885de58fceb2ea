"""Distillation: match the sentence vectors of one teacher, or of several that embedded the texts beforehand.

The teacher may be the encoder itself, as it is served. Then the student learns to give the same vectors with another
template or another pooling, such as [MASK] (the recipe `mask`).

The loss is 5 x (1 - cosine with the teacher's vector of the same text) + KL divergence between the teacher's and the
student's distributions of similarity over the batch. An ensemble teaches better than each of its members
(arXiv:1805.04770).
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cloze.training.bar import bar, console
from cloze.training.data.corpus import Corpus
from cloze.training.data.stored_rows import Row
from cloze.training.data.teacher_vectors import TeacherVectors
from cloze.training.encoder_source import keeps_own_config
from cloze.training.errors import RecipeError
from cloze.training.evaluation.measures import Embed, units
from cloze.training.hub.adoption import load_as_served
from cloze.training.methods.gather import gather
from cloze.training.methods.losses import cosine_distance, similarity_divergence
from cloze.training.methods.objective import Objective
from cloze.training.methods.teacher import embed_of, embedded, parts, read_by_itself
from cloze.training.model.attention import train_on_cpu
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.views import View, encode_trimmed, view
from cloze.training.recipes.methods import DistillRecipe

COSINE_WEIGHT: Final = 5.0  # in the loss; the divergence has the weight 1


class Distill(Objective):
    """The student has no dropout. Teachers embed each text once: several beforehand, or a single one in `begin`."""

    recipe: DistillRecipe

    def __init__(self, encoder: SentenceEncoder, recipe: DistillRecipe) -> None:
        super().__init__(encoder, recipe)
        self._taught: TeacherVectors | None = None
        self._teacher: Embed | None = None  # a function, so that the teacher's modules do not belong to this one
        if recipe.teacher_vectors:
            self._taught = _fitting(_read(recipe), encoder, len(recipe.teacher_vectors))
        else:
            self._teacher = _teacher(recipe)
        train_on_cpu(encoder.backbone)

    def begin(self, corpus: Corpus, folder: Path) -> None:
        """Check that every text has its teacher vectors, or embed all with the one teacher. Raises CorpusError."""
        count = len(corpus) + len(corpus.held_out)
        if self._teacher is None:
            assert self._taught is not None, "there are vectors or a teacher. This is a bug."
            with bar(total=count, desc="checking", unit=" texts", unit_scale=True) as shown:
                for texts in _parts(corpus):
                    self._taught.find(texts)
                    shown.update(len(texts))
            return
        vectors = TeacherVectors.collected(_parts(corpus), embedded(_parts(corpus), count, self._teacher, folder))
        self._taught, self._teacher = _fitting(vectors, self.encoder), None

    def views(self, rows: Sequence[Row]) -> dict[str, View]:
        """What the student sees, and its `target`, the teacher's vectors (n, d)."""
        texts = [text for (text,) in rows]
        return {"student": view(self.text_encoder, texts) | {"target": torch.from_numpy(self._targets(texts))}}

    def _targets(self, texts: Sequence[str]) -> NDArray[np.float32]:
        if self._taught is not None:
            return self._taught.of(texts)
        assert self._teacher is not None, "there are vectors or a teacher. This is a bug."  # before `begin`: a dry run
        return _fitting(TeacherVectors.collected([texts], [self._teacher(texts)]), self.encoder).of(texts)

    def forward(self, student: View) -> dict[str, Tensor]:
        self.encoder.eval()
        vectors = encode_trimmed(lambda part: self.encoder.vectors(part, self.text_encoder), student)  # (n, d)
        vectors, targets = gather(vectors, student["target"])  # the batch of all processes
        distance = cosine_distance(vectors, targets)
        divergence = similarity_divergence(vectors, targets, self.recipe.temperature)
        loss = COSINE_WEIGHT * distance + divergence
        return {"loss": loss, "cosine_distance": distance.detach(), "divergence": divergence.detach()}


def _teacher(recipe: DistillRecipe) -> Embed:
    """The teacher: an encoder as it is served by itself, or as the recipe's keys configure it. Raises ClozeError."""
    source = recipe.teacher or recipe.encoder
    keys = {"template": recipe.teacher_template, "pooling": recipe.teacher_pooling}
    config = {key: value for key, value in keys.items() if value is not None}
    if not config and recipe.teacher is None:
        if (encoder := load_as_served(source)) is None:
            raise RecipeError(
                f"{source!r} is the teacher, but it has no template and pooling of its own; write teacher_pooling, "
                "such as mean, or another teacher"
            )
        _warn_of_own_config(recipe)
        return embed_of(encoder, recipe.compile)
    return read_by_itself(source, recipe.compile, config)


def _warn_of_own_config(recipe: DistillRecipe) -> None:
    """Warn if the encoder's own template, pooling and final period are the recipe's: then it has nothing to learn."""
    if keeps_own_config(recipe.encoder, recipe):
        console.print(
            f"warning: {recipe.encoder} already has this template and pooling, so there is nothing to learn; give "
            "another --template, --pooling or --encoder"
        )


def _parts(corpus: Corpus) -> Iterator[Sequence[str]]:
    """The texts of a corpus, held-out texts last."""
    return parts(text for (text,) in chain(corpus.rows, corpus.held_out))


def _read(recipe: DistillRecipe) -> TeacherVectors:
    """The vectors that the teachers computed beforehand. Raises CorpusError."""
    column = recipe.columns[0] if recipe.columns else "text"
    weights = recipe.teacher_weights or (1.0,) * len(recipe.teacher_vectors)
    return TeacherVectors.read(recipe.teacher_vectors, weights, column)


def _fitting(taught: TeacherVectors, encoder: SentenceEncoder, teachers: int = 1) -> TeacherVectors:
    """The teachers' vectors with the student's width.

    A single teacher's vectors of this width stay as they are. Others are projected to their principal axes, so that
    their products change least, and rotated towards the student's own vectors of some texts (orthogonal Procrustes).
    """
    width = encoder.dimension
    if teachers > 1 or taught.vectors.shape[1] != width:
        axes, share = taught.principal(width)
        own = encoder.embed(taught.sample)  # (n, d)
        left, _, right = np.linalg.svd((taught.of(taught.sample) @ axes).T @ units(own), full_matrices=False)
        taught = taught.projected((axes @ left @ right).astype(np.float32))
        console.print(f"teacher vectors: {axes.shape[1]} principal axes keep {share:.1%} of their squared length")
    return taught
