"""Search scores: nDCG worked by hand and against scikit-learn's, and folders that cannot be read."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import ndcg_score

from cloze.training.errors import CorpusError
from cloze.training.evaluation.search import Collection, find_collections, load_collection, search_metrics, search_score

VECTORS = {"north": (0.0, 1.0), "east": (2.0, 0.0), "north east": (1.0, 1.0), "up": (0.1, 0.9), "nowhere": (0.0, 0.0)}


def embed(texts: list[str]) -> np.ndarray:
    return np.array([VECTORS[text] for text in texts], dtype=np.float32)


def write(folder: Path, qrels: str = "q1\td2\t1\nq2\td1\t2\n", name: str = "qrels.tsv", **lines: list[object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    documents = [{"_id": "d1", "title": "north", "text": ""}, {"_id": "d2", "text": "east"}]
    queries = [{"_id": "q1", "text": "up"}, {"_id": "q2", "text": "north east"}, {"_id": "q3", "text": "north"}]
    for file, records in {"corpus": documents, "queries": queries}.items():
        text = "".join(json.dumps(record) + "\n" for record in lines.get(file, records))
        (folder / f"{file}.jsonl").write_text(text)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("query-id\tcorpus-id\tscore\n" + qrels)
    return folder


def ndcg(ranking: list[int], relevance: dict[int, int]) -> float:
    return search_metrics([np.array(ranking)], [relevance])["nDCG@10"][0]


def test_ndcg_by_hand() -> None:
    assert ndcg([0, 1, 2], {0: 1}) == 1
    assert ndcg([1, 0, 2], {0: 1}) == pytest.approx(1 / math.log2(3))
    assert ndcg([3, 4, 5], {0: 1}) == 0
    found, best = 1 + 3 / math.log2(3), 3 + 1 / math.log2(3)
    assert ndcg([1, 0], {0: 3, 1: 1}) == pytest.approx(found / best)


def test_ndcg_is_scikit_learns() -> None:
    chance = np.random.default_rng(0)
    for _ in range(20):
        grades, scores = chance.integers(0, 3, 40), chance.normal(size=40)
        grades[0] = 1
        ranking = np.argsort(-scores)[:10]
        expected = ndcg_score(grades[None], scores[None], k=10)
        assert ndcg(ranking.tolist(), dict(enumerate(grades.tolist()))) == pytest.approx(expected)


def test_a_collection_is_read_and_scored(tmp_path: Path) -> None:
    collection = load_collection(write(tmp_path / "compass"))
    assert collection == Collection("compass", ["north", "east"], ["up", "north east"], [{1: 1}, {0: 2}])
    # "up" finds east second; "north east" is as near to both, and the first of equals comes first
    assert search_score(embed, embed, collection) == pytest.approx(100 * (1 / math.log2(3) + 1) / 2)


def test_a_vector_of_zeros_finds_nothing_and_breaks_nothing() -> None:
    assert search_score(embed, embed, Collection("c", ["nowhere", "east"], ["nowhere"], [{1: 1}])) == pytest.approx(
        100 / math.log2(3)
    )


def test_judgements_of_queries_that_are_not_there_are_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path, "q1\td2\t1\nq9\td1\t1\nq2\td1\t0\n", name="qrels/test.tsv")
    assert load_collection(folder).queries == ["up"]
    assert capsys.readouterr().err.startswith("skipped 1 queries that ")


def test_collections_are_found_by_folder(tmp_path: Path) -> None:
    assert find_collections(tmp_path) == []
    for name in ("b", "a"):
        write(tmp_path / "retrieval" / name)
    (tmp_path / "retrieval" / "other").mkdir()
    assert [path.name for path in find_collections(tmp_path)] == ["a", "b"]


@pytest.mark.parametrize(
    ("qrels", "message"),
    [
        ("q1\td7\t1\n", r"qrels\.tsv, line 2: document 'd7' is not in .*corpus\.jsonl; add it there or remove"),
        ("q1\td1\tmuch\n", r"line 2: score 'much' is not a whole number"),
        ("q1\td1\t10000000000\n", r"line 2: score 10000000000 is not a grade"),
        ("q7\td1\t1\nq8\td1\t1\n", r"qrels\.tsv judges no query of .*queries\.jsonl \(it has 'q7'\); give both"),
        ("q1\td1\t0\n", "has no query with a relevant document"),
        ("q1\td1\n", "line 2: no text under 'score'"),
    ],
)
def test_judgements_that_cannot_be_used_are_refused(qrels: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=message):
        load_collection(write(tmp_path, qrels))


@pytest.mark.parametrize("file", ["corpus.jsonl", "queries.jsonl", "qrels.tsv"])
def test_a_missing_file_is_named(file: str, tmp_path: Path) -> None:
    (write(tmp_path) / file).unlink()
    with pytest.raises(CorpusError, match=rf"{file} is missing"):
        load_collection(tmp_path)


def test_a_record_without_its_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"corpus\.jsonl, line 1: no text under 'text' \(it has _id, body\)"):
        load_collection(write(tmp_path, corpus=[{"_id": "d1", "body": "x"}]))


@pytest.mark.parametrize("file", ["corpus", "queries"])
def test_an_id_that_occurs_twice_is_named(tmp_path: Path, file: str) -> None:
    twice: list[object] = [{"_id": "x", "text": "north"}, {"_id": "x", "text": "east"}]
    with pytest.raises(CorpusError, match=rf"{file}\.jsonl, line 2: the id 'x' also occurs in another line"):
        load_collection(write(tmp_path, **{file: twice}))


def test_a_query_that_is_a_document_does_not_find_itself(tmp_path: Path) -> None:
    """As in BEIR, where the id is shared; but a number that is shared by chance leaves no document out."""
    documents: list[object] = [
        {"_id": "1", "title": "a title", "text": "north"},
        {"_id": "2", "text": "up"},
        {"_id": "3", "text": "east"},
    ]
    queries: list[object] = [{"_id": "1", "text": " north"}, {"_id": "3", "text": "up"}]
    qrels = "1\t2\t1\n3\t2\t1\n"
    collection = load_collection(write(tmp_path, qrels, corpus=documents, queries=queries))
    assert collection.own == {0: 0}
    vectors = {"a title north": (0.0, 1.0), **VECTORS}

    def embed_all(texts: list[str]) -> np.ndarray:
        return np.array([vectors[each] for each in texts])

    assert search_score(embed_all, embed_all, collection) == pytest.approx(100)
    whole = Collection(*(getattr(collection, name) for name in ("name", "documents", "queries", "relevance")))
    assert search_score(embed_all, embed_all, whole) == pytest.approx(81.55, abs=0.005)
