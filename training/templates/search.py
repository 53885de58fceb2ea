"""Greedy search for a template: candidates in, the same candidates ranked out. The caller gives the score.

PromptBERT (arXiv:2201.04337) section 4.2 finds its templates by hand: first the words between text and mask, then the
words around the text. `RELATIONS` and `PREFIXES` are from its Table 4.
"""

from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

from encoding.template import MASK, TEXT

__all__ = ["PREFIXES", "RELATIONS", "Score", "greedy", "rank", "related", "wrapped"]

Score: TypeAlias = Callable[[str], float]
"""A template -> how good it is."""

RELATIONS: Final = ("", "is", "mean", "means")
PREFIXES: Final = (
    f"This {TEXT}",
    f"This sentence of {TEXT}",
    f'This sentence of "{TEXT}"',
    f'This sentence : "{TEXT}"',
)


def greedy(score: Score, relations: Iterable[str] = RELATIONS, prefixes: Iterable[str] = PREFIXES) -> dict[str, float]:
    """The best relation, then each prefix with it: everything that was tried, best first."""
    tried = rank(score, map(related, relations))
    best = next(iter(tried))
    return _best_first(tried | rank(score, (wrapped(best, prefix) for prefix in prefixes)))


def rank(score: Score, templates: Iterable[str]) -> dict[str, float]:
    """Each distinct template and its score, best first."""
    return _best_first({template: score(template) for template in dict.fromkeys(templates)})


def related(relation: str) -> str:
    """`means` -> `[X] means [MASK].`"""
    return f"{' '.join([TEXT, *relation.split(), MASK])}."


def wrapped(template: str, prefix: str) -> str:
    """`This` or `This [X]` before `[X] means [MASK].` -> `This [X] means [MASK].`"""
    around = prefix if TEXT in prefix else f"{prefix.strip()} {TEXT}".strip()
    return template.replace(TEXT, around)


def _best_first(scores: dict[str, float]) -> dict[str, float]:
    return dict(sorted(scores.items(), key=lambda item: -item[1]))
