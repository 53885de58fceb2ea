"""The geometry of the vectors: alignment, uniformity, anisotropy, and the cosines for each gold score.

They are measured on STS-B test, as in DiffCSE (arXiv:2204.10298, section 6.3 and Figure 2). All vectors are first
divided by their lengths. Alignment uses the pairs with a gold score above `THRESHOLD`; uniformity and anisotropy use
all pairs of different sentences of the set, never a sentence with itself. For a model in torch, the anisotropy of its
static word vectors is measured too (PromptBERT, arXiv:2201.04337, Table 2).

If the data has sentences of Wikipedia, the anisotropy of their vectors is measured, and for a model in torch also the
anisotropy of the means of their static word vectors (Table 1).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from cloze.training.data.corpus import read_corpus
from cloze.training.evaluation.measures import Pairs, alignment, uniformity, units
from cloze.training.evaluation.postprocessing import static_means
from cloze.training.evaluation.sts import load_tasks
from cloze.training.evaluation.task import Score, Subject, Task, measured
from cloze.training.model.encoder import SentenceEncoder

THRESHOLD: Final = 4.0
GOLD_BINS: Final = ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5))
SENTENCES: Final = 2000  # of Wikipedia; the paper uses 100,000
COSINE_EDGES: Final = 41  # of the histograms, from -1 to 1


def tasks(data: Path | None, own: Sequence[Path]) -> list[Task]:
    """STS-B, and sentences of Wikipedia if the data has them. Raises CorpusError."""
    if data is None:
        return []
    space_tasks: list[Task] = [SpaceTask("STS-B", load_tasks(data, ("STS-B",))["STS-B"])]
    wikipedia = data / "corpus" / "enwiki_sentences.txt"
    if wikipedia.is_file():
        corpus = read_corpus([str(wikipedia)], sample=SENTENCES)
        space_tasks.append(AnisotropyTask("Wikipedia", [text for (text,) in corpus.rows]))
    return space_tasks


def anisotropy(vectors: NDArray[np.floating]) -> float:
    """The mean cosine over all pairs of the vectors (n, d), n > 1."""
    vectors = units(vectors)
    total = np.square(vectors.sum(0)).sum() - np.square(vectors).sum()  # without the product of each vector with itself
    return float(total / (len(vectors) * (len(vectors) - 1)))


def cosines_by_gold(cosine: NDArray[np.floating], gold: Sequence[float]) -> dict[str, Any]:
    """For each integer gold score: number of pairs, mean cosine, and a histogram over `edges`. The last includes 5."""
    scores, edges = np.array(gold), np.linspace(-1, 1, COSINE_EDGES)
    bins = []
    for low, high in GOLD_BINS:
        here = cosine[(scores >= low) & ((scores < high) | (high == GOLD_BINS[-1][1]))]
        histogram = np.histogram(np.clip(here, -1, 1), edges)[0]
        mean = float(here.mean()) if len(here) else None
        bins.append({"gold": [low, high], "pairs": len(here), "mean": mean, "histogram": histogram.tolist()})
    return {"edges": np.round(edges, 4).tolist(), "bins": bins}


@dataclass(frozen=True)
class SpaceTask(Task):
    suite: ClassVar[str] = "space"
    pairs: Pairs
    threshold: float = THRESHOLD

    def run(self, subject: Subject) -> list[Score]:
        texts = sorted({*self.pairs.left, *self.pairs.right})
        places = {text: place for place, text in enumerate(texts)}
        vectors = units(subject.embed(texts))
        left, right = (vectors[[places[text] for text in side]] for side in (self.pairs.left, self.pairs.right))
        positive = np.array(self.pairs.gold) > self.threshold
        distances = alignment(left[positive], right[positive])
        counts = {"positives": len(distances)}
        details = cosines_by_gold((left * right).sum(1), self.pairs.gold) | {"threshold": self.threshold}
        return [
            measured(self.suite, self.name, "alignment", "plain mean", distances, counts=counts, details=details),
            self._score("uniformity", uniformity(vectors), len(texts)),
            self._score("anisotropy", anisotropy(vectors), len(texts)),
            *self._static(subject),
        ]

    def _static(self, subject: Subject) -> list[Score]:
        if not isinstance(subject.model, SentenceEncoder):
            return []
        words = subject.model.word_embeddings.weight.detach().cpu().numpy()
        return [self._score("anisotropy of word vectors", anisotropy(words), len(words))]

    def _score(self, metric: str, value: float, vectors: int) -> Score:
        return Score(self.suite, self.name, metric, value, {"vectors": vectors})


@dataclass(frozen=True)
class AnisotropyTask(Task):
    suite: ClassVar[str] = "space"
    texts: list[str]

    def run(self, subject: Subject) -> list[Score]:
        samples = {"anisotropy": subject.embed(self.texts)}
        if isinstance(subject.model, SentenceEncoder):
            samples["anisotropy of averaged word vectors"] = static_means(subject.model, self.texts)
        counts = {"vectors": len(self.texts)}
        return [
            Score(self.suite, self.name, metric, anisotropy(vectors), counts) for metric, vectors in samples.items()
        ]
