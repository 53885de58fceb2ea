"""The metric by hand, the sets by their counts, and errors that name the file."""

import gzip
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from data_folder import DATA
from numpy.typing import NDArray

from cloze.training.errors import CorpusError
from cloze.training.evaluation.measures import Pairs, cosines, rank_correlation
from cloze.training.evaluation.sts import (
    COUNTS,
    DEV_TASKS,
    FILES,
    PARTS,
    STS_TASKS,
    average,
    find_downstream,
    load_pairs,
    load_semeval,
    load_tasks,
    spearman,
)

needs_data = pytest.mark.skipif(not (DATA / "senteval").is_dir(), reason="SentEval's data is missing")


def test_ties_share_their_average_rank() -> None:
    assert rank_correlation([0.1, 0.2, 0.3], [0, 0, 5]) == pytest.approx(86.60254)


def test_joined_parts_differ_from_the_mean_of_parts() -> None:
    first = ([0.7, 0.8, 0.9], [1, 2, 3])
    second = ([0.1, 0.2, 0.3, 0.4], [3.5, 4, 4.5, 5])
    assert rank_correlation(*first) == pytest.approx(100)
    assert rank_correlation(*second) == pytest.approx(100)
    assert rank_correlation(first[0] + second[0], first[1] + second[1]) == pytest.approx(-50)


def test_joined_parts_of_which_one_is_reversed() -> None:
    first, second = ([0.3, 0.2, 0.1], [1, 2, 3]), ([0.1, 0.2, 0.3, 0.4], [1, 2, 3, 4])
    assert rank_correlation(*first) == pytest.approx(-100)
    assert rank_correlation(first[0] + second[0], first[1] + second[1]) == pytest.approx(39.6226, abs=1e-4)


def test_a_constant_side_scores_nothing() -> None:
    assert rank_correlation([0.5, 0.5], [1, 2]) == 0


def test_a_vector_that_is_zero_or_not_finite_has_cosine_0() -> None:
    left = np.array([[1, 0], [0, 0], [np.nan, 1], [np.inf, 1], [1, 1]], dtype=np.float32)
    right = np.array([[2, 0], [1, 1], [1, 1], [1, 1], [-3, -3]], dtype=np.float32)
    np.testing.assert_allclose(cosines(left, right), [1, 0, 0, 0, -1], atol=1e-12)


def test_each_distinct_sentence_is_embedded_once() -> None:
    seen: list[str] = []

    def embed(texts: Sequence[str]) -> NDArray[np.float32]:
        seen.extend(texts)
        return np.array([[len(text), 1] for text in texts], dtype=np.float32)

    spearman(embed, Pairs(["a", "b", "a"], ["bb", "a", "a"], [1, 2, 3]))
    assert sorted(seen) == ["a", "b", "bb"]


def test_the_average_is_that_of_the_rounded_figures() -> None:
    parent = dict(zip(STS_TASKS, (72.37, 80.60, 75.59, 85.39, 78.99, 82.03, 77.15), strict=True))
    assert average(parent) == 78.87


def test_pairs_are_read_in_every_form(tmp_path: Path) -> None:
    rows = [("A  man.", 'He said "no".', 4.5), ("x", "y", 0.0)]
    expected = Pairs(["A man.", "x"], ['He said "no".', "y"], [4.5, 0.0])
    benchmark = "".join(f"genre\tfile\tyear\t0\t{gold}\t{left}\t{right}\textra\n" for left, right, gold in rows)
    jsonl = "".join(json.dumps({"sentence1": a, "sentence2": b, "score": c}) + "\n" for a, b, c in rows)
    table = "score,sentence2,sentence1\n" + '4.5,"He said ""no"".",A  man.\n0,y,x\n'
    for name, content in (("sts-dev.csv", benchmark), ("pairs.jsonl", jsonl), ("pairs.csv", table)):
        (tmp_path / name).write_text(content, encoding="utf-8")
        assert load_pairs(tmp_path / name) == expected
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content.encode()))
        assert load_pairs(tmp_path / f"{name}.gz") == expected


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "sentence1,score\nx,1\n", "line 2 has no sentence2"),
        ("a.csv", "sentence1,sentence2,score\nx,y,1\n ,y,2\n", "line 3: sentence1 is ' '; write a text"),
        (
            "a.jsonl",
            '{"sentence1": "x", "sentence2": ["y"], "score": 1}\n',
            r"line 1: sentence2 is \['y'\]; write a text",
        ),
        ("a.csv", "sentence1,sentence2,score\nx,y,high\n", "line 2: score 'high' is not a number"),
        ("a.jsonl", '{"sentence1": "x", "sentence2": "y", "score": NaN}\n', "is not a number"),
        ("a.csv", "sentence1,sentence2,score\n", "has no pairs"),
        ("a.csv", "sentence1,sentence2,score\na,b,1\nc,d,1\n", "has only the score 1, so there is nothing to rank"),
        ("a.csv", "g\tf\ty\t0\t5.0\tx\ty\ntorn\tline\n", "line 2 has 2 tab-separated columns"),
    ],
)
def test_what_is_no_pair_is_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(CorpusError, match=message):
        load_pairs(tmp_path / name)


@pytest.mark.parametrize(
    ("inputs", "gold", "message"),
    [
        ("a\tb\nc\td\n", "1\n1\n", r"STS\.gs\.es\.txt has fewer than two different scores"),
        ("a\tb\nc\td\n", None, r"STS\.gs\.es\.txt is missing; it has the scores of STS\.input\.es\.txt"),
        ("a\tb\nc\td\n", "1\n", r"STS\.gs\.es\.txt has 1 lines, .*STS\.input\.es\.txt has 2"),
        ("a\tb\nc\n", "1\n2\n", r"STS\.input\.es\.txt, line 2 is not two tab-separated sentences"),
        ("a\tb\nc\td\n", "1\ninf\n", r"STS\.input\.es\.txt, line 2 is not two .* with a finite score"),
    ],
)
def test_a_broken_set_of_semeval_is_named(inputs: str, gold: str | None, message: str, tmp_path: Path) -> None:
    (tmp_path / "STS.input.es.txt").write_text(inputs, encoding="utf-8")
    if gold is not None:
        (tmp_path / "STS.gs.es.txt").write_text(gold, encoding="utf-8")
    with pytest.raises(CorpusError, match=message):
        load_semeval(tmp_path)


def test_blank_scores_mark_lines_of_semeval_that_are_not_used(tmp_path: Path) -> None:
    (tmp_path / "STS.input.es.txt").write_text("a\tb\nc\td\ne\tf\n", encoding="utf-8")
    (tmp_path / "STS.gs.es.txt").write_text("1\n\n2.5\n\n", encoding="utf-8")  # and a blank line at the end
    assert load_semeval(tmp_path) == {"es": Pairs(["a", "e"], ["b", "f"], [1.0, 2.5])}


def test_bytes_that_are_not_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"sentence1,sentence2,score\n\xff,y,1\n")
    with pytest.raises(CorpusError, match=r"a\.csv.*not UTF-8"):
        load_pairs(tmp_path / "a.csv")
    with pytest.raises(CorpusError, match="is not a file"):
        load_pairs(tmp_path / "none.csv")


def test_a_folder_without_the_sets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="has no STS folder"):
        find_downstream(tmp_path)


def sick(folder: Path, rows: int) -> Path:
    (folder / "STS").mkdir(parents=True)
    (folder / "SICK").mkdir()
    lines = ["pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment"]
    lines += [f"{row}\ta  dog {row}\ta cat\t{1 + row % 5}\tNEUTRAL" for row in range(rows)]
    (folder / "SICK" / "SICK_trial.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def test_counts_are_held(tmp_path: Path) -> None:
    tasks = load_tasks(sick(tmp_path / "whole", 500), ("SICK-R trial",))
    assert tasks["SICK-R trial"].left[3] == "a dog 3"
    with pytest.raises(CorpusError, match=r"SICK_trial\.txt has 499 scored pairs, but SICK-R trial has 500"):
        load_tasks(sick(tmp_path / "short", 499), ("SICK-R trial",))


def test_layouts_above_the_sets_are_found(tmp_path: Path) -> None:
    folder = sick(tmp_path / "senteval" / "downstream", 1)
    assert find_downstream(tmp_path) == find_downstream(tmp_path / "senteval") == find_downstream(folder) == folder


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"sts-test\.csv is missing"):
        load_tasks(sick(tmp_path, 1), ("STS-B",))
    with pytest.raises(CorpusError, match=r"STS\.input\.MSRpar\.txt is missing"):
        load_tasks(tmp_path, ("STS12",))


def semeval(folder: Path, part: str, rows: int) -> None:
    """A part of `rows` pairs."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"STS.input.{part}.txt").write_text("".join(f"a dog {row}\ta cat\n" for row in range(rows)))
    (folder / f"STS.gs.{part}.txt").write_text("".join(f"{row % 5}\n" for row in range(rows)))


def test_the_pairs_of_every_part_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for task, parts in PARTS.items():
        folder = tmp_path / "STS" / f"{task}-en-test"
        monkeypatch.setitem(PARTS, task, dict.fromkeys(parts, 12))
        for part in parts:
            semeval(folder, part, 12)
        assert len(load_tasks(tmp_path, (task,))[task]) == 12 * len(parts)
        for part in parts:
            semeval(folder, part, 11)
            message = rf"STS\.gs\.{re.escape(part)}\.txt has 11 scored pairs, but {re.escape(part)} of {task} has 12"
            with pytest.raises(CorpusError, match=message):
                load_tasks(tmp_path, (task,))
            semeval(folder, part, 12)


@pytest.mark.parametrize("task", FILES)
def test_the_pairs_of_every_single_file_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str) -> None:
    monkeypatch.setitem(COUNTS, task, 12)
    path = tmp_path / FILES[task]
    (tmp_path / "STS").mkdir()
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [f"1\ta dog {row}\ta cat\t{row % 5}\t{row % 5}\ta dog\ta cat" for row in range(12)]
    rows = [*(["a header"] if task.startswith("SICK") else []), *rows]
    path.write_text("\n".join(rows) + "\n")
    assert len(load_tasks(tmp_path, (task,))[task]) == 12
    path.write_text("\n".join(rows[:-1]) + "\n")
    with pytest.raises(CorpusError, match=rf"{re.escape(path.name)} has 11 scored pairs, but {task} has 12"):
        load_tasks(tmp_path, (task,))


@needs_data
def test_the_published_sets_have_their_counts() -> None:
    tasks = load_tasks(DATA, (*STS_TASKS, *DEV_TASKS))
    assert {task: len(pairs) for task, pairs in tasks.items()} == COUNTS
    assert tasks["STS-B"].gold.count(5.0) == 97
    assert all(text and text == " ".join(text.split()) for pairs in tasks.values() for text in pairs.left + pairs.right)
    assert load_tasks(DATA / "senteval" / "downstream", ("STS-B",))["STS-B"] == tasks["STS-B"]


@needs_data
def test_an_altered_set_is_refused(tmp_path: Path) -> None:
    source = DATA / "senteval" / "downstream" / "STS" / "STS16-en-test"
    shutil.copytree(source, tmp_path / "STS" / source.name)
    gold = tmp_path / "STS" / source.name / "STS.gs.plagiarism.txt"
    gold.chmod(0o644)
    gold.write_text(gold.read_text().replace("5", "", 1))
    with pytest.raises(
        CorpusError, match=r"STS\.gs\.plagiarism\.txt has 229 scored pairs, but plagiarism of STS16 has 230"
    ):
        load_tasks(tmp_path, ("STS16",))


@needs_data
def test_words_in_common_score_as_expected() -> None:
    """A bag of words is a known, weak encoder: its figure shows that pairs and scores stay together."""

    def embed(texts: Sequence[str]) -> NDArray[np.float32]:
        vectors = np.zeros((len(texts), 4096), dtype=np.float32)
        for row, text in enumerate(texts):
            for word in text.lower().split():
                vectors[row, sum(ord(letter) * 31**place for place, letter in enumerate(word)) % 4096] += 1
        return vectors

    [pairs] = load_tasks(DATA, ("STS-B dev",)).values()
    assert 50 < spearman(embed, pairs) < 65
