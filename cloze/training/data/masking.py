"""Masked words: which tokens of a batch a language model has to guess, and what replaces them.

BERT's rule (arXiv:1810.04805 section 3.1): of the chosen tokens 80 % become [MASK], 10 % a random token, 10 % stay.
"""

import torch
from tokenizers.models import WordPiece
from torch import Tensor
from transformers import PreTrainedTokenizerBase

_MASKED, _RANDOM = 0.8, 0.1


def maskable_tokens(input_ids: Tensor, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """True (n, L) at the tokens of the text: not at special tokens or padding."""
    return ~torch.isin(input_ids, torch.tensor(tokenizer.all_special_ids, device=input_ids.device))


def mask_tokens(
    input_ids: Tensor,
    maskable: Tensor,
    share: float,
    mask_id: int,
    vocabulary: int,
) -> tuple[Tensor, Tensor]:
    """Ids (n, L) -> ids with chosen tokens replaced, and True (n, L) where one was chosen.

    Each maskable token is chosen independently with probability `share`. `input_ids` is not changed.
    """
    chosen = maskable & (torch.rand(input_ids.shape, device=input_ids.device) < share)
    fates = torch.rand(input_ids.shape, device=input_ids.device)
    strangers = torch.randint(vocabulary, input_ids.shape, device=input_ids.device)
    masked = torch.where(chosen & (fates < _MASKED), mask_id, input_ids)
    masked = torch.where(chosen & (fates >= _MASKED) & (fates < _MASKED + _RANDOM), strangers, masked)
    return masked, chosen


def continuing_prefix(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The prefix of a token inside a word, `##` in WordPiece; None if the beginning of a word is marked instead."""
    pieces = tokenizer.backend_tokenizer.model  # not the vocabulary: RoBERTa also has a token ##, which is text
    return str(pieces.continuing_subword_prefix) if isinstance(pieces, WordPiece) else None
