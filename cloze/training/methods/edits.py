"""Edited sentences, and which of their tokens were edited: replaced or inserted by a language model, or deleted.

The edits of DiffCSE section 5 (arXiv:2204.10298). [CLS] is never edited and padding stays padding, with label 0. Words
can also be masked, for a discriminator that guesses them.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from cloze.training.data.masking import mask_tokens, maskable_tokens
from cloze.training.encoder_source import encoder_folder
from cloze.training.errors import EncoderError
from cloze.training.model.encoder import loading
from cloze.training.model.masked_words import load_masked_lm
from cloze.training.model.pretrained import word_embeddings
from cloze.training.model.views import trimmed
from cloze.training.recipes.methods import EditKind, Guessing


class Edited(NamedTuple):
    """A batch of edited sentences, all (n, L). `labels` are 1 where the discriminator should find an edit.

    For a discriminator that guesses words they are the ids of the words, and -100 where there is nothing to guess.
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor


class Editor:
    """Edits batches of token ids with a frozen language model whose dropout is on, for more variety.

    `best` takes the model's likeliest word at every position, masked or not; `sampled` draws a word at each masked
    position. The model is not a submodule of anything, so it is not in a checkpoint.
    """

    def __init__(
        self, generator: PreTrainedModel | None, tokenizer: PreTrainedTokenizerBase, share: float, guessing: Guessing
    ) -> None:
        self.generator = None if generator is None else generator.requires_grad_(False).train()
        self.tokenizer = tokenizer
        self.share = share
        self.guessing = guessing

    @classmethod
    def load(
        cls, source: str | None, tokenizer: PreTrainedTokenizerBase, share: float, guessing: Guessing = "best"
    ) -> Self:
        """Load the masked language model in `source`; it needs the tokenizer's vocabulary. None: only delete and mask.

        Raises EncoderError if the vocabulary differs, or if there is no masked-word head.
        """
        if source is None:
            return cls(None, tokenizer, share, guessing)
        source = encoder_folder(source)
        if tokenizer.mask_token_id is None:
            raise EncoderError(
                "the encoder's tokenizer has no mask token, which editing words requires; choose another encoder"
            )
        _check_vocabulary(source, tokenizer)
        generator = load_masked_lm(source)
        if (rows := word_embeddings(generator).num_embeddings) < len(tokenizer):
            raise EncoderError(
                f"generator {source!r} has embeddings for {rows} tokens, but the encoder's tokenizer has "
                f"{len(tokenizer)}; choose a generator with that tokenizer"
            )
        return cls(generator, tokenizer, share, guessing)

    @torch.no_grad()
    def edit(self, kind: EditKind, input_ids: Tensor, attention_mask: Tensor) -> Edited:
        """Sentences (n, L) -> the same sentences edited; the arguments are not changed."""
        edits = {"replace": self._replace, "insert": self._insert, "delete": self._delete}
        return edits[kind](input_ids, attention_mask)

    def mask(self, input_ids: Tensor, attention_mask: Tensor) -> Edited:
        """Sentences (n, L) -> the same sentences with words masked. The labels are these words."""
        masked, chosen = self._mask(input_ids)
        return Edited(masked, attention_mask, input_ids.where(chosen, -100))

    def correct(self, input_ids: Tensor, attention_mask: Tensor) -> Edited:
        """Sentences (n, L) -> the same sentences with words replaced. The labels are all original tokens but [CLS]."""
        edited = self.edit("replace", input_ids, attention_mask)
        answers = input_ids.where(attention_mask.bool(), -100)
        answers[:, 0] = -100
        return edited._replace(labels=answers)

    def _mask(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        tokenizer = self.tokenizer
        return mask_tokens(ids, maskable_tokens(ids, tokenizer), self.share, tokenizer.mask_token_id, len(tokenizer))

    def _replace(self, ids: Tensor, attention: Tensor) -> Edited:
        """Label 1 where a token differs: a masked word that was guessed right is not an edit."""
        masked, chosen = self._mask(ids)
        places = chosen if self.guessing == "sampled" else attention.bool()
        edited = self._guess(masked, attention, places)
        edited[:, 0] = ids[:, 0]
        return Edited(edited, attention, (edited != ids).long())

    def _insert(self, ids: Tensor, attention: Tensor) -> Edited:
        """A new word before some tokens, never two in a row; label 1 for the new words."""
        text = maskable_tokens(ids, self.tokenizer)
        gaps = attention.bool()
        gaps[:, 0] = False  # a word before [SEP] follows the last word
        chosen = _choose(gaps, self.share * text.sum(1))
        masks = torch.full_like(ids, self.tokenizer.mask_token_id)
        pairs = torch.stack([masks, ids], dim=2).flatten(1)  # (n, 2 L): each token with a possible mask before it
        kept = torch.stack([chosen, attention.bool()], dim=2).flatten(1)
        labels = torch.stack([torch.ones_like(ids), torch.zeros_like(ids)], dim=2).flatten(1)
        edited, attention, labels = self._close(kept, pairs, labels)
        return Edited(self._guess(edited, attention, labels.bool()), attention, labels)

    def _delete(self, ids: Tensor, attention: Tensor) -> Edited:
        """Label 1 for a token (or [SEP]) if the token before it was deleted."""
        text = maskable_tokens(ids, self.tokenizer)
        gone = _choose(text, self.share * text.sum(1))
        return Edited(*self._close(attention.bool() & ~gone, ids, gone.roll(1, dims=1).long()))

    def _guess(self, ids: Tensor, attention: Tensor, places: Tensor) -> Tensor:
        """Ids with the generator's words at `places`. They are never [PAD], because RoBERTa counts positions by it."""
        assert self.generator is not None, "an editor without a generator only deletes. This is a bug."
        generator, guessed = self.generator.to(ids.device), ids.clone()
        for rows, part in trimmed(
            {"input_ids": ids, "attention_mask": attention, "places": places}, tokenwise=["places"]
        ):
            scores = generator(input_ids=part["input_ids"], attention_mask=part["attention_mask"]).logits
            guessed[rows, : scores.shape[1]] = self._choose_words(scores, part["input_ids"], part["places"])
        return guessed

    def _choose_words(self, scores: Tensor, ids: Tensor, places: Tensor) -> Tensor:
        """Scores (n, L, V) -> ids (n, L) with the likeliest or drawn words at `places`."""
        scores = scores[..., : len(self.tokenizer)]  # an embedding table may have more rows than words
        scores[..., self.tokenizer.pad_token_id] = -torch.inf  # in place: a copy would take hundreds of megabytes
        if self.guessing == "best":
            return scores.argmax(-1).where(places, ids)
        chosen = scores[places].float()  # (m, V)
        chosen -= torch.empty_like(chosen).exponential_().log()  # the highest is a draw of the softmax
        return ids.masked_scatter(places, chosen.argmax(-1))

    def _close(self, kept: Tensor, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, attention mask and labels of the kept tokens (n, L), moved together and cut to the longest row."""
        lengths = kept.sum(1, keepdim=True)  # (n, 1)
        order = kept.int().argsort(dim=1, descending=True, stable=True)[:, : int(lengths.max())]
        attention = torch.arange(order.shape[1], device=ids.device) < lengths
        ids = ids.gather(1, order).where(attention, self.tokenizer.pad_token_id)
        return ids, attention.long(), labels.gather(1, order) * attention


def _choose(places: Tensor, numbers: Tensor) -> Tensor:
    """Draw `numbers` (n) of the places (n, L) in each row; a fractional number is rounded up or down at random."""
    numbers = (numbers + torch.rand_like(numbers)).floor()
    draws = torch.rand(places.shape, device=places.device).where(places, 2.0)
    return places & (draws.argsort(dim=1).argsort(dim=1) < numbers.unsqueeze(1))


def _check_vocabulary(source: str, tokenizer: PreTrainedTokenizerBase) -> None:
    with loading(source, "a generator"):
        theirs = AutoTokenizer.from_pretrained(source, trust_remote_code=False).get_vocab()
    ours = tokenizer.get_vocab()
    if strange := [word for word, number in ours.items() if theirs.get(word) != number]:
        raise EncoderError(
            f"generator {source!r} does not have the encoder's vocabulary: {len(strange)} of the encoder's "
            f"{len(ours)} tokens are missing or have another id there, such as {min(strange)!r}; choose a masked "
            "language model with the encoder's own tokenizer"
        )
