"""DiffCSE's conditional tasks: a copy of the encoder reads a sentence, with a sentence vector in place of [CLS].

`Discriminator` finds the edited tokens: ELECTRA's task (arXiv:2003.10555) with one more input, so that the vector
learns to hold what the edit changed. `WordGuesser` guesses masked words, or restores the words of an edited sentence.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from training.methods.losses import corrected_words, edit_detection
from training.methods.parts.gather import total
from training.model.masked_head import MaskedHead
from training.model.pretrained import word_embeddings
from training.model.views import View

__all__ = ["ConditionalTask", "Discriminator", "WordGuesser"]


class ConditionalTask(nn.Module, ABC):
    """A copy of the encoder's backbone that shares nothing with it. A subclass has a head and a loss."""

    def __init__(self, backbone: PreTrainedModel) -> None:
        super().__init__()
        self.backbone = deepcopy(backbone)

    def hidden(self, input_ids: Tensor, attention_mask: Tensor, condition: Tensor) -> Tensor:
        """Token ids (n, L) and the vector in place of [CLS] (n, d) -> the last layer (n, L, d).

        The condition is inserted after the embeddings' sum, layer norm and dropout: it has no position and no type.
        """

        def replace(_module: nn.Module, _inputs: object, embedded: Tensor) -> Tensor:  # (n, L, d)
            return torch.cat([condition.unsqueeze(1).to(embedded.dtype), embedded[:, 1:]], dim=1)

        hook = self.backbone.get_submodule("embeddings").register_forward_hook(replace)
        try:
            states: Tensor = self.backbone(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        finally:
            hook.remove()
        return states

    @abstractmethod
    def loss(self, views: Sequence[View], conditions: Sequence[Tensor]) -> dict[str, Tensor]:
        """Views with `edited_ids`, `edited_mask` and `labels`, and a vector for each row -> loss and parts to log.

        The rows are those of this process.
        """


class Discriminator(ConditionalTask):
    """Two scores per token: kept, edited. The processes average their means."""

    def __init__(self, backbone: PreTrainedModel) -> None:
        super().__init__(backbone)
        self.head = nn.Linear(backbone.config.hidden_size, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, condition: Tensor) -> Tensor:
        """Token ids (n, L) and the vector in place of [CLS] (n, d) -> scores (n, L, 2)."""
        scores: Tensor = self.head(self.hidden(input_ids, attention_mask, condition))
        return scores

    def loss(self, views: Sequence[View], conditions: Sequence[Tensor]) -> dict[str, Tensor]:
        passes = [
            self(view["edited_ids"], view["edited_mask"], condition)
            for view, condition in zip(views, conditions, strict=True)
        ]
        scores = torch.cat([scores.flatten(0, 1) for scores in passes])  # (m, 2); edited views differ in length
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
    """A score per word of the vocabulary at the tokens that have a label, which is the word to guess.

    With `copies` the sentence is an edited one, and a token may also be kept as it is. The loss is the mean over the
    tokens of all processes.
    """

    def __init__(self, backbone: PreTrainedModel, head: MaskedHead, copies: bool) -> None:
        super().__init__(backbone)
        self.head = head
        self.copy = nn.Linear(backbone.config.hidden_size, 1) if copies else None

    def loss(self, views: Sequence[View], conditions: Sequence[Tensor]) -> dict[str, Tensor]:
        asked = [view["labels"] >= 0 for view in views]
        hidden = torch.cat(
            [
                self.hidden(view["edited_ids"], view["edited_mask"], condition)[places]
                for view, condition, places in zip(views, conditions, asked, strict=True)
            ]
        )  # (m, d)
        seen, answers = (
            torch.cat([view[key][places] for view, places in zip(views, asked, strict=True)])
            for key in ("edited_ids", "labels")
        )
        words = self.head(hidden, word_embeddings(self.backbone).weight).float()  # (m, vocabulary)
        right = (words.argmax(1) == answers).float()
        count = total(torch.ones_like(right)).clamp(min=1)
        if self.copy is None:
            loss = total(F.cross_entropy(words, answers, reduction="sum")) / count
            return {"loss": loss, "guessing": loss.detach(), "accuracy": total(right) / count}
        copied = self.copy(hidden).squeeze(1).float()  # (m)
        loss = total(corrected_words(words, copied, seen, answers)) / count
        edited = (seen != answers).float()
        return {
            "loss": loss,
            "correction": loss.detach(),
            "accuracy_edited": _mean(right, edited),
            "copied_edited": _mean((copied > 0).float(), edited),
            "copied_kept": _mean((copied > 0).float(), 1 - edited),
        }


def _mean(values: Tensor, where: Tensor) -> Tensor:
    """The mean of the values at the ones of `where`; 0 if there are none."""
    return (values * where).sum() / where.sum().clamp(min=1)
