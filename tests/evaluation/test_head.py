"""cloze head: what it learns, against scikit-learn and loops, and what it does to a bundle."""

import csv
import math
import re
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]
from tiny_bundle import WORDS, write_bundle

from cloze.command import run
from cloze.encoding.bundle import Bundle
from cloze.encoding.heads import ClassifierHead
from cloze.training.evaluation.classifiers import fit_head
from cloze.training.evaluation.head import main
from cloze.training.evaluation.measures import units
from cloze.training.evaluation.own_data import load_label_sets
from cloze.training.evaluation.task import least_threshold
from cloze.training.model.graph_encoder import GraphEncoder

Numbers = NDArray[np.float64]


def drawn(count: int, labels: int, seed: int = 0, sharpness: float = 6) -> tuple[Numbers, NDArray[np.int64]]:
    """Unit vectors (count, 12), and labels drawn by the softmax of a linear function of them."""
    directions = np.random.default_rng(99).normal(size=(labels, 12))
    rng = np.random.default_rng(seed)
    vectors = units(rng.normal(size=(count, 12)))
    scores = sharpness * vectors @ directions.T
    odds = np.exp(scores - np.logaddexp.reduce(scores, axis=1, keepdims=True))
    return vectors, np.array([rng.choice(labels, p=row) for row in odds])


def learnt(vectors: Numbers, gold: NDArray[np.generic], labels: int, *, balanced: bool = False) -> ClassifierHead:
    names = [f"label {place}" for place in range(labels)]
    return fit_head(vectors, gold, names, "x.csv", balanced=balanced, wanted=0.9)


@pytest.mark.parametrize("labels", [2, 4])
def test_it_finds_what_labels_were_drawn_from(labels: int) -> None:
    """On other texts, nearly as often right as scikit-learn without a penalty, and no more certain than right."""
    vectors, gold = drawn(3000, labels)
    head = learnt(vectors, gold, labels)
    others, truth = drawn(3000, labels, seed=1)
    probabilities = head.probabilities(head.scores(others))
    np.testing.assert_allclose(probabilities.sum(axis=1), 1)
    reference = LogisticRegression(C=np.inf).fit(vectors, gold)
    np.testing.assert_allclose(probabilities, reference.predict_proba(others), atol=0.06)
    right = probabilities.argmax(axis=1) == truth
    assert right.mean() == pytest.approx(head.figures["accuracy"], abs=0.03)
    assert probabilities.max(axis=1).mean() == pytest.approx(right.mean(), abs=0.03)
    assert head.figures["calibration error"] < 0.03


def test_answers_that_are_kept_are_as_often_right_as_was_wanted() -> None:
    head = learnt(*drawn(3000, 4), 4)
    others, truth = drawn(3000, 4, seed=1)
    probabilities = head.probabilities(head.scores(others))
    assert head.threshold is not None
    kept = probabilities.max(axis=1) >= head.threshold
    assert kept.mean() == pytest.approx(head.figures["kept"], abs=0.04)
    assert (probabilities.argmax(axis=1) == truth)[kept].mean() == pytest.approx(0.9, abs=0.03)


def test_the_threshold_is_that_of_a_loop() -> None:
    """The least probability from which on nine of ten held-out answers are right."""

    rng = np.random.default_rng(0)
    confidence = rng.uniform(0.3, 1, 400).round(2)
    right = (rng.uniform(size=400) < confidence).astype(float)
    reached = [
        value
        for value in sorted(set(confidence))
        if np.mean([each for each, sure in zip(right, confidence, strict=True) if sure >= value]) >= 0.9
    ]
    assert least_threshold(confidence, right, 0.9) == reached[0]
    assert least_threshold(confidence, np.zeros(400), 0.9) is None


def test_of_labels_without_any_sense_no_threshold_is_found() -> None:
    vectors, _ = drawn(600, 2)
    head = learnt(vectors, np.random.default_rng(5).integers(0, 3, 600), 3)
    assert head.threshold is None
    assert "kept" not in head.figures
    probabilities = head.probabilities(head.scores(vectors))
    assert probabilities.max() < 0.6  # after the temperature


@pytest.mark.parametrize("labels", [2, 3])
def test_texts_without_an_error_among_a_few_make_no_answer_certain(labels: int) -> None:
    """The rule of Platt: of 8 texts of each of two labels, the probability that is wanted is 9 / 10."""
    gold = np.repeat(np.arange(labels), 8)
    vectors = units(np.eye(12)[gold] + np.random.default_rng(0).normal(size=(len(gold), 12)) / 50)
    head = learnt(vectors, gold, labels)
    assert head.figures["accuracy"] == 1
    sure = head.probabilities(head.scores(vectors)).max(axis=1)
    assert sure.mean() == pytest.approx(1 - 1 / (8 * labels / 2 + 2), abs=0.05)
    assert head.probabilities(head.scores(np.eye(12)[-1:])).max() < 0.75  # of a text that is like none


def test_several_labels_are_learnt_one_by_one() -> None:
    vectors, first = drawn(2000, 2)
    _, second = drawn(2000, 2, seed=3)
    columns = np.stack([first, second], axis=1).astype(bool)
    head = learnt(vectors, columns, 2)
    assert head.several
    alone = learnt(vectors, first, 2)
    np.testing.assert_allclose(
        head.probabilities(head.scores(vectors))[:, 0], alone.probabilities(alone.scores(vectors))[:, 1], atol=1e-4
    )
    np.testing.assert_allclose(head.probabilities(head.scores(vectors))[:, 1], second.mean(), atol=0.15)
    assert set(head.figures) >= {"micro F1", "macro F1", "calibration error"}


def test_balanced_gives_rare_labels_their_share() -> None:
    vectors, gold = drawn(3000, 2, sharpness=2)
    kept = (gold == 0) | (np.arange(3000) % 10 == 0)
    plain = learnt(vectors[kept], gold[kept], 2)
    balanced = learnt(vectors[kept], gold[kept], 2, balanced=True)
    predicted = [head.scores(vectors).argmax(axis=1) for head in (plain, balanced)]
    assert predicted[0].mean() < 0.2 < 0.4 < predicted[1].mean()
    recalls = [[(found[gold == label] == label).mean() for label in (0, 1)] for found in predicted]
    assert np.mean(recalls[1]) > np.mean(recalls[0]) + 0.05


def write_labelled(path: Path, labels: list[str]) -> Path:
    """Texts with "guitar" have the first label of two, those with "dogs" the second."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for row, label in enumerate(labels):
            words = [WORDS[row % 11], WORDS[row // 11]]  # each text once
            writer.writerow([" ".join([*words, "guitar" if row % 2 else "dogs"]), label])
    return path


def test_a_head_goes_into_the_bundle_and_out_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = Bundle.load(write_bundle(tmp_path / "tiny", heads={}))
    card = (before.path / "README.md").read_text()
    data = write_labelled(tmp_path / "topics.csv", ["animals", "music"] * 60)
    main([str(before.path), "--train", str(data), "--name", "topic"])
    shown = capsys.readouterr().out
    assert shown.startswith(f"{before.path}/heads/topic.json: 2 labels, 120 texts; held out: accuracy 0.9")
    assert re.search(
        r"; \d+% of the answers have a probability of 0\.\d+ or more, and at least 95% of these are right", shown
    )
    after = Bundle.load(before.path)
    assert after.spec.space == before.spec.space
    assert after.graph("fp32").read_bytes() == (before.path / "onnx" / "model.onnx").read_bytes()
    head = after.heads["topic"]
    assert head.labels == ("animals", "music")
    assert (head.texts, head.source) == (120, "topics.csv")
    vectors = units(GraphEncoder.of(after, "fp32").embed(["the guitar", "two dogs"]))
    probabilities = head.probabilities(head.scores(vectors))
    assert probabilities.argmax(axis=1).tolist() == [1, 0]
    assert "| topic | animals, music | one | 120 texts of topics.csv |" in (before.path / "README.md").read_text()
    tags = write_labelled(tmp_path / "tags.csv", ["loud; animal", "loud;music ", ""] * 40)
    main([str(before.path), "--train", str(tags), "--name", "tags", "--separator", ";"])
    heads = Bundle.load(before.path).heads
    assert (list(heads), heads["tags"].labels, heads["tags"].several) == (
        ["tags", "topic"],
        ("animal", "loud", "music"),
        True,
    )
    main([str(before.path), "--name", "topic", "--remove"])
    main([str(before.path), "--name", "tags", "--remove"])
    assert Bundle.load(before.path).spec.files == before.spec.files
    assert (before.path / "README.md").read_text() == card


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        (
            ["a", "b"] * 7,
            "--train",
            "2 labels, and the rarest, 'a', has 7 texts; give two labels or more, with 8 texts each",
        ),
        (["a"] * 20, "--train", "has 1 labels"),
        (["a", ""] * 20, "--train", "line 3: label is empty; every row needs text, label"),
        (["a", ""] * 7, "--separator ; --train", "7 texts with the label 'a' and 7 without it; give 8 or more of each"),
        ([""] * 20, "--separator ; --train", "has no labels; write them into the column label"),
        ([], "--remove", "has no head 'topic'; it has none"),
        ([], "", "give either --train, to learn the head, or --remove"),
        (["a", "b"] * 8, "--name Topic/.. --train", "Topic/.."),
    ],
)
def test_what_cannot_be_learnt_is_one_line_and_changes_nothing(
    labels: list[str], options: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = Bundle.load(write_bundle(tmp_path / "tiny", heads={}))
    words = ["--name", "topic"] if "--name" not in options else []
    data = [str(write_labelled(tmp_path / "topics.csv", labels))] if options.endswith("--train") else []
    assert run(lambda: main([str(bundle.path), *words, *options.split(), *data])) == 2
    found = capsys.readouterr()
    assert message in found.err
    assert found.err.count("\n") == 1
    assert bundle.unchanged()


def test_a_text_that_occurs_again_is_not_both_learnt_and_held_out(tmp_path: Path) -> None:
    """Labels without any sense would be found right by the copies."""
    labels = np.random.default_rng(0).choice(["a", "b"], 80).tolist()
    once = write_labelled(tmp_path / "once.csv", labels)
    header, *rows = once.read_text().splitlines(keepends=True)
    (tmp_path / "often.csv").write_text(header + 4 * "".join(rows) + "".join(f" {row.capitalize()}" for row in rows))
    bundle = write_bundle(tmp_path / "tiny", heads={})
    for name in ("once", "often"):
        main([str(bundle), "--name", name, "--train", str(tmp_path / f"{name}.csv")])
    heads = Bundle.load(bundle).heads
    assert heads["often"].figures == heads["once"].figures
    assert heads["often"].texts == 80
    assert load_label_sets(tmp_path / "often.csv", ";", 8) == load_label_sets(once, ";", 8)


def test_labels_in_another_order_are_the_same_row(tmp_path: Path) -> None:
    header, *rows = write_labelled(tmp_path / "once.csv", ["a;b", "b", ""] * 20).read_text().splitlines(keepends=True)
    (tmp_path / "often.csv").write_text(header + "".join([*rows, *(row.replace("a;b", "b; a") for row in rows)]))
    assert load_label_sets(tmp_path / "often.csv", ";", 8) == load_label_sets(tmp_path / "once.csv", ";", 8)


def test_a_label_may_have_lines_and_bars(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "tiny", heads={})
    main([str(bundle), "--name", "t", "--train", str(write_labelled(tmp_path / "x.csv", ["a|b\nc", "d"] * 8))])
    assert "| t | a\\|b c, d | one | 16 texts of x.csv |" in (bundle / "README.md").read_text()


def test_a_label_is_a_text_and_not_a_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = write_bundle(tmp_path / "tiny", heads={})
    (tmp_path / "a.jsonl").write_text('{"text": "a", "label": ["b", "c"]}\n', encoding="utf-8")
    assert run(lambda: main([str(bundle), "--name", "topic", "--train", str(tmp_path / "a.jsonl")])) == 2
    assert "a.jsonl, line 1: label is ['b', 'c']; write one text, as in a csv" in capsys.readouterr().err


def test_eight_texts_of_a_label_suffice(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "tiny", heads={})
    main([str(bundle), "--name", "t", "--train", str(write_labelled(tmp_path / "x.csv", ["a", "b"] * 8))])
    head = Bundle.load(bundle).heads["t"]
    assert all(math.isfinite(value) for value in head.figures.values())


def test_of_several_labels_none_is_given_that_is_less_probable_than_not() -> None:
    """Labels that are always found leave room for wrong ones, which must not lower the threshold."""
    vectors, first = drawn(2000, 2, sharpness=500)
    head = learnt(vectors, np.stack([first, 1 - first], axis=1).astype(bool), 2)
    assert head.figures["micro F1"] > 0.95
    assert head.threshold is not None
    assert head.threshold >= 0.5
