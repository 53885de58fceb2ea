"""What an encoder's vectors give without training: each layer's mean, first-last, static words, and whitening.

The text has no template; means are over all tokens, special ones included. `static` is the mean of the word embeddings
alone (PromptBERT, arXiv:2201.04337, Table 3, first row). `first-last` is the mean of layers 1 and last, as in SimCSE
since 2022. `whitening` (arXiv:2103.15316) is fitted on the set's own distinct sentences, by that mean, and keeps all
dimensions. Figures are Spearman's correlation x100 ('all') on the seven STS sets.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

import numpy as np
import torch
from numpy.typing import NDArray

from training.data.scored_pairs import Pairs
from training.data.similarity import cosines
from training.data.sts_sets import load_tasks
from training.errors import RunError
from training.evaluate.measures import Score, measured
from training.evaluate.subject import Subject
from training.evaluate.task import Task
from training.model.encoder import SentenceEncoder
from training.model.pooling import token_batches

__all__ = ["BaselineTask", "layer_means", "tasks", "whiten"]

TOKENS: Final = 4096  # of a batch
SMALLEST: Final = 1e-12  # singular value, relative to the largest, of a direction that is kept


def tasks(data: Path | None, own: Sequence[Path]) -> list[Task]:
    """The seven STS sets. Raises CorpusError."""
    return [] if own or data is None else [BaselineTask(name, pairs) for name, pairs in load_tasks(data).items()]


def whiten(vectors: NDArray[np.floating]) -> NDArray[np.float64]:
    """Vectors (n, d) with mean 0 and the identity as covariance, in the directions in which they differ."""
    centred = vectors.astype(np.float64) - vectors.mean(0, dtype=np.float64)
    directions, sizes, _ = np.linalg.svd(np.cov(centred.T))
    kept = sizes > SMALLEST * sizes[0]
    whitened: NDArray[np.float64] = centred @ directions[:, kept] / np.sqrt(sizes[kept])
    return whitened


@torch.no_grad()
def layer_means(encoder: SentenceEncoder, texts: Sequence[str]) -> dict[str, NDArray[np.float32]]:
    """`static` and `layer 0` (the embeddings) to the last -> means over tokens (n, d)."""
    pooling = encoder.make_pooling("[X]", encoder.config.max_tokens, mode="mean")
    sequences = [tokens.ids for tokens in pooling.text_encoder.encode(texts)]
    found: dict[str, NDArray[np.float32]] = {}
    for rows in token_batches([len(ids) for ids in sequences], TOKENS):
        batch = pooling.text_encoder.pad([sequences[row] for row in rows])
        input_ids, attention_mask = (torch.from_numpy(array).to(encoder.device) for array in batch)
        output = encoder.backbone(input_ids, attention_mask=attention_mask, output_hidden_states=True)
        layers = {f"layer {number}": states for number, states in enumerate(output.hidden_states)}
        for name, states in {"static": encoder.word_embeddings(input_ids), **layers}.items():
            vectors = pooling.read(states, attention_mask).float().cpu().numpy()
            found.setdefault(name, np.empty((len(texts), vectors.shape[1]), np.float32))[rows] = vectors
    return found


@dataclass(frozen=True)
class BaselineTask(Task):
    suite: ClassVar[str] = "baselines"
    pairs: Pairs

    def run(self, subject: Subject) -> list[Score]:
        if not isinstance(subject.model, SentenceEncoder):
            raise RunError(f"{subject.name} shows no layers; score the baselines of a run or an encoder")
        texts = sorted({*self.pairs.left, *self.pairs.right})
        vectors: dict[str, NDArray[np.floating]] = {**layer_means(subject.model.eval(), texts)}
        last = len(vectors) - 2  # without static and layer 0
        vectors["first-last"] = (vectors["layer 1"] + vectors[f"layer {last}"]) / 2
        vectors["whitening"] = whiten(vectors["first-last"])
        places = {text: place for place, text in enumerate(texts)}
        left, right = ([places[text] for text in side] for side in (self.pairs.left, self.pairs.right))
        counts = {"pairs": len(self.pairs)}
        return [
            measured(
                self.suite,
                self.name,
                name,
                "spearman",
                cosines(each[left], each[right]),
                self.pairs.gold,
                counts=counts,
            )
            for name, each in vectors.items()
        ]
