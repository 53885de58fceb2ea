"""The training methods: a module for each, which has the method's name, with one objective."""

from importlib import import_module

from cloze.training.methods.objective import Objective

__all__ = ["objective_of"]


def objective_of(method: str) -> type[Objective]:
    """The class that trains by a method, of the names that recipes give."""
    module = import_module(f"{__name__}.{method}")
    (found,) = (
        kind
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Objective) and kind.__module__ == module.__name__
    )
    return found
