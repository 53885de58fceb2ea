"""A round of training: by the method `ranking`, on a part of the queries, scored on the others.

A third of what a round sees are queries that were made of documents, whose judge is the encoder itself and BM25: they
keep it from forgetting, and from learning the few judged documents by heart.
"""

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Final

from encoding.machine import has_bf16
from training.adaptation.pairs import Judgements
from training.adaptation.queries import QueryMaker, sentences_of
from training.recipes.command import load_recipe
from training.recipes.recipe import Recipe

__all__ = ["Plan", "made_queries", "recipe_of_round", "split"]

BATCH: Final = 24
MADE_SHARE: Final = 1 / 3  # of a batch, if there are judged queries
ROWS: Final = 8  # of each judged query: its documents, again where it has fewer
STEPS: Final = 60
TOKENS: Final = 96  # of a text in training
JUDGED_WEIGHT: Final = 0.4  # of a cosine


@dataclass(frozen=True)
class Plan:
    """What all rounds share."""

    encoder: str
    judged: Judgements
    folder: Path
    seed: int
    max_tokens: int  # that the encoder has positions for


def split(count: int, parts: int, seed: int) -> list[list[int]]:
    """`count` numbers in `parts` lists of about the same length, in a random order."""
    order = random.Random(seed).sample(range(count), count)
    return [sorted(order[part::parts]) for part in range(parts)]


def recipe_of_round(plan: Plan, name: str, queries: Sequence[int], sources: Sequence[int]) -> Recipe:
    """Write the text of a round and give its recipe: `queries` are trained on, and others made of the `sources`."""
    judged, chance = plan.judged, random.Random(plan.seed)
    folder = plan.folder / "text" / name
    folder.mkdir(parents=True, exist_ok=True)
    maker = QueryMaker(judged.documents, plan.seed)
    documents = islice(_again(sources, chance), STEPS * BATCH)
    made = [(maker(place), judged.documents[place], 0.0) for place in documents]
    drawn, others = list[tuple[str, str, float]](), list[tuple[str, str, float]]()
    for query in queries:
        relevant = judged.relevant(query)
        chance.shuffle(relevant)
        text = judged.queries[query]
        drawn += [
            (text, judged.documents[place], judged.grades[query][place]) for place in islice(cycle(relevant), ROWS)
        ]
        rest = judged.grades[query].keys() - set(relevant[:ROWS])
        others += [(text, judged.documents[place], judged.grades[query][place]) for place in sorted(rest)]
    files = {"made": (made, MADE_SHARE if drawn else 1.0), "judged": (drawn, 1 - MADE_SHARE), "known": (others, 0.0)}
    kept = {folder / f"{kind}.jsonl": (rows, weight) for kind, (rows, weight) in files.items() if rows}
    for file, (rows, _) in kept.items():
        _write(file, ({"query": query, "document": text, "grade": min(grade, 1.0)} for query, text, grade in rows))
    _write(folder / "documents.jsonl", ({"document": text} for text in judged.documents))
    keys = {
        "encoder": plan.encoder,
        "corpus": list(map(str, kept)),
        "weights": [weight for _, weight in kept.values()],
        "columns": ["query", "document", "grade"] if drawn else ["query", "document"],
        "documents": [str(folder / "documents.jsonl")],
        "judged_weight": JUDGED_WEIGHT if drawn else 0.0,
        "held_out": 0,
        "max_tokens": min(TOKENS, plan.max_tokens),
        "max_steps": STEPS,
        "log_steps": STEPS,
        "candidates": 1,
        "batch_size": BATCH,
        "precision": "bf16" if has_bf16() else "fp32",
        "seed": plan.seed,
    }
    return load_recipe("ranking", keys)


def made_queries(documents: Sequence[str], places: Sequence[int], seed: int) -> Judgements:
    """Documents, of those at `places` each without one sentence, which is a query for it (inverse cloze task)."""
    chance, texts, queries, grades = random.Random(seed), list(documents), list[str](), list[dict[int, float]]()
    for place in places:
        sentences = sentences_of(texts[place])
        taken = chance.choice(sentences)
        left = texts[place].replace(taken, " ", 1).strip()
        if len(sentences) > 1 and left:
            texts[place] = " ".join(left.split())
            queries.append(taken)
            grades.append({place: 1.0})
    return Judgements(queries, texts, grades)


def _again(places: Sequence[int], chance: random.Random) -> Iterable[int]:
    while True:
        yield from chance.sample(places, len(places))


def _write(file: Path, records: Iterable[dict[str, object]]) -> None:
    with file.open("w", encoding="utf-8") as out:
        for record in records:
            out.write(json.dumps(record, ensure_ascii=False) + "\n")
