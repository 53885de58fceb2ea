"""Distillation: match a teacher's sentence vectors, so that a good sentence encoder learns to give them at [MASK].

The loss is `cosine_weight` x (1 - cosine with the teacher's vector of the same text) + `divergence_weight` x KL
divergence between the teacher's and the student's distributions of similarity over the batch + `spread_weight` x the
uniformity of the student's vectors. The teacher's vector of a text is the sum of its vectors for several views of the
text. Punctuation carries little of a sentence's meaning but still moves a vector, so one view has only words. A teacher
of sentences is inaccurate on long texts, so other views have windows of them. The vectors of co-teachers, such as an
earlier student, are added: an ensemble teaches better than each of its members (arXiv:1805.04770).

A student learns nothing about search from sentences alone. So some sentences become passages, joined with the sentences
after them, and some become queries, a few of their words. A batch holds all three, from the same places in the corpus.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Annotated, Final, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from rich.console import Console
from torch import Tensor

from encoding.errors import TemplateError
from encoding.template import PoolingMode, Template
from training.data.corpus import Row
from training.data.rows.teacher_vectors import TeacherVectors
from training.data.similarity import units
from training.errors import RecipeError
from training.methods.losses import cosine_distance, similarity_divergence, uniformity
from training.methods.objective import Objective
from training.methods.parts.gather import gather, rank_and_count
from training.methods.parts.student_texts import as_sentence, search_text, share_of, windows, words_only
from training.model.encoder import SentenceEncoder
from training.model.model_path import model_folder
from training.model.pooling import Pooling
from training.model.views import View, encode_trimmed, view
from training.recipes.keys import Positive, Recipe

__all__ = ["Distill", "DistillRecipe"]

TEXTS: Final = 8192  # looked up at once

Weight = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
TeacherView = Literal["text", "words", "text-windows", "words-windows"]


class DistillRecipe(Recipe):
    """The keys of `method = "distill"`."""

    method: Literal["distill"]
    teacher: str = Field(description="encoder to match: a local folder or a hub name")
    teacher_vectors: tuple[str, ...] = Field(
        (),
        description="folders that python -m service.bulk wrote with the corpus's texts: the vectors of one teacher or "
        "of several, in place of teacher, which is then not loaded",
    )
    teacher_weights: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        (), description="weight of each teacher of teacher_vectors in a cosine; unset: the same for all"
    )
    teacher_template: str = Field("[X]", description="words around the teacher's text")
    teacher_pooling: PoolingMode = Field("mean", description="pooling of the teacher")
    teacher_views: tuple[TeacherView, ...] = Field(
        ("text",),
        min_length=1,
        description="what the teacher sees of a text; their vectors are added: text; words, without punctuation; and "
        "text-windows and words-windows, for a text longer than teacher_window",
    )
    teacher_window: Positive = Field(
        80, description="words, at most, in each part in which the teacher sees a long text"
    )
    co_teachers: tuple[str, ...] = Field(
        (),
        description="runs or encoders with this template; their vectors of short texts are added to the teacher's",
    )
    co_teacher_tokens: Positive = Field(64, description="tokens of the longest text that the co_teachers see")
    cosine_weight: Weight = Field(5.0, description="weight of 1 - cosine with the teacher's vector")
    divergence_weight: Weight = Field(1.0, description="weight of the KL divergence of the batch's similarities")
    temperature: Annotated[float, Field(gt=0)] = Field(0.05, description="divides the cosines in the KL divergence")
    spread_weight: Weight = Field(
        0.0, description="weight of the uniformity of the student's vectors in a batch, which spreads them out"
    )
    words_only_share: Share = Field(
        0.0, description="share of the texts of which the student sees only the words, without punctuation"
    )
    passage_share: Share = Field(
        0.0,
        description="share of the sentences that become passages, joined with their neighbours",
    )
    query_share: Share = Field(
        0.0, description="share of the sentences that become short queries, a few of their words"
    )

    @model_validator(mode="after")
    def _weights(self) -> Self:
        if not {"text", "words"} & set(self.teacher_views):
            raise ValueError("teacher_views has only windows, which short texts do not have; add text or words")
        if self.cosine_weight == self.divergence_weight == 0:
            raise ValueError("cosine_weight and divergence_weight are both 0; write one above 0")
        if self.teacher_weights and len(self.teacher_weights) != len(self.teacher_vectors):
            raise ValueError(
                f"teacher_weights has {len(self.teacher_weights)} numbers and teacher_vectors "
                f"{len(self.teacher_vectors)} folders; write one number for each folder"
            )
        try:
            Template.parse(self.teacher_template, self.teacher_pooling)
        except TemplateError as error:
            raise ValueError(f"teacher_template: {error}") from error
        return self

    @model_validator(mode="after")
    def _ready_texts(self) -> Self:
        """What a teacher has seen beforehand is not changed."""
        live = {"passage_share": 0, "query_share": 0, "co_teachers": (), "teacher_views": ("text",)}
        for key, value in live.items() if self.teacher_vectors else ():
            if getattr(self, key) != value:
                raise ValueError(
                    f"teacher_vectors belong to the corpus's own texts, which {key} would change; write --preset "
                    "vectors"
                )
        return self

    @model_validator(mode="after")
    def _shares(self) -> Self:
        if self.passage_share + self.query_share > 1:
            raise ValueError(
                f"passage_share is {self.passage_share} and query_share {self.query_share}; together at most 1"
            )
        if self.passage_share and (self.neighbours == 1 or self.batch_size % self.neighbours):
            raise ValueError(
                f"passage_share is {self.passage_share}, and a passage is made of a run of neighbours: write "
                f"neighbours = 8, say, and batch_size as a multiple of it (found {self.neighbours}, {self.batch_size})"
            )
        return self


class Distill(Objective):
    """Teachers are frozen, in evaluation mode, and not part of a checkpoint. The student has no dropout."""

    Recipe = DistillRecipe

    def __init__(self, encoder: SentenceEncoder, recipe: DistillRecipe) -> None:
        super().__init__(encoder, recipe)
        self._taught = _teacher_vectors(encoder, recipe) if recipe.teacher_vectors else None
        # in tuples, so that the modules of teachers do not belong to this one
        self._teacher: tuple[SentenceEncoder, ...] = () if self._taught else (_teacher(encoder, recipe),)
        if not torch.cuda.is_available():  # in bf16 its gradient takes half the time of the fused kernel's on a CPU
            encoder.backbone.set_attn_implementation("eager")
        self._co_teachers = tuple(_co_teacher(source, encoder, recipe) for source in recipe.co_teachers)
        for teacher in self._teacher:
            self.teacher_pooling = teacher.make_pooling(
                recipe.teacher_template, min(recipe.max_tokens, teacher.config.max_tokens)
            )

    def begin(self, rows: Iterable[Row]) -> None:
        """Raises CorpusError if a text has no vector of every teacher."""
        texts = (text for (text,) in rows)
        while self._taught and (some := list(islice(texts, TEXTS))):
            self._taught.find(some)

    def views(self, rows: Sequence[Row]) -> dict[str, View]:
        """`teacher` has a row for each part that it sees, with the number of its `text` and its `weight` there.

        `text` is what the co-teachers see, if there are any. With teacher_vectors the student's view has the `target`.
        """
        recipe = self.recipe
        sentences = [text for (text,) in rows]
        if self._taught:
            target = torch.from_numpy(self._taught.of(sentences))
            return {"student": view(self.pooling, list(map(self._seen, sentences))) | {"target": target}}
        runs = [sentences[first : first + recipe.neighbours] for first in range(0, len(rows), recipe.neighbours)]
        texts = [
            search_text(run, place, recipe.passage_share, recipe.query_share)
            for run in runs
            for place in range(len(run))
        ]
        parts = [(place, part, weight) for place, text in enumerate(texts) for part, weight in self._parts(text)]
        places, taught, weights = zip(*parts, strict=True)
        teacher = view(self.teacher_pooling, taught) | {"text": torch.tensor(places), "weight": torch.tensor(weights)}
        views = {"student": view(self.pooling, list(map(self._seen, texts))), "teacher": teacher}
        return views | {"text": view(self.pooling, texts)} if self._co_teachers else views

    def _seen(self, text: str) -> str:
        """What the student sees of a text."""
        return words_only(text) if share_of(text) < self.recipe.words_only_share else text

    def _parts(self, text: str) -> Iterator[tuple[str, float]]:
        """The parts of a text that the teacher sees, and their weights, which add up to 1 for each view."""
        parts = windows(text, self.recipe.teacher_window)
        for kind in self.recipe.teacher_views:
            if kind in ("text", "words"):
                yield text if kind == "text" else as_sentence(text), 1.0
            elif len(parts) > 1:
                shown = parts if kind == "text-windows" else map(as_sentence, parts)
                yield from ((part, 1 / len(parts)) for part in shown)

    def forward(self, student: View, teacher: View | None = None, text: View | None = None) -> dict[str, Tensor]:
        self.encoder.eval()
        vectors = self._encode(self.encoder, self.pooling, student)  # (n, d)
        targets = self._targets(teacher, vectors) if teacher is not None else student["target"]
        if text is not None:
            targets = targets + self._co_targets(text, vectors)
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
        """The teacher's vectors, (n, teacher's d): the weighted sum of its parts' unit vectors."""
        encoder = self._teacher[0].to(like.device)
        units = F.normalize(self._encode(encoder, self.teacher_pooling, teacher), dim=-1)
        units = units * teacher["weight"].unsqueeze(1)
        return units.new_zeros(len(like), encoder.dimension).index_add_(0, teacher["text"], units)

    @torch.no_grad()
    def _co_targets(self, text: View, like: Tensor) -> Tensor:
        """The sum of the co-teachers' unit vectors of the short texts, (n, d); 0 for the other texts."""
        (rows,) = (text["attention_mask"].sum(1) <= self.recipe.co_teacher_tokens).nonzero(as_tuple=True)
        targets = torch.zeros_like(like)
        if not len(rows):
            return targets
        short = {name: tensor[rows, : self.recipe.co_teacher_tokens] for name, tensor in text.items()}
        for encoder in self._co_teachers:
            units = F.normalize(self._encode(encoder.to(like.device), self.pooling, short), dim=-1)
            targets.index_add_(0, rows, units)
        return targets

    @staticmethod
    def _encode(encoder: SentenceEncoder, pooling: Pooling, view: View) -> Tensor:
        return encode_trimmed(lambda part: encoder.vectors(part, pooling), view)


def _teacher(encoder: SentenceEncoder, recipe: DistillRecipe) -> SentenceEncoder:
    """Raises RecipeError if the student cannot give its vectors."""
    teacher = SentenceEncoder.load(
        recipe.teacher, template=recipe.teacher_template, pooling=recipe.teacher_pooling, denoising=False
    )
    if recipe.cosine_weight and teacher.dimension != encoder.dimension:
        raise RecipeError(
            f"teacher {recipe.teacher!r} has {teacher.dimension} dimensions and the encoder {encoder.dimension}; "
            "choose a teacher of the same width, or cosine_weight = 0, or give its vectors as teacher_vectors"
        )
    return teacher.eval().requires_grad_(False)


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
        console = Console(stderr=True, soft_wrap=True, highlight=False, quiet=rank_and_count()[0] > 0)
        console.print(f"teacher vectors: {kept:.1%} of their squares are in {axes.shape[1]} principal axes")
    return found


def _co_teacher(source: str, encoder: SentenceEncoder, recipe: DistillRecipe) -> SentenceEncoder:
    """Raises RecipeError if its vectors cannot be added to those that the student learns."""
    found = SentenceEncoder.load(model_folder(source))
    if (found.config.template, found.config.pooling) != (recipe.template, recipe.pooling):
        raise RecipeError(
            f"co_teacher {source!r} has the template {found.config.template!r} with {found.config.pooling} pooling, "
            f"and the student {recipe.template!r} with {recipe.pooling}; choose a run of the student's template"
        )
    if found.dimension != encoder.dimension or found.tokenizer.get_vocab() != encoder.tokenizer.get_vocab():
        raise RecipeError(
            f"co_teacher {source!r} differs in dimension or vocabulary from the encoder {recipe.encoder!r}; choose a "
            "run of the same parent"
        )
    if not torch.cuda.is_available():
        found.backbone.set_attn_implementation("eager")
    return found.eval().requires_grad_(False)
