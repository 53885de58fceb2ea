"""benchmarks/methods.md matches the recorded results, and each verdict follows the rule on the page."""

import json
import math
import sys
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import pytest

from benchmarks.methods import Benchmark, OutOfTime
from benchmarks.methods_plan import FULL, Plan
from benchmarks.methods_report import Difference, difference, page
from benchmarks.methods_run import Paths

ROOT = Path(__file__).parents[1]
PLAN = Plan.load()
ORDERS = PLAN.content["page"]["orders"]


@pytest.mark.parametrize("file", [FULL, FULL.with_name("methods_scratch.toml")], ids=lambda file: str(file.stem))
def test_the_page_is_made_from_the_results(file: Path) -> None:
    written = file.with_suffix(".md").read_text(encoding="utf-8")
    assert written == page(Plan.load(file)), f"run: python -m benchmarks.methods_report benchmarks/{file.name}"


def test_a_difference_is_that_of_runs_with_one_seed_and_parent() -> None:
    for order in ORDERS:
        on = order.get("on", "Avg.")
        loop = [
            (one["scores"][on], other["scores"][on])
            for one in PLAN.shown(order["better"])
            for other in PLAN.shown(order["worse"])
            if one["parent"] == other["parent"] and other.get("seed", one["seed"]) == one["seed"]
        ]
        assert PLAN.paired(order["better"], order["worse"], on) == loop, order


@pytest.mark.parametrize(
    ("shift", "paper", "verdict"),
    [
        (4.0, 1.0, "shown"),  # 4 ± 3.9266
        (3.0, 8.0, "not shown, smaller"),  # 3 ± 3.9266: contains 0, and no 8
        (3.0, 2.0, "undecided"),  # contains 0 and 2
        (-6.0, 0.1, "not shown, reversed"),
        (4.0, None, "shown"),
        (3.0, None, "undecided"),
        (-6.0, None, "not shown, reversed"),
    ],
)
def test_a_verdict_follows_the_interval_and_the_papers_figure(shift: float, paper: float | None, verdict: str) -> None:
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


def test_the_best_rate_is_one_of_the_plan_when_all_are_tried(tmp_path: Path) -> None:
    """A rate that was tried and left the plan does not count."""
    plan = Plan({"simcse": {"title": "", "recipe": "simcse", "rate": 1e-4, "rates": [1e-5, 3e-5]}}, tmp_path)
    plan.keep("simcse", {"runs": [], "rates": {"1e-05": 70.0, "0.0001": 90.0}})
    assert plan.best_rate("simcse") == 1e-4  # as written by hand
    plan.keep("simcse", {"runs": [], "rates": {"1e-05": 70.0, "0.0001": 90.0, "3e-05": 80.0}})
    assert plan.best_rate("simcse") == 3e-5
    assert plan.tried("simcse") == {1e-5: 70.0, 3e-5: 80.0}
    assert [path.name for path in tmp_path.iterdir()] == ["simcse.json"]


TINY = """
seeds = [1, 2]
[pretraining]
corpus = ["few"]
[simcse]
rates = [1e-4, 1e-3]
"""
ORDER = ["parent", "simcse-0.0001", "simcse-0.001", "simcse-1", "simcse-2"]


class Interrupted(Benchmark):
    """A benchmark whose processes train nothing; the one at index `at` is interrupted by `error`, and none follows."""

    def __init__(self, plan: Plan, paths: Paths, at: int | None = None, error: type[BaseException] = OutOfTime) -> None:
        super().__init__(plan, paths, jobs=1, minutes=None)
        self.started: list[str] = []
        self._paths, self._at, self._error = paths, at, error

    def _process(self, module: str, words: Sequence[str], log_name: str) -> str:
        if self._at is not None and len(self.started) > self._at:
            raise self._error
        self.started.append(log_name)
        if len(self.started) - 1 == self._at:
            raise self._error
        if module == "cloze.training.pretrain":
            _written(self._paths.parent / "model.safetensors", "weights")
            _written(self._paths.runs / "parent" / "run.json", "{}")
            return ""
        kind, value = words[-2:]
        found = {"--rate": {"dev": 70 + float(value)}, "--seed": {"seed": int(float(value)), "parent": PARENT}}[kind]
        return "a warning\n" + json.dumps(found | {"recipe": {"learning_rate": 1e-3}, "scores": {"STS-B dev": 71.0}})


PARENT = sha256(b"weights").hexdigest()[:16]


@pytest.mark.parametrize("error", [OutOfTime, KeyboardInterrupt])
def test_an_interrupted_benchmark_goes_on(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it is interrupted, what is measured is kept, and the same command repeats only what is not."""
    monkeypatch.setattr(sys, "argv", ["methods"])
    for at in range(len(ORDER)):
        folder = tmp_path / str(at)
        plan = Plan.load(_written(folder / "tiny.toml", TINY), folder / "results")
        paths = Paths(folder / "data", folder / "encoder", folder / "runs")
        first, second, third = Interrupted(plan, paths, at, error), Interrupted(plan, paths), Interrupted(plan, paths)
        with pytest.raises(error):
            first.measure(["simcse"])
        assert first.started == ORDER[: at + 1]
        second.measure(["simcse"])
        assert second.started == ORDER[at:]
        found = plan.results("simcse")
        assert found["rates"] == {"0.0001": 70.0001, "0.001": 70.001}
        assert [run["seed"] for run in found["runs"]] == [1, 2]
        third.measure(["simcse"])
        assert third.started == []


def test_a_process_is_interrupted_when_the_time_is_over(tmp_path: Path) -> None:
    benchmark = Benchmark(PLAN, Paths(tmp_path, tmp_path, tmp_path), jobs=1, minutes=0.005)
    with pytest.raises(OutOfTime):  # it would serve for ever
        benchmark._process("http.server", ["--bind", "127.0.0.1", "0"], "server")
    with pytest.raises(OutOfTime):
        benchmark._process("http.server", [], "none")
    assert not (tmp_path / "none.log").exists()


def test_a_process_that_fails_names_its_log(tmp_path: Path) -> None:
    benchmark = Benchmark(PLAN, Paths(tmp_path, tmp_path, tmp_path), jobs=1, minutes=None)
    with pytest.raises(SystemExit, match=r"json.tool no-such-file ended with an error: see .*failed\.log"):
        benchmark._process("json.tool", ["no-such-file"], "failed")
    assert "no-such-file" in (tmp_path / "failed.log").read_text()


def _written(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file
