"""A round of training with the method `ranking`, on a part of the queries, scored on the others.

Half of the queries of a round are synthetic. Their judge is the encoder itself and BM25. They keep the encoder from
forgetting, and from memorising the few judged documents.
"""

import json
import random
import shutil
from collections.abc import Iterable, Sequence, Set
from functools import cached_property, partial
from itertools import cycle, islice
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from cloze.adoption.hub import model_folder
from cloze.adoption.modules import limit_of
from cloze.encoding.bundle import SEARCH_NAMES
from cloze.training.adaptation.held_out import HeldOutQueries, best_lexical_weight
from cloze.training.adaptation.pairs import Judgements
from cloze.training.adaptation.queries import QueryMaker, sentences_of
from cloze.training.bar import console
from cloze.training.data.lexical import Lexical
from cloze.training.encoder_source import of_library, own_config
from cloze.training.errors import EncoderError
from cloze.training.evaluation.measures import Embed, units
from cloze.training.hub.adoption import load_as_served, refuse_layers_behind
from cloze.training.loop.run import fit
from cloze.training.methods.ranking import search_embed
from cloze.training.methods.teacher import embedded_list
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.pretrained import fastest_device, has_bf16
from cloze.training.recipes.command import load_recipe
from cloze.training.recipes.recipe import Recipe
from cloze.training.run_folder import Run

BATCH: Final = 24
MADE_SHARE: Final = 1 / 2  # of a batch, if there are judged queries
ROWS: Final = 8  # per judged query: its documents, repeated if it has fewer
STEPS: Final = 150
LEXICAL_WEIGHT: Final = 0.2  # of BM25 in the judge, if there are no judged queries to choose it
TOKENS: Final = 96  # most tokens of a text in training
VECTORS: Final = "vectors"  # folder of the vectors before training
QUERY, DOCUMENT = SEARCH_NAMES

_Row: TypeAlias = tuple[str, str, float]  # query, document, grade


class Rounds:
    """Rounds of training in a folder, and the vectors that the encoder gave before training, which all rounds need."""

    def __init__(self, encoder: str, parent: SentenceEncoder, judged: Judgements, folder: Path, seed: int) -> None:
        """`parent` is the loaded `encoder`. `judged` has the documents and the queries of all rounds."""
        self.encoder, self.parent, self.judged, self.folder, self.seed = encoder, parent, judged, folder, seed
        self._embed = search_embed(load_as_served(encoder) or parent)
        self.vectors = self.embedded(DOCUMENT, judged.documents)

    def embedded(self, name: str, texts: Sequence[str]) -> NDArray[np.float32]:
        """Unit vectors (n, d) of the encoder before training, for queries or documents as `name` says.

        A list of texts is embedded once.
        """
        return units(embedded_list(texts, partial(self._embed, name), self.folder / VECTORS / name)).astype(np.float32)

    def held_out(self, queries: list[int]) -> HeldOutQueries:
        """The queries on which a round is scored."""
        return self.held_out_of(self.judged, queries, self.vectors)

    def held_out_of(self, judged: Judgements, queries: list[int], vectors: NDArray[np.float32]) -> HeldOutQueries:
        """`held_out` for other judgements, with the vectors (m, d) of their documents."""
        query_vectors = self.embedded(QUERY, [judged.queries[query] for query in queries])
        return HeldOutQueries.among_nearest(judged, queries, vectors, query_vectors)

    def train(self, name: str, queries: Sequence[int], sources: Sequence[int], held_out: Sequence[int] = ()) -> Path:
        """Train a run on `queries` and on synthetic queries of the documents `sources`.

        If a held-out query is itself a document, as with texts of a class, judgements of that document are not learnt:
        in the opposite direction they are the ones by which the query is scored.
        """
        unseen = {self.judged.queries[query] for query in held_out}
        recipe, run = self._recipe(name, queries, sources, unseen), Run(self.folder / name)
        shutil.copytree(self.folder / VECTORS, run.prepared)
        console.quiet = True
        try:
            if not fit(recipe, run):
                raise KeyboardInterrupt
        finally:
            console.quiet = False
        return run.path

    def _rows(
        self, queries: Sequence[int], sources: Sequence[int], unseen: Set[str]
    ) -> dict[str, tuple[list[_Row], float]]:
        """The rows of a round by the name of their file, and each file's share of a batch."""
        judged, rng, maker = self.judged, random.Random(self.seed), QueryMaker(self.judged.documents, self.seed)
        documents = islice(_again(sources, rng), STEPS * BATCH)
        made_rows = [(maker(place), judged.documents[place], 0.0) for place in documents]
        judged_rows, known_rows = list[_Row](), list[_Row]()
        for query in queries:
            grades = {
                place: grade for place, grade in judged.grades[query].items() if judged.documents[place] not in unseen
            }
            relevant = [place for place in judged.relevant(query) if place in grades]
            rng.shuffle(relevant)
            if not relevant:
                continue
            text = judged.queries[query]
            judged_rows += [(text, judged.documents[place], grades[place]) for place in islice(cycle(relevant), ROWS)]
            remaining = grades.keys() - set(relevant[:ROWS])
            known_rows += [(text, judged.documents[place], grades[place]) for place in sorted(remaining)]
        files = {
            "made": (made_rows, MADE_SHARE if judged_rows else 1.0),
            "judged": (judged_rows, 1 - MADE_SHARE),
            "known": (known_rows, 0.0),
        }
        return {stem: (rows, weight) for stem, (rows, weight) in files.items() if rows}

    def _recipe(self, name: str, queries: Sequence[int], sources: Sequence[int], unseen: Set[str]) -> Recipe:
        """Write the texts of a round, and return its recipe."""
        folder = self.folder / "text" / name
        folder.mkdir(parents=True, exist_ok=True)
        files = {folder / f"{stem}.jsonl": rows for stem, rows in self._rows(queries, sources, unseen).items()}
        for file, (rows, _) in files.items():
            _write(file, ({"query": query, "document": text, "grade": min(grade, 1.0)} for query, text, grade in rows))
        _write(folder / "documents.jsonl", ({"document": text} for text in self.judged.documents))
        keys = {
            "encoder": self.encoder,
            **self.parent.config.model_dump(include={"template", "pooling", "final_period"}),
            "corpus": list(map(str, files)),
            "weights": [weight for _, weight in files.values()],
            "columns": ["query", "document", "grade"] if queries else ["query", "document"],
            "documents": [str(folder / "documents.jsonl")],
            "lexical_weight": self._lexical_weight(queries) if queries else LEXICAL_WEIGHT,
            **({} if queries else {"judged_weight": 0.0}),  # without a grade, every row would count as judged
            "held_out": 0,
            "candidates": 0,  # one for each query makes a step nearly twice as slow, and gains little
            "max_tokens": min(TOKENS, self.parent.config.max_tokens),
            "max_steps": STEPS,
            "log_steps": STEPS,
            "batch_size": BATCH,
            "precision": "bf16" if has_bf16() else "fp32",
            "seed": self.seed,
        }
        return load_recipe("ranking", keys)

    def _lexical_weight(self, queries: Sequence[int]) -> float:
        query_vectors = self.embedded(QUERY, [self.judged.queries[query] for query in queries])
        return best_lexical_weight(self.judged, queries, self.vectors, query_vectors, self._lexical)

    @cached_property
    def _lexical(self) -> Lexical:
        return Lexical(self.judged.documents)


def load_parent(encoder: str) -> SentenceEncoder:
    """Load an encoder with its own template and pooling, including sentence-transformers models. Raises ClozeError."""
    config = own_config(encoder)
    if config is None:
        raise EncoderError(
            f"{encoder!r} has no template and pooling of its own; train it for sentences first, such as with "
            "`cloze fit promptbert`"
        )
    if of_library(encoder):
        refuse_layers_behind(encoder)
        config["max_tokens"], _ = limit_of(model_folder(encoder))
    return SentenceEncoder.load(encoder, **config).to(fastest_device())


def search_embedders(encoder: SentenceEncoder) -> tuple[Embed, Embed]:
    """`in_bf16` with the template of queries, and with that of documents, if the encoder has them."""
    return in_bf16(encoder.named(QUERY)), in_bf16(encoder.named(DOCUMENT))


def in_bf16(encoder: SentenceEncoder) -> Embed:
    """Embed in bf16 if the machine supports it: twice as fast, and exact enough for a ranking."""

    def embed(texts: Sequence[str]) -> NDArray[np.float32]:
        with torch.autocast(encoder.device.type, torch.bfloat16, enabled=has_bf16()):
            return encoder.embed(texts)

    return embed


def make_queries(documents: Sequence[str], places: Sequence[int], seed: int) -> Judgements:
    """Take one sentence out of each document at `places`, as a query for that document (inverse cloze task)."""
    rng, texts, queries, grades = random.Random(seed), list(documents), list[str](), list[dict[int, float]]()
    for place in places:
        sentences = sentences_of(texts[place])
        query = rng.choice(sentences)
        remaining = texts[place].replace(query, " ").strip()
        if len(sentences) > 1 and remaining:
            texts[place] = " ".join(remaining.split())
            queries.append(query)
            grades.append({place: 1.0})
    return Judgements(queries, texts, grades)


def _again(places: Sequence[int], rng: random.Random) -> Iterable[int]:
    while True:
        yield from rng.sample(places, len(places))


def _write(file: Path, records: Iterable[dict[str, object]]) -> None:
    with file.open("w", encoding="utf-8") as out:
        for record in records:
            out.write(json.dumps(record, ensure_ascii=False) + "\n")
