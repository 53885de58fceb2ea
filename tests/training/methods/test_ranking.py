"""The method `ranking`: its judge against a loop over the formula, what a batch has, and training on a file."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from recipes import arguments, load_recipe

from cloze.training.data.corpus import Corpus
from cloze.training.data.lexical import Lexical, lower_words
from cloze.training.errors import CorpusError, RecipeError
from cloze.training.evaluation.measures import units
from cloze.training.fit import main
from cloze.training.inputs import digests_of
from cloze.training.loop.prepare import prepare
from cloze.training.methods.losses import ranking_divergence
from cloze.training.methods.ranking import Ranking
from cloze.training.model.encoder import SentenceEncoder

DOCUMENTS = [f"The {colour} {thing} stands in the {place}." for colour in ("red", "old") for thing in ("dog", "house")
             for place in ("city", "field")]  # fmt: skip
QUERIES = {"red dog": 0, "old house in the field": 7, "dog": 5, "city": 2}


def keys_of(folder: Path, encoder: Path, **keys: Any) -> dict[str, Any]:
    rows = [{"query": query, "document": DOCUMENTS[place], "grade": 1} for query, place in QUERIES.items()]
    rows += [
        {"query": "red", "document": DOCUMENTS[1], "grade": 0},
        {"query": "dog", "document": DOCUMENTS[2], "grade": -1},
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "more.jsonl").write_text(
        "".join(json.dumps({"document": text}) + "\n" for text in DOCUMENTS), encoding="utf-8"
    )
    known = {"encoder": str(encoder), "corpus": str(folder / "pairs.jsonl"), "documents": str(folder / "more.jsonl")}
    known |= {"columns": ["query", "document", "grade"], "template": "[X] means [MASK].", "pooling": "mask"}
    return (
        known
        | {"batch_size": 3, "held_out": 0, "max_steps": 4, "eval_steps": 2, "log_steps": 1, "max_tokens": 24}
        | keys
    )


def begun(folder: Path, encoder: Path, **keys: Any) -> tuple[Ranking, Corpus]:
    corpus, _, objective = prepare(load_recipe("ranking", keys_of(folder, encoder, **keys)))
    assert isinstance(objective, Ranking)
    objective.begin(corpus, folder / "prepared")
    return objective, corpus


def test_a_query_is_held_out_with_all_its_documents(tmp_path: Path, tiny_bert: Path) -> None:
    """Else the judge would know its grades, and teach them."""
    corpus, *_ = prepare(load_recipe("ranking", keys_of(tmp_path, tiny_bert, held_out=3)))
    assert {row[0] for row in corpus.held_out}.isdisjoint(row[0] for row in corpus.rows)
    assert len(corpus.held_out) >= 2
    rows = [{"query": f"dog {number % 4}", "document": str(number), "grade": 1} for number in range(20)]
    (tmp_path / "many.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    keys = keys_of(tmp_path, tiny_bert, held_out=3, corpus=str(tmp_path / "many.jsonl"))
    with pytest.raises(
        RecipeError, match="held_out is 3, but a query is held out with all its rows, and these are more; raise"
    ):
        prepare(load_recipe("ranking", keys))


def test_judgements_may_all_have_one_grade(tmp_path: Path, tiny_bert: Path) -> None:
    keys = keys_of(tmp_path, tiny_bert)
    lines = (tmp_path / "pairs.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "pairs.jsonl").write_text("".join(line for line in lines if '"grade": 1' in line), encoding="utf-8")
    corpus, *_ = prepare(load_recipe("ranking", keys))
    assert {row[2] for row in corpus.rows} == {"1.0"}


def bm25(query: str, document: str, k1: float = 1.2, b: float = 0.75) -> float:
    """Robertson and Zaragoza's formula without the constant factor k1 + 1, as Lucene computes it since 8.0."""
    words, length = lower_words(document), sum(len(lower_words(each)) for each in DOCUMENTS) / len(DOCUMENTS)
    score = 0.0
    for word in lower_words(query):
        having, count = sum(word in lower_words(each) for each in DOCUMENTS), words.count(word)
        idf = math.log(1 + (len(DOCUMENTS) - having + 0.5) / (having + 0.5))
        score += idf * count / (count + k1 * (1 - b + b * len(words) / length))
    return score


def test_lexical_scores_are_bm25() -> None:
    lexical = Lexical(DOCUMENTS)
    for query in ("red dog", "the THE house", "Nothing of this", ""):
        np.testing.assert_allclose(lexical.scores(query), [bm25(query, text) for text in DOCUMENTS], rtol=1e-5)


def test_documents_without_words_score_nothing() -> None:
    np.testing.assert_array_equal(Lexical(["", "?!", "a word"]).scores("word").argmax(), 2)
    np.testing.assert_array_equal(Lexical(["", "?!"]).scores("word"), [0, 0])


def test_the_loss_of_a_known_table() -> None:
    """Two documents: the shares are those of a logistic function."""
    student, judge = torch.tensor([[0.5, 0.1]]), torch.tensor([[0.2, 0.6]])
    p, q = 1 / (1 + math.exp(0.4 / 0.1)), 1 / (1 + math.exp(-0.4 / 0.1))
    expected = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    assert ranking_divergence(student, judge, 0.1).item() == pytest.approx(expected, rel=1e-5)
    assert ranking_divergence(judge, judge, 0.1).item() == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_the_judge_is_the_formula(tiny_bert: Path, tmp_path: Path, weight: float) -> None:
    objective, corpus = begun(tmp_path, tiny_bert, lexical_weight=weight, judged_weight=0.25, candidates=8)
    texts = [*DOCUMENTS, *dict.fromkeys(row[0] for row in corpus.rows)]
    encoder = SentenceEncoder.load(str(tiny_bert), template="[X] means [MASK].", pooling="mask")
    vectors = dict(zip(texts, units(encoder.embed(texts)), strict=True))
    grades = {(query, text): float(grade) for query, text, grade in corpus.rows}
    rows = corpus.rows[:3]
    views = objective.views(rows)
    decoded = objective.encoder.tokenizer.batch_decode(views["documents"]["input_ids"], skip_special_tokens=True)
    found = [text.removesuffix(" means.") for text in decoded]
    lowered = {text.lower(): text for text in DOCUMENTS}
    documents = [lowered[text] for text in found]
    assert sorted(documents) == sorted(DOCUMENTS)
    for row, judged in zip(rows, views["queries"]["judged"], strict=True):
        cosines = np.array([vectors[row[0]] @ vectors[text] for text in DOCUMENTS])
        words = np.array([bm25(row[0], text) for text in DOCUMENTS])
        scores = cosines + weight * cosines.std() * (words - words.mean()) / words.std()
        scores += 0.25 * np.array([grades.get((row[0], text), 0.0) for text in DOCUMENTS])
        by_text = dict(zip(DOCUMENTS, scores, strict=True))
        np.testing.assert_allclose(judged, [by_text[text] for text in documents], atol=2e-3)  # held in 16 bits


def test_several_encoders_judge_by_their_mean_cosine(tiny_bert: Path, tiny_roberta: Path, tmp_path: Path) -> None:
    """Each read by itself; of these, by the mean without a template."""
    judges = [str(tiny_bert), str(tiny_roberta)]
    objective, corpus = begun(tmp_path, tiny_bert, judges=judges, lexical_weight=0, judged_weight=0, candidates=8)
    [query, first, _] = corpus.rows[0]
    documents = [first, *(text for text in DOCUMENTS if text != first)]
    expected = np.zeros(len(documents))
    for name in judges:
        encoder = SentenceEncoder.load(name, template="[X]", pooling="mean")
        [vector, *others] = units(encoder.embed([query, *documents]))
        expected += np.array([vector @ other for other in others]) / 2
    judged = objective.views([corpus.rows[0]])["queries"]["judged"][0]
    assert judged[0] == pytest.approx(expected[0], abs=2e-3)
    np.testing.assert_allclose(sorted(judged), sorted(expected), atol=2e-3)  # the others come in the judge's order


def test_a_batch_has_its_own_documents_and_the_candidates_that_rank_first(
    tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloze.training.methods.ranking.DEPTH", 2)
    objective, corpus = begun(tmp_path, tiny_bert, candidates=0)
    assert len(objective.views(corpus.rows[:3])["documents"]["input_ids"]) == 3
    objective.recipe = objective.recipe.model_copy(update={"candidates": 2})
    torch.manual_seed(0)
    (row,) = corpus.rows[:1]
    fit, graded = objective._judge.scores(row[0])  # type: ignore[union-attr]
    best = [place for place in np.argsort(-fit) if not graded[place]][:2]
    chosen = objective.views([row])["queries"]["judged"][0]
    np.testing.assert_allclose(sorted(chosen), sorted([(fit + graded).max(), *fit[best]]), rtol=1e-5)


def test_runs_that_rank_the_same_files_share_the_vectors(
    tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(tmp_path, tiny_bert)
    asked: list[str] = []
    embed = SentenceEncoder.embed

    def noted(encoder: SentenceEncoder, texts: list[str], *rest: Any, **others: Any) -> NDArray[np.float32]:
        asked.extend(texts)
        return embed(encoder, texts, *rest, **others)

    monkeypatch.setattr(SentenceEncoder, "embed", noted)
    keys = keys_of(tmp_path, tiny_bert)
    rows = [{"query": "a new query", "document": text, "grade": place} for place, text in enumerate(DOCUMENTS[3:7])]
    Path(keys["corpus"]).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    corpus, _, objective = prepare(load_recipe("ranking", keys))
    objective.begin(corpus, tmp_path / "prepared")
    assert asked == ["a new query"]


def test_training_draws_judged_documents_near_to_their_queries(tiny_bert: Path, tmp_path: Path) -> None:
    keys = keys_of(tmp_path, tiny_bert, max_steps=100, learning_rate=0.003, candidates=2, judged_weight=0.2)
    assert main(["ranking", *arguments(keys), "--out", str(tmp_path / "run")]) == 0

    def advantage(encoder: SentenceEncoder) -> float:
        """How far the cosines of judged pairs are above those of others."""
        cosines = units(encoder.embed(list(QUERIES))) @ units(encoder.embed(DOCUMENTS)).T
        judged = cosines[range(len(QUERIES)), list(QUERIES.values())]
        return float(judged.mean() - cosines.mean())

    before = SentenceEncoder.load(str(tiny_bert), template="[X] means [MASK].", pooling="mask")
    assert advantage(SentenceEncoder.load(str(tmp_path / "run"))) > 0.05 > 0.02 > advantage(before)


def test_a_dry_run_shows_queries_and_documents(
    tiny_bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ranking", *arguments(keys_of(tmp_path, tiny_bert)), "--dry-run"]) == 0
    shown = capsys.readouterr().err
    assert "view queries" in shown
    assert "view documents" in shown


def test_queries_and_documents_have_the_templates_that_a_search_gives_them(tiny_bert: Path, tmp_path: Path) -> None:
    parent = SentenceEncoder.load(str(tiny_bert), template="[X] means [MASK].", pooling="mask")
    templates = {"query": "old [X] is [MASK]", "document": "city [X] is [MASK]"}
    parent.reconfigure(parent.config.model_copy(update={"templates": templates}))
    parent.save(tmp_path / "parent")
    objective, corpus = begun(tmp_path, tmp_path / "parent", candidates=0, lexical_weight=0, judged_weight=0)
    [row, *_] = corpus.rows
    views = objective.views([row])
    for name, text in (("query", row[0]), ("document", row[1])):
        named = parent.named(name)
        ids = views["queries" if name == "query" else "documents"]["input_ids"]
        assert ids.tolist() == named.text_encoder.batch([text]).input_ids.tolist()
    query, document = (units(parent.named(name).embed([text])) for name, text in zip(templates, row, strict=False))
    np.testing.assert_allclose(views["queries"]["judged"], query @ document.T, atol=2e-3)  # held in 16 bits


def test_the_candidates_of_a_batch_do_not_depend_on_what_was_drawn_before(tiny_bert: Path, tmp_path: Path) -> None:
    """A resumed run fetches its batches at other times."""
    objective, corpus = begun(tmp_path, tiny_bert, candidates=2)
    first = objective.views(corpus.rows[:3])
    objective.views(corpus.rows[3:])
    again = objective.views(corpus.rows[:3])
    assert torch.equal(first["documents"]["input_ids"], again["documents"]["input_ids"])
    other = Ranking(objective.encoder, objective.recipe.model_copy(update={"seed": 7}))
    other._judge = objective._judge
    assert not torch.equal(other.views(corpus.rows[:3])["documents"]["input_ids"], first["documents"]["input_ids"])


def test_documents_and_judges_have_digests_and_what_is_missing_is_named(tiny_bert: Path, tmp_path: Path) -> None:
    keys = keys_of(tmp_path, tiny_bert, judges=[str(tiny_bert)]) | {"documents": str(tmp_path / "mo*.jsonl")}
    digests = digests_of(load_recipe("ranking", keys))
    assert {name.partition(" ")[0] for name in digests} == {"encoder", "judges", "documents"}
    assert f"documents {tmp_path / 'more.jsonl'}" in digests
    for name in ("no*.jsonl", "none here.jsonl"):
        with pytest.raises(CorpusError, match="no file matches" if "*" in name else "does not exist"):
            prepare(load_recipe("ranking", keys | {"documents": str(tmp_path / name)}))


def test_a_dry_run_judges_by_the_rows_alone(tiny_bert: Path, tmp_path: Path) -> None:
    _, _, objective = prepare(load_recipe("ranking", keys_of(tmp_path, tiny_bert)))
    assert isinstance(objective, Ranking)
    judge = objective._judge_of([("red dog", DOCUMENTS[0], "1"), ("dog", DOCUMENTS[5], "1")])
    assert judge.documents == [DOCUMENTS[0], DOCUMENTS[5]]
