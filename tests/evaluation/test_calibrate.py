"""cloze calibrate: errors and thresholds against loops, the better curve, and what it does to a bundle."""

import csv
import errno
import os
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_bundle import WORDS, write_bundle

from cloze.command import run
from cloze.encoding.bundle import Bundle
from cloze.encoding.errors import BundleError
from cloze.training.evaluation.calibrate import main
from cloze.training.evaluation.card import with_section
from cloze.training.evaluation.curves import calibration_error, fit_curve

Numbers = NDArray[np.float64]


def drawn(count: int, slope: float, seed: int = 0) -> tuple[Numbers, Numbers]:
    """Cosines, and labels that are 1 with probability 1 / (1 + exp(-slope (cosine - 0.5)))."""
    rng = np.random.default_rng(seed)
    cosines = rng.uniform(-0.2, 1, count)
    return cosines, (rng.uniform(size=count) < 1 / (1 + np.exp(-slope * (cosines - 0.5)))).astype(float)


def test_the_error_of_right_and_of_shifted_values() -> None:
    gold = np.repeat(np.linspace(0, 5, 10), 20)
    assert calibration_error(gold, gold) == pytest.approx(0, abs=1e-12)
    assert calibration_error(gold - 0.5, gold) == pytest.approx(0.1)


def test_the_error_is_that_of_a_loop_over_bins() -> None:
    predicted, gold = drawn(1003, 5)
    expected, start = 0.0, 0
    ranked = sorted(zip(predicted, gold, strict=True), key=lambda pair: pair[0])
    for number in range(10):
        size = 101 if number < 3 else 100
        rows = ranked[start : start + size]
        start += size
        expected += size / 1003 * abs(sum(one for one, _ in rows) / size - sum(other for _, other in rows) / size)
    assert calibration_error(predicted, gold) == pytest.approx(expected)


def test_the_order_of_pairs_with_one_value_does_not_matter() -> None:
    gold = np.repeat([0.0, 1.0], 500)
    assert calibration_error(np.full(1000, 0.5), gold) == pytest.approx(0, abs=1e-12)
    cosines, gold = drawn(2000, 12)
    coarse, by_label = cosines.round(1), np.argsort(gold, kind="stable")
    assert calibration_error(coarse[by_label], gold[by_label]) == pytest.approx(calibration_error(coarse, gold))


def test_no_probability_is_certain() -> None:
    """Platt's targets: of 100 pairs of each label, 1 / 102 and 101 / 102."""
    cosines = np.concatenate([np.linspace(0, 0.4, 100), np.linspace(0.6, 1, 100)])
    curve = fit_curve(cosines, np.repeat([0.0, 1.0], 100), wanted_precision=0.9)
    assert curve.values[0] >= 1 / 102 - 1e-6
    assert curve.values[-1] <= 101 / 102 + 1e-6


def test_the_errors_are_those_of_the_bins_that_are_shown() -> None:
    cosines, gold = drawn(1000, 5)
    curve = fit_curve(cosines, gold)
    for bins, error in ((curve.bins_before, curve.error_before), (curve.bins, curve.error)):
        assert len(bins) == 10
        assert sorted(bins) == list(bins)
        assert sum(abs(value - judged) for value, judged in bins) / 10 == pytest.approx(error, abs=2e-4)
    ranked = np.sort(np.clip(cosines, 0, 1)).reshape(10, 100)
    np.testing.assert_allclose([value for value, _ in curve.bins_before], ranked.mean(1), atol=1e-4)


def test_platts_curve_finds_the_probabilities_that_labels_were_drawn_from() -> None:
    curve = fit_curve(*drawn(20_000, 12), wanted_precision=0.9)
    cosines = np.linspace(-0.2, 1, 50)
    np.testing.assert_allclose(curve(cosines), 1 / (1 + np.exp(-12 * (cosines - 0.5))), atol=0.03)
    assert curve.error < 0.02 < 0.1 < curve.error_before
    assert set(curve.thresholds) == {"F1", "precision 0.9"}
    assert 0.3 < curve.thresholds["F1"] < 0.5  # the best F1 is at half its value: 0.5 of about 0.9
    above = [gold for cosine, gold in zip(*drawn(20_000, 12, seed=1), strict=True) if curve(cosine) >= 0.8]
    assert sum(above) / len(above) > 0.9


def test_a_step_is_isotonic_and_a_scale_may_have_any_ends() -> None:
    cosines = np.random.default_rng(0).uniform(0, 1, 2000)
    gold = np.where(cosines < 0.8, 1.0, 3.0)
    curve = fit_curve(cosines, gold)
    assert curve.method == "isotonic"
    np.testing.assert_allclose(curve(np.array([0, 0.5, 0.79, 0.81, 1])), [1, 1, 1, 3, 3], atol=0.05)
    assert curve.thresholds == {}


def test_no_threshold_is_given_for_a_precision_that_is_not_reached() -> None:
    cosines = np.repeat(np.linspace(0, 1, 20), 100)
    labels = np.tile([0.0, 1.0], 1000)
    assert set(fit_curve(cosines, labels, wanted_precision=0.99).thresholds) == {"F1"}


def write_pairs(file: Path, labels: list[str], column: str = "label") -> Path:
    rng = np.random.default_rng(0)
    with file.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["sentence1", "sentence2", column])
        for label in labels:
            one = " ".join(rng.choice(WORDS[:-1], 5))
            other = one if float(label) > 0.5 else " ".join(rng.choice(WORDS[:-1], 5))
            writer.writerow([one, other, label])
    return file


def test_a_bundle_gets_a_curve_for_each_precision_and_keeps_its_vectors(tmp_path: Path) -> None:
    before = Bundle.load(write_bundle(tmp_path / "tiny", precisions=("fp32", "fp16")))
    main([str(before.path), "--pairs", str(write_pairs(tmp_path / "pairs.csv", ["0", "1"] * 120))])
    after = Bundle.load(before.path)
    assert after.calibration is not None
    assert (after.calibration.meaning, after.calibration.pairs) == ("probability", 240)
    assert (after.calibration.lowest, after.calibration.highest) == (0, 1)
    for curve in after.calibration.curves.values():
        assert curve(1.0) > 0.9 > 0.2 > curve(0.0)
    assert set(after.calibration.curves) == {"fp32", "fp16"}
    assert after.spec.space == before.spec.space
    main([str(before.path), "--pairs", str(write_pairs(tmp_path / "scores.csv", ["0", "2.5", "5"] * 50, "score"))])
    again = Bundle.load(before.path)
    assert again.calibration is not None
    assert (again.calibration.meaning, again.calibration.highest) == ("score", 5)
    card = (before.path / "README.md").read_text()
    assert card.count("## What a cosine means") == 1
    assert "the score, from 0 to 5, that people give a pair: fitted to 150 pairs of scores.csv" in card


def test_the_card_shows_the_reliability_where_matplotlib_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = Bundle.load(write_bundle(tmp_path / "tiny"))
    command = [str(bundle.path), "--pairs", str(write_pairs(tmp_path / "pairs.csv", ["0", "1"] * 120))]
    main(command)
    drawing = (bundle.path / "reliability.svg").read_bytes()
    assert b"<svg" in drawing
    assert "reliability.svg" in Bundle.load(bundle.path).spec.files
    assert "](reliability.svg)" in (bundle.path / "README.md").read_text()
    main(command)
    assert (bundle.path / "reliability.svg").read_bytes() == drawing
    monkeypatch.setattr("cloze.training.evaluation.curves.find_spec", lambda _name: None)
    main(command)
    assert not (bundle.path / "reliability.svg").exists()
    assert "reliability.svg" not in Bundle.load(bundle.path).spec.files
    assert "](reliability.svg)" not in (bundle.path / "README.md").read_text()


def test_a_section_in_the_middle_of_the_card_is_replaced_there() -> None:
    card = "# A\n\n## B\n\nb\n\n## What a cosine means\n\nformer\n\n## C\n\nc\n"
    changed = with_section(card, "What a cosine means", "present")
    assert changed == card.replace("former", "present")
    assert with_section(changed, "What a cosine means", "") == "# A\n\n## B\n\nb\n\n## C\n\nc\n"
    assert with_section("# A\n", "B", "b") == "# A\n\n## B\n\nb\n"
    assert with_section("# A\n\n## B", "B", "b") == "# A\n\n## B\n\nb\n"


@pytest.mark.parametrize(
    ("labels", "column", "message"),
    [
        (
            ["0", "1"] * 99,
            "label",
            "99 pairs labelled 0 and 99 labelled 1; a curve needs at least 100 of each label",
        ),
        (["0", "5"] * 49, "score", "has 98 pairs; a curve needs at least 100"),
        (["3"] * 120, "score", "has only the score 3, so there is nothing to rank; give pairs with several scores"),
        (["0", "1"] * 120, "similarity", "score"),
        (["0", "2"] * 120, "label", "label '2' is neither 1 nor 0"),
    ],
)
def test_pairs_that_say_too_little_are_one_line_and_change_nothing(
    labels: list[str], column: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = Bundle.load(write_bundle(tmp_path / "tiny"))
    pairs = write_pairs(tmp_path / "pairs.csv", labels, column)
    assert run(lambda: main([str(bundle.path), "--pairs", str(pairs)])) == 2
    found = capsys.readouterr()
    assert message in found.err
    assert found.err.count("\n") == 1
    assert bundle.unchanged()


def test_a_bundle_that_cannot_be_changed_is_found_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bundle(tmp_path / "tiny")
    full = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    monkeypatch.setattr("cloze.encoding.files.tempfile.TemporaryFile", full)
    with pytest.raises(
        BundleError,
        match=r"tiny cannot be replaced .*: .* cannot be written to \(No space left on device\)",
    ):
        main([str(tmp_path / "tiny"), "--pairs", "nowhere.csv"])


def test_judgements_that_run_against_the_cosines_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = Bundle.load(write_bundle(tmp_path / "tiny"))
    header, *rows = write_pairs(tmp_path / "pairs.csv", ["0", "1"] * 120).read_text().splitlines()
    swapped = [row[:-1] + str(1 - int(row[-1])) for row in rows]
    (tmp_path / "pairs.csv").write_text("\n".join([header, *swapped]) + "\n")
    assert run(lambda: main([str(bundle.path), "--pairs", str(tmp_path / "pairs.csv")])) == 2
    found = capsys.readouterr().err
    assert "pairs with higher judgements have lower cosines; check that a high judgement means similar texts" in found
    assert found.count("\n") == 1
    assert bundle.unchanged()


def test_where_a_file_has_both_it_is_the_score_that_counts(tmp_path: Path) -> None:
    """As in `evaluate`."""
    bundle = Bundle.load(write_bundle(tmp_path / "tiny"))
    pairs = write_pairs(tmp_path / "pairs.csv", ["0", "2.5", "5"] * 50, "score")
    header, *rows = pairs.read_text().splitlines()
    pairs.write_text("\n".join([f"{header},label", *(f"{row},entailment" for row in rows)]) + "\n")
    main([str(bundle.path), "--pairs", str(pairs)])
    calibration = Bundle.load(bundle.path).calibration
    assert calibration is not None
    assert calibration.meaning == "score"
