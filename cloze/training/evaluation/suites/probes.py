"""What a model does not understand: each sentence is compared with one of the same meaning and one of another meaning.

An item is a sentence of a corpus (the anchor), a text that a rule made from it without changing the meaning (near), and
one that another rule made from it with another meaning (far); `evaluation/rewriting.py` has the rules. For paraphrases
and typing errors the far text is the sentence of the corpus that shares most words with the anchor, by tf-idf. The
figure is the share of items whose near text has the higher cosine with the anchor; equal cosines count half, and chance
is 50. The score's details have its 95 % interval by Wilson (1927). The other figure is the mean cosine of anchor and
far text, which a threshold would have to exceed. English only.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, TypeAlias

import numpy as np
from numpy.random import Generator
from scipy.stats import binomtest
from sklearn.feature_extraction.text import TfidfVectorizer  # type: ignore[import-untyped]

from cloze.training.data.corpus import read_lines
from cloze.training.errors import CorpusError
from cloze.training.evaluation import rewriting
from cloze.training.evaluation.measures import Pairs, cosines_of
from cloze.training.evaluation.own_data import Triplets, shares_right, triplet_margins
from cloze.training.evaluation.task import Score, Subject, Task, measured

Rewrite: TypeAlias = Callable[[str, Generator], rewriting.Rewritten | None]

ITEMS: Final = 300  # of each probe, at most
LEAST: Final = 30  # with fewer, a probe is skipped
POOL: Final = 40_000  # sentences that are searched for the one with most words in common
SEED: Final = 0
FAR: Final = "far cosine"  # the metric in addition to the accuracy

REWRITTEN: Final[dict[str, Rewrite]] = {
    "negation": rewriting.negation,
    "roles": rewriting.swapped_roles,
    "numbers": rewriting.other_number,
    "names": rewriting.other_name,
    "antonyms": rewriting.antonym,
    "word order": rewriting.other_order,
}
BESIDE_NEIGHBOUR: Final[dict[str, rewriting.Rule]] = {
    "paraphrase": rewriting.paraphrases,
    "typing errors": rewriting.misspelt,
}
PROBES: Final = (*REWRITTEN, *BESIDE_NEIGHBOUR)


def tasks(data: Path | None, own: Sequence[Path]) -> list[Task]:
    """One task per probe, made from own files with one sentence per line, or else from the data's `corpus/*.txt`.

    A probe with fewer than `LEAST` items is skipped, with a message on stderr. Raises CorpusError if none is left.
    """
    files = list(own) or (sorted((data / "corpus").glob("*.txt")) if data else [])
    if not files:
        return []
    probes = make_probes(line.strip() for file in files for line in read_lines(file))
    few = [name for name, items in probes.items() if len(items) < LEAST]
    if len(few) == len(probes):
        raise CorpusError(
            f"{', '.join(map(str, files))}: no probe has {LEAST} items; give more English sentences, one per line"
        )
    for name in few:
        print(
            f"skipped the probe {name}: these sentences give {len(probes[name])} items, fewer than {LEAST}",
            file=sys.stderr,
        )
    return [ProbeTask(name, items) for name, items in probes.items() if name not in few]


def make_probes(sentences: Iterable[str], items: int = ITEMS, seed: int = SEED) -> dict[str, Triplets]:
    """Probe -> anchors with a near and a far text. They depend on the sentences, not their order, and on the seed."""
    plain = sorted({sentence for sentence in sentences if rewriting.is_plain(sentence)})
    rng = np.random.default_rng(seed)
    plain = [plain[place] for place in rng.permutation(len(plain))]
    triplets = {name: list(_rewritten(plain, rule, items, seed)) for name, rule in REWRITTEN.items()}
    return triplets | {name: _beside_neighbours(plain, rule, items, seed) for name, rule in BESIDE_NEIGHBOUR.items()}


def _rewritten(plain: Sequence[str], rule: Rewrite, items: int, seed: int) -> Iterator[tuple[str, str, str]]:
    rng = np.random.default_rng(seed)
    for sentence in plain:
        if items and (texts := rule(sentence, rng)):
            near, far = texts
            yield sentence, near, far
            items -= 1


def _beside_neighbours(plain: Sequence[str], rule: rewriting.Rule, items: int, seed: int) -> Triplets:
    pool, rng = plain[:POOL], np.random.default_rng(seed)
    anchors, near = list[int](), list[str]()
    for place, sentence in enumerate(pool):
        if len(anchors) < items and (rewritten := rule(sentence, rng)):
            anchors.append(place)
            near.append(rewritten)
    if not anchors or len(pool) < 2:
        return []
    words = TfidfVectorizer().fit_transform(pool)
    cosines = (words[anchors] @ words.T).toarray()  # (anchors, pool)
    cosines[np.arange(len(anchors)), anchors] = -1.0
    far = cosines.argmax(1)
    return [(pool[anchors[row]], near[row], pool[far[row]]) for row in range(len(anchors))]


@dataclass(frozen=True)
class ProbeTask(Task):
    suite: ClassVar[str] = "probes"
    triplets: Triplets

    def run(self, subject: Subject) -> list[Score]:
        right = shares_right(triplet_margins(subject.embed, self.triplets))
        interval = binomtest(round(right.sum()), len(right)).proportion_ci(method="wilson")
        details = {"interval": [round(100 * limit, 2) for limit in interval]}
        anchors, _, far = map(list, zip(*self.triplets, strict=True))
        cosines = cosines_of(subject.embed, Pairs(anchors, far, [0.0] * len(far)))
        counts = {"items": len(right)}
        return [
            measured(self.suite, self.name, "accuracy", "mean", right, counts=counts, details=details),
            measured(self.suite, self.name, FAR, "plain mean", cosines, counts=counts),
        ]
