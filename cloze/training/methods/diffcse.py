"""DiffCSE (arXiv:2204.10298): SimCSE, with sentence vectors that also help to find edits of the sentence.

A fixed generator edits the sentence. A discriminator finds the edits with the help of the original's vector, which it
sees in place of [CLS]. Its gradient reaches the encoder through that vector. Generator, discriminator and projector are
used in training only.

The recipe's keys select the variants of Tables 3, 5 and 15: without contrast, the next sentence instead of the same
one, words to guess instead of edits to find, a projector without BatchNorm, and edited sentences as further positives
or negatives.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from cloze.training.data.stored_rows import Row
from cloze.training.errors import EncoderError, RecipeError
from cloze.training.methods.contrastive import BatchObjective, projection
from cloze.training.methods.edits import Edited, Editor
from cloze.training.methods.gather import of_first, own, totals
from cloze.training.methods.losses import corrected_words, edit_detection, info_nce
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.masked_words import MaskedHead
from cloze.training.model.pretrained import word_embeddings
from cloze.training.model.views import View, view
from cloze.training.recipes.methods import DiffCSERecipe, EditKind

VIEWS: Final = ("first", "second")
COMPARED: Final = "edited"  # the view of the edited sentences, where they are positives or negatives
EDITED: Final = {"same": ("same", "same"), "next": ("next", "next"), "both": ("same", "next")}  # for the two views


class ConditionalTask(nn.Module, ABC):
    """A copy of the encoder's backbone that reads a sentence with a sentence vector in place of [CLS].

    It shares nothing with the encoder. A subclass has a head and a loss.
    """

    def __init__(self, backbone: PreTrainedModel) -> None:
        super().__init__()
        self.backbone = deepcopy(backbone)
        self._condition: Tensor | None = None  # of the current pass
        self.backbone.get_submodule("embeddings").register_forward_hook(self._insert)  # once: a compiled pass keeps it

    def forward(self, input_ids: Tensor, attention_mask: Tensor, condition: Tensor) -> Tensor:
        """Token ids (n, L) and the vector in place of [CLS] (n, d) -> the last layer (n, L, d)."""
        self._condition = condition
        states: Tensor = self.backbone(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        self._condition = None
        return states

    def outputs(self, views: Sequence[View], conditions: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """`forward` of each view, in one pass if the edited sentences have the same length."""
        ids, masks = ([view[key] for view in views] for key in ("edited_ids", "edited_mask"))
        if len({rows.shape for rows in ids}) > 1:
            return tuple(map(self, ids, masks, conditions))
        together: Tensor = self(torch.cat(ids), torch.cat(masks), torch.cat(list(conditions)))
        return together.chunk(len(views))

    def _insert(self, _module: nn.Module, _inputs: object, embedded: Tensor) -> Tensor:  # (n, L, d)
        """Insert the condition after the embeddings' sum, layer norm and dropout: it has no position and no type."""
        if self._condition is None:
            return embedded
        return torch.cat([self._condition.unsqueeze(1).to(embedded.dtype), embedded[:, 1:]], dim=1)

    @abstractmethod
    def loss(self, views: Sequence[View], conditions: Sequence[Tensor]) -> dict[str, Tensor]:
        """Views with `edited_ids`, `edited_mask` and `labels`, and a vector for each row -> loss and parts to log.

        The rows are those of this process.
        """


class Discriminator(ConditionalTask):
    """Two scores per token: kept, edited. The processes average their means.

    This is ELECTRA's task (arXiv:2003.10555) with one more input, so that the vector learns to hold what the edit
    changed.
    """

    def __init__(self, backbone: PreTrainedModel) -> None:
        super().__init__(backbone)
        self.head = nn.Linear(backbone.config.hidden_size, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, condition: Tensor) -> Tensor:
        """Token ids (n, L) and the vector in place of [CLS] (n, d) -> scores (n, L, 2)."""
        scores: Tensor = self.head(super().forward(input_ids, attention_mask, condition))
        return scores

    def loss(self, views: Sequence[View], conditions: Sequence[Tensor]) -> dict[str, Tensor]:
        scores = torch.cat([scores.flatten(0, 1) for scores in self.outputs(views, conditions)])  # (m, 2)
        labels, attended = (torch.cat([view[key].flatten() for view in views]) for key in ("labels", "edited_mask"))
        loss = edit_detection(scores, labels)
        right = (scores.argmax(1) == labels).float()
        return {
            "loss": loss,
            "detection": loss.detach(),
            "accuracy_edited": _mean(right, labels),
            "accuracy_kept": _mean(right, attended - labels),
        }


class WordGuesser(ConditionalTask):
    """A score per word of the vocabulary at each token with a label. The label is the word to guess.

    With `copies` the sentence is an edited one, and a token can also be copied. The loss is the mean over the tokens of
    all processes.
    """

    def __init__(self, backbone: PreTrainedModel, head: MaskedHead, copies: bool) -> None:
        super().__init__(backbone)
        self.head = head
        self.copy = nn.Linear(backbone.config.hidden_size, 1) if copies else None

    def loss(self, views: Sequence[View], conditions: Sequence[Tensor]) -> dict[str, Tensor]:
        labelled = [view["labels"] >= 0 for view in views]
        outputs = zip(self.outputs(views, conditions), labelled, strict=True)
        hidden = torch.cat([states[places] for states, places in outputs])  # (m, d)
        edited_words, answers = (
            torch.cat([view[key][places] for view, places in zip(views, labelled, strict=True)])
            for key in ("edited_ids", "labels")
        )
        words = self.head(hidden, word_embeddings(self.backbone).weight).float()  # (m, vocabulary)
        right = (words.argmax(1) == answers).float()
        if self.copy is None:
            losses = F.cross_entropy(words, answers, reduction="sum")
        else:
            copied = self.copy(hidden).squeeze(1).float()  # (m)
            losses = corrected_words(words, copied, edited_words, answers)
        total_loss, rights, count = totals(losses, right, torch.ones_like(right))
        count = count.clamp(min=1)
        loss = total_loss / count
        if self.copy is None:
            return {"loss": loss, "guessing": loss.detach(), "accuracy": (rights / count).detach()}
        edited = (edited_words != answers).float()
        return {
            "loss": loss,
            "correction": loss.detach(),
            "accuracy_edited": _mean(right, edited),
            "copied_edited": _mean((copied > 0).float(), edited),
            "copied_kept": _mean((copied > 0).float(), 1 - edited),
        }


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean of the values at the ones of `mask`; 0 if there are none."""
    return (values * mask).sum() / mask.sum().clamp(min=1)


class DiffCSE(BatchObjective):
    """Contrast plus lambda times detection, section 3. The projector with BatchNorm is from appendix A."""

    recipe: DiffCSERecipe

    def __init__(self, encoder: SentenceEncoder, recipe: DiffCSERecipe) -> None:
        super().__init__(encoder, recipe)
        _check_room(encoder, recipe)
        projected = recipe.contrast or recipe.condition == "projected"
        self.projector = _projector(encoder, recipe.projector) if projected else nn.Identity()
        self.editor: Editor | None = None
        self.discriminator: ConditionalTask | None = None
        if recipe.detection_weight:
            edits = recipe.task != "mlm" and set(recipe.edits) != {"delete"}
            generator = (recipe.generator or recipe.encoder) if edits else None
            self.editor = Editor.load(generator, encoder.tokenizer, recipe.masked_share, recipe.guessing)
            self.discriminator = None if recipe.compares_edited else _discriminator(encoder, recipe)

    def models(self) -> Iterator[nn.Module]:
        yield from super().models()
        if self.discriminator is not None:
            yield self.discriminator
        if self.editor is not None and self.editor.generator is not None:
            yield self.editor.generator

    def views(self, rows: Sequence[Row]) -> dict[str, View]:
        first, *following = (view(self.text_encoder, texts) for texts in zip(*rows, strict=True))
        for texts in following:  # one, if the recipe reads the next sentences
            first |= {"next_ids": texts["input_ids"], "next_mask": texts["attention_mask"]}
        return dict.fromkeys(VIEWS, first)

    def draw(self, views: dict[str, View]) -> dict[str, View]:
        if self.recipe.compares_edited:
            texts = views[VIEWS[0]]
            edited = self._edit(self._kind(), texts["input_ids"], texts["attention_mask"])
            return views | {COMPARED: {"input_ids": edited.input_ids, "attention_mask": edited.attention_mask}}
        if self.discriminator is None:
            return views
        edits = zip(views.items(), self._edits(views), strict=True)
        return {
            name: texts | {"edited_ids": ids, "edited_mask": attention, "labels": labels}
            for (name, texts), (ids, attention, labels) in edits
        }

    def _edits(self, views: dict[str, View]) -> list[Edited]:
        """The edited sentences of both views, made in one pass if the kind of edit and the sentences are the same."""
        texts, sentences = views[VIEWS[0]], EDITED[self.recipe.edited]  # both views have the same tensors
        kinds = [self._kind() for _ in VIEWS]
        tokens = {"same": (texts["input_ids"], texts["attention_mask"])}
        if "next" in sentences:
            tokens["next"] = texts["next_ids"], texts["next_mask"]
        if len({*zip(sentences, kinds, strict=True)}) > 1:
            return [self._edit(kind, *tokens[name]) for kind, name in zip(kinds, sentences, strict=True)]
        edited = self._edit(kinds[0], *(rows.repeat(2, 1) for rows in tokens[sentences[0]]))
        return [Edited(*parts) for parts in zip(*(rows.chunk(2) for rows in edited), strict=True)]

    def examples(self, views: dict[str, View]) -> Iterator[tuple[str, Tensor, Tensor]]:
        yield from super().examples(views)
        if self.discriminator is not None:
            for name, view in self.draw(views).items():
                yield f"drawn {name}, edited", view["edited_ids"], view["edited_mask"]

    def _kind(self) -> EditKind:
        drawn = torch.randint(len(self.recipe.edits), ())
        return self.recipe.edits[int(of_first(drawn, self.encoder.device))]

    def _edit(self, kind: EditKind, ids: Tensor, attention: Tensor) -> Edited:
        assert self.editor is not None, "only `draw` with a detection_weight leads here. This is a bug."
        match self.recipe.task:
            case "mlm":
                return self.editor.mask(ids, attention)
            case "correction":
                return self.editor.correct(ids, attention)
        return self.editor.edit(kind, ids, attention)

    def loss(self, vectors: Mapping[str, Tensor], views: Mapping[str, View]) -> dict[str, Tensor]:
        first, second, *edited = self.joined(*vectors.values())  # before BatchNorm, so that it sees all processes
        losses, parts = [], {}
        if self.recipe.contrast:
            contrast = self.nested(self._contrast, first, second, *edited)
            losses.append(contrast)
            parts["contrast"] = contrast.detach()
        if self.discriminator is not None:
            conditions = [vectors[name] for name in VIEWS]
            if self.recipe.condition == "projected":
                conditions = [own(rows) for rows in self._project(first, second)]
            parts |= self.discriminator.loss([views[name] for name in VIEWS], conditions)
            losses.append(self.recipe.detection_weight * parts.pop("loss"))
        return {"loss": torch.stack(losses).sum()} | parts

    def _project(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Both views, (n, d) each; BatchNorm takes the statistics of the two together."""
        first, second = self.projector(torch.cat([first, second])).chunk(2)
        return first, second

    def _contrast(self, first: Tensor, second: Tensor, edited: Tensor | None = None) -> Tensor:
        """SimCSE's loss; edited sentences (n, d) are hard negatives, or positives with a loss of the same weight."""
        if edited is None:
            return info_nce(*self._project(first, second), self.recipe.temperature)
        first, second, edited = self.projector(torch.cat([first, second, edited])).chunk(3)
        if self.recipe.task == "negative":
            return info_nce(first, second, self.recipe.temperature, edited)
        losses = [info_nce(first, positive, self.recipe.temperature) for positive in (second, edited)]
        return torch.stack(losses).mean()


def _projector(encoder: SentenceEncoder, kind: str) -> nn.Sequential:
    if kind == "tanh":
        return projection(encoder)
    width = encoder.dimension
    return nn.Sequential(
        nn.Linear(width, 2 * width, bias=False),
        nn.BatchNorm1d(2 * width),
        nn.ReLU(),
        nn.Linear(2 * width, width, bias=False),
        nn.BatchNorm1d(width, affine=False),
    )


def _discriminator(encoder: SentenceEncoder, recipe: DiffCSERecipe) -> ConditionalTask:
    if recipe.task == "detection":
        return Discriminator(encoder.backbone)
    if encoder.tokenizer.mask_token_id is None:
        raise EncoderError(f"{recipe.encoder!r}: its tokenizer has no mask token; write task = 'detection'")
    return WordGuesser(encoder.backbone, MaskedHead.load(recipe.encoder), copies=recipe.task == "correction")


def _check_room(encoder: SentenceEncoder, recipe: DiffCSERecipe) -> None:
    """Check that inserted words have positions too. Raises RecipeError."""
    longest = recipe.max_tokens + math.ceil(recipe.masked_share * recipe.max_tokens) * ("insert" in recipe.edits)
    if longest > encoder.config.max_tokens:
        raise RecipeError(
            f"max_tokens is {recipe.max_tokens}, or {longest} after words are inserted; the encoder has positions for "
            f"{encoder.config.max_tokens}: lower max_tokens or masked_share"
        )
