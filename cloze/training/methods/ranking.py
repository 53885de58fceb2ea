"""Ranking: draw a query's cosines with the documents of a batch to the scores of a judge.

The judge knows three things: the cosine that the encoder gave before training, so that what it does well stays as it
is, or the mean cosine of stronger encoders (`judges`); how well the query's words fit the document (BM25), which a
small encoder blurs; and the judgements in the corpus:

    judge(q, d) = cosine(q, d) + lexical_weight · s(q) · z(BM25(q, d)) + judged_weight · grade(q, d)

z standardises over all documents, and s(q) is the standard deviation of the query's cosines with them, so that
lexical_weight has no unit. The loss is the mean over queries of KL(judge || student) between the softmaxes over the
batch's documents: listwise distillation, as of a cross-encoder in RocketQAv2 (arXiv:2110.07367). A query whose document
nobody judged, one with the grade 0, learns from the first two terms alone.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cloze.training.data.corpus import Corpus, Row, read_corpus
from cloze.training.data.lexical import Lexical, beside
from cloze.training.data.teacher_vectors import TeacherVectors
from cloze.training.evaluation.measures import Embed, units
from cloze.training.hub.adoption import served
from cloze.training.methods.losses import cosine_matrix, ranking_divergence
from cloze.training.methods.objective import Objective
from cloze.training.methods.teacher import embed_of, embedded, parts, read_by_itself
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.views import View, encode_trimmed, view
from cloze.training.recipes.methods import RankingRecipe

__all__ = ["Ranking"]


class Judge:
    """The documents that are ranked, and their scores for a query.

    `rows` are those of the corpus: query, document and, perhaps, a grade. `embed_lists` gives the vectors of documents
    and queries whose products are the judge's cosines.
    """

    def __init__(
        self, recipe: RankingRecipe, rows: Sequence[Row], embed_lists: Callable[[list[list[str]]], TeacherVectors]
    ) -> None:
        self.recipe = recipe
        collection = read_corpus(recipe.documents, recipe.columns[1:2]).rows if recipe.documents else ()
        # those of the files first: rounds with the same files share the vectors
        self.documents = list(dict.fromkeys(chain((text for (text,) in collection), (row[1] for row in rows))))
        self.places = {text: place for place, text in enumerate(self.documents)}
        self.grades: dict[str, dict[int, float]] = {}
        for query, document, *grade in rows:
            self.grades.setdefault(query, {})[self.places[document]] = float(grade[0]) if grade else 1.0
        self.lexical = Lexical(self.documents) if recipe.lexical_weight else None
        self._vectors = embed_lists([self.documents, list(self.grades)])
        self._matrix = self._vectors.of(self.documents)  # (m, d)

    def scores(self, query: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Of all documents, (m): what cosine and words say, and what the judgements add."""
        cosines: NDArray[np.float32] = self._matrix @ self._vectors.of([query])[0]
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
        self._judge: Judge | None = None

    def begin(self, corpus: Corpus, folder: Path) -> None:
        embed = _judging(self.recipe) or embed_of(served(self.recipe.encoder) or self.encoder, self.recipe.compile)

        def embed_lists(lists: list[list[str]]) -> TeacherVectors:
            chunks = [chunk for texts in lists for chunk in parts(texts)]
            return TeacherVectors.collected(chunks, embedded(chunks, sum(map(len, lists)), embed, folder))

        self._judge = Judge(self.recipe, [*corpus.rows, *corpus.held_out], embed_lists)

    def _judge_of(self, rows: Sequence[Row]) -> Judge:
        """That of the whole corpus; of these rows alone before `begin`, in a dry run."""
        return self._judge or Judge(
            self.recipe, rows, lambda lists: TeacherVectors.collected(lists, map(self.encoder.embed, lists))
        )

    def views(self, rows: Sequence[Row]) -> dict[str, View]:
        """The queries with `judged`, their scores (n, m), and the batch's m documents."""
        judge = self._judge_of(rows)
        scores = [judge.scores(row[0]) for row in rows]
        places = dict.fromkeys(judge.places[row[1]] for row in rows)
        for fit, graded in scores:
            best = np.argsort(np.where(graded > 0, -np.inf, fit))[::-1][: self.recipe.depth].copy()
            sampled = torch.randperm(len(best))[: self.recipe.candidates]
            places |= dict.fromkeys(best[sampled.numpy()].tolist())
        chosen = list(places)
        judged = np.stack([(fit + graded)[chosen] for fit, graded in scores])
        return {
            "queries": view(self.text_encoder, [row[0] for row in rows]) | {"judged": torch.from_numpy(judged)},
            "documents": view(self.text_encoder, [judge.documents[place] for place in chosen]),
        }

    def forward(self, queries: View, documents: View) -> dict[str, Tensor]:
        vectors = [
            encode_trimmed(lambda part: self.encoder.vectors(part, self.text_encoder), batch)
            for batch in (queries, documents)
        ]
        return {"loss": ranking_divergence(cosine_matrix(*vectors), queries["judged"], self.recipe.temperature)}


def _judging(recipe: RankingRecipe) -> Embed | None:
    """Vectors whose products are the mean of the judges' cosines; None without judges. Raises ClozeError."""
    encoders = [read_by_itself(name, recipe.compile) for name in recipe.judges]

    def embed(texts: Sequence[str]) -> NDArray[np.float32]:
        parts = [units(encoder(texts)) for encoder in encoders]
        return np.concatenate(parts, axis=1).astype(np.float32)  # `collected` gives them length 1

    return embed if encoders else None
