"""matplotlib figures as inline SVG whose colours are CSS variables, so that they follow light and dark.

A figure is drawn with the stand-ins in `COLOURS`; `inline` replaces each by its variable. Text stays text.
"""

import io
import re
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = ["COLOURS", "MARKERS", "SERIES", "STYLE", "canvas", "inline", "quiet_axes"]

SVG: Final = "{http://www.w3.org/2000/svg}"
HREF: Final = "{http://www.w3.org/1999/xlink}href"
NAMES: Final = ("ink", "quiet", "line", "surface", "accent", "warm", "third", "fourth")
COLOURS: Final = {name: f"#01fe{number:02x}" for number, name in enumerate(NAMES)}
"""CSS variable -> the colour that stands for it while matplotlib draws."""
SERIES: Final = ("accent", "warm", "third", "fourth")
MARKERS: Final = ("o", "s", "^", "D")
STYLE: Final[Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "cloze",
    "text.parse_math": False,
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.unicode_minus": True,
    "text.color": COLOURS["ink"],
    "axes.labelcolor": COLOURS["ink"],
    "axes.edgecolor": COLOURS["line"],
    "xtick.color": COLOURS["line"],
    "ytick.color": COLOURS["line"],
    "xtick.labelcolor": COLOURS["quiet"],
    "ytick.labelcolor": COLOURS["quiet"],
    "grid.color": COLOURS["line"],
    "legend.frameon": False,
}


def canvas(width: float, height: float, columns: int = 1) -> tuple[Figure, Sequence[Axes]]:
    """A figure of this size in inches, with axes side by side."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def quiet_axes(axes: Axes, grid: str = "y") -> None:
    """Only the lower spine, and a faint grid."""
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0)
    axes.set_axisbelow(True)
    axes.grid(axis=grid, linewidth=0.8)  # type: ignore[arg-type]


def inline(figure: Figure, name: str, title: str, description: str) -> str:
    """The figure as an SVG element for an HTML page. `name` begins its ids, which must differ from other figures'."""
    text = io.StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # letters that the font lacks: the browser's fonts draw them
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    root = ElementTree.fromstring(text.getvalue())  # noqa: S314 - our own text
    for metadata in root.findall(f"{SVG}metadata"):
        root.remove(metadata)
    _rename(root, name)
    for attribute in ("width", "height"):
        root.attrib.pop(attribute, None)
    root.attrib |= {"role": "img", "aria-labelledby": f"{name}-title {name}-description"}
    for place, (tag, content) in enumerate((("title", title), ("desc", description))):
        element = ElementTree.Element(f"{SVG}{tag}", id=f"{name}-{'title' if tag == 'title' else 'description'}")
        element.text = content
        root.insert(place, element)
    ElementTree.register_namespace("", SVG[1:-1])
    found = re.sub(r' xmlns(:\w+)?="[^"]*"', "", ElementTree.tostring(root, encoding="unicode"))
    for variable, colour in COLOURS.items():
        found = found.replace(colour, f"var(--{variable})")
    return found


def _rename(root: ElementTree.Element, name: str) -> None:
    """Keep only the ids that something refers to, begin them with `name`, and link with href alone."""
    used = set(re.findall(r"#([\w-]+)", ElementTree.tostring(root, encoding="unicode")))
    for element in root.iter():
        if "id" in element.attrib and element.attrib["id"] not in used:
            del element.attrib["id"]
        for key, value in list(element.attrib.items()):
            if key == "id":
                element.attrib["id"] = f"{name}-{value}"
            elif key == HREF:
                del element.attrib[key]
                element.attrib["href"] = f"#{name}-{value[1:]}"
            elif "url(#" in value:
                element.attrib[key] = value.replace("url(#", f"url(#{name}-")
