"""Distillation: match a teacher's sentence vectors, so that a good sentence encoder learns to speak at [MASK].

The loss is `cosine_weight` x (1 - cosine with the teacher's vector of the same text) + `divergence_weight` x KL
between teacher's and student's distributions of similarity over the batch. The teacher's vector of a text is the sum
of what it gives for several views of it. Punctuation carries little of a sentence's meaning and sways a vector all the
same, so one view has words only; long texts blur a teacher of sentences, so others have windows of them. The vectors of
co-teachers, such as an earlier student, are added: an ensemble teaches better than each of its members
(arXiv:1805.04770).

Of sentences alone a student learns nothing about search. So some become passages, joined with the sentences after them,
and some become queries, a few of their words; a batch holds all three, of the same places in the corpus.
"""

import random
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Final, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from encoding.errors import TemplateError
from encoding.template import PoolingMode, Template
from training.corpus import Row
from training.encoder import SentenceEncoder
from training.errors import RecipeError
from training.gather import gather
from training.losses import cosine_distance, similarity_divergence
from training.objective import Objective, View, view
from training.pooling import Pooling
from training.recipe import Positive, Recipe
from training.source import model_folder
from training.trimmed import encode_trimmed

__all__ = ["Distill", "DistillRecipe", "search_text", "windows", "words_only"]

Weight = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
TeacherView = Literal["text", "words", "text-windows", "words-windows"]

QUERY_WORDS: Final = 9  # of a query made from a sentence, at most
QUESTION_SHARE: Final = 0.25  # of the queries: given a question word
BARE_SHARE: Final = 0.25  # of the queries: without the punctuation around them
QUESTIONS: Final = ("what is", "what are", "how does", "how to", "who is", "why is", "where is", "when was")


class DistillRecipe(Recipe):
    """The keys of `method = "distill"`."""

    method: Literal["distill"]
    teacher: str = Field(description="encoder to match: a local folder or a hub name")
    teacher_template: str = Field("[X]", description="words around the teacher's text")
    teacher_pooling: PoolingMode = Field("mean", description="where the teacher's vector is read: mask, cls or mean")
    teacher_views: tuple[TeacherView, ...] = Field(
        ("text",),
        min_length=1,
        description="what the teacher sees of a text, its vector being the sum: text; words, without punctuation; and "
        "of one longer than teacher_window, text-windows and words-windows",
    )
    teacher_window: Positive = Field(
        80, description="words of the parts in which the teacher sees a long text, at most"
    )
    co_teachers: tuple[str, ...] = Field(
        (),
        description="runs, or encoders, of this template, whose vectors of short texts are added to the teacher's",
    )
    co_teacher_tokens: Positive = Field(64, description="tokens of the longest text that co_teachers see")
    cosine_weight: Weight = Field(5.0, description="weight of 1 - cosine with the teacher's vector")
    divergence_weight: Weight = Field(1.0, description="weight of the KL divergence of the batch's similarities")
    temperature: Annotated[float, Field(gt=0)] = Field(0.05, description="divides the cosines in the KL divergence")
    words_only_share: Share = Field(
        0.0, description="share of the texts of which the student sees the words only, without punctuation"
    )
    passage_share: Share = Field(
        0.0,
        description="share of the sentences that become passages, joined with others of their run of neighbours",
    )
    query_share: Share = Field(
        0.0, description="share of the sentences that become short queries, a few of their words"
    )

    @model_validator(mode="after")
    def _weights(self) -> Self:
        if not {"text", "words"} & set(self.teacher_views):
            raise ValueError("teacher_views has windows only, which short texts have not; add text or words")
        if self.cosine_weight == self.divergence_weight == 0:
            raise ValueError("cosine_weight and divergence_weight are both 0; write one above 0")
        try:
            Template.parse(self.teacher_template, self.teacher_pooling)
        except TemplateError as error:
            raise ValueError(f"teacher_template: {error}") from error
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
        teacher = SentenceEncoder.load(
            recipe.teacher, template=recipe.teacher_template, pooling=recipe.teacher_pooling, denoising=False
        )
        if recipe.cosine_weight and teacher.dimension != encoder.dimension:
            raise RecipeError(
                f"teacher {recipe.teacher!r} has {teacher.dimension} dimensions and the encoder {encoder.dimension}; "
                "choose a teacher of the same width, or cosine_weight = 0"
            )
        if not torch.cuda.is_available():  # in bf16 its gradient takes half the time of the fused kernel's on a CPU
            encoder.backbone.set_attn_implementation("eager")
        self._teacher = (teacher.eval().requires_grad_(False),)  # in a tuple, so that it is no submodule
        self._co_teachers = tuple(_co_teacher(source, encoder, recipe) for source in recipe.co_teachers)
        self.teacher_prompt = teacher.make_prompt(
            recipe.teacher_template, min(recipe.max_tokens, teacher.config.max_tokens)
        )

    def views(self, rows: Sequence[Row]) -> dict[str, View]:
        """`teacher` has a row for each part it sees, with the `text` it is of and its `weight` in that vector.

        `text` is what co-teachers see, where there are any.
        """
        recipe = self.recipe
        sentences = [text for (text,) in rows]
        runs = [sentences[first : first + recipe.neighbours] for first in range(0, len(rows), recipe.neighbours)]
        texts = [
            search_text(run, place, recipe.passage_share, recipe.query_share)
            for run in runs
            for place in range(len(run))
        ]
        seen = [words_only(text) if _share(text) < recipe.words_only_share else text for text in texts]
        parts = [(place, part, weight) for place, text in enumerate(texts) for part, weight in self._taught(text)]
        places, taught, weights = zip(*parts, strict=True)
        teacher = view(self.teacher_prompt, taught) | {"text": torch.tensor(places), "weight": torch.tensor(weights)}
        views = {"student": view(self.prompt, seen), "teacher": teacher}
        return views | {"text": view(self.prompt, texts)} if self._co_teachers else views

    def _taught(self, text: str) -> Iterator[tuple[str, float]]:
        """The parts of a text that the teacher sees, and the weight of each: 1 for all of one view together."""
        parts = windows(text, self.recipe.teacher_window)
        for kind in self.recipe.teacher_views:
            if kind in ("text", "words"):
                yield text if kind == "text" else _spoken(text), 1.0
            elif len(parts) > 1:
                shown = parts if kind == "text-windows" else map(_spoken, parts)
                yield from ((part, 1 / len(parts)) for part in shown)

    def forward(self, student: View, teacher: View, text: View | None = None) -> dict[str, Tensor]:
        self.encoder.eval()
        vectors = self._encode(self.encoder, self.prompt, student)  # (n, d)
        targets = self._targets(teacher, vectors)
        if text is not None:
            targets = targets + self._co_targets(text, vectors)
        vectors, targets = gather(vectors), gather(targets)  # the batch is that of all processes
        parts: dict[str, Tensor] = {}
        if self.recipe.cosine_weight:
            parts["cosine_distance"] = cosine_distance(vectors, targets)
        if self.recipe.divergence_weight:
            parts["divergence"] = similarity_divergence(vectors, targets, self.recipe.temperature)
        weights = {"cosine_distance": self.recipe.cosine_weight, "divergence": self.recipe.divergence_weight}
        loss = torch.stack([weights[name] * part for name, part in parts.items()]).sum()
        return {"loss": loss} | {name: part.detach() for name, part in parts.items()}

    @torch.no_grad()
    def _targets(self, teacher: View, like: Tensor) -> Tensor:
        """The teacher's vectors, (n, teacher's d): the weighted sum of its parts' unit vectors."""
        encoder = self._teacher[0].to(like.device)
        units = F.normalize(self._encode(encoder, self.teacher_prompt, teacher), dim=-1)
        units = units * teacher["weight"].unsqueeze(1)
        return units.new_zeros(len(like), encoder.dimension).index_add_(0, teacher["text"], units)

    @torch.no_grad()
    def _co_targets(self, text: View, like: Tensor) -> Tensor:
        """The sum of the co-teachers' unit vectors of the short texts, (n, d); 0 for the others."""
        (rows,) = (text["attention_mask"].sum(1) <= self.recipe.co_teacher_tokens).nonzero(as_tuple=True)
        targets = torch.zeros_like(like)
        if not len(rows):
            return targets
        short = {name: tensor[rows, : self.recipe.co_teacher_tokens] for name, tensor in text.items()}
        for encoder in self._co_teachers:
            units = F.normalize(self._encode(encoder.to(like.device), self.prompt, short), dim=-1)
            targets.index_add_(0, rows, units)
        return targets

    @staticmethod
    def _encode(encoder: SentenceEncoder, prompt: Pooling, view: View) -> Tensor:
        return encode_trimmed(lambda part: encoder(part["input_ids"], part["attention_mask"], prompt), view)


def _co_teacher(source: str, encoder: SentenceEncoder, recipe: DistillRecipe) -> SentenceEncoder:
    """Raises RecipeError where its vectors cannot be added to those that the student learns."""
    found = SentenceEncoder.load(model_folder(source))
    if (found.config.template, found.config.pooling) != (recipe.template, recipe.pooling):
        raise RecipeError(
            f"co_teacher {source!r} reads {found.config.template!r} at {found.config.pooling}, and the student "
            f"{recipe.template!r} at {recipe.pooling}; choose a run of the student's template"
        )
    if found.dimension != encoder.dimension or found.tokenizer.get_vocab() != encoder.tokenizer.get_vocab():
        raise RecipeError(
            f"co_teacher {source!r} has another dimension or vocabulary than the encoder {recipe.encoder!r}; choose a "
            "run of the same parent"
        )
    if not torch.cuda.is_available():
        found.backbone.set_attn_implementation("eager")
    return found.eval().requires_grad_(False)


def search_text(run: Sequence[str], place: int, passage_share: float, query_share: float) -> str:
    """What the sentence at `place` of a run of consecutive ones is trained as: itself, a passage or a query.

    The sentence alone decides, so that a resumed run makes the same choices.
    """
    sentence = run[place]
    chance = random.Random(zlib.crc32(sentence.encode()))
    kind = chance.random()
    if kind < passage_share:
        count = chance.randint(2, max(2, len(run)))
        first = max(0, min(place, len(run) - count))
        return " ".join(run[first : first + count])
    return _query(sentence, chance) if kind < passage_share + query_share else sentence


def windows(text: str, longest: int) -> list[str]:
    """A text's words in as few parts of at most `longest` words as there can be, of like size."""
    words = text.split()
    count = max(1, -(-len(words) // longest))
    size = max(1, -(-len(words) // count))
    return [" ".join(words[first : first + size]) for first in range(0, len(words), size)] or [text]


def words_only(text: str) -> str:
    """The words without punctuation and other signs; a text that has no words stays as it is."""
    return " ".join(re.findall(r"\w+", text)) or text


def _spoken(text: str) -> str:
    """The words, as one sentence."""
    return f"{words_only(text)}."


def _query(sentence: str, chance: random.Random) -> str:
    """A few consecutive words, as someone would type them."""
    words = sentence.split()
    count = chance.randint(1, QUERY_WORDS)
    first = chance.randrange(max(1, len(words) - count))
    query = " ".join(words[first : first + count])
    form = chance.random()
    if form < QUESTION_SHARE:
        return f"{chance.choice(QUESTIONS)} {query}{chance.choice(('', '?', '?'))}"
    return query.strip(".,;:\"'()") or query if form < QUESTION_SHARE + BARE_SHARE else query


def _share(text: str) -> float:
    """A number in [0, 1) that belongs to the text, so that a resumed run makes the same choices."""
    return zlib.crc32(text.encode()) / 2**32
