"""The folders of training/: imports that point one way."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "training").rglob("*.py")
}


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


def test_folders_import_one_another_in_one_direction() -> None:
    """The commands and what all folders share (errors, options) are in training/ itself."""
    below: dict[str, set[str]] = {}
    for module in FILES:
        folders = (name.split(".")[1] for name in (module, *imports(module)) if name.count(".") > 1)
        own, *others = [*folders] if module.count(".") > 1 else [""]
        below.setdefault(own, set()).update(set(others) - {own})
    order = list(TopologicalSorter(below).static_order())  # raises CycleError
    assert len(order) > 1
