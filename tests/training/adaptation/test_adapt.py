"""The command adapt, from files to a run: with queries, without, and with what is wrong."""

import csv
import errno
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sentence_transformers.base.modules import Dense
from test_adopt import model_of

from cloze.command import run as run_command
from cloze.training.adapt import main
from cloze.training.adaptation import adapt as adapting
from cloze.training.adaptation import held_out as held_out_queries
from cloze.training.adaptation import rounds
from cloze.training.adaptation.adapt import AdaptationResult
from cloze.training.adaptation.held_out import HeldOutQueries, best_lexical_weight
from cloze.training.adaptation.pairs import Judgements
from cloze.training.adaptation.queries import QueryMaker, sentences_of
from cloze.training.adaptation.rounds import make_queries
from cloze.training.data.lexical import Lexical
from cloze.training.evaluation.search import search_metrics
from cloze.training.export.__main__ import main as export
from cloze.training.fit import main as fit
from cloze.training.hub.adoption import load_as_served
from cloze.training.loop.soup import average_weights
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.token_weights import TokenWeights
from cloze.training.pretrain import main as pretrain
from cloze.training.run_folder import Run

THINGS = ("dog", "man", "letter", "city", "rain", "guitar", "field", "house")
PLACES = ("river", "door", "road", "table", "hill", "wall", "gate", "tree")
DOCUMENTS = [
    f"The {thing} is near the {place}. Nobody looks at a {thing} there." for thing in THINGS for place in PLACES
]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> str:
    folder = tmp_path_factory.mktemp("served") / "parent"
    SentenceEncoder.load(str(tiny_bert), template="[X] means [MASK].", pooling="mask").save(folder)
    return str(folder)


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    file = tmp_path / "documents.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS), encoding="utf-8")
    return file


def pairs(file: Path, count: int = 12) -> Path:
    with file.open("w", encoding="utf-8", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(("query", "document"))
        writer.writerows((f"{text.split()[1]} {text.split()[5]}"[:-1], text) for text in DOCUMENTS[: 5 * count : 5])
    return file


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "STEPS", 2)


@pytest.mark.usefixtures("short")
def test_queries_make_a_run_that_says_what_it_gained(
    encoder: str, documents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    words = ["--encoder", encoder, "--pairs", str(pairs(tmp_path / "pairs.csv")), "--documents", str(documents)]
    assert fit(["adapt", *words, "--out", str(out)]) == 0
    shown = capsys.readouterr().err
    assert "documents: 64, of 64 files or rows" in shown
    assert "queries: 12, answered by 12 documents" in shown
    assert "round 2 of 2: 6 queries to learn from, 6 held out" in shown
    assert "12 queries held out: nDCG@10 " in shown
    assert f"next: cloze export {out} models/NAME" in shown
    provenance = Run(out).provenance()
    assert provenance["recipe"]["method"] == "adapt"
    assert provenance["recipe"]["pairs"] == [str(tmp_path / "pairs.csv")]
    assert {source["name"] for source in provenance["data"]} == {"pairs.csv", "documents.jsonl"}
    found = provenance["recipe"]["held_out"]
    assert found["after"] >= found["before"]
    assert found.keys() >= {"queries", "interval"} | ({"growth"} if provenance["recipe"]["parent_share"] < 1 else set())
    assert sorted(path.name for path in out.iterdir()) == ["documents.jsonl", "model", "run.json"]
    written = [json.loads(line) for line in (out / "documents.jsonl").read_text(encoding="utf-8").splitlines()]
    assert written == [
        {"document": f"documents.jsonl:{number}", "text": text} for number, text in enumerate(DOCUMENTS, 1)
    ]
    trained = SentenceEncoder.load(str(out))
    assert (trained.config.template, trained.config.pooling) == ("[X] means [MASK].", "mask")
    export([str(out), str(tmp_path / "bundle"), "--precision", "fp32"])
    card = (tmp_path / "bundle" / "README.md").read_text(encoding="utf-8")
    assert "On 12 queries that were held out, nDCG@10 was" in card
    assert "cloze adapt --encoder parent --pairs pairs.csv --documents documents.jsonl --seed 42 --out RUN" in card
    gained = provenance["recipe"]["parent_share"] < 1
    assert ("last round: all 12 queries to learn from" in shown) == gained
    same = np.array_equal(trained.embed(["dog"]), SentenceEncoder.load(encoder).embed(["dog"]))
    assert same == (provenance["recipe"]["parent_share"] == 1)


@pytest.mark.usefixtures("short")
def test_the_result_is_the_mean_of_all_rounds(
    encoder: str, documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    means: list[list[str]] = []

    def recorded(runs: list[Path], *, parent_share: float) -> Any:
        means.append([run.name for run in runs])
        return average_weights(runs, parent_share=parent_share)

    monkeypatch.setattr(adapting, "average_weights", recorded)
    monkeypatch.setattr(adapting.AdaptationResult, "_is_sure", lambda *_: True)
    words = ["--pairs", str(pairs(tmp_path / "pairs.csv")), "--documents", str(documents)]
    main(["--encoder", encoder, *words, "--out", str(tmp_path / "run")])
    assert means[-1] == ["round-1", "round-2", "last"]


@pytest.mark.usefixtures("short")
def test_spellings_of_one_query_are_never_apart(
    encoder: str, documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An encoder without capitals reads them alike: one that is learnt would give the other away."""
    file, seen = pairs(tmp_path / "pairs.csv"), list[tuple[set[str], set[str]]]()
    with file.open(encoding="utf-8", newline="") as rows:
        header, *asked = csv.reader(rows)
    with file.open("w", encoding="utf-8", newline="") as out:
        rows_of_all = [
            (spelling, text) for query, text in asked for spelling in (query, query.title(), f" {query}  now")
        ]
        csv.writer(out).writerows([header, *rows_of_all, *((query.replace(" ", "  "), text) for query, text in asked)])
    train = rounds.Rounds.train

    def recorded(self: Any, name: str, queries: Sequence[int], *others: Any) -> Path:
        if others[1:]:
            keys = [" ".join(query.lower().split()) for query in self.judged.queries]
            seen.append(({keys[query] for query in queries}, {keys[query] for query in others[1]}))
        return train(self, name, queries, *others)

    monkeypatch.setattr(rounds.Rounds, "train", recorded)
    main(["--encoder", encoder, "--pairs", str(file), "--documents", str(documents), "--out", str(tmp_path / "run")])
    assert [(len(learnt), len(held_out)) for learnt, held_out in seen[:2]] == [(12, 12), (12, 12)]
    for learnt, held_out in seen:
        assert not learnt & held_out


@pytest.mark.usefixtures("short")
def test_a_run_without_sentences_keeps_its_template(
    masked_bert: Path, documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sentences.txt").write_text("\n".join(DOCUMENTS), encoding="utf-8")
    words = ["--corpus", str(tmp_path / "sentences.txt"), "--max-steps", "2", "--batch-size", "8", "--held-out", "0"]
    parent = str(tmp_path / "mlm")
    assert pretrain(["--encoder", str(masked_bert), *words, "--out", parent]) == 0
    monkeypatch.setattr(adapting.AdaptationResult, "_is_sure", lambda *_: True)
    words = ["--encoder", parent, "--pairs", str(pairs(tmp_path / "pairs.csv")), "--documents", str(documents)]
    main([*words, "--out", str(tmp_path / "run")])
    before, after = (SentenceEncoder.load(run).config for run in (parent, str(tmp_path / "run")))
    assert (after.template, after.pooling) == (before.template, before.pooling)


def test_a_weighed_encoder_is_refused_before_the_first_round(
    tiny_bert: Path, documents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weighed = SentenceEncoder.load(str(tiny_bert), template="[X]", pooling="mean")
    weighed.token_weights = TokenWeights(np.ones((weighed.word_embeddings.num_embeddings, 1)))
    weighed.save(tmp_path / "weighed")
    words = ["--encoder", str(tmp_path / "weighed"), "--documents", str(documents), "--out", str(tmp_path / "run")]
    assert run_command(lambda: main(words)) == 2
    assert (
        "weighed came from cloze weigh, and a mean of weights cannot include its token weights"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("short")
def test_without_queries_it_says_what_to_label(
    encoder: str, documents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    main(["--encoder", encoder, "--documents", str(documents), "--out", str(out)])
    shown = capsys.readouterr().err
    assert "queries made from 43 documents; 21 queries from others are held out" in shown
    assert "text alone did not help: in " in shown
    with (out / "label.csv").open(encoding="utf-8-sig", newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["query", "document"]
    assert len(rows) == 50
    assert {query for query, _ in rows} == {""}
    assert {text for _, text in rows} <= set(DOCUMENTS)
    parent, kept = SentenceEncoder.load(encoder), SentenceEncoder.load(str(out))
    assert torch.equal(parent.backbone.state_dict()["embeddings.word_embeddings.weight"],
                       kept.backbone.state_dict()["embeddings.word_embeddings.weight"])  # fmt: skip
    rows = [(f"where is it {number}", text) for number, (_, text) in enumerate(rows)][:12]
    with (out / "label.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([header, *rows, ("", "left out")])
    again = ["--encoder", encoder, "--documents", str(documents), "--pairs", str(out / "label.csv")]
    main([*again, "--out", str(tmp_path / "labelled")])
    assert "queries: 12, answered by 12 documents" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "count", "said"),
    [
        ([], 0, "nothing to learn from; give --documents"),
        (["--documents", "{documents}"], 3, "pairs.csv has 3 queries with a document that answers them"),
        (["--documents", "{few}"], 0, "10 documents are too few"),
        (["--documents", "{none}"], 0, "none does not exist"),
        (["--documents", "{plain}"], 0, "have two or more sentences"),
    ],
)
def test_what_is_too_little_is_said_before_anything_is_computed(
    tmp_path: Path, documents: Path, words: Sequence[str], count: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("".join(documents.read_text(encoding="utf-8").splitlines(keepends=True)[:10]), encoding="utf-8")
    plain = tmp_path / "plain.jsonl"
    plain.write_text(
        "".join(json.dumps({"text": f"Part number {number}"}) + "\n" for number in range(99)), encoding="utf-8"
    )
    paths = {"documents": documents, "few": few, "none": tmp_path / "none", "plain": plain}
    given = [word.format(**paths) for word in words]
    if count:
        given += ["--pairs", str(pairs(tmp_path / "pairs.csv", count))]
    assert run_command(lambda: main([*given, "--encoder", "nobody/nothing", "--out", str(tmp_path / "run")])) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("short")
def test_text_that_the_encoder_does_not_know_is_said(
    encoder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "foreign.jsonl"
    sentence = "Donaudampfschifffahrtsgesellschaft Rindfleischetikettierung Grundstücksverkehr Genehmigung {}."
    texts = [f"{sentence.format(number)} {sentence.format(-number)}" for number in range(60)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    main(["--encoder", encoder, "--documents", str(file), "--out", str(tmp_path / "run")])
    assert "it was probably not trained on this language" in capsys.readouterr().err


def test_a_folder_that_is_no_encoder_is_named_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--encoder", str(tmp_path / "none"), "--documents", "nowhere", "--out", str(tmp_path / "run")]
    assert run_command(lambda: main(words)) == 2
    assert f"{tmp_path / 'none'} is not a folder" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--columns", "--document-columns"])
def test_columns_of_no_table_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(lambda: main([option, "text"])) == 2
    assert f"{option} names columns of --" in capsys.readouterr().err


@pytest.mark.usefixtures("short")
def test_what_a_killed_command_left_is_removed(
    encoder: str, documents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    (out / "rounds-of-adapt" / "round-1").mkdir(parents=True)
    (out / "model").mkdir()
    for name in ("documents.jsonl", "label.csv"):
        (out / name).touch()
    words = ["--encoder", encoder, "--documents", str(documents), "--out", str(out)]
    main(words)
    assert Run(out).finished
    assert not (out / "rounds-of-adapt").exists()
    assert run_command(lambda: main(words)) == 2
    assert "is not an empty folder" in capsys.readouterr().err


@pytest.mark.usefixtures("short")
def test_a_command_that_is_stopped_as_it_writes_leaves_nothing(
    encoder: str, documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Run, "write_provenance", full)
    words = ["--encoder", encoder, "--documents", str(documents), "--out", str(tmp_path / "run")]
    assert run_command(lambda: main(words)) == 2
    assert not list((tmp_path / "run").iterdir())


def test_an_encoder_that_nobody_reads_is_named(
    tiny_bert: Path, documents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--encoder", str(tiny_bert), "--documents", str(documents), "--out", str(tmp_path / "run")]
    assert run_command(lambda: main(words)) == 2
    assert "has no template and pooling of its own" in capsys.readouterr().err


def test_an_encoder_with_layers_behind_its_pooling_is_refused(
    tiny_bert: Path, documents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = model_of(tmp_path / "saved", tiny_bert, "bert", "mean", Dense(32, 24))
    words = ["--encoder", str(saved), "--documents", str(documents), "--out", str(tmp_path / "run")]
    assert run_command(lambda: main(words)) == 2
    assert not (tmp_path / "run").exists()
    assert "has layers after its pooling, which a run cannot include (Dense)" in capsys.readouterr().err


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("sure", [True, False])
def test_an_encoder_of_sentence_transformers_is_adapted(
    sure: bool,
    tiny_bert: Path,
    documents: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With its own limit, which is lower than its positions, whether a gain was sure or it stays as it was."""
    monkeypatch.setattr(adapting.AdaptationResult, "_is_sure", lambda *_: sure)
    saved = model_of(tmp_path / "saved", tiny_bert)
    settings = saved / "sentence_bert_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"max_seq_length": 24}))
    words = ["--documents", str(documents), "--pairs", str(pairs(tmp_path / "pairs.csv"))]
    main(["--encoder", str(saved), *words, "--out", str(tmp_path / "run")])
    assert "12 queries held out" in capsys.readouterr().err
    config, parent = SentenceEncoder.load(str(tmp_path / "run")).config, load_as_served(str(saved)).config  # type: ignore[union-attr]
    assert (config.pooling, config.templates, config.max_tokens) == ("mean", parent.templates, parent.max_tokens)


def test_a_round_is_scored_as_trec_eval_scores_all_documents(tiny_bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the pool has all documents, the figures are those of an exact search."""
    monkeypatch.setattr(held_out_queries, "NEAREST", 30)
    judged = Judgements(["red dog", "old house"], DOCUMENTS[:30], [{0: 1.0, 7: 3.0, 9: -1.0}, {12: 1.0}])
    embed = SentenceEncoder.load(str(tiny_bert), template="[X]", pooling="mean").embed
    vectors = units(embed(judged.documents))
    held_out = HeldOutQueries.among_nearest(judged, [0, 1], vectors, units(embed(judged.queries)))
    assert held_out.pool == list(range(30))
    order = [np.argsort(-(vectors @ query), kind="stable") for query in units(embed(judged.queries))]
    expected = search_metrics(order, [{0: 1, 7: 3}, {12: 1}])["nDCG@10"]
    np.testing.assert_allclose(held_out.scores(embed, embed), 100 * np.array(expected))


def units(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_a_pool_has_the_judged_the_nearest_and_those_of_the_same_words() -> None:
    documents = [f"text {number}" for number in range(100)] + ["needle"]
    judged = Judgements(["needle"], documents, [{50: 1.0, 51: -1.0}])
    vectors = np.eye(101, 4, dtype=np.float32)[::-1] + np.float32(0.01)
    held_out = HeldOutQueries.among_nearest(judged, [0], units(vectors), np.eye(1, 4, dtype=np.float32))
    assert {50, 51, 100} <= set(held_out.pool)
    assert len(held_out.pool) <= 42


@pytest.mark.parametrize(
    ("of_answer", "of_words", "apart", "expected"), [(1, 0.6, 1, 0.1), (0, 0, 0, 0.5), (1, 1, 0, 0.2)]
)
def test_the_weight_of_words_is_that_by_which_the_queries_find_most(
    of_answer: float, of_words: float, apart: int, expected: float
) -> None:
    """Where the words mislead, the least; where they alone tell, the most; of equal weights, 0.2.

    A query's cosines: `of_answer` with its answer, `of_words` with the document that has its word, `apart` places
    before it, and of the others half have 0.9. One standard deviation is 0.45; the word stands out by 6.4 of its own.
    """
    count = 40
    documents = [f"text number{number}" for number in range(count)]
    cosines = np.tile(np.array([0.0, 0.9] * (count // 2), np.float32), (10, 1))
    for query, row in enumerate(cosines):
        row[query] = of_words
        row[query + apart] = of_answer
    judged = Judgements(
        [f"number{query}" for query in range(10)], documents, [{query + apart: 1.0} for query in range(10)]
    )
    identity = np.eye(count, dtype=np.float32)  # so that a query's vector is its cosines
    assert best_lexical_weight(judged, range(10), identity, cosines, Lexical(documents)) == expected


def test_a_text_of_a_class_does_not_find_itself() -> None:
    texts = ["a", "b", "c"]
    judged = Judgements(["a", "b"], texts, [{1: 1.0}, {0: 1.0}])
    embed = {"a": [1.0, 0.0], "b": [0.9, 0.1], "c": [0.0, 1.0]}
    held_out = HeldOutQueries(judged, [0, 1], [0, 1, 2])

    def embedded(asked: Sequence[str]) -> NDArray[np.float32]:
        return np.array([embed[text] for text in asked])

    np.testing.assert_allclose(held_out.scores(embedded, embedded), [100, 100])


def test_a_judgement_is_not_learnt_the_other_way_round(encoder: str, tmp_path: Path) -> None:
    """Texts of one class answer each other: what a held-out text is scored by would be trained on."""
    texts = ["a dog", "two dogs", "the rain", "a city"]
    judged = Judgements(texts[:3], texts, [{1: 1.0, 2: 1.0}, {0: 1.0, 2: 1.0}, {0: 1.0, 1: 1.0}])
    made = rounds.Rounds(encoder, rounds.load_parent(encoder), judged, tmp_path, 0)
    rows, _ = made._rows([0, 1], range(4), {texts[2]})["judged"]
    assert {(query, document) for query, document, _ in rows} == {(texts[0], texts[1]), (texts[1], texts[0])}
    assert "known" not in made._rows([0, 1], range(4), {texts[2]})
    assert "judged" not in made._rows([0], range(4), {texts[1], texts[2]})


@pytest.mark.parametrize(
    ("gains", "share"),
    [
        ({0.3: [1.0, 3.0, 2.0, 2.0], 0.5: [1.0, 1.0, 1.0, 1.0]}, 0.3),
        ({0.3: [-5.0, 9.0, -5.0, 9.0], 0.5: [1.0, 1.0, 1.0, 1.0]}, 0.5),  # its mean is higher, and may be chance
        ({0.3: [-5.0, 9.0, -5.0, 9.0], 0.5: [-1.0, -1.0, -1.0, -1.0]}, 1.0),
    ],
)
def test_a_gain_that_may_be_chance_is_not_taken(gains: dict[float, list[float]], share: float) -> None:
    before = np.array([50.0, 60.0, 70.0, 80.0])
    after = {each: before + np.array(gain) for each, gain in gains.items()}
    found = AdaptationResult([], before, after, judged=True)
    assert found.share == share
    assert found.shown == (share if share < 1 else 0.3)
    np.testing.assert_array_equal(found.gains(share), gains.get(share, [0.0] * 4))


def test_a_gain_on_queries_that_nobody_judged_has_to_be_surer() -> None:
    gains = np.array([-4.0, 3.0, 3.0, 3.0] * 10)
    assert gains.mean() > gains.std() / len(gains) ** 0.5
    before = np.full(40, 50.0)
    many = {0.5: before + gains}
    assert [AdaptationResult([], before, many, judged=each).share for each in (True, False)] == [0.5, 0.5]
    few = {0.5: before[:8] + gains[:8]}
    assert [AdaptationResult([], before[:8], few, judged=each).share for each in (True, False)] == [0.5, 1.0]


def test_a_made_query_is_taken_out_of_its_document() -> None:
    made = make_queries([*DOCUMENTS[:5], "One sentence is here alone."], [1, 5], 3)
    assert made.grades == [{1: 1.0}]
    (query,) = made.queries
    assert query in DOCUMENTS[1]
    assert query not in made.documents[1]
    assert made.documents[0] == DOCUMENTS[0]
    twice = make_queries(["It is sold as it is. It is sold as it is. It rains in the city."], [0], 1)
    assert twice.queries[0] not in twice.documents[0]


@pytest.mark.parametrize("documents", [["open paid late", "open late", "paid open late"] * 5, ["!!!", "..."] * 5])
def test_queries_are_made_of_documents_without_rare_words(documents: list[str]) -> None:
    maker = QueryMaker(documents, 0)
    assert all(maker(place) for place in range(len(documents)) for _ in range(10))


def test_made_queries_are_of_their_documents_words() -> None:
    maker = QueryMaker(DOCUMENTS, 0)
    starts = {"what", "is", "are", "how", "does", "to", "who", "why", "where", "when", "was"}
    for place, document in enumerate(DOCUMENTS):
        words = set(maker(place).lower().replace("?", "").replace(".", "").split())
        assert words <= set(document.lower().replace(".", "").split()) | starts
    assert [QueryMaker(DOCUMENTS, 0)(3)] == [QueryMaker(DOCUMENTS, 0)(3)]


def test_a_document_without_sentences_is_its_own() -> None:
    assert sentences_of("Short. One.") == ["Short. One."]
    assert sentences_of("It has four words. No.") == ["It has four words."]
    assert sentences_of("图书馆九点开门，周日关闭。不。借书三周。") == ["图书馆九点开门，周日关闭。", "借书三周。"]
