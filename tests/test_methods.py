"""benchmarks/methods.md matches the recorded results, and each verdict follows the rule on the page."""

import math

import pytest

from benchmarks.methods import PLAN, RESULTS, counted, parents_of, results, rows
from benchmarks.methods_report import PAGE, Difference, difference, gaps, page

TRAINED = [name for name, row in rows().items() if "recipe" in row]
ORDERS = PLAN["page"]["orders"]


def test_the_page_is_made_from_the_results() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m benchmarks.methods_report"


def test_results_are_of_rows() -> None:
    assert {path.stem for path in RESULTS.glob("*.json")} <= set(rows())


def test_all_rows_of_a_seed_have_one_parent() -> None:
    seeds = {run["seed"] for name in TRAINED for run in results(name)["runs"]}
    assert seeds
    for seed in seeds:
        for encoder in (None, "sentences"):
            assert len(parents_of(seed, encoder)) <= 1


@pytest.mark.parametrize("name", TRAINED)
def test_a_run_ends_above_its_own_untrained_pooling(name: str) -> None:
    for run in counted(name):
        if rows()[name]["group"] != "Ablations":
            assert run["scores"]["STS-B dev"] > run["before"]


@pytest.mark.parametrize("name", [name for name, row in rows().items() if "like" in row])
def test_a_variant_has_the_rate_of_its_method(name: str) -> None:
    assert rows()[rows()[name]["like"]]["group"] == "Unsupervised"


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: f"{order['better']}-{order['worse']}")
def test_a_difference_is_that_of_runs_with_one_seed_and_parent(order: dict[str, str]) -> None:
    better, worse = results(order["better"])["runs"], results(order["worse"])["runs"]
    found = gaps(order["better"], order["worse"])
    loop = [
        round(one["scores"]["Avg."] - other["scores"]["Avg."], 2)
        for one in better
        for other in worse
        if one["parent"] == other["parent"] and other.get("seed", one["seed"]) == one["seed"]
    ]
    assert found == loop


@pytest.mark.parametrize(
    ("shift", "paper", "verdict"),
    [
        (4.0, 1.0, "shown"),  # 4 ± 3.9266
        (3.0, 8.0, "not shown"),  # 3 ± 3.9266: contains 0, and no 8
        (3.0, 2.0, "undecided"),  # contains 0 and 2
        (-6.0, 0.1, "not shown"),
    ],
)
def test_a_verdict_follows_the_interval_and_the_papers_figure(shift: float, paper: float, verdict: str) -> None:
    """Five seeds at -4, -2, 0, 2 and 4 around `shift`: standard error sqrt(10 / 5), Student t of 4 degrees 2.7764."""
    found = difference([shift + gap for gap in (-4.0, -2.0, 0.0, 2.0, 4.0)])
    half = 2.776445 * math.sqrt(10 / 5)
    assert found == pytest.approx((5, shift, shift - half, shift + half), abs=1e-5)
    assert found.verdict(paper) == verdict


def test_one_seed_has_no_interval() -> None:
    found = difference([2.5])
    assert (found.seeds, found.mean, found.verdict(0.1)) == (1, 2.5, "one seed")
    assert math.isnan(found.low)


@pytest.mark.parametrize(("paper", "words"), [(1.0, "contains"), (0.1, "below"), (3.0, "above")])
def test_the_papers_figure_is_placed(paper: float, words: str) -> None:
    assert words in Difference(5, 1.0, 0.5, 1.5).beside(paper)
