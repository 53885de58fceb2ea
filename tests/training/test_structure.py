"""The folders of training/: imports that point one way in few steps."""

import ast
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "training").rglob("*.py")
}
FLOORS = 7


@cache
def imports(module: str) -> frozenset[str]:
    """The modules of training/ that a module imports, in functions too."""
    found = set()
    for node in ast.walk(ast.parse(FILES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module in FILES:
            inside = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {name if name in FILES else node.module for name in inside}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in FILES}
    return frozenset(found - {module})


@cache
def floor(module: str) -> int:
    return 1 + max((floor(below) for below in imports(module)), default=0)


def test_no_chain_of_imports_is_long() -> None:
    assert max(map(floor, FILES)) <= FLOORS


def test_folders_import_one_another_in_one_direction() -> None:
    """The commands and what all folders share (errors, options) are in training/ itself."""
    below: dict[str, set[str]] = {}
    for module in FILES:
        folders = (name.split(".")[1] for name in (module, *imports(module)) if name.count(".") > 1)
        own, *others = [*folders] if module.count(".") > 1 else [""]
        below.setdefault(own, set()).update(set(others) - {own})
    order = list(TopologicalSorter(below).static_order())  # raises CycleError
    assert len(order) > 1


def test_no_two_modules_share_a_name() -> None:
    names = Counter(path.stem for path in FILES.values() if not path.stem.startswith("__"))
    assert [name for name, count in names.items() if count > 1] == []
