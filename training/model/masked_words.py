"""The words an encoder predicts at [MASK], and a sentence vector of them: PromptBERT (arXiv:2201.04337) equation 3."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from training.errors import EncoderError
from training.model.encoder import SentenceEncoder, saved_config
from training.model.masked_head import MaskedHead
from training.model.pretrained import fastest_device

__all__ = ["MaskedWords"]

ROWS: Final = 128  # texts whose scores over the whole vocabulary are held at once


class MaskedWords:
    """An encoder with mask pooling and its masked-word head.

    If the encoder denoises, the input of the head is h - h^. The paper's Tables 7 and 9 do not say how; this is the
    most plausible reading.
    """

    def __init__(self, encoder: SentenceEncoder, head: MaskedHead) -> None:
        encoder.head = None  # a kept head makes sentence vectors; words are predicted before it
        self.encoder = encoder.eval()
        self.head = head.to(encoder.device)
        self.static = encoder.word_embeddings.weight.detach()  # (vocabulary, d)

    @classmethod
    def load(cls, source: str, **changes: object) -> Self:
        """Load a folder or hub name; `changes` override its embedding configuration. Raises ClozeError."""
        if changes.get("template") is None and saved_config(Path(source)) is None:
            raise EncoderError(f"{source!r} has no template of its own; give one: --template '[X] means [MASK].'")
        head = MaskedHead.load(source)
        return cls(SentenceEncoder.load(source, **changes | {"pooling": "mask"}).to(fastest_device()), head)

    @torch.no_grad()
    def top(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Vectors at [MASK] (n, d) -> probabilities and ids (n, k) of the likeliest tokens, likeliest first."""
        if not 1 <= k <= len(self.static):
            raise EncoderError(f"--top-k is {k}; write 1 to {len(self.static)}, the size of the vocabulary")
        probabilities, ids = self.head(hidden, self.static).softmax(-1).topk(k)
        return probabilities, ids

    def words(self, texts: Sequence[str], k: int) -> list[list[tuple[str, float]]]:
        """A text's likeliest tokens and their probabilities."""
        decode = self.encoder.tokenizer.decode
        return [
            [(str(decode([token])).strip(), probability) for probability, token in zip(*row, strict=True)]
            for row in zip(*(part.tolist() for part in self.top(self._hidden(texts), k)), strict=True)
        ]

    def embed(self, texts: Sequence[str], k: int) -> NDArray[np.float32]:
        """Equation 3: the static embeddings (n, d) of a text's k likeliest tokens, weighted by probability and added.

        The weights are not divided by their sum: that would only change the length of a vector.
        """
        vectors = []
        for hidden in self._hidden(texts).split(ROWS):
            probabilities, ids = self.top(hidden, k)
            vectors.append(torch.einsum("nk,nkd->nd", probabilities, self.static[ids]))
        return torch.cat(vectors).cpu().numpy()

    def _hidden(self, texts: Sequence[str]) -> Tensor:
        return torch.from_numpy(self.encoder.embed(texts)).to(self.encoder.device)
