"""docs/keys.md holds every key of every recipe, and docs/commands.md every option of every command.

To write their tables again: python tests/training/test_docs.py
"""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from pydantic.fields import FieldInfo
from pydantic_settings import CliPositionalArg

from cloze.command import COMMANDS
from cloze.options import Options, flag
from cloze.service.bulk.__main__ import BulkOptions
from cloze.service.doctor import DoctorOptions
from cloze.training.adapt import AdaptOptions
from cloze.training.adopt import AdoptOptions
from cloze.training.average import AverageOptions
from cloze.training.bridge import BridgeOptions
from cloze.training.convert import ConvertOptions
from cloze.training.distil_static import DistilStaticOptions
from cloze.training.evaluation.calibrate import CalibrateOptions
from cloze.training.evaluation.head import HeadOptions
from cloze.training.evaluation.options import (
    CompareOptions,
    EvaluateOptions,
    ModelOptions,
    ScoringOptions,
    TemplateOptions,
)
from cloze.training.evaluation.verify import VerifyOptions
from cloze.training.explain import ExplainOptions
from cloze.training.export.__main__ import ExportOptions
from cloze.training.export.options import BundleOptions
from cloze.training.mine import MineOptions
from cloze.training.recipes.command import FitOptions
from cloze.training.recipes.methods import RECIPES
from cloze.training.recipes.recipe import Recipe
from cloze.training.texts import TextsOptions
from cloze.training.weigh import WeighOptions

DOCS = Path(__file__).parents[2] / "docs"
MADE = "made from the code; tests/training/test_docs.py compares"
POSITIONAL = get_args(CliPositionalArg[str])[1]  # the marker of an argument without a name
OPTIONS: dict[str, type[Options]] = {
    "doctor": DoctorOptions,
    "bulk": BulkOptions,
    "adapt": AdaptOptions,
    "fit": FitOptions,
    "pretrain": FitOptions,
    "evaluate": EvaluateOptions,
    "compare": CompareOptions,
    "calibrate": CalibrateOptions,
    "head": HeadOptions,
    "verify": VerifyOptions,
    "texts": TextsOptions,
    "bridge": BridgeOptions,
    "mine": MineOptions,
    "export": ExportOptions,
    "adopt": AdoptOptions,
    "convert": ConvertOptions,
    "distil-static": DistilStaticOptions,
    "templates": TemplateOptions,
    "explain": ExplainOptions,
    "weigh": WeighOptions,
    "average": AverageOptions,
}
SHARED: dict[type[Options], str] = {  # what several commands have, and the title of its section
    BundleOptions: "Options of a new bundle",
    ModelOptions: "Options of a model",
    ScoringOptions: "Options of data to score",
}
DESCRIBED = {  # what the docstring of the options does not say
    "serve": "Serve bundles over HTTP. The options are the [settings of the service](settings.md). `--check` only "
    "loads and tests the bundles.",
    "fit": "Train a sentence encoder with a recipe: `cloze fit RECIPE`. Further options are the [keys of the "
    "recipe](keys.md).",
    "pretrain": "Masked language modelling, continued or from scratch, with the recipe `mlm`. Further options are the "
    "[keys of that recipe](keys.md#mlm).",
}


def table(recipe: type[Recipe], names: list[str]) -> str:
    rows = ["| key | default | meaning |", "| --- | --- | --- |"]
    for name in names:
        field = recipe.model_fields[name]
        rows.append(f"| `{name}` | {default(field)} | {field.description} |")
    return "\n".join(rows) + "\n"


def default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return "" if field.default in (None, (), [], "") else shown(field.default)


def shown(value: object) -> str:
    """As a recipe spells it; texts and paths without quotes."""
    return f"`{value if isinstance(value, str | Path) else json.dumps(value)}`"


def keys() -> str:
    parts = ["## Every method\n\n" + table(Recipe, list(Recipe.model_fields))]
    for method, recipe in RECIPES.items():
        own = [name for name in recipe.model_fields if name not in Recipe.model_fields]
        parts.append(f"## `{method}`\n\n" + table(recipe, own))
    return "\n" + "\n".join(parts) + "\n"


def commands() -> str:
    shared = [f"## {title}\n\n{options_of(kind)}" for kind, title in SHARED.items()]
    return "\n" + "\n".join([*map(section, COMMANDS), *shared]) + "\n"


def section(name: str) -> str:
    """What a command does, and its arguments and options."""
    options = OPTIONS.get(name, Options)
    described = DESCRIBED.get(name) or inspect.cleandoc(options.__doc__ or "")
    also = [
        f"[{title.lower()}](#{title.lower().replace(' ', '-')})"
        for kind, title in SHARED.items()
        if issubclass(options, kind)
    ]
    parts = [
        f"## cloze {name}\n",
        f"{described}\n",
        options_of(options),
        f"It also has the {' and the '.join(also)}.\n" if also else "",
    ]
    return "\n".join(filter(None, parts))


def options_of(options: type[Options]) -> str:
    """The table of a command's own arguments and options: those that it shares have a table of their own."""
    shared = {key for kind in SHARED if kind in options.__mro__[1:] for key in kind.model_fields}
    fields = [(key, field) for key, field in options.model_fields.items() if key not in shared]
    rows = ["| option | default | meaning |", "| --- | --- | --- |"]
    for key, field in sorted(fields, key=lambda item: POSITIONAL not in item[1].metadata):
        written = (field.alias or key).upper() if POSITIONAL in field.metadata else flag(field.alias or key)
        rows.append(f"| `{written}` | {default(field)} | {field.description} |")
    return "\n".join(rows) + "\n" if fields else ""


PAGES = {"keys": keys, "commands": commands}


def with_tables(page: str, name: str, tables: Callable[[], str]) -> str:
    before, rest = page.split(begin := f"<!-- {name}: {MADE} -->\n")
    return before + begin + tables() + (end := f"<!-- end of {name} -->") + rest.split(end)[1]


@pytest.mark.parametrize(("name", "tables"), PAGES.items())
def test_the_page_has_what_the_code_has(name: str, tables: Callable[[], str]) -> None:
    page = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    assert page == with_tables(page, name, tables), "run: python tests/training/test_docs.py"


if __name__ == "__main__":
    for name, tables in PAGES.items():
        path = DOCS / f"{name}.md"
        path.write_text(with_tables(path.read_text(encoding="utf-8"), name, tables), encoding="utf-8")
