"""What benchmarks/methods.py trains, and what it has measured so far."""

import json
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self

from cloze.machine import versions

__all__ = ["FULL", "Plan", "Results", "Row", "Run"]

FULL: Final = Path(__file__).parent / "methods.toml"
Row = dict[str, Any]
Run = dict[str, Any]
Results = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """The rows and the keys of their runs, and a folder with one file of results per row."""

    content: dict[str, Any]
    folder: Path

    @classmethod
    def load(cls, file: Path = FULL, results: Path | None = None) -> Self:
        """methods.toml, in which the tables of another plan replace keys. `results` is the folder of the results."""
        content = tomllib.loads(FULL.read_text(encoding="utf-8"))
        if file != FULL:
            for key, value in tomllib.loads(file.read_text(encoding="utf-8")).items():
                content[key] = content.get(key, {}) | value if isinstance(value, dict) else value
        return cls(content, results or FULL.parent / "results" / file.stem)

    @cached_property
    def rows(self) -> dict[str, Row]:
        """The rows of the page, in its order."""
        return {name: row for name, row in self.content.items() if isinstance(row, dict) and "title" in row}

    @cached_property
    def trained(self) -> list[str]:
        """The names of the rows that are trained; the others are the untuned parent's."""
        return [name for name, row in self.rows.items() if "recipe" in row]

    def results(self, name: str) -> Results:
        """What is measured of a row so far; without a run, {"runs": []}."""
        file = self.folder / f"{name}.json"
        return {"runs": []} | (json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {})

    def keep(self, name: str, results: Results) -> None:
        """Write what is measured of a row."""
        text = json.dumps(results | {"versions": versions(("torch", "transformers"))}, indent=2)
        part = self.folder / f"{name}.partial"
        part.write_text(text + "\n", encoding="utf-8")
        part.replace(self.folder / f"{name}.json")  # a kill leaves the former file or the new one

    def best_rate(self, name: str) -> float:
        """The rate with the best dev score, or `rate` before all are tried; `like` names a row with the same rate."""
        if "like" in (row := self.rows[name]):
            return self.best_rate(row["like"])
        tried = self.tried(name)
        return max(tried, key=tried.__getitem__) if tried else float(row["rate"])

    def tried(self, name: str) -> dict[float, float]:
        """The row's rates in their order -> dev score, if all of them are tried."""
        rates, scores = self.rows[name].get("rates", []), self.results(name).get("rates", {})
        return {rate: scores[str(rate)] for rate in rates} if {*map(str, rates)} <= scores.keys() else {}

    def counted(self, name: str) -> list[Run]:
        """The runs of a trained row at its chosen learning rate."""
        rate = self.best_rate(name)
        return [run for run in self.results(name)["runs"] if run["recipe"]["learning_rate"] == rate]

    def shown(self, name: str) -> list[Run]:
        """The runs of a row that the page shows: those at the chosen rate, or the untuned parent's."""
        return self.counted(name) if name in self.trained else self.results(name)["runs"]

    def parents_of(self, seed: int, encoder: str | None) -> set[str]:
        """The digests of the parents that rows with this `encoder` had for a seed."""
        same = [name for name in self.trained if self.rows[name].get("encoder") == encoder]
        return {run["parent"] for name in same for run in self.results(name)["runs"] if run["seed"] == seed}

    def best_templates(self, parent: str) -> list[str]:
        """The templates of the greedy search with a parent, best first."""
        runs = self.results("templates")["runs"]
        return [template for run in runs if run["parent"] == parent for template in run["templates"]]

    def paired(self, better: str, worse: str, task: str = "Avg.") -> list[tuple[float, float]]:
        """The scores of two rows: of runs with one seed and one parent, or of a run and its untuned parent."""
        other = {(run.get("seed"), run["parent"]): run["scores"][task] for run in self.shown(worse)}
        keys = [(run["seed"] if worse in self.trained else None, run["parent"]) for run in self.shown(better)]
        keyed_runs = zip(keys, self.shown(better), strict=True)
        return [(run["scores"][task], other[key]) for key, run in keyed_runs if key in other]
