"""The report as one HTML page, and as Markdown with the same tables and the numbers of figures that have few.

The page has no script and needs no network. It follows the light or dark mode of the reader's system.
"""

import re
from collections.abc import Iterator
from html import escape
from importlib.resources import files
from string import Template
from typing import Final

from cloze.training.evaluation.report.contents import Examples, Figure, Part, Report, Section, Table
from cloze.training.evaluation.tables import markdown_table

PAGE: Final = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>$title</title>
<style>
$style</style>
</head>
<body>
<header>
<h1>$title</h1>
$facts
<nav aria-label="Sections"><ul>$links</ul></nav>
</header>
<main>
$sections
$gaps
</main>
<footer><p>$source</p></footer>
</body>
</html>
""")


def page(report: Report) -> str:
    """The report as HTML. All texts are escaped; only the figures' SVG is markup."""
    facts = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(number)}</dd><dd>{escape(measure)}</dd></div>"
        for label, number, measure in report.facts
    )
    links = "".join(f'<li><a href="#{section.name}">{escape(section.title)}</a></li>' for section in report.sections)
    gaps = "".join(f"<li><strong>{escape(gap.title)}</strong>: {escape(gap.reason)}</li>" for gap in report.gaps)
    return PAGE.substitute(
        title=escape(report.title),
        style=files(__package__).joinpath("report.css").read_text(encoding="utf-8"),
        facts=f"<dl>{facts}</dl>" if facts else "",
        links=links,
        sections="\n".join(map(_section, report.sections)),
        gaps=f'<section id="left-out"><h2>Left out</h2><ul>{gaps}</ul></section>' if gaps else "",
        source=escape(report.source),
    )


def _section(section: Section) -> str:
    parts = "\n".join(map(_part_html, section.parts))
    head = f"<h2>{escape(section.title)}</h2>\n<p>{escape(section.says)}</p>"
    return f'<section id="{section.name}">{head}\n{parts}\n</section>'


def _part_html(part: Part) -> str:
    match part:
        case Table():
            return _table_html(part)
        case Figure():
            return _figure(part)
        case Examples():
            return _examples(part)


def _figure(figure: Figure) -> str:
    numbers = f"<details><summary>The numbers</summary>{_table_html(figure.table)}</details>" if figure.table else ""
    return (
        f"<figure><h3>{escape(figure.title)}</h3>"
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(figure.title)}">{figure.svg}</div>'
        f"<figcaption>{escape(figure.says)}</figcaption>{numbers}</figure>"
    )


def _examples(examples: Examples) -> str:
    cards = "".join(
        f"<article><h4>{escape(card.title)}</h4><ol>{''.join(f'<li>{escape(line)}</li>' for line in card.lines)}</ol>"
        "</article>"
        for card in examples.cards
    )
    return f'<h3>{escape(examples.title)}</h3><p>{escape(examples.says)}</p><div class="cards">{cards}</div>'


def _table_html(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    body = ""
    for name, rows in table.groups.items():
        lines = ""
        for row in rows:
            first, *cells = row.cells
            numbers = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
            mark = ' class="own"' if row.own else ""
            lines += f'<tr{mark}><th scope="row">{escape(first)}</th>{numbers}</tr>\n'
        span = f'<tr><th scope="rowgroup" colspan="{len(table.columns)}">{escape(name)}</th></tr>\n' if name else ""
        body += f"<tbody>\n{span}{lines}</tbody>\n"
    notes = "".join(f"<li>{escape(note)}</li>" for note in table.notes)
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(table.title)}"><table>'
        f"<caption>{escape(table.title)}</caption><thead><tr>{head}</tr></thead>\n{body}</table></div>"
        + (f'<ul class="notes">{notes}</ul>' if notes else "")
    )


def markdown(report: Report) -> str:
    """The report as Markdown. All texts are escaped."""
    lines = [f"# {_escaped(report.title)}", ""]
    lines += [
        f"- {_escaped(label)}: **{_escaped(number)}** ({_escaped(measure)})" for label, number, measure in report.facts
    ]
    for section in report.sections:
        lines += ["", f"## {_escaped(section.title)}", "", _escaped(section.says)]
        for part in section.parts:
            lines += ["", *_part_lines(part)]
    if report.gaps:
        lines += ["", "## Left out", ""]
        lines += [f"- {_escaped(gap.title)}: {_escaped(gap.reason)}" for gap in report.gaps]
    return "\n".join([*lines, "", _escaped(report.source), ""])


def _part_lines(part: Part) -> Iterator[str]:
    match part:
        case Table():
            yield from _table_lines(part)
        case Figure():
            yield from (f"### {_escaped(part.title)}", "", _escaped(part.says))
            yield from ["", *_table_lines(part.table)] if part.table else ()
        case Examples():
            yield from (f"### {_escaped(part.title)}", "", _escaped(part.says))
            for card in part.cards:
                yield from ("", f"**{_escaped(card.title)}**", "")
                yield from (f"{place}. {_escaped(line)}" for place, line in enumerate(card.lines, 1))


def _table_lines(table: Table) -> Iterator[str]:
    yield from (f"**{_escaped(table.title)}**", "")
    rows = []
    for name, group in table.groups.items():
        if name:
            rows.append([f"*{_escaped(name)}*", *[""] * (len(table.columns) - 1)])
        rows += [list(map(_escaped, row.cells)) for row in group]
    yield markdown_table(list(map(_escaped, table.columns)), rows)
    yield from ["", *(f"- {_escaped(note)}" for note in table.notes)] if table.notes else ()


def _escaped(text: str) -> str:
    """The text in one line, without characters that act as markup."""
    return re.sub(r"([\\`*_<>\[\]|#&])", r"\\\1", " ".join(text.split()))
