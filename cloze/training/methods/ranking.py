"""Ranking: bring a query's cosines with the documents of a batch close to the scores of a judge.

The judge's score has three terms. The first is the encoder's own cosine before training, which preserves what it does
well, or the mean cosine of stronger encoders (`judges`). The second is BM25: how well the query's words fit the
document, which a small encoder blurs. The third is the judgement in the corpus:

    judge(q, d) = cosine(q, d) + lexical_weight · s(q) · z(BM25(q, d)) + judged_weight · grade(q, d)

z standardises over all documents, and s(q) is the standard deviation of the query's cosines with them, so that
lexical_weight has no unit. The loss is the mean over queries of KL(judge || student) between the softmaxes over the
batch's documents: listwise distillation, as from the cross-encoder of RocketQAv2 (arXiv:2110.07367). A query whose
document was not judged (grade 0) learns from the first two terms alone.
"""

from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cloze.encoding.bundle import SEARCH_NAMES
from cloze.training.data.corpus import Corpus, read_corpus
from cloze.training.data.lexical import Lexical, beside
from cloze.training.data.stored_rows import Row
from cloze.training.evaluation.measures import units
from cloze.training.hub.adoption import load_as_served
from cloze.training.methods.losses import cosine_matrix, ranking_divergence
from cloze.training.methods.objective import Objective
from cloze.training.methods.teacher import by_itself, embed_of, embedded_list
from cloze.training.model.attention import train_on_cpu
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.graph_encoder import GraphEncoder
from cloze.training.model.views import View, encode_trimmed, view
from cloze.training.recipes.methods import RankingRecipe

DEPTH: Final = 30  # candidates are drawn from this many documents that the judge ranks first

EmbedAs: TypeAlias = Callable[[str, Sequence[str]], NDArray[np.float32]]
"""One of SEARCH_NAMES, and texts of that kind -> vectors (n, d)."""


class Judge:
    """Scores documents for a query.

    `rows` are the rows of the corpus: a query, a document and, optionally, a grade. `embed` gives the vectors of
    queries and documents for the cosines.
    """

    def __init__(self, recipe: RankingRecipe, rows: Sequence[Row], embed: EmbedAs) -> None:
        self.recipe = recipe
        collection = read_documents(recipe) if recipe.documents else ()
        # the documents of the files first: rounds with the same files share their vectors
        self.documents = list(dict.fromkeys(chain(collection, (row[1] for row in rows))))
        self.places = {text: place for place, text in enumerate(self.documents)}
        self.grades: dict[str, dict[int, float]] = {}
        for query, document, *grade in rows:
            self.grades.setdefault(query, {})[self.places[document]] = float(grade[0]) if grade else 1.0
        self.lexical = Lexical(self.documents) if recipe.lexical_weight else None
        texts = zip(SEARCH_NAMES, (list(self.grades), self.documents), strict=True)
        query_vectors, self._matrix = (units(embed(*named)).astype(np.float32) for named in texts)  # (n, d), (m, d)
        self._vectors = dict(zip(self.grades, query_vectors, strict=True))

    def scores(self, query: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """For all documents, (m): the score from cosine and words, and what the judgements add to it."""
        cosines: NDArray[np.float32] = self._matrix @ self._vectors[query]
        graded = np.zeros_like(cosines)
        grades = self.grades[query]
        graded[list(grades)] = self.recipe.judged_weight * np.array(list(grades.values()), np.float32)
        if self.lexical is None:
            return cosines, graded
        return beside(cosines, self.lexical.scores(query), self.recipe.lexical_weight), graded


class Ranking(Objective):
    """The columns are a query, a document and, optionally, a grade: 1 relevant, 0 not judged, -1 not relevant."""

    recipe: RankingRecipe

    def __init__(self, encoder: SentenceEncoder, recipe: RankingRecipe) -> None:
        super().__init__(encoder, recipe)
        templates = (encoder.config.templates.get(name, recipe.template) for name in SEARCH_NAMES)
        self.text_encoders = [encoder.make_text_encoder(template, recipe.max_tokens) for template in templates]
        self._judge: Judge | None = None
        train_on_cpu(encoder.backbone)

    def begin(self, corpus: Corpus, folder: Path) -> None:
        embed_as = _judging(self.recipe) or search_embed(
            load_as_served(self.recipe.encoder) or self.encoder, self.recipe.compile
        )

        def embed(name: str, texts: Sequence[str]) -> NDArray[np.float32]:
            return embedded_list(texts, partial(embed_as, name), folder / name)

        self._judge = Judge(self.recipe, [*corpus.rows, *corpus.held_out], embed)

    def _judge_of(self, rows: Sequence[Row]) -> Judge:
        """The judge of the whole corpus. Before `begin`, in a dry run: a judge of these rows alone."""
        alone = self.recipe.model_copy(update={"documents": ()})
        return self._judge or Judge(alone, rows, search_embed(self.encoder))

    def views(self, rows: Sequence[Row]) -> dict[str, View]:
        """The queries with `judged`, the judge's scores (n, m), and the batch's m documents."""
        judge = self._judge_of(rows)
        scores = [judge.scores(row[0]) for row in rows]
        places = dict.fromkeys(judge.places[row[1]] for row in rows)
        rng = self._random([row[0] for row in rows])
        for fit, graded in scores if self.recipe.candidates else ():
            best = np.argsort(np.where(graded > 0, -np.inf, fit))[::-1][:DEPTH]
            places |= dict.fromkeys(rng.permutation(best)[: self.recipe.candidates].tolist())
        chosen = list(places)
        judged = np.stack([(fit + graded)[chosen] for fit, graded in scores])
        return {
            "queries": view(self.text_encoders[0], [row[0] for row in rows]) | {"judged": torch.from_numpy(judged)},
            "documents": view(self.text_encoders[1], [judge.documents[place] for place in chosen]),
        }

    def _random(self, queries: Sequence[str]) -> np.random.Generator:
        """The generator for the draws of one batch. torch's own is one batch ahead when a run is stopped."""
        digest = blake2b("\0".join(queries).encode(), digest_size=16).digest()
        return np.random.default_rng([self.recipe.seed, *digest])

    def forward(self, queries: View, documents: View) -> dict[str, Tensor]:
        vectors = [
            encode_trimmed(partial(self.encoder.vectors, text_encoder=text_encoder), batch)
            for text_encoder, batch in zip(self.text_encoders, (queries, documents), strict=True)
        ]
        return {"loss": ranking_divergence(cosine_matrix(*vectors), queries["judged"], self.recipe.temperature)}


def read_documents(recipe: RankingRecipe) -> list[str]:
    """The additional documents that are ranked. Raises CorpusError."""
    return [text for (text,) in read_corpus(recipe.documents, recipe.columns[1:2]).rows]


def search_embed(encoder: SentenceEncoder | GraphEncoder, compiled: bool = False) -> EmbedAs:
    """A function that embeds with an encoder's named templates, as a search does."""
    embeds = {name: embed_of(encoder.named(name), compiled) for name in SEARCH_NAMES}
    return lambda name, texts: embeds[name](texts)


def _judging(recipe: RankingRecipe) -> EmbedAs | None:
    """Vectors whose products are the mean of the judges' cosines; None without judges. Raises ClozeError."""
    judges = [search_embed(by_itself(name), recipe.compile) for name in recipe.judges]

    def embed(name: str, texts: Sequence[str]) -> NDArray[np.float32]:
        return np.concatenate([units(judge(name, texts)) for judge in judges], axis=1).astype(np.float32)

    return embed if judges else None
