"""Train every method of the papers from one parent on the same sentences, with several seeds.

python -m benchmarks.methods --data DATA --encoder ENCODER [--plan PLAN] [--jobs 2] [--minutes 60] [ROW ...]

methods.toml lists the rows, and `python -m benchmarks.methods_report` writes methods.md. First the parent is trained
by masked language modelling, each row's learning rate is chosen on STS-B dev with the first seed, then all rows are
trained with one seed after the other. Every run has its own process, is kept in results/ at once and is not repeated.
So the command can be stopped at any time and started again, also on another machine: there it trains a parent again
and goes on with a seed that no row has yet. Rows are compared within a seed, and all rows of a seed have one parent.

`--plan benchmarks/methods_gpu.toml` is the plan for a GPU: a parent from random weights, then longer runs. With
`--jobs 8 --minutes 8.5` eight runs share the GPU, and the command ends within nine minutes. Started again, it goes on.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Final

from benchmarks.methods_plan import FULL, Plan, Results
from benchmarks.methods_run import Paths, digest, pretraining, source_of, trained, tried, untrained

__all__ = ["Benchmark", "OutOfTime"]

INTERRUPTED: Final = 60  # seconds until a process that goes on is interrupted again


class OutOfTime(Exception):
    """The minutes that the command was given are over."""


class Benchmark:
    """The runs of a plan in their order, `jobs` at a time, until they are all measured or the time is over."""

    def __init__(self, plan: Plan, paths: Paths, jobs: int, minutes: float | None) -> None:
        self._plan, self._paths, self._jobs = plan, paths, jobs
        self._deadline = time.monotonic() + (float("inf") if minutes is None else 60 * minutes)
        self._keeping = Lock()  # jobs add to the same files

    def measure(self, names: Sequence[str]) -> None:
        """Measure these rows. Raises OutOfTime, and SystemExit with the log of a run that fails."""
        rows, paths, plan = self._plan.rows, self._paths, self._plan
        for folder in (paths.runs, plan.folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._pretrain("parent")
        if any("GENERATOR" in map(str, rows[name].get("keys", {}).values()) for name in names):
            self._pretrain("generator")
        to_train = [name for name in names if name in plan.trained]
        self._together([partial(self._score_parent, name) for name in names if name not in plan.trained])
        rates = [(name, rate) for name in to_train for rate in rows[name].get("rates", [])]
        self._together([partial(self._try_rate, name, rate) for name, rate in rates])
        for seed in plan.content["seeds"]:
            self._together([partial(self._add_run, name, seed) for name in to_train])

    def _together(self, jobs: Sequence[Callable[[], None]]) -> None:
        with ThreadPoolExecutor(self._jobs) as pool:
            waiting = [pool.submit(job) for job in jobs]
            try:
                for job in waiting:
                    job.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _pretrain(self, role: str) -> None:
        if not (self._paths.runs / role / "run.json").is_file():
            self._process("cloze.training.pretrain", pretraining(self._plan, self._paths, role), role)

    def _score_parent(self, name: str) -> None:
        """Score the untuned parent, unless this one is scored."""
        parent = digest(source_of(self._plan.rows[name], self._paths))
        runs = self._plan.results(name)["runs"]
        if parent not in [run["parent"] for run in runs]:
            self._plan.keep(name, {"runs": [*runs, self._one(name)]})
            print(f"{name}: scored", flush=True)

    def _try_rate(self, name: str, rate: float) -> None:
        """Record the dev score of one learning rate after a short run."""
        if str(rate) in self._plan.results(name).get("rates", {}):
            return
        score = self._one(name, "--rate", str(rate))["dev"]
        print(f"{name}, learning rate {rate:g}: STS-B dev {score:.2f}", flush=True)
        with self._keeping:
            results = self._plan.results(name)
            self._plan.keep(name, results | {"rates": results.get("rates", {}) | {str(rate): score}})

    def _add_run(self, name: str, seed: int) -> None:
        """Train a row with a seed and add the scores to its results."""
        row, runs = self._plan.rows[name], self._plan.counted(name)
        if seed in [run["seed"] for run in runs] or len(runs) == row.get("seeds"):
            return
        parent = digest(source_of(row, self._paths))
        if others := self._plan.parents_of(seed, row.get("encoder")) - {parent}:
            print(f"seed {seed} has runs from another parent ({', '.join(others)}); this one is {parent}: seed skipped")
            return
        run = self._one(name, "--seed", str(seed))
        print(f"{name}, seed {seed}: STS-B dev {run['scores']['STS-B dev']:.2f}", flush=True)
        with self._keeping:
            results = self._plan.results(name)
            self._plan.keep(name, results | {"runs": sorted([*results["runs"], run], key=lambda run: int(run["seed"]))})

    def _one(self, name: str, *words: str) -> Results:
        """Measure in a process of its own."""
        output = self._process(
            "benchmarks.methods", [*sys.argv[1:], "--one", name, *words], "-".join((name, *words[1:]))
        )
        run: Results = json.loads(output.splitlines()[-1])
        return run

    def _process(self, module: str, words: Sequence[str], log_name: str) -> str:
        """What a module prints. It has its share of the cores, and is interrupted when the time is over."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise OutOfTime
        share = max(1, (os.cpu_count() or 1) // self._jobs)
        log = self._paths.runs / f"{log_name}.log"
        with log.open("w", encoding="utf-8") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *words],
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": str(share)},
            )
            try:
                output, _ = process.communicate(timeout=None if left == float("inf") else left)
            except subprocess.TimeoutExpired:
                while process.returncode is None:
                    process.send_signal(signal.SIGINT)  # training ends after its step, with a checkpoint
                    with suppress(subprocess.TimeoutExpired):  # an interrupt while Python starts may be lost
                        process.communicate(timeout=INTERRUPTED)
                raise OutOfTime from None
            except KeyboardInterrupt:  # Ctrl-C has reached the process too
                process.communicate()
                raise
        if process.returncode:
            raise SystemExit(f"{module} {' '.join(words)} ended with an error: see {log}")
        return output


def main() -> None:
    options = _options()
    plan = Plan.load(options.plan, options.results)
    paths = Paths(options.data, options.encoder, options.runs or Path("runs", options.plan.stem))
    if unknown := [name for name in options.rows if name not in plan.rows]:
        raise SystemExit(f"{unknown[0]!r} is not a row; the rows are {', '.join(plan.rows)}")
    if options.one:
        print(json.dumps(_measure(plan, paths, options)))
        return
    try:
        Benchmark(plan, paths, options.jobs, options.minutes).measure(options.rows or list(plan.rows))
    except OutOfTime:
        print(f"stopped after {options.minutes:g} minutes; the same command goes on")
    except KeyboardInterrupt:
        raise SystemExit("interrupted; the same command goes on") from None


def _measure(plan: Plan, paths: Paths, options: argparse.Namespace) -> Results:
    if options.rate is not None:
        return tried(plan, paths, options.one, options.rate)
    return (
        untrained(plan, paths, options.one) if options.seed is None else trained(plan, paths, options.one, options.seed)
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="default: all")
    parser.add_argument("--data", type=Path, required=True, help="folder that holds corpus/ and senteval/")
    parser.add_argument("--encoder", type=Path, required=True, help="all-MiniLM-L6-v2")
    parser.add_argument("--plan", type=Path, default=FULL, help="tables that replace parts of methods.toml")
    parser.add_argument("--runs", type=Path, help="folder of the runs (default: runs/PLAN)")
    parser.add_argument("--results", type=Path, help="folder of the results (default: benchmarks/results/PLAN)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: %(default)s)")
    parser.add_argument("--minutes", type=float, help="stop after this long; runs are continued later")
    for hidden, value_type in (("--one", str), ("--seed", int), ("--rate", float)):
        parser.add_argument(hidden, type=value_type, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.jobs < 1:
        parser.error(f"--jobs is {options.jobs}; it is at least 1")
    return options


if __name__ == "__main__":
    main()
