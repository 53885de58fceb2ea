"""The rows that the papers print, from published.toml."""

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from statistics import fmean
from typing import Final

__all__ = ["AVERAGED", "Published", "published"]

AVERAGED: Final = ("sts", "transfer")  # suites whose rows end with an average


@dataclass(frozen=True)
class Published:
    """A printed row. `cells` is set or metric -> figure; `average` is the printed one, None where none is printed."""

    name: str
    group: str
    source: str
    cells: dict[str, float]
    average: float | None = None

    @property
    def mean(self) -> float | None:
        """The mean of the printed cells, with two decimals: what the printed average should be."""
        return round(fmean(self.cells.values()) + 1e-9, 2) if self.cells and self.average is not None else None


def published(suite: str) -> list[Published]:
    """The rows of a suite, in the file's order."""
    content = tomllib.loads(files(__package__).joinpath("published.toml").read_text(encoding="utf-8"))
    found = []
    for table in content["tables"]:
        for name, *numbers in table["rows"] if table["suite"] == suite else ():
            average = numbers.pop() if suite in AVERAGED else None
            cells = dict(zip(table["columns"], numbers, strict=True))
            found.append(Published(name, table["group"], table["source"], cells, average))
    return found
