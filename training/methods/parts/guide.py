"""The guide of a contrastive method: an encoder that says which texts of a batch are not negatives of a row."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from torch import Tensor

from encoding.bundle import Bundle
from evaluation.measures import Embed
from training.methods.parts.gather import rank_and_count
from training.model.encoder import SentenceEncoder, saved_config
from training.model.graph_encoder import GraphEncoder
from training.model.model_path import kind_of, model_folder
from training.model.pretrained import fastest_device

__all__ = ["Guide"]

TEXTS: Final = 4096  # embedded at once: enough that the texts of a batch have similar lengths


class Guide:
    """The guide's vectors of texts, each computed once and kept in memory."""

    def __init__(self, embed: Embed) -> None:
        self._embed = embed
        self._vectors: dict[str, NDArray[np.float32]] = {}

    @classmethod
    def load(cls, source: str) -> Self:
        """A run, a bundle (its most exact graph), an encoder's folder or a hub name. Raises ClozeError.

        An encoder that has no embedding configuration of its own is read by mean pooling, without a template.
        """
        if kind_of(source) == "bundle":
            bundle = Bundle.load(source)
            return cls(GraphEncoder.of(bundle, bundle.precisions[0]).embed)
        folder = model_folder(source)
        configuration = {} if saved_config(Path(folder)) else {"template": "[X]", "pooling": "mean"}
        return cls(SentenceEncoder.load(folder, **configuration).to(fastest_device()).embed)

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Vectors (n, d)."""
        self._add(texts)
        return torch.from_numpy(np.stack([self._vectors[text] for text in texts]))

    def read(self, texts: Iterable[str]) -> None:
        """Embed all texts that training will ask for, with a progress bar.

        A vector depends a little on the texts that it is computed with. They are the same in a run that is resumed.
        """
        distinct = list(dict.fromkeys(texts))
        starts = range(0, len(distinct), TEXTS)
        console, (rank, _) = Console(stderr=True), rank_and_count()
        for start in track(starts, "guide", console=console, transient=True, disable=rank > 0):
            self._add(distinct[start : start + TEXTS])

    def _add(self, texts: Iterable[str]) -> None:
        new = [text for text in dict.fromkeys(texts) if text not in self._vectors]
        if new:
            self._vectors |= zip(new, self._embed(new), strict=True)
