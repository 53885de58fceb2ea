"""Lines over time, one panel above the other, as an SVG of a few kilobytes."""

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

__all__ = ["Line", "Panel", "svg"]

WIDTH, HEIGHT = 720, 180  # of one panel
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 34, 30
COLOURS = ("#1f5fa8", "#c8641b", "#3d8b40", "#8a4fa3", "#777777")


class Line(NamedTuple):
    """Values at equal steps from the beginning to the end."""

    name: str
    values: Sequence[float]


class Panel(NamedTuple):
    """One axis; from 0, or over powers of ten where `log`."""

    title: str
    lines: Sequence[Line]
    log: bool = False


def svg(panels: Sequence[Panel], minutes: float) -> str:
    """The panels from top to bottom, over the same time."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT * len(panels)}" '
        'font-family="sans-serif" font-size="11" fill="#333">',
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    for place, panel in enumerate(panels):
        parts += [f'<g transform="translate(0 {place * HEIGHT})">', *_panel(panel, minutes), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, minutes: float) -> Iterator[str]:
    values = [value for line in panel.lines for value in line.values if value > 0 or not panel.log]
    ticks = _powers(values) if panel.log else _steps(max(values, default=1.0))

    def x(share: float) -> float:
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        low, high, value = ticks[0], ticks[-1], max(value, ticks[0])
        share = math.log(value / low) / math.log(high / low) if panel.log else value / high
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    yield f'<text x="{LEFT}" y="15" font-weight="bold">{escape(panel.title)}</text>'
    for tick in ticks:
        yield f'<path d="M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>'
        yield f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>'
    for minute in _steps(minutes):
        if minute <= minutes:
            place = x(minute / minutes)
            yield f'<text x="{place:.1f}" y="{HEIGHT - 12}" text-anchor="middle">{minute:g} min</text>'
    for place, (line, colour) in enumerate(zip(panel.lines, COLOURS, strict=False)):
        last = max(1, len(line.values) - 1)
        points = " ".join(f"{x(step / last):.1f},{y(value):.1f}" for step, value in enumerate(line.values))
        yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        if len(panel.lines) > 1:
            yield f'<text x="{LEFT + 80 * place}" y="29" fill="{colour}">{escape(line.name)}</text>'


def _steps(high: float) -> list[float]:
    """0 and about five round steps, the last at `high` or above it."""
    high = high or 1.0
    power = 10.0 ** math.floor(math.log10(high / 5))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * 5 >= high)
    return [step * count for count in range(math.ceil(high / step) + 1)]


def _powers(values: Sequence[float]) -> list[float]:
    low, high = math.floor(math.log10(min(values, default=1))), math.ceil(math.log10(max(values, default=10)))
    return [10.0**power for power in range(low, max(high, low + 1) + 1)]
