"""Search: equal to pytrec_eval on rankings made here; templates for queries."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import pytrec_eval
from suite_data import embed, numbers, text

from cloze.training.errors import RunError
from cloze.training.evaluation.options import EvaluateOptions
from cloze.training.evaluation.search import METRICS, Collection, rankings, search_metrics
from cloze.training.evaluation.subjects import subjects
from cloze.training.evaluation.suites.retrieval import RetrievalTask
from cloze.training.evaluation.task import Subject


def collection(seed: int = 0) -> Collection:
    chance = np.random.default_rng(seed)
    documents = [text(*vector) for vector in chance.normal(size=(150, 4))]
    queries = [text(*vector) for vector in chance.normal(size=(8, 4))]
    grades = [{int(place): int(chance.integers(0, 3)) for place in chance.integers(0, 150, 12)} for _ in queries]
    return Collection("random", documents, queries, [each | {0: 1} for each in grades])


def test_metrics_are_those_of_pytrec_eval() -> None:
    """Of the cosines themselves, which have no ties here."""
    data = collection()
    queries, documents = embed(data.queries).astype(float), embed(data.documents).astype(float)
    cosines = (queries / np.linalg.norm(queries, axis=1, keepdims=True)) @ documents.T
    cosines /= np.linalg.norm(documents, axis=1)
    runs = {str(q): {str(d): float(cosine) for d, cosine in enumerate(row)} for q, row in enumerate(cosines)}
    judged = {str(q): {str(d): grade for d, grade in row.items()} for q, row in enumerate(data.relevance)}
    expected = pytrec_eval.RelevanceEvaluator(judged, {"ndcg_cut.10", "recip_rank", "map", "recall.1,10,100"}).evaluate(
        runs
    )
    scores = {score.metric: score for score in RetrievalTask("random", data).run(numbers())}
    assert set(scores) == set(METRICS)
    for name, theirs in METRICS.items():
        values = [expected[str(query)][theirs] for query in range(len(queries))]
        assert scores[name].items is not None
        assert scores[name].items.values == pytest.approx(values)
        assert scores[name].value == pytest.approx(100 * np.mean(values))


def test_equal_cosines_keep_the_order_of_the_corpus() -> None:
    (ranking,) = rankings(np.array([[1.0, 0]]), np.array([[0, 1.0], [2, 0], [1, 0], [0, 3]]))
    assert ranking.tolist() == [1, 2, 0, 3]
    assert search_metrics([ranking], [{2: 1}])["MRR"] == [0.5]


def test_queries_have_their_own_template() -> None:
    data = Collection("two", [text(1, 0), text(0, 1)], [text(1, 0)], [{1: 1}])
    turned = Subject("turned", embed, lambda texts: embed(texts)[:, ::-1], "digest")
    assert RetrievalTask("two", data).run(turned)[0].value == 100
    assert RetrievalTask("two", data).run(numbers())[0].value == pytest.approx(63.093, abs=1e-3)


def test_documents_have_their_own_template() -> None:
    data = Collection("two", [text(1, 0), text(0, 1)], [text(1, 0)], [{1: 1}])
    turned = Subject("turned", embed, embed, "digest", embed_documents=lambda texts: embed(texts)[:, ::-1])
    assert RetrievalTask("two", data).run(turned)[0].value == 100


def test_templates_of_queries_and_documents_are_options(tiny_bert: Path) -> None:
    def subject(*words: str) -> Subject:
        return next(subjects(str(tiny_bert), EvaluateOptions.parse([str(tiny_bert), *words], "p")))

    config, templates = ["--template", "[X]", "--pooling", "cls"], ["--query-template", "a [X]"]
    templates += ["--document-template", "the [X]"]
    plain, found = subject(*config), subject(*config, *templates)
    expected = {name: plain.embed([f"{name} dogs run"]) for name in ("a", "the")}
    np.testing.assert_allclose(found.embed_queries(["dogs run"]), expected["a"], atol=1e-6)
    np.testing.assert_allclose(found.documents(["dogs run"]), expected["the"], atol=1e-6)
    np.testing.assert_array_equal(found.embed(["dogs run"]), plain.documents(["dogs run"]))
    assert found.digest != plain.digest
    with pytest.raises(RunError, match=r"--top-k uses one template .* omit --query-template, --document"):
        subject("--top-k", "5", *templates)


def test_a_querys_own_document_is_left_out_of_its_results() -> None:
    documents = np.array([[1.0, 0], [0.9, 0.1], [0, 1]])
    found = rankings(np.array([[1.0, 0], [0, 1]]), documents, {0: 0})
    assert [ranking.tolist() for ranking in found] == [[1, 2], [2, 1, 0]]
    data = Collection("c", [text(*row) for row in documents], [text(1, 0)], [{0: 1, 1: 1}], {0: 0})
    scores = {score.metric: score.value for score in RetrievalTask("c", data).run(numbers())}
    assert scores["recall@1"] == 50  # its own judgement counts as one that was not found, as in BEIR


def test_collections_of_data_and_own_folders(tmp_path: Path) -> None:
    from test_retrieval import write

    from cloze.training.evaluation.suites.retrieval import tasks

    write(tmp_path / "data" / "retrieval" / "a")
    own = write(tmp_path / "mine")
    assert [task.name for task in tasks(tmp_path / "data", [own])] == ["a", "mine"]


def test_the_memory_of_a_search_depends_on_what_is_kept() -> None:
    """All cosines would be 320 MB in fp64, and the order of all documents as much again."""
    chance = np.random.default_rng(0)
    queries, documents = chance.normal(size=(2000, 4)), chance.normal(size=(20_000, 4))
    tracemalloc.start()
    found = rankings(queries, documents)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [len(ranking) for ranking in found] == [1000] * 2000
    assert kept < 1.2 * sum(ranking.nbytes for ranking in found)
    assert peak < kept + 150e6
