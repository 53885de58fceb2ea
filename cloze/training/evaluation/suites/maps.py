"""Maps of vectors in two dimensions: t-SNE of sentence pairs, and PCA of word vectors.

t-SNE shows the unit vectors of 20 pairs of STS-B dev with gold score 5 and 20 with 0 (SG-OPT, arXiv:2106.07345, Figure
5). Its figure is the trustworthiness x100: how far neighbours in the map are also neighbours among the vectors. PCA is
fitted on the static word vectors of a model in torch (PromptBERT, arXiv:2201.04337, Figure 1); its figure is the share
of the variance x100. Tokens without letters and single letters are skipped, and a sample is shown.

A token's place in the vocabulary approximates its frequency. For bert-base-uncased, place and count in 120,000
sentences of English Wikipedia have a Spearman correlation of 0.76 for words and 0.67 for subwords.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray
from sklearn.decomposition import PCA  # type: ignore[import-untyped]
from sklearn.manifold import TSNE, trustworthiness  # type: ignore[import-untyped]

from cloze.training.data.masking import continuing_prefix
from cloze.training.evaluation.measures import Pairs, cosines, units
from cloze.training.evaluation.sts import load_tasks
from cloze.training.evaluation.task import Score, Subject, Task
from cloze.training.model.encoder import SentenceEncoder

SHOWN_PAIRS: Final = 20  # of each kind
SHOWN_WORDS: Final = 2000
PERPLEXITY: Final = 10
SEED: Final = 1111  # SentEval's
WORD_STARTS: Final = "Ġ▁"  # in byte-level BPE and in SentencePiece


def tasks(data: Path | None, own: Sequence[Path]) -> list[Task]:
    """Both maps. Raises CorpusError."""
    if data is None:
        return []
    pairs = load_tasks(data, ("STS-B dev",))["STS-B dev"]
    return [PairMapTask("STS-B dev", _sample(pairs, 5.0), _sample(pairs, 0.0)), WordMapTask("word vectors")]


@dataclass(frozen=True)
class PairMapTask(Task):
    suite: ClassVar[str] = "maps"
    positive: list[tuple[str, str]]
    negative: list[tuple[str, str]]

    def run(self, subject: Subject) -> list[Score]:
        pairs = self.positive + self.negative
        vectors = units(subject.embed([text for pair in pairs for text in pair]))
        perplexity = min(PERPLEXITY, (len(vectors) - 1) / 3)
        points = TSNE(2, perplexity=perplexity, init="pca", random_state=SEED).fit_transform(vectors)
        value = 100 * trustworthiness(vectors, points, n_neighbors=min(5, (len(vectors) - 1) // 2))
        cosine = cosines(vectors[::2], vectors[1::2])
        shown = [
            {
                "texts": list(pair),
                "positive": row < len(self.positive),
                "cosine": round(float(cosine[row]), 4),
                "points": np.round(points[2 * row : 2 * row + 2].astype(float), 3).tolist(),
            }
            for row, pair in enumerate(pairs)
        ]
        counts, details = {"pairs": len(pairs)}, {"pairs": shown}
        return [Score(self.suite, self.name, "trustworthiness", float(value), counts, None, details)]


@dataclass(frozen=True)
class WordMapTask(Task):
    """Only a model in torch has word vectors to show. Other models have no score."""

    suite: ClassVar[str] = "maps"
    shown: int = SHOWN_WORDS

    def run(self, subject: Subject) -> list[Score]:
        if not isinstance(subject.model, SentenceEncoder):
            return []
        encoder = subject.model
        tokens = [token or "" for token in encoder.tokenizer.convert_ids_to_tokens(list(range(encoder.vocabulary)))]
        kinds = kinds_of(tokens, continuing_prefix(encoder.tokenizer))
        rows = np.array([*kinds])
        vectors = encoder.word_embeddings.weight.detach().cpu().numpy()[rows]
        pca = PCA(2, random_state=SEED)
        points = pca.fit_transform(vectors)
        chosen = np.sort(np.random.default_rng(SEED).permutation(len(rows))[: self.shown])
        words = [_word(tokens[rows[i]], points[i], i / len(rows), kinds[int(rows[i])]) for i in chosen]
        value, counts = 100 * float(pca.explained_variance_ratio_.sum()), {"tokens": len(rows), "shown": len(words)}
        return [Score(self.suite, self.name, "variance of two components", value, counts, None, {"words": words})]


def kinds_of(tokens: Sequence[str], prefix: str | None) -> dict[int, str]:
    """Place of a token -> `subword`, or `lower` or `upper` for a token that begins a word in that case.

    Tokens without letters and single letters are skipped. A vocabulary marks either its subwords, with `prefix`, or the
    tokens that begin a word, with Ġ or ▁.
    """
    kinds = {}
    for place, token in enumerate(tokens):
        word = token.removeprefix(prefix) if prefix else token.lstrip(WORD_STARTS)
        if len(word) > 1 and word.isalpha():
            starts = not token.startswith(prefix) if prefix else token[0] in WORD_STARTS
            kinds[place] = ("upper" if word[0].isupper() else "lower") if starts else "subword"
    return kinds


def _sample(pairs: Pairs, gold: float) -> list[tuple[str, str]]:
    rows = [row for row, score in enumerate(pairs.gold) if score == gold]
    chosen = np.sort(np.random.default_rng(SEED).permutation(len(rows))[:SHOWN_PAIRS])
    return [(pairs.left[rows[i]], pairs.right[rows[i]]) for i in chosen]


def _word(token: str, point: NDArray[np.floating], place: float, kind: str) -> dict[str, Any]:
    return {"token": token, "point": np.round(point.astype(float), 4).tolist(), "place": round(place, 3), "kind": kind}
