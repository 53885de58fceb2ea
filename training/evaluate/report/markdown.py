"""The report as Markdown: the same tables, and the numbers of the figures that have few."""

import re
from collections.abc import Iterator

from training.evaluate.report.contents import Examples, Figure, Part, Report, Table

__all__ = ["markdown"]


def markdown(report: Report) -> str:
    """All texts are escaped."""
    lines = [f"# {_text(report.title)}", ""]
    lines += [f"- {_text(label)}: **{_text(number)}** ({_text(of)})" for label, number, of in report.facts]
    for section in report.sections:
        lines += ["", f"## {_text(section.title)}", "", _text(section.says)]
        for part in section.parts:
            lines += ["", *_part(part)]
    if report.gaps:
        lines += ["", "## Left out", ""]
        lines += [f"- {_text(gap.title)}: {_text(gap.reason)}" for gap in report.gaps]
    return "\n".join([*lines, "", _text(report.source), ""])


def _part(part: Part) -> Iterator[str]:
    match part:
        case Table():
            yield from _table(part)
        case Figure():
            yield from (f"### {_text(part.title)}", "", _text(part.says))
            yield from ["", *_table(part.table)] if part.table else ()
        case Examples():
            yield from (f"### {_text(part.title)}", "", _text(part.says))
            for card in part.cards:
                yield from ("", f"**{_text(card.title)}**", "")
                yield from (f"{place}. {_text(line)}" for place, line in enumerate(card.lines, 1))


def _table(table: Table) -> Iterator[str]:
    yield from (f"**{_text(table.title)}**", "")
    yield "| " + " | ".join(map(_text, table.columns)) + " |"
    yield "| --- |" + " ---: |" * (len(table.columns) - 1)
    for name, rows in table.groups.items():
        if name:
            yield f"| *{_text(name)}* |" + " |" * (len(table.columns) - 1)
        for row in rows:
            yield "| " + " | ".join(map(_text, row.cells)) + " |"
    yield from ["", *(f"- {_text(note)}" for note in table.notes)] if table.notes else ()


def _text(text: str) -> str:
    """One line whose letters are not markup."""
    return re.sub(r"([\\`*_<>\[\]|#&])", r"\\\1", " ".join(text.split()))
