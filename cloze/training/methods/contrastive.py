"""What contrastive methods share: passes over views, a head, a loss over all rows, and a guide.

Passes and loss are separate because they scale differently. A pass works row by row, and may run in chunks and discard
their activations (GradCache). `loss` sees the vectors of all rows and of all processes.
"""

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import ClassVar, Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cloze.training.bar import bar
from cloze.training.data.corpus import Corpus
from cloze.training.errors import RecipeError
from cloze.training.evaluation.measures import Embed
from cloze.training.methods.gather import gather
from cloze.training.methods.losses import false_negatives, info_nce
from cloze.training.methods.objective import Objective
from cloze.training.methods.teacher import read_by_itself
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.heads import ProjectionHead
from cloze.training.model.masked_words import MaskedHead
from cloze.training.model.views import Pass, View, encode_trimmed
from cloze.training.recipes.methods import BatchRecipe, PairsRecipe

TEXTS: Final = 4096  # embedded at once: enough for batches of texts of similar length

VIEWS = ("first", "second", *(f"negative{number}" for number in range(1, 9)))  # a text, its positive, hard negatives


def loss_head(encoder: SentenceEncoder, recipe: PairsRecipe) -> nn.Module:
    """A tanh head for training only; with the recipe's `kept_head` an identity, because that head is in the encoder."""
    if recipe.kept_head is None:
        return projection(encoder)
    if encoder.head is None:
        encoder.head = projection(encoder) if recipe.kept_head == "tanh" else transform(encoder, recipe.encoder)
    elif encoder.head.kind != recipe.kept_head:
        raise RecipeError(
            f"kept_head is {recipe.kept_head!r}, but the kept head of {recipe.encoder!r} is {encoder.head.kind!r}; "
            f"write kept_head = {encoder.head.kind!r}"
        )
    return nn.Identity()


def projection(encoder: SentenceEncoder) -> ProjectionHead:
    """The contrastive papers' head, Linear(d, d) and tanh, initialised as BERT initialises its own weights."""
    return ProjectionHead("tanh", encoder.backbone.config)


def transform(encoder: SentenceEncoder, source: str) -> ProjectionHead:
    """A head initialised with the masked-word head of `source`, without its output matrix. Raises EncoderError."""
    head, masked = ProjectionHead("transform", encoder.backbone.config), MaskedHead.load(source)
    head.load_state_dict(nn.Sequential(masked.dense, masked.activation, masked.norm).state_dict())
    return head


class Guide:
    """The guide's vectors of texts, each computed once and kept in memory."""

    def __init__(self, embed: Embed) -> None:
        self._embed = embed
        self._vectors: dict[str, NDArray[np.float32]] = {}

    @classmethod
    def load(cls, source: str, compiled: bool = False) -> Self:
        """Load a run, a bundle (its most exact graph), an encoder's folder or a hub name. Raises ClozeError.

        For an encoder without an embedding configuration, mean pooling without a template is used.
        """
        return cls(read_by_itself(source, compiled))

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Vectors (n, d)."""
        self._add(texts)
        return torch.from_numpy(np.stack([self._vectors[text] for text in texts]))

    def read(self, texts: Iterable[str]) -> None:
        """Embed all texts that training will ask for, with a progress bar.

        A vector depends slightly on the other texts of its batch. A resumed run has the same batches.
        """
        distinct = list(dict.fromkeys(texts))
        with bar(total=len(distinct), desc="guide", unit=" texts") as shown:
            for start in range(0, len(distinct), TEXTS):
                part = distinct[start : start + TEXTS]
                self._add(part)
                shown.update(len(part))

    def _add(self, texts: Iterable[str]) -> None:
        new = [text for text in dict.fromkeys(texts) if text not in self._vectors]
        if new:
            self._vectors |= zip(new, self._embed(new), strict=True)


class BatchObjective(Objective):
    """Base class of the methods whose loss compares vectors across the batch. A subclass writes `loss`."""

    contrastive = True
    tokenwise: ClassVar[tuple[str, ...]] = ()  # tensors that `draw` adds with a column per token, (n, L)
    head: nn.Module  # between vectors and loss
    recipe: BatchRecipe

    def __init__(self, encoder: SentenceEncoder, recipe: BatchRecipe) -> None:
        super().__init__(encoder, recipe)
        if recipe.dimensions and max(recipe.dimensions) > encoder.dimension:
            raise RecipeError(
                f"dimensions has {max(recipe.dimensions)}; the encoder's vectors have {encoder.dimension}: lower it"
            )

    def draw(self, views: dict[str, View]) -> dict[str, View]:
        """The views, with what a step draws at random before its passes added (masked words, dropout rates)."""
        return views

    def encode(self, name: str, view: View) -> Tensor:
        """The vectors of a view: (n, ...), row i from row i of the view alone."""
        return self.encoder.vectors(view, self.text_encoder)  # (n, d)

    def passes(self) -> dict[str, Pass]:
        """The passes over every view, by the name of the `loss` argument that takes their results."""
        return {"vectors": self.encode}

    @abstractmethod
    def loss(self, vectors: Mapping[str, Tensor], views: Mapping[str, View]) -> dict[str, Tensor]:
        """Each pass's results by view, with all n rows -> the output of `forward`. Heads are applied here."""

    def reads(self, name: str) -> Hashable:
        """A key that is equal for views that may be encoded together in one pass."""
        return None

    def forward(self, **views: View) -> dict[str, Tensor]:
        views = self.draw(views)
        results = {argument: self._results(run, views) for argument, run in self.passes().items()}
        return self.loss(views=views, **results)

    def _results(self, run: Pass, views: Mapping[str, View]) -> dict[str, Tensor]:
        """The results of a pass by view. k views of one shape with equal `reads` are one pass over k·n rows."""
        alike: dict[Hashable, list[str]] = {}
        for name, view in views.items():
            shapes = tuple((key, tensor.shape) for key, tensor in view.items())
            alike.setdefault((self.reads(name), shapes), []).append(name)
        results: dict[str, Tensor] = {}
        for names in alike.values():
            rows = {key: torch.cat([views[name][key] for name in names]) for key in views[names[0]]}
            vectors = encode_trimmed(partial(run, names[0]), rows, self.recipe.mini_batch_size, self.tokenwise)
            results |= zip(names, vectors.chunk(len(names)), strict=True)
        return {name: results[name] for name in views}

    def joined(self, *vectors: Tensor) -> tuple[Tensor, ...]:
        """Gather vectors (n, ..., d) of all processes, before the head, in fp32: the gather's gradient is a sum."""
        return gather(*(tensor.float() for tensor in vectors))

    def headed(self, *vectors: Tensor) -> tuple[Tensor, ...]:
        """Vectors (n, ..., d) after the head, in fp32."""
        return tuple(self.head(tensor).float() for tensor in vectors)

    def nested(self, loss: Callable[..., Tensor], *vectors: Tensor) -> Tensor:
        """`loss` of the vectors (n, d), averaged over the recipe's Matryoshka dimensions (arXiv:2205.13147).

        The dimensions that are cut off are set to 0: the cosine is that of the shorter vector, and the width of the
        head's input does not change.
        """
        if not self.recipe.dimensions:
            return loss(*vectors)
        places = torch.arange(self.encoder.dimension, device=vectors[0].device)
        cuts = [places < size for size in self.recipe.dimensions]
        return torch.stack([loss(*(vector * cut for vector in vectors)) for cut in cuts]).mean()


class FromPairs(BatchObjective):
    """Base class of the methods of pairs and hard negatives. A subclass calls `guided` in `views`."""

    recipe: PairsRecipe

    def __init__(self, encoder: SentenceEncoder, recipe: PairsRecipe) -> None:
        super().__init__(encoder, recipe)
        self.guide = Guide.load(recipe.guide, recipe.compile) if recipe.guide else None

    def begin(self, corpus: Corpus, folder: Path) -> None:
        if self.guide is not None:
            self.guide.read(text for row in chain(corpus.rows, corpus.held_out) for text in row)

    def guided(self, views: dict[str, View], columns: list[tuple[str, ...]]) -> dict[str, View]:
        """If there is a guide, add `guide` to each view: the guide's vectors of its texts, (n, d)."""
        if self.guide is None:
            return views
        texts = columns * 2 if len(columns) == 1 else columns
        return {name: views[name] | {"guide": self.guide(column)} for name, column in zip(views, texts, strict=True)}

    def pairs_loss(self, vectors: Iterable[Tensor], views: Mapping[str, View]) -> dict[str, Tensor]:
        """`loss` of each view's vectors (n, d), and `left_out`: the share of comparisons that the guide removed."""
        if self.guide is None:
            return {"loss": self.nested(self._contrast, *self.joined(*vectors))}
        joined = self.joined(*vectors, *(view["guide"] for view in views.values()))
        vectors, (anchors, positives, *negatives) = joined[: len(views)], joined[len(views) :]
        hard = torch.cat(negatives) if negatives else None  # (k·n, d)
        left_out = false_negatives(anchors, positives, self.recipe.guide_margin, hard)
        loss = self.nested(partial(self._contrast, left_out=left_out), *vectors)
        return {"loss": loss, "left_out": left_out.float().mean()}

    def _contrast(self, first: Tensor, second: Tensor, *negatives: Tensor, left_out: Tensor | None = None) -> Tensor:
        """InfoNCE with hard negatives, all (n, d), over the rows of all processes."""
        first, second, *headed_negatives = self.headed(first, second, *negatives)
        hard = torch.cat(headed_negatives) if headed_negatives else None  # (k·n, d)
        return info_nce(first, second, self.recipe.temperature, hard, self.recipe.negative_weight, left_out)
