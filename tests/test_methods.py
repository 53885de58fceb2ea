"""benchmarks/methods.md matches the recorded results, and each verdict follows the rule on the page."""

import json

import pytest

from benchmarks.methods import PAGE, RESULTS, difference, page, rows

TRAINED = [name for name, row in rows().items() if "recipe" in row]


def test_the_page_is_made_from_the_results() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m benchmarks.methods table"


def test_every_row_has_its_figures() -> None:
    assert {path.stem for path in RESULTS.glob("*.json")} == set(rows())


@pytest.mark.parametrize("name", TRAINED)
def test_a_method_ends_above_its_own_untrained_pooling(name: str) -> None:
    for run in json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["runs"]:
        assert run["scores"]["STS-B dev"] > run["before"]


@pytest.mark.parametrize(
    ("smallest", "verdict"),
    [
        (1, "shown"),  # 2.002 to 5.998: above the seed noise of 1.2
        (0, "undecided"),  # 1.002 to 4.998: above zero, but within the seed noise
        (-3, "undecided"),  # -1.998 to 1.998
        (-6, "undecided"),  # -4.998 to -1.002
        (-7, "reversed"),  # -5.998 to -2.002
    ],
)
def test_a_verdict_follows_the_interval_and_the_seed_noise(smallest: int, verdict: str) -> None:
    gaps = [smallest + step for step in range(7)]  # seven test sets, standard deviation sqrt(28 / 6)
    gap = difference([50.0 + gap for gap in gaps], [50.0] * 7)
    half = 2.44691 * (28 / 6 / 7) ** 0.5  # Student t of 6 degrees of freedom at 0.975, times the standard error
    assert gap == pytest.approx((smallest + 3, smallest + 3 - half, smallest + 3 + half), abs=1e-4)
    assert gap.verdict == verdict
