"""The training methods. Each has a module of its name, with one objective."""

from importlib import import_module

from cloze.training.methods.objective import Objective


def objective_of(method: str) -> type[Objective]:
    """The objective class of a method, by the name that recipes use."""
    module = import_module(f"{__name__}.{method}")
    (objective,) = (
        member
        for member in vars(module).values()
        if isinstance(member, type) and issubclass(member, Objective) and member.__module__ == module.__name__
    )
    return objective
