"""Paired intervals: equal models, better ones, chance, and the command on files and on models."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cloze.command import run as run_command
from cloze.training import compare, evaluate
from cloze.training.errors import RunError
from cloze.training.evaluation.compare import compared, draws
from cloze.training.evaluation.sts import STS_TASKS
from cloze.training.evaluation.task import Items, Score, measured
from cloze.training.model.encoder import SentenceEncoder

CHANCE = np.random.default_rng(0)
GOLD = CHANCE.normal(size=200)


def score(noise: float, task: str = "a", suite: str = "pairs", seed: int = 1) -> Score:
    values = GOLD + noise * np.random.default_rng(seed).normal(size=len(GOLD))
    return measured(suite, task, "spearman", "spearman", values, GOLD, counts={"pairs": len(GOLD)})


def test_a_better_model_is_shown_and_the_same_one_is_not() -> None:
    scores = {"good": [score(0.3)], "same": [score(0.3)], "bad": [score(2)], "close": [score(0.3, seed=2)]}
    good, same, bad, close = compared(scores, 300)
    assert good.difference is None
    assert good.verdict == ""
    assert (same.difference, same.low, same.high, same.verdict) == (0, 0, 0, "undecided")
    assert bad.verdict == "lower"
    assert bad.high is not None
    assert bad.high < 0
    assert bad.difference == pytest.approx(bad.value - good.value)
    assert close.verdict == "undecided"
    assert compared({"bad": [score(2)], "good": [score(0.3)]}, 300)[1].verdict == "higher"


def test_the_interval_is_that_of_a_mean() -> None:
    """The bootstrap's standard deviation of a mean is that of theory, and pairing makes a constant gain certain."""
    values = CHANCE.normal(size=400)
    found = draws(Items("plain mean", values.tolist()), 2000, 0)
    assert found.std() == pytest.approx(values.std() / 20, rel=0.1)
    models = {
        name: [measured("s", "t", "m", "plain mean", values + gain, counts={})]
        for name, gain in (("first", 0), ("second", 0.01))
    }
    _, second = compared(models, 200)
    assert (second.low, second.high) == (pytest.approx(0.01), pytest.approx(0.01))


def test_means_over_the_tasks_of_a_suite() -> None:
    row = [score(0.5, task, "sts") for task in (*STS_TASKS, "STS-B dev")]
    other = [score(1, task, "sts") for task in (*STS_TASKS, "STS-B dev")]
    found = compared({"one": row, "two": other}, 100)
    average = [each for each in found if each.task == "Avg."]
    assert average[1].value == pytest.approx(np.mean([each.value for each in other[:7]]))
    assert average[1].verdict == "lower"
    two = compared({"one": row[:2], "two": other[:2]}, 100)
    assert "Avg." not in [each.task for each in two]  # it is the papers' only with all seven sets
    own = compared({name: [score(n, "a"), score(n, "b")] for name, n in (("x", 0.1), ("y", 1))}, 100)
    assert [each.task for each in own] == ["a", "a", "b", "b", "mean", "mean"]


def test_a_mean_is_of_one_metric() -> None:
    """Scored pairs and duplicate pairs are one suite with two metrics."""
    found = [measured("pairs", "d", "best F1", "best F1", GOLD, GOLD > 0, counts={})]
    kept = compared({name: [score(1, "a"), score(1, "b"), *found] for name in "xy"}, 100)
    assert [each.task for each in kept[::2]] == ["a", "b", "d", "mean, spearman"]
    assert kept[6].value == pytest.approx(score(1).value)


def test_only_the_first_score_of_a_task_is_compared() -> None:
    without = Score("pairs", "a", "speed", 3.0, {})
    assert [each.metric for each in compared({"x": [without, score(1), score(2)], "y": [score(1)]}, 100)] == [
        "spearman",
        "spearman",
    ]


def test_other_data_is_refused() -> None:
    other = measured("pairs", "a", "spearman", "spearman", GOLD, GOLD + 1, counts={})
    with pytest.raises(RunError, match="x and y were scored on different data for a"):
        compared({"x": [score(1)], "y": [other]}, 100)
    with pytest.raises(RunError, match="x, y have no scored set in common"):
        compared({"x": [score(1)], "y": [score(1, "b")]}, 100)
    x, y = (replace(measured("s", "t", "m", "mean", [1.0, 0.0], counts={}), data=data) for data in "ab")
    with pytest.raises(RunError, match="scored on different data for t"):
        compared({"x": [x], "y": [y]}, 100)
    assert compared({"x": [x], "y": [replace(y, data="")]}, 100)  # a file of an older version does not say


def test_a_suite_that_has_no_items_is_refused_before_any_model_is_loaded() -> None:
    with pytest.raises(
        RunError, match="the suite cost has no scores of single items to compare; score it with cloze evaluate"
    ):
        compare.main(["a", "b", "--suite", "cost"])


def test_models_and_files_are_compared(
    tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # the cache is a folder below it
    words = ["dog", "man", "letter", "city", "rain", "guitar"]
    rows = [
        f"a {left},the {right},{(7 * i + 5 * j) % 11}" for i, left in enumerate(words) for j, right in enumerate(words)
    ]
    Path("mine.csv").write_text("\n".join(["sentence1,sentence2,score", *rows]) + "\n")
    SentenceEncoder.load(str(tiny_bert), template="[X]", pooling="mean").save(tmp_path / "mean")
    config = ["--template", "[X]", "--pooling", "cls", "--pairs", "mine.csv"]
    compare.main(["mean", str(tiny_bert), *config, "--resamples", "100", "--json", "found.json"])
    shown = capsys.readouterr().out
    assert "95 % interval" in shown
    found = json.loads(Path("found.json").read_text())
    assert found["first"] == "mean torch fp32"
    first, second = found["differences"]
    assert first["value"] != second["value"]  # --pooling is for the encoder without a configuration

    evaluate.main(["mean", "--pairs", "mine.csv", "--json", "a.json"])
    evaluate.main([str(tiny_bert), *config, "--json", "b.json"])
    compare.main(["a.json", "b.json", "--resamples", "100", "--json", "again.json"])
    again = json.loads(Path("again.json").read_text())["differences"]
    assert [each["model"] for each in again] == ["a torch fp32", "b torch fp32"]
    assert [each["value"] for each in again] == [first["value"], second["value"]]
    assert again[1]["low"] == second["low"]


def test_what_cannot_be_compared_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "torn.json").write_text("{")
    (tmp_path / "one.json").write_text(
        json.dumps({"path": "p", "results": [{"model": "m"} | score(1).as_json()]}), encoding="utf-8"
    )
    for name, items in {
        "unknown": {"measure": "foo"},
        "nan": {"values": [float("nan")] * 2},
        "none": {"values": []},
    }.items():
        record = {"model": "m"} | score(1).as_json()
        record["items"] |= items
        (tmp_path / f"{name}.json").write_text(json.dumps({"path": "p", "results": [record]}), encoding="utf-8")
    one, pairs = str(tmp_path / "one.json"), str(tmp_path / "pairs.csv")
    Path(pairs).write_text("sentence1,sentence2,score\na,b,1\nc,d,2\n", encoding="utf-8")
    for words, message in (
        ([str(tmp_path / "torn.json")], "torn.json cannot be read as the scores of evaluate --json"),
        ([str(tmp_path / "one.json")], "one m is one model; give two or more"),
        *(
            ([one, str(tmp_path / f"{name}.json")], f"{name}.json cannot be read as the scores of evaluate --json")
            for name in ("unknown", "nan", "none")
        ),
        ([one, one, "--json", f"{tmp_path}/./one.json"], "would overwrite one of the files that are read"),
        *(
            (
                [one, str(tmp_path / "other.json"), *words],
                f"{words[0]} chooses the data to score models on, but files have",
            )
            for words in (["--suite", "probes"], ["--data", "nowhere"], ["--pairs", pairs])
        ),
        (["a", "b"], "there is nothing to score"),
        (["cloze-mini", "./nowhere", "--pairs", pairs], "nowhere is not a folder; give a run, a bundle"),
        (["cloze-mini", "cloze-mini", "--pairs", pairs], "cloze-mini is named twice; name each model once"),
    ):
        assert run_command(lambda words=words: compare.main(words)) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
