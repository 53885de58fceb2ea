"""docs/keys.md holds every key of every recipe, as the code has it.

To write the table again: python tests/training/test_docs.py
"""

import json
from pathlib import Path

from cloze.training.recipes.methods import RECIPES
from cloze.training.recipes.recipe import Recipe

PAGE = Path(__file__).parents[2] / "docs" / "keys.md"
BEGIN, END = "<!-- keys: made from the code; tests/training/test_docs.py compares -->\n", "<!-- end of keys -->"


def table(recipe: type[Recipe], names: list[str]) -> str:
    rows = ["| key | default | meaning |", "| --- | --- | --- |"]
    for name in names:
        field = recipe.model_fields[name]
        default = "required" if field.is_required() else "" if field.default in (None, ()) else shown(field.default)
        rows.append(f"| `{name}` | {default} | {field.description} |")
    return "\n".join(rows) + "\n"


def shown(value: object) -> str:
    """As a recipe spells it; texts without their quotes."""
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def keys() -> str:
    parts = ["## Every method\n\n" + table(Recipe, list(Recipe.model_fields))]
    for method, recipe in RECIPES.items():
        own = [name for name in recipe.model_fields if name not in Recipe.model_fields]
        parts.append(f"## `{method}`\n\n" + table(recipe, own))
    return "\n" + "\n".join(parts) + "\n"


def with_keys(page: str) -> str:
    before, rest = page.split(BEGIN)
    return before + BEGIN + keys() + END + rest.split(END)[1]


def test_the_page_has_every_key_as_the_code_has_it() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_keys(page), "run: python tests/training/test_docs.py"


if __name__ == "__main__":
    PAGE.write_text(with_keys(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
