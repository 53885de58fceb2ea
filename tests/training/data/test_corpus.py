import bz2
import gzip
import json
import lzma
import os
import random
import tempfile
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from cloze.encoding.bundle import sha256
from cloze.training.data.corpus import Corpus, read_corpus
from cloze.training.data.stored_rows import BATCH, ChosenRows, StoredRows
from cloze.training.errors import CorpusError
from cloze.training.evaluation.own_data import load_labels

COMPRESS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: pyarrow.compress(content, codec="zstd", asbytes=True),
}


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_text_file_has_a_sentence_a_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "one\r\n\n  two three \n \nvier ä\u2028b")
    corpus = read_corpus([path])
    assert list(corpus.rows) == [("one",), ("two three",), ("vier ä\u2028b",)]
    assert corpus.empty == 2
    source = corpus.sources[0]
    assert (source.name, source.sentences, source.sha256) == ("a.txt", 3, sha256(Path(path)))


def test_tables_and_json_lines_give_the_columns_asked_for(tmp_path: Path) -> None:
    csv = write(tmp_path / "a.csv", 'id,text,other\n1,"a, ""b""",x\n2,,y\n3,"two\nlines",z\n')
    tsv = write(tmp_path / "a.tsv", "text\tother\nfive\tsix\n")
    jsonl = write(tmp_path / "a.jsonl", '{"text": "seven", "other": null}\n\n{"other": "x", "text": "eight"}\n')
    corpus = read_corpus([csv, tsv, jsonl], ["text"])
    assert list(corpus.rows) == [('a, "b"',), ("two\nlines",), ("five",), ("seven",), ("eight",)]
    assert corpus.empty == 1
    assert list(read_corpus([csv], ["text", "other"]).rows) == [('a, "b"', "x"), ("two\nlines", "z")]


@pytest.mark.parametrize(
    ("name", "ending"), [("a.txt", ".gz"), ("a.jsonl", ".bz2"), ("a.txt", ".xz"), ("a.jsonl", ".zst")]
)
def test_a_compressed_file_is_read_as_it_is_named(tmp_path: Path, name: str, ending: str) -> None:
    lines = [f"satz {number} ä" for number in range(3000)]
    content = "\r\n".join(lines if "txt" in name else [json.dumps({"text": line}) for line in lines]).encode()
    path = tmp_path / f"{name}{ending}"
    path.write_bytes(COMPRESS[ending](content))
    corpus = read_corpus([str(path)], ["text"])
    assert list(corpus.rows) == [(line,) for line in lines]
    assert corpus.sources[0].sha256 == sha256(path)
    path.write_bytes(COMPRESS[ending](content)[:-20])  # as after a download that broke off
    with pytest.raises(CorpusError, match=rf"{path.name}, after line \d+: cannot be read"):
        read_corpus([str(path)], ["text"])


def test_a_pattern_stands_for_the_files_that_match_it(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for name in ("b.txt", "a.txt", "c.csv", "[x].txt", "deep/er/d.txt"):
        write(tmp_path / name, f"text\n{name}\n")
    expected = {
        "*.txt": ["[x].txt", "a.txt", "b.txt"],
        "?.[tc]*": ["a.txt", "b.txt", "c.csv"],
        "**/*.txt": ["[x].txt", "a.txt", "b.txt", "d.txt"],
        "[x].txt": ["[x].txt"],  # where a file has this name, it is meant
    }
    for pattern, names in expected.items():
        corpus = read_corpus([f"{tmp_path}/{pattern}"], ["text"])
        assert [source.name for source in corpus.sources] == names
    with pytest.raises(CorpusError, match=r"no file matches .*/\*\.jsonl; check the pattern"):
        read_corpus([f"{tmp_path}/*.jsonl"])
    with pytest.raises(CorpusError, match=r"no file matches .*/dee\*; check"):
        read_corpus([f"{tmp_path}/dee*"])  # a folder is not a file
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt")).write_text("text\n", encoding="utf-8")
    with pytest.raises(CorpusError, match=r"caf\\xe9\.txt' is not UTF-8; rename the file"):
        read_corpus([f"{tmp_path}/*.txt"])


def test_length_limits_and_samples_are_counted_and_seeded(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "".join("w " * words + "\n" for words in range(10)))
    corpus = read_corpus([path], min_words=2, max_words=8)
    assert (len(corpus), corpus.empty, corpus.outside) == (7, 1, 2)
    first, second, other = (list(read_corpus([path], sample=4, seed=seed).rows) for seed in (1, 1, 2))
    assert first == second != other
    assert len(first) == 4
    assert len(read_corpus([path], sample=100)) == 9


@pytest.mark.parametrize(
    ("name", "content", "columns", "message"),
    [
        ("a.txt", b"good\nbad \xff byte\n", (), r"a\.txt, line \d: not UTF-8"),
        ("a.txt", b"\n \n", (), r"no sentences remain from .*2 empty"),
        ("a.csv", b"x,y\n1,2\n", ("text",), r"a\.csv, line 2: no column 'text'; it has x, y"),
        ("a.csv", b"x,y\n1,2\n", (), "has columns x, y; name the column to read"),
        ("a.csv", b"x,y\n1,\xff\n", ("x",), r"a\.csv, line \d: not UTF-8"),
        ("a.jsonl", b'{"text": 3}\n', ("text",), "line 1: text is 3; write a text"),
        ("a.jsonl", b"{\n", ("text",), "line 1: not JSON"),
        ("a.jsonl", b"[1]\n", ("text",), "line 1: .* is not a JSON object"),
        ("a.jsonl", b"[" * 100_000 + b"\n", ("text",), "line 1: not JSON"),
        ("a.docx", b"x", ("text",), "cannot tell the format from its name"),
        ("a.parquet.gz", b"x", ("text",), "cannot tell the format from its name"),
        ("a.parquet", b"x", ("text",), "cannot be read as parquet"),
        ("a.txt.gz", b"not gzip", (), "cannot be read"),
        ("a.txt.bz2", b"not bzip2", (), "cannot be read"),
        ("a.txt.xz", b"not xz", (), "cannot be read"),
        ("a.txt.zst", b"not zstd", (), "cannot be read"),
        ("a.txt.xz", lzma.compress(b"good\nbad \xff byte\n"), (), r"a\.txt\.xz, line \d: not UTF-8"),
        ("a.txt", "\u200b\n".encode(), (), r"no sentences remain from .*1 empty"),
        ("a.csv", b"x,y\na, b,c\n", ("x", "y"), 'line 2: 3 cells, more than the 2 columns .* put "quotes"'),
        ("a.tsv", b'x\ty\n"Hello" she said\tc\nd\te\n', ("x", "y"), "line 2: .*written twice"),
        ("a.tsv", b'x\ty\n"Hello\tc\nd\te\n', ("x", "y"), "line 3: .*check the quoting"),
    ],
)
def test_what_cannot_be_read_says_where_and_what_to_do(
    tmp_path: Path, name: str, content: bytes, columns: tuple[str, ...], message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(CorpusError, match=message):
        read_corpus([str(path)], columns)


def test_signs_that_cannot_be_seen_are_no_text_and_harm_none(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "\u200b\n \ufeff\u200e \na\u200bb\n\u200b.\n")
    corpus = read_corpus([path])
    assert (list(corpus.rows), corpus.empty) == ([("a\u200bb",), ("\u200b.",)], 2)


def test_a_folder_is_no_corpus(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="is a folder; give the path of a file"):
        read_corpus([str(tmp_path)])


def test_a_missing_file_is_found_before_any_is_read(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"gone\.txt does not exist"):
        read_corpus([write(tmp_path / "a.txt", "x\n"), str(tmp_path / "gone.txt")])


ROWS = [(f"sentence {number}", "é" * (number % 3)) for number in range(2 * BATCH + 3)]


def test_stored_rows_are_the_list_of_them() -> None:
    stored = StoredRows.write(iter(ROWS))
    assert len(stored) == len(ROWS)
    assert list(stored) == ROWS
    assert [stored[place] for place in (0, BATCH - 1, BATCH, -1)] == [
        ROWS[place] for place in (0, BATCH - 1, BATCH, -1)
    ]
    assert stored[BATCH - 2 : BATCH + 2] == ROWS[BATCH - 2 : BATCH + 2]
    with pytest.raises(IndexError):
        stored[len(ROWS)]
    assert list(StoredRows.write([])) == []


def test_a_choice_of_a_choice_has_the_places_among_all() -> None:
    chosen = ChosenRows(ChosenRows(ROWS, np.array([7, 5, 3, 1])), np.array([2, 0]))
    assert list(chosen) == [ROWS[3], ROWS[7]]
    assert chosen.places.tolist() == [3, 7]


def test_samples_and_held_out_rows_are_those_of_a_list(tmp_path: Path) -> None:
    lines = [f"line {number}" for number in range(1000)]
    path = write(tmp_path / "a.txt", "\n".join(lines))
    corpus = read_corpus([path], sample=300, seed=5)
    listed = random.Random(5).sample([(line,) for line in lines], 300)
    assert list(corpus.rows) == listed
    corpus, in_memory = (each.hold_out(40, seed=1) for each in (corpus, Corpus(rows=listed)))
    assert list(corpus.rows) == list(in_memory.rows)
    assert corpus.held_out == in_memory.held_out


def test_each_row_knows_its_file(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}.txt", f"{name}\n\n" * size) for name, size in (("a", 5), ("b", 0), ("c", 7))]
    corpus = read_corpus(paths[:1] + paths[2:])
    assert corpus.files().tolist() == [0] * 5 + [1] * 7
    paths = [
        write(tmp_path / f"{name}.txt", "".join(f"{name}{number}\n" for number in range(size)))
        for name, size in (("a", 5), ("b", 0), ("c", 7))
    ]
    corpus = read_corpus(paths, sample=6, seed=3).hold_out(2, seed=0)
    assert [{"a": 0, "c": 2}[text[0]] for (text,) in corpus.rows] == corpus.files().tolist()


def test_a_folder_that_takes_no_rows_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.txt", "x\n")
    monkeypatch.setattr(tempfile, "tempdir", "/dev/null/folder")
    with pytest.raises(CorpusError, match=r"cannot be stored in /dev/null/folder .* set TMPDIR"):
        read_corpus([path])


def test_numbers_that_python_writes_do_not_matter_in_another_column(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "a", "other": NaN}\n{"text": "b", "other": -Infinity}\n')
    assert list(read_corpus([path], ["text"]).rows) == [("a",), ("b",)]


def test_half_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "a \\ud800 b"}\n')
    with pytest.raises(CorpusError, match=r"a\.jsonl, line 1: an unpaired surrogate"):
        read_corpus([path], ["text"])


@pytest.mark.parametrize("score", ["true", "1" + "0" * 400, '"1_0"', "null", '"x"'])
def test_what_is_no_score_is_refused(tmp_path: Path, score: str) -> None:
    path = write(tmp_path / "a.jsonl", f'{{"one": "x", "other": "y", "score": {score}}}\n')
    with pytest.raises(CorpusError, match=r"line 1: score .* is not a number"):
        read_corpus([path], ["one", "other", "score"], scored=True)


def test_an_empty_row_has_no_score_either(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "one,other,score\nx,y,3\n , ,\n")
    corpus = read_corpus([path], ["one", "other", "score"], scored=True)
    assert (list(corpus.rows), corpus.empty) == ([("x", "y", "3.0")], 1)


def test_a_parquet_file_may_have_dates_that_python_has_not(tmp_path: Path) -> None:
    dates = pyarrow.array([10_000_000], pyarrow.int32()).cast(pyarrow.date32())
    parquet.write_table(pyarrow.table({"text": ["a"], "at": dates}), tmp_path / "a.parquet")
    assert list(read_corpus([str(tmp_path / "a.parquet")], ["text"]).rows) == [("a",)]
    nested = pyarrow.StructArray.from_arrays([dates], ["at"])
    parquet.write_table(pyarrow.table({"text": ["a"], "more": nested}), tmp_path / "b.parquet")
    with pytest.raises(CorpusError, match=r"b\.parquet: cannot be read as parquet \(date value out of range\)"):
        read_corpus([str(tmp_path / "b.parquet")], ["text"])


def test_text_that_parquet_holds_as_bytes_is_text(tmp_path: Path) -> None:
    """Spark and Impala write it so."""
    labels = pyarrow.table({"text": [b"caf\xc3\xa9", b"tea"], "label": [b"a", b"b"]})
    parquet.write_table(labels, tmp_path / "a.parquet")
    assert list(read_corpus([str(tmp_path / "a.parquet")], ["text"]).rows) == [("café",), ("tea",)]
    assert load_labels(tmp_path / "a.parquet", 1)[0] == ["café", "tea"]
    parquet.write_table(pyarrow.table({"text": [b"caf\xe9"], "label": [b"a"]}), tmp_path / "b.parquet")
    for read in (lambda path: read_corpus([str(path)], ["text"]), lambda path: load_labels(path, 1)):
        with pytest.raises(CorpusError, match=r"line 1: text is b'caf\\xe9'; write"):
            read(tmp_path / "b.parquet")


def test_a_cell_may_be_long(tmp_path: Path) -> None:
    long = "word " * 40_000
    path = write(tmp_path / "a.csv", f'text\n"{long}"\n')
    assert list(read_corpus([path], ["text"]).rows) == [(long.strip(),)]


def test_a_row_that_does_not_follow_the_one_before_it_is_known(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a.txt", "\na\nb\n\n\nc\n\n"), write(tmp_path / "b.txt", "d\ne\n")]
    corpus = read_corpus(paths)
    assert [corpus.rows[place] for place in corpus.starts] == [("a",), ("c",), ("d",)]


def test_a_query_is_held_out_with_all_its_documents_or_not_at_all(tmp_path: Path) -> None:
    lines = [f"query {number % 90}\tdocument {number}" for number in range(300)]
    path = write(tmp_path / "a.tsv", "\n".join(["query\tdocument", *lines]))
    corpus = read_corpus([path], ["query", "document"])
    left = corpus.hold_out(31, seed=3, whole=True)
    assert 28 <= len(left.held_out) <= 31
    assert {query for query, _ in left.held_out}.isdisjoint(query for query, _ in left.rows)
    assert sorted([*left.held_out, *left.rows]) == sorted(corpus.rows)
    assert (left.repeated, len(corpus.hold_out(2, seed=3, whole=True).held_out)) == (0, 0)


def test_a_parquet_file_with_two_columns_of_one_name_is_refused(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table([["a"], ["b"]], names=["text", "text"]), tmp_path / "a.parquet")
    with pytest.raises(CorpusError, match=r"a\.parquet has two columns named 'text'; rename one of them"):
        read_corpus([str(tmp_path / "a.parquet")], ["text"])


def test_the_neighbours_of_a_sentence_held_out_are_not_trained_on(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "".join(f"sentence {number}\n" for number in range(100)))
    corpus = read_corpus([path], next_sentences=True)
    left = corpus.hold_out(5, seed=1, linked=True)
    texts = {text for row in left.held_out for text in row}
    assert len(left.held_out) == 5
    assert list(left.rows) == [row for row in corpus.rows if texts.isdisjoint(row)]


@pytest.mark.parametrize("sample", [None, 900])
def test_rows_equal_to_a_held_out_one_are_not_trained_on(tmp_path: Path, sample: int | None) -> None:
    lines = [f"a {number % 400}\tb {number // 800}" for number in range(1000)]
    path = write(tmp_path / "a.tsv", "\n".join(["one\tother", *lines]))
    corpus = read_corpus([path], ["one", "other"], sample=sample)
    left = corpus.hold_out(50, seed=3)
    assert len(left.held_out) == 50
    assert list(left.rows) == [row for row in corpus.rows if row not in left.held_out]
    assert left.repeated == len(corpus) - 50 - len(left) > 20
    assert f"{left.repeated} with text of rows held out; held out: 50" in str(left)
