"""The contents of a report: sections with tables, figures and examples, and the figures that are missing."""

from dataclasses import dataclass, field
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Row:
    """The first cell is the row's name. `own` marks a model that was scored here."""

    cells: list[str]
    own: bool = False


@dataclass(frozen=True)
class Table:
    """Rows in named groups. A group without a name has no heading. `notes` are printed below the table."""

    title: str
    columns: list[str]
    groups: dict[str, list[Row]]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Figure:
    """`says` is the sentence that explains it, `data` what is drawn. `table` has the same numbers if they are few."""

    name: str
    title: str
    says: str
    svg: str
    data: Any
    table: Table | None = None


@dataclass(frozen=True)
class Card:
    """A text with a list below it."""

    title: str
    lines: list[str]


@dataclass(frozen=True)
class Examples:
    title: str
    says: str
    cards: list[Card]


@dataclass(frozen=True)
class Gap:
    """A figure that is missing, and why."""

    title: str
    reason: str


Part: TypeAlias = Table | Figure | Examples


@dataclass(frozen=True)
class Section:
    name: str
    title: str
    says: str
    parts: list[Part]


@dataclass(frozen=True)
class Report:
    """`facts` are the first numbers that a reader sees: label, number and what is measured."""

    title: str
    facts: list[tuple[str, str, str]]
    sections: list[Section]
    gaps: list[Gap]
    source: str
