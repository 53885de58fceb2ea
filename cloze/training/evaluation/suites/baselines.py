"""Scores of an encoder without training: every layer and pooling, static words, and post-processing.

The text has no template, but a period is added for a model with `final_period`. A layer's mean and maximum are over all
tokens, special ones included; layer 0 is the embeddings (SG, arXiv:2106.07345, Figure 1). `static` is the mean of the
word embeddings alone, `head` the mean of the rows of an untied masked-word head (PromptBERT, arXiv:2201.04337, Table
12), and the rows after them omit biased tokens (Table 3).
`first-last` is the mean of the first and the last layer, as in SimCSE since 2022, `last-two` the mean of the last two.
`whitening` is fitted on `first-last` and `BERT-flow` on `last-two`, both on the set's own distinct sentences. `WK
pooling` is SBERT-WK's. Figures are Spearman's correlation x100 ('all') on the seven STS sets. An encoder of one layer
has no WK pooling.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

import numpy as np
import torch
from numpy.typing import NDArray

from cloze.encoding.errors import ClozeError
from cloze.encoding.template import PoolingMode
from cloze.encoding.text import token_batches
from cloze.training.evaluation.measures import Pairs, cosines
from cloze.training.evaluation.postprocessing import (
    EPOCHS,
    FEWEST_STATES,
    FREQUENT,
    flow_vectors,
    static_averages,
    static_means,
    whiten,
    wk_pooling,
)
from cloze.training.evaluation.sts import load_tasks
from cloze.training.evaluation.task import Score, Subject, Task, measured
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.masked_words import MaskedHead
from cloze.training.model.pooling import pool

TOKENS: Final = 4096  # per batch
MODES: Final[tuple[PoolingMode, ...]] = ("mean", "cls", "max")  # of each layer


def tasks(data: Path | None, own: Sequence[Path]) -> list[Task]:
    """The seven STS sets. Raises CorpusError."""
    return [] if data is None else [BaselineTask(name, pairs) for name, pairs in load_tasks(data).items()]


@torch.no_grad()
def pooled_layers(encoder: SentenceEncoder, texts: Sequence[str]) -> dict[str, NDArray[np.float32]]:
    """`static`, `layer 0 mean`, `layer 0 cls`, `layer 0 max` to the last layer, `WK pooling` -> vectors (n, d)."""
    text_encoder = encoder.make_text_encoder("[X]", encoder.config.max_tokens, "mean")
    sequences = [tokens.ids for tokens in text_encoder.encode(texts)]
    layers: dict[str, NDArray[np.float32]] = {}
    for rows in token_batches([len(ids) for ids in sequences], TOKENS):
        batch = text_encoder.pad([sequences[row] for row in rows])
        input_ids, attention_mask = (torch.from_numpy(array).to(encoder.device) for array in batch)
        output = encoder.backbone(input_ids, attention_mask=attention_mask, output_hidden_states=True)
        pooled = {"static": pool(encoder.word_embeddings(input_ids), attention_mask, "mean")}
        for number, states in enumerate(output.hidden_states):
            pooled |= {f"layer {number} {mode}": pool(states, attention_mask, mode) for mode in MODES}
        if len(output.hidden_states) >= FEWEST_STATES:
            pooled["WK pooling"] = wk_pooling(output.hidden_states, attention_mask)
        for name, vectors in pooled.items():
            layers.setdefault(name, np.empty((len(texts), vectors.shape[1]), np.float32))[rows] = vectors.float().cpu()
    return layers


def _untied_head(encoder: SentenceEncoder, texts: Sequence[str]) -> dict[str, NDArray[np.float32]]:
    """`head`: means (n, d) over the rows of an untied masked-word head (PromptBERT, arXiv:2201.04337, Table 12)."""
    source = encoder.backbone.name_or_path
    try:
        weight = MaskedHead.load(source).weight if source else None
    except ClozeError:  # the encoder has no head
        return {}
    if weight is None:  # the head is tied: its rows are the static word embeddings
        return {}
    return {"head": static_means(encoder, texts, weight.detach().float().cpu().numpy())}


@dataclass(frozen=True)
class BaselineTask(Task):
    suite: ClassVar[str] = "baselines"
    pairs: Pairs
    frequent: int = FREQUENT
    flow_epochs: int = EPOCHS

    def obstacle(self, subject: Subject) -> str | None:
        if not isinstance(subject.model, SentenceEncoder):
            return f"{subject.name} does not expose its layers, so it has no baselines; score a run or an encoder"
        return None

    def run(self, subject: Subject) -> list[Score]:
        encoder = subject.model
        assert isinstance(encoder, SentenceEncoder), "a subject with an obstacle is not scored. This is a bug."
        texts = sorted({*self.pairs.left, *self.pairs.right})
        places = {text: place for place, text in enumerate(texts)}
        left, right = ([places[text] for text in side] for side in (self.pairs.left, self.pairs.right))
        counts = {"pairs": len(self.pairs)}
        scores = []
        for name, vectors in self.vectors(encoder.eval(), texts).items():
            cosine = cosines(vectors[left], vectors[right])
            scores.append(measured(self.suite, self.name, name, "spearman", cosine, self.pairs.gold, counts=counts))
        return scores

    def vectors(self, encoder: SentenceEncoder, texts: Sequence[str]) -> dict[str, NDArray[np.floating]]:
        """Every baseline's vectors (n, d) of the texts."""
        layers = pooled_layers(encoder, texts)
        wk, last = (
            {name: layers.pop(name) for name in ("WK pooling",) if name in layers},
            encoder.backbone.config.num_hidden_layers,
        )
        first_last = (layers["layer 1 mean"] + layers[f"layer {last} mean"]) / 2
        last_two = (layers[f"layer {last - 1} mean"] + layers[f"layer {last} mean"]) / 2
        return {
            **layers,
            **_untied_head(encoder, texts),
            **static_averages(encoder, texts, self.frequent),
            "first-last": first_last,
            "last-two": last_two,
            "whitening": whiten(first_last),
            "BERT-flow": flow_vectors(last_two, self.flow_epochs),
            **wk,
        }
