"""Hard negatives: the fast search against a naive loop, what is left out, and the command on a tiny encoder."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cloze.command import run as run_command
from cloze.training import mine
from cloze.training.data.corpus import read_corpus
from cloze.training.errors import CorpusError
from cloze.training.evaluation.measures import nearest, units
from cloze.training.model.encoder import SentenceEncoder

PAIRS = [
    ("two dogs run", "dogs are running"),
    ("two dogs run", "a pair of dogs runs"),
    ("it rains on the city", "rain falls over the city"),
    ("a man walks", "a man is walking"),
    ("the old field", "a field that is old"),
]


def vectors(count: int, seed: int) -> NDArray[np.float64]:
    return units(np.random.default_rng(seed).normal(size=(count, 8)))


def test_the_nearest_are_those_of_a_naive_loop() -> None:
    queries, texts = vectors(40, 1), vectors(60, 2)
    for query, (cosines, places) in zip(queries, nearest(queries, texts, 7), strict=True):
        every = sorted(((float(query @ text), -place) for place, text in enumerate(texts)), reverse=True)[:7]
        assert list(places) == [-place for _, place in every]
        np.testing.assert_allclose(cosines, [cosine for cosine, _ in every], atol=1e-6)


def test_equal_cosines_are_in_the_order_of_the_texts() -> None:
    same = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0]])
    ((_, places),) = nearest(np.array([[1.0, 0.0]]), same, 3)
    assert list(places) == [0, 2, 3]


def test_what_is_left_out() -> None:
    texts = ["own text", "own positive", "other positive", "too near", "near", "far"]
    pairs = [("own text", "own positive"), ("own text", "other positive")]
    cosines = np.array([1.0, 0.9, 0.89, 0.86, 0.85, 0.1])
    found = [(cosines, np.arange(6))] * 2
    likeness = np.array([0.9, 0.2])
    assert mine.mine(pairs, likeness, found, texts, 1, 0.05) == [("near",), ("far",)]
    assert mine.mine(pairs, likeness, found, texts, 2, 0.05) == [("near", "far"), ()]


def write(path: Path, rows: list[tuple[str, str]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("sent0", "sent1"), *rows])
    return path


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".jsonl"])
def test_the_command_writes_a_corpus_that_can_be_read(
    tmp_path: Path, tiny_bert: Path, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    encoder = tmp_path / "encoder"
    SentenceEncoder.load(str(tiny_bert), template="[X]", pooling="mean").save(encoder)
    pairs, out = write(tmp_path / "pairs.csv", PAIRS), tmp_path / f"mined{ending}"
    options = ["--negatives", "2", "--margin", "0", "--depth", "5"]
    mine.main([str(encoder), "--pairs", str(pairs), "--out", str(out), *options])
    columns = ["sent0", "sent1", "negative1", "negative2"]
    rows = list(read_corpus([str(out)], columns).rows)
    assert f"next: cloze fit RECIPE --corpus {out} --columns {' '.join(columns)}" in capsys.readouterr().err
    embed = SentenceEncoder.load(str(encoder)).embed
    positives = list(dict.fromkeys(positive for _, positive in PAIRS))
    own = {text: {positive for other, positive in PAIRS if other == text} for text, _ in PAIRS}
    expected = []
    for text, positive in PAIRS:
        query = units(embed([text]))[0]
        cosine = {each: float(query @ units(embed([each]))[0]) for each in positives}
        allowed = [each for each in positives if each not in own[text] and cosine[each] <= cosine[positive] + 1e-9]
        if len(allowed) >= 2:
            expected.append((text, positive, *sorted(allowed, key=lambda each: -cosine[each])[:2]))
    assert rows == expected


@pytest.mark.parametrize("ending", [".txt", ".csv"])
def test_negatives_come_from_another_corpus(tmp_path: Path, tiny_bert: Path, ending: str) -> None:
    encoder, texts, out = tmp_path / "encoder", tmp_path / f"texts{ending}", tmp_path / "mined.jsonl"
    SentenceEncoder.load(str(tiny_bert), template="[X]", pooling="mean").save(encoder)
    header, column = ("text\n", ["--corpus-columns", "text"]) if ending == ".csv" else ("", [])
    texts.write_text(f"{header}a letter\na field\nthe city\n", encoding="utf-8")
    words = ["--pairs", str(write(tmp_path / "pairs.csv", PAIRS)), "--corpus", str(texts), *column, "--out", str(out)]
    mine.main([str(encoder), *words, "--margin", "0"])
    found = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert found
    assert {row["negative"] for row in found} <= {"a letter", "a field", "the city"}


def test_errors_are_one_line(tmp_path: Path, tiny_bert: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encoder, pairs = tmp_path / "encoder", write(tmp_path / "pairs.csv", PAIRS)
    SentenceEncoder.load(str(tiny_bert), template="[X]", pooling="mean").save(encoder)
    for words, message in (
        (["--pairs", str(pairs), "--out", str(tmp_path / "mined.txt")], "must end in .csv, .tsv, .jsonl"),
        (["--pairs", str(pairs), "--out", str(tmp_path / "no" / "mined.csv")], "is not a folder; create it first"),
        (
            ["--pairs", str(pairs), "--out", str(tmp_path / "m.csv"), "--negatives", "8"],
            "lower --margin or --negatives",
        ),
        (["--pairs", str(pairs), "--out", str(tmp_path / "m.csv"), "--columns", "a", "b"], "no column 'a'"),
        (
            ["--pairs", str(pairs), "--out", str(tmp_path / "m.csv"), "--columns", "sent0", "negative"],
            "would have the name 'negative'; rename one of --columns",
        ),
        (
            ["--pairs", str(pairs), "--out", str(tmp_path / "m.csv"), "--corpus-columns", "text"],
            "--corpus-columns names columns of --corpus, which is not given",
        ),
    ):
        assert run_command(lambda words=words: mine.main([str(encoder), *words])) == 2
        assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("m*.csv"))


@pytest.mark.parametrize("ending", [".csv", ".tsv"])
def test_texts_with_line_ends_are_read_as_they_were_written(tmp_path: Path, ending: str) -> None:
    rows = [("one\rtwo", "b\nc", 'say "d"'), ("e\r\nf", "g\th", "i,j")]
    mine._write(tmp_path / f"mined{ending}", ["sent0", "sent1", "negative"], rows)
    assert list(read_corpus([str(tmp_path / f"mined{ending}")], ["sent0", "sent1", "negative"]).rows) == rows


def test_the_pairs_are_not_written_over(tmp_path: Path) -> None:
    pairs = write(tmp_path / "pairs.csv", [("a", "b")])
    before = pairs.read_bytes()
    words = ["cloze-mini", "--pairs", str(pairs)]
    other = write(tmp_path / "other.csv", [("a", "b")])
    for more in ([], ["--corpus", str(tmp_path / "*.csv"), "--pairs", str(other)]):
        with pytest.raises(CorpusError, match=r"pairs\.csv would overwrite one of the files that are read"):
            mine.main([*words, "--out", str(pairs), *more])
    assert pairs.read_bytes() == before
