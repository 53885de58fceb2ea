"""A training method: views of a batch of texts, and a loss over them.

An objective owns what only training needs (heads, second templates, teachers). The encoder inside it is what is
served, so export forgets the rest by construction.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from cloze.training.data.corpus import Corpus
from cloze.training.data.stored_rows import Row
from cloze.training.errors import RecipeError
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.views import View
from cloze.training.recipes.recipe import Recipe


class Objective(nn.Module, ABC):
    """Base class of the methods. A subclass writes `views` and `forward`."""

    contrastive: ClassVar[bool] = False  # whether its loss pulls positives together and pushes negatives apart

    recipe: Recipe
    adds_head = False  # whether it gave the encoder a head, through which the served vectors pass

    def __init__(self, encoder: SentenceEncoder, recipe: Recipe) -> None:
        super().__init__()
        self.encoder = encoder
        self.recipe = recipe
        limit = encoder.config.max_tokens
        if recipe.max_tokens > limit:
            raise RecipeError(f"max_tokens is {recipe.max_tokens}; the encoder has positions for {limit}: lower it")
        self.text_encoder = encoder.make_text_encoder(recipe.template, recipe.max_tokens)  # or a lower limit

    def models(self) -> Iterator[nn.Module]:
        """The transformers that a step runs; the recipe's key `compile` compiles them."""
        yield self.encoder.backbone

    @abstractmethod
    def views(self, rows: Sequence[Row]) -> dict[str, View]:
        """Rows of the corpus -> the token ids that `forward` takes by name."""

    def begin(self, corpus: Corpus, folder: Path) -> None:
        """Do once what depends only on the texts; `fit` calls it before the first step.

        All processes share `folder`. What `begin` writes there still exists when the run is resumed.
        """
        return

    @abstractmethod
    def forward(self, *_: Any, **views: Any) -> dict[str, Tensor]:
        """Views by name -> {"loss": scalar with gradient, and detached parts to log by name}."""

    def examples(self, views: dict[str, View]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """What a step reads, for display: name, token ids (n, L) and attention mask of each view and random draw."""
        for name, view in views.items():
            yield f"view {name}", view["input_ids"], view["attention_mask"]

    def save(self, folder: Path) -> None:
        """Write the result of the training: the encoder alone, unless a method adds to it."""
        self.encoder.save(folder)
