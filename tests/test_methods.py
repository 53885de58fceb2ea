"""benchmarks/methods.md is what the script makes of the runs' figures, and the runs kept what was asked of them."""

import json

import pytest

from benchmarks.methods import PAGE, RESULTS, page, rows

TRAINED = [name for name, row in rows().items() if "recipe" in row]


def test_the_page_is_made_from_the_results() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m benchmarks.methods table"


def test_every_row_has_its_figures() -> None:
    assert {path.stem for path in RESULTS.glob("*.json")} == set(rows())


@pytest.mark.parametrize("name", TRAINED)
def test_a_method_ends_above_its_own_untrained_read_out(name: str) -> None:
    for run in json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["runs"]:
        assert run["scores"]["STS-B dev"] > run["before"]
