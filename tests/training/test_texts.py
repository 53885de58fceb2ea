"""The texts that `cloze texts` makes: each once, none that is excluded or held out, and a collection to search."""

import csv
import gzip
import json
import random
import re
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pyarrow as pa
import pytest
from pyarrow import parquet

from cloze.command import run as run_command
from cloze.training.errors import CorpusError
from cloze.training.evaluation.search import load_collection
from cloze.training.texts import QUERY_WORDS, _digest, _texts_of, bare, main, query_of

ARTICLES, EACH = 60, 50
SENTENCES = [
    f"Sentence {number} of article {article} says, in some ten words, what it says."
    for article in range(ARTICLES)
    for number in range(EACH)
]
COUNTS = ["--sentences", "300", "--passages", "60", "--queries", "100", "--held-out", "20", "--held-out-queries", "8"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "articles.txt"
    path.write_text("\n".join(SENTENCES) + "\n", encoding="utf-8")
    return str(path)


def made(out: Path, corpus: str, *options: str) -> list[dict[str, Any]]:
    assert run_command(lambda: main([str(out), "--corpus", corpus, *COUNTS, *options])) == 0
    return [json.loads(line) for line in (out / "texts.jsonl").read_text(encoding="utf-8").splitlines()]


def sources(text: str) -> list[str]:
    """The sentences of a text."""
    return re.findall(r"Sentence \d+ of article \d+ says, in some ten words, what it says\.", text)


def test_the_texts_are_of_three_kinds_and_each_is_there_once(corpus: str, tmp_path: Path) -> None:
    texts = made(tmp_path / "out", corpus)
    by_kind = {
        kind: [each["text"] for each in texts if each["kind"] == kind] for kind in ("sentence", "passage", "query")
    }
    assert {kind: len(found) for kind, found in by_kind.items()} == {"sentence": 300, "passage": 60, "query": 100}
    assert len({each["text"] for each in texts}) == len(texts)
    assert [each["kind"] for each in texts] != sorted(each["kind"] for each in texts)
    assert set(by_kind["sentence"]) <= set(SENTENCES)
    used = [sentence for kind in ("sentence", "passage") for text in by_kind[kind] for sentence in sources(text)]
    assert len(set(used)) == len(used)
    for passage in by_kind["passage"]:
        assert 50 <= len(passage.split()) <= 400
        first = SENTENCES.index(sources(passage)[0])
        assert passage == " ".join(SENTENCES[first : first + len(sources(passage))])
    assert all(len(query.split()) <= QUERY_WORDS + 2 for query in by_kind["query"])
    assert all(each["words"] == bare(each["text"]) for each in texts)


def test_more_than_one_pass_makes_other_texts_of_the_same_sentences(corpus: str, tmp_path: Path) -> None:
    texts = made(tmp_path / "often", corpus, "--sentences", "2500", "--passages", "2000", "--queries", "3000")
    assert len(texts) == 7500
    assert len({each["text"] for each in texts}) == len(texts)
    collection = load_collection(tmp_path / "often" / "retrieval" / "articles")
    held_out = {sentence for passage in collection.documents for sentence in sources(passage)}
    used = {sentence for each in texts for sentence in sources(each["text"])}
    assert held_out
    assert used.isdisjoint(held_out)


def test_the_same_seed_makes_the_same_files(corpus: str, tmp_path: Path) -> None:
    one, same, other = (
        made(tmp_path / name, corpus, "--seed", seed) for name, seed in (("a", "1"), ("b", "1"), ("c", "2"))
    )
    assert one == same != other


def test_the_collection_is_not_trained_on_and_its_queries_are_not_in_their_passages(
    corpus: str, tmp_path: Path
) -> None:
    texts = made(tmp_path / "out", corpus)
    collection = load_collection(tmp_path / "out" / "retrieval" / "articles")
    assert (len(collection.documents), len(collection.queries)) == (20, 8)
    held_out = {sentence for document in collection.documents for sentence in sources(document)}
    assert held_out.isdisjoint(sentence for each in texts for sentence in sources(each["text"]))
    whole = [query for query in collection.queries if query in SENTENCES]
    assert len(whole) == 4
    assert all(4 <= len(query.split()) <= QUERY_WORDS + 2 for query in collection.queries if query not in whole)
    for query in whole:
        ((document, grade),) = collection.relevance[collection.queries.index(query)].items()
        assert grade == 1
        places = sorted(map(SENTENCES.index, [query, *sources(collection.documents[document])]))
        assert places == list(range(places[0], places[0] + len(places)))  # the passage and what was taken out of it


def test_no_text_of_the_evaluation_data_occurs(corpus: str, tmp_path: Path) -> None:
    """In whatever case and with whatever punctuation; in lines, in cells and in JSON."""
    data = tmp_path / "data"
    (data / "sets").mkdir(parents=True)
    lines, cells, records = SENTENCES[0:900:3], SENTENCES[1:900:3], SENTENCES[2:900:3]
    (data / "lines.txt").write_text("\n".join(text.upper().replace(",", " ;") for text in lines), encoding="utf-8")
    (data / "sets" / "cells.tsv").write_text("\n".join(f"4.0\t{text}\tx" for text in cells), encoding="utf-8")
    rows = [json.dumps({"_id": "1", "text": text}) for text in records]
    (data / "sets" / "records.jsonl").write_text("\n".join([*rows, "{torn", "[1]"]), encoding="utf-8")
    texts = made(tmp_path / "out", corpus, "--exclude", str(data))
    collection = load_collection(tmp_path / "out" / "retrieval" / "articles")
    used = {
        sentence for text in [*(each["text"] for each in texts), *collection.documents] for sentence in sources(text)
    }
    assert used
    assert used.isdisjoint(SENTENCES[:900])


def test_each_format_of_evaluation_data_is_excluded(corpus: str, tmp_path: Path) -> None:
    """Csv with quotes and with lines in a cell, compressed files, parquet, lists in JSON, and Latin-1."""
    data = tmp_path / "data"
    data.mkdir()
    with (data / "pairs.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["sentence1", "score"], *([text, "4.2"] for text in SENTENCES[0:900:5])])
        for text in SENTENCES[1:900:5]:  # each on two lines of one cell
            first, _, rest = text.partition(" ")
            csv.writer(file).writerow([f"{first}\n{rest}", "4.2"])
    with gzip.open(data / "lines.txt.gz", "wt", encoding="utf-8") as packed:
        packed.write("\n".join(SENTENCES[2:900:5]))
    parquet.write_table(pa.table({"text": SENTENCES[3:900:5]}), data / "rows.parquet")
    (data / "lists.json").write_text(json.dumps([{"texts": [each]} for each in SENTENCES[4:900:5]], indent=1))
    documents = [{"_id": "d", "text": " ".join(SENTENCES[990:1020])}]  # of which no sentence is a text of its own
    (data / "corpus.jsonl").write_text("".join(json.dumps(each) + "\n" for each in documents))
    (data / "semicolons.csv").write_text("text;score\n" + "".join(f"{text};4,2\n" for text in SENTENCES[900:990]))
    with (data / "CAPITALS.CSV").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows([["4.2", text] for text in SENTENCES[1020:1040]])
    (tmp_path / "disk").mkdir()
    spark = pa.table({"text": [text.encode() for text in SENTENCES[1040:1060]]})
    parquet.write_table(spark, tmp_path / "disk" / "bytes.parquet")
    (data / "linked").symlink_to(tmp_path / "disk")
    (data / ".hidden").write_bytes(b"\0\xff")
    (data / "latin.neg").write_bytes("\n".join(f"caf\xe9 {each}" for each in SENTENCES).encode("latin-1"))
    texts = made(tmp_path / "out", corpus, "--exclude", str(data))
    used = {sentence for each in texts for sentence in sources(each["text"])}
    assert used
    assert used.isdisjoint(SENTENCES[:1060])


@pytest.mark.parametrize("text", ["हिन्दी भाषा में", "தமிழ் மொழி", "re\u0301sume\u0301", "မြန်မာ", "10² ½"])
def test_a_word_keeps_its_marks(text: str) -> None:
    assert bare(f"({text})!") == f"{normalize('NFC', text)}."


def test_words_that_differ_in_a_mark_differ() -> None:
    assert _digest("लड़का") != _digest("लड़की")
    assert _digest("re\u0301sume\u0301.") == _digest("R\u00e9sum\u00e9")


def test_latin_1_is_read(tmp_path: Path) -> None:
    (tmp_path / "set.pos").write_bytes("un caf\xe9 cr\xe8me\n".encode("latin-1"))
    assert "un caf\xe9 cr\xe8me\n" in list(_texts_of(tmp_path))
    (tmp_path / "set.zip").write_bytes(b"PK\x03\x04\x00\x00\xff")
    with pytest.raises(CorpusError, match=r"set\.zip is not text; unpack it, or name other files"):
        list(_texts_of(tmp_path))


def test_no_query_is_a_phrase_of_the_evaluation_data(corpus: str, tmp_path: Path) -> None:
    """Although the phrase is a whole sentence nowhere."""
    before = {each["text"] for each in made(tmp_path / "before", corpus) if each["kind"] == "query"}
    (tmp_path / "phrases.txt").write_text("\n".join(sorted(before)[::2]) + "\n", encoding="utf-8")
    texts = made(tmp_path / "after", corpus, "--exclude", str(tmp_path / "phrases.txt"))
    assert {each["text"] for each in texts}.isdisjoint(sorted(before)[::2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sentences", "100000"], r"the corpus has too few sentences: .*[\d,]+ sentence are missing; add text"),
        (["--single-texts", "5"], "--single-texts is 5, but --singles does not name their file; add --singles"),
        (["--singles", __file__], "--singles is given, but --single-texts is 0, so none of its texts would be used"),
        (["--single-texts", "5", "--singles", __file__], "cannot tell the format from its name"),
        (
            ["--held-out-queries", "0"],
            "--held-out is 20, but --held-out-queries is 0, and a collection without queries",
        ),
        (["--held-out-queries", "21"], "--held-out-queries is 21, but --held-out is 20; each query needs a passage"),
        (["--exclude", "nowhere"], "--exclude nowhere does not exist; give a file or a folder"),
    ],
)
def test_what_cannot_be_made_is_one_line_and_nothing_is_written(
    options: list[str], message: str, corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run_command(lambda: main([str(out), "--corpus", corpus, *COUNTS, *options])) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not out.exists()


def test_a_folder_with_something_in_it_is_not_written(
    corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").touch()
    assert run_command(lambda: main([str(tmp_path), "--corpus", corpus])) == 2
    assert "is not an empty folder; choose another, or remove it" in capsys.readouterr().err
    assert run_command(lambda: main([str(tmp_path / "mine" / "texts"), "--corpus", "nowhere.txt"])) == 2
    assert "texts cannot be written to (Not a directory); choose another folder" in capsys.readouterr().err


def test_a_query_has_no_blanks_around_it() -> None:
    queries = {query_of("so ( he said ) . ( and then )", random.Random(seed)) for seed in range(400)}
    assert len(queries) > 20
    assert [query for query in queries if query != query.strip()] == []


def test_no_passage_is_of_two_articles(tmp_path: Path) -> None:
    """Articles are files, or runs of lines between empty ones."""
    articles = ["\n".join(SENTENCES[start : start + 12]) for start in range(0, len(SENTENCES), 12)]
    (tmp_path / "in-one.txt").write_text("\n\n".join(articles[:150]), encoding="utf-8")
    for number, article in enumerate(articles[150:]):
        (tmp_path / f"article-{number}.txt").write_text(article, encoding="utf-8")
    texts = made(tmp_path / "out", str(tmp_path / "*.txt"))
    held_out = load_collection(tmp_path / "out" / "retrieval" / "texts").documents
    passages = [each["text"] for each in texts if each["kind"] == "passage"]
    assert len(passages) == 60
    for passage in [*passages, *held_out]:
        assert len({SENTENCES.index(sentence) // 12 for sentence in sources(passage)}) == 1


def test_a_query_may_be_any_words_of_a_sentence() -> None:
    words = [f"w{number}" for number in range(15)]
    queries = [query_of(" ".join(words), random.Random(seed)) for seed in range(4000)]
    for word in words:
        assert sum(word in query.rstrip("?").split() for query in queries) > 150


def test_texts_that_stand_alone_are_kept_as_they_are(corpus: str, tmp_path: Path) -> None:
    alone = [f"what is the price of ticket {number}" for number in range(40)]
    (tmp_path / "questions.txt").write_text("\n".join([*alone, *SENTENCES]), encoding="utf-8")
    (tmp_path / "known.txt").write_text("\n".join(alone[:10]), encoding="utf-8")
    asked = ["--singles", str(tmp_path / "questions.txt"), "--exclude", str(tmp_path / "known.txt"), "--single-texts"]
    texts = made(tmp_path / "out", corpus, *asked, "30")
    assert {each["text"] for each in texts if each["kind"] == "single"} == set(alone[10:])  # nor a sentence of articles
    assert run_command(lambda: main([str(tmp_path / "more"), "--corpus", corpus, *COUNTS, *asked, "31"])) == 2


def test_a_text_that_stands_alone_is_no_query_too(corpus: str, tmp_path: Path) -> None:
    before = [each["text"] for each in made(tmp_path / "before", corpus) if each["kind"] == "query"]
    (tmp_path / "questions.txt").write_text("\n".join([*before, "one more question"]), encoding="utf-8")
    texts = made(tmp_path / "out", corpus, "--singles", str(tmp_path / "questions.txt"), "--single-texts", "1")
    assert [each["text"] for each in texts if each["kind"] == "single"] == ["one more question"]


def test_of_one_long_article_a_tenth_at_most_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("\n".join(SENTENCES[:390]), encoding="utf-8")
    options = ["--held-out", "100", "--held-out-queries", "10", "--sentences", "100", "--passages", "5"]
    main([str(tmp_path / "out"), "--corpus", str(tmp_path / "one.txt"), "--queries", "20", *options])
    collection = load_collection(tmp_path / "out" / "retrieval" / "one")
    held_out = {sentence for document in collection.documents for sentence in sources(document)}
    assert 20 < len(held_out) <= 39
    trained = (json.loads(line)["text"] for line in (tmp_path / "out" / "texts.jsonl").read_text("utf-8").splitlines())
    assert held_out.isdisjoint(sentence for text in trained for sentence in sources(text))


def test_each_source_has_a_collection_of_a_tenth_at_most(tmp_path: Path) -> None:
    for folder, start in (("one", 0), ("two", 1500)):
        (tmp_path / folder).mkdir()
        text = "\n\n".join("\n".join(SENTENCES[at : at + 50]) for at in range(start, start + 1500, 50))
        (tmp_path / folder / "text.txt").write_text(text, encoding="utf-8")
    sources_of = [str(tmp_path / folder / "text.txt") for folder in ("one", "two")]
    options = ["--held-out", "1000", "--held-out-queries", "1000", "--sentences", "200", "--passages", "20"]
    main([str(tmp_path / "out"), "--corpus", *sources_of, "--queries", "50", *options])
    assert sorted(each.name for each in (tmp_path / "out" / "retrieval").iterdir()) == ["text", "text-2"]
    for name, own in (("text", SENTENCES[:1500]), ("text-2", SENTENCES[1500:])):
        collection = load_collection(tmp_path / "out" / "retrieval" / name)
        found = {sentence for document in collection.documents for sentence in sources(document)}
        assert found <= set(own)
        assert len({SENTENCES.index(sentence) // 50 for sentence in found}) == 3  # of 30 articles, whole ones
        assert len(collection.queries) == len(collection.documents)


def test_nothing_need_be_held_out(corpus: str, tmp_path: Path) -> None:
    assert made(tmp_path / "out", corpus, "--held-out", "0", "--held-out-queries", "0")
    assert not (tmp_path / "out" / "retrieval").exists()
