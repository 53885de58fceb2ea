"""Averages of static word embeddings without biased tokens: PromptBERT (arXiv:2201.04337), Table 3 and appendix A.1.

The kinds of tokens are removed one after the other, as in the table: the 36 most frequent, subwords, upper case (by
writing the text in lower case), and tokens of punctuation alone. Special tokens never count. The most frequent tokens
are counted in the distinct texts that are averaged; the paper's own list of 36 is that of its texts. A text without a
token left has a vector of zeros, whose cosines are 0; the paper's code puts [PAD] there.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from encoding.text import TextEncoder
from training.data.masking import continuing_prefix
from training.model.encoder import SentenceEncoder

__all__ = ["FREQUENT", "Removal", "static_averages"]

FREQUENT: Final = 36
BEGINNINGS: Final = ("Ġ", "▁")  # of a word's first token, where continuations are not marked


def static_averages(
    encoder: SentenceEncoder, texts: Sequence[str], frequent: int = FREQUENT
) -> dict[str, NDArray[np.float32]]:
    """Name -> averages (n, d), with more kinds of tokens removed in each. An uncased model has no row for case."""
    text_encoder = encoder.make_pooling("[X]", encoder.config.max_tokens, mode="mean").text_encoder
    words = encoder.word_embeddings.weight.detach().float().cpu().numpy()
    pieces = [piece or "" for piece in encoder.tokenizer.convert_ids_to_tokens(list(range(len(encoder.tokenizer))))]
    removal = Removal(pieces, len(words), continuing_prefix(encoder.tokenizer))
    sequences = _inner_tokens(text_encoder, texts)
    removal.frequent(sequences, frequent)
    found = {"static -freq": removal.averages(words, sequences)}
    removal.subwords()
    found["static -freq -sub"] = removal.averages(words, sequences)
    if _inner_tokens(text_encoder, ["A"]) != _inner_tokens(text_encoder, ["a"]):
        sequences = _inner_tokens(text_encoder, [text.lower() for text in texts])
        found["static -freq -sub -case"] = removal.averages(words, sequences)
    removal.punctuation()
    return found | {f"{[*found][-1]} -pun": removal.averages(words, sequences)}


class Removal:
    """Which token ids are left out; `pieces` are the vocabulary's, by id, and `prefix` marks those inside a word."""

    def __init__(self, pieces: Sequence[str], vocabulary: int, prefix: str | None) -> None:
        self.pieces, self.prefix = pieces, prefix
        self.removed = np.zeros(vocabulary, dtype=bool)
        self.inside = np.zeros(vocabulary, dtype=bool)  # removed except at the start of a text

    def frequent(self, sequences: Sequence[Sequence[int]], count: int) -> None:
        counts = np.bincount(np.concatenate(sequences).astype(int), minlength=len(self.removed))
        self.removed[np.argsort(-counts, kind="stable")[:count]] = True

    def subwords(self) -> None:
        """A text's first token begins a word, though byte-level vocabularies write it like a subword."""
        for token, piece in enumerate(self.pieces[: len(self.removed)]):
            if self.prefix:
                self.removed[token] |= piece.startswith(self.prefix)
            else:
                self.inside[token] = not piece.startswith(BEGINNINGS)

    def punctuation(self) -> None:
        for token, piece in enumerate(self.pieces[: len(self.removed)]):
            self.removed[token] |= not any(character.isalnum() for character in piece)

    def averages(self, words: NDArray[np.float32], sequences: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Word embeddings (v, d) -> the mean of those that are left in each sequence, (n, d)."""
        found = np.zeros((len(sequences), words.shape[1]), np.float32)
        for row, ids in enumerate(sequences):
            kept = [
                token for place, token in enumerate(ids) if not (self.removed[token] or (place and self.inside[token]))
            ]
            if kept:
                found[row] = words[kept].mean(0)
        return found


def _inner_tokens(text_encoder: TextEncoder, texts: Sequence[str]) -> list[list[int]]:
    """Ids without [CLS] and [SEP]."""
    return [tokens.ids[1:-1] for tokens in text_encoder.encode(texts)]
