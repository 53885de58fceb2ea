"""The tables in the docs: settings, metrics and figures of scale. `make reference` writes them."""

import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from benchmarks import scale_report
from cloze.options import flag
from cloze.service.monitoring.metrics import Metrics
from cloze.service.settings import Settings, variable

DOCS = Path(__file__).parents[2] / "docs"
KINDS: dict[Any, str] = {
    int: "integer",
    float: "number",
    bool: "true, false",
    Path: "path",
    str: "text",
    SecretStr: "text",
}


def settings_table() -> str:
    rows = ["| Variable | Option | Value | Default | Meaning |", "|---|---|---|---|---|"]
    for name, field in Settings.model_fields.items():
        cells = (f"`{variable(name)}`", f"`{flag(name)}`", _allowed(field), _default(field), str(field.description))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def metrics_table() -> str:
    rows = ["| Name | Type | Labels | Meaning |", "|---|---|---|---|"]
    metrics = Metrics()
    labels = {each._name: each._labelnames for each in vars(metrics).values() if hasattr(each, "_labelnames")}
    for family in metrics.registry.collect():
        if family.name.startswith("cloze_"):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            listed = ", ".join(f"`{label}`" for label in labels.get(family.name, ("model",)))
            rows.append(f"| `{name}` | {family.type} | {listed} | {family.documentation} |")
    rows.append("| `process_*` | | | Memory, CPU time, open files and start time of the process. |")
    return "\n".join(rows)


def documented_metrics() -> list[str]:
    """The names in the table of metrics, without those of the process."""
    return [row.split("`")[1] for row in metrics_table().splitlines()[2:-1]]


TABLES = {
    "settings": ("settings.md", settings_table),
    "metrics": ("metrics.md", metrics_table),
    "scale figures": ("notes/scale.md", scale_report.figures),
    "scale setting": ("notes/scale.md", scale_report.setting),
    "scale plans": ("scale.md", scale_report.plans),
}


def documented(name: str) -> str:
    """The table between the markers of its page."""
    return _split((DOCS / TABLES[name][0]).read_text(encoding="utf-8"), name)[1]


def _split(page: str, name: str) -> tuple[str, str, str]:
    found = re.fullmatch(rf"(.*<!-- {name} -->\n)(.*?)(\n<!-- end of {name} -->.*)", page, re.DOTALL)
    assert found, f"the page has lost its {name} markers"
    return found[1], found[2], found[3]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    empty = str(field.default) in ("None", "", "()", "[]")
    return "none" if empty else f"`{str(field.default).lower()}`"


def _allowed(field: FieldInfo) -> str:
    if get_origin(field.annotation) is Literal:
        return ", ".join(f"`{word}`" for word in get_args(field.annotation))
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    limits = [f"{signs[key]} {getattr(rule, key)}" for rule in field.metadata for key in signs if hasattr(rule, key)]
    return " ".join([KINDS[field.annotation], ", ".join(limits)]).strip()


if __name__ == "__main__":
    for name, (file, table) in TABLES.items():
        before, _, after = _split((DOCS / file).read_text(encoding="utf-8"), name)
        (DOCS / file).write_text(before + table() + after, encoding="utf-8")
