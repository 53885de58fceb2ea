"""Runs in this process: whole ones, and ones that are killed at a step."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cloze.training.loop import run as loop
from cloze.training.loop.callbacks import Journal
from cloze.training.recipes.recipe import Recipe
from cloze.training.run_folder import Run

__all__ = ["assert_same_weights", "fit", "fit_until_killed", "killed_at", "whole_and_resumed"]


class Killed(Exception):
    pass


@contextmanager
def killed_at(step: int) -> Iterator[None]:
    """Runs in this block end once this step's loss is logged, and one must."""

    class Kill(Journal):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            super().on_log(args, state, control, logs)
            if state.global_step == step and "loss" in (logs or {}):
                raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "Journal", Kill)
        with pytest.raises(Killed):
            yield


def fit(recipe: Recipe, run: Run, resume: bool = False) -> bool:
    return loop.fit(recipe, run, resume)


def fit_until_killed(recipe: Recipe, run: Run, step: int = 3) -> None:
    with killed_at(step):
        fit(recipe, run)


def whole_and_resumed(recipe: Recipe, folder: Path, step: int = 3) -> tuple[Run, Run]:
    """An unbroken run, and one that is killed at a step and resumed: their weights are the same."""
    whole, killed = Run(folder / "whole"), Run(folder / "killed")
    fit(recipe, whole)
    fit_until_killed(recipe, killed, step)
    fit(recipe, killed, resume=True)
    assert_same_weights(whole.path, killed.path)
    return whole, killed


def assert_same_weights(run: Path, other: Path, part: str = "model") -> None:
    """Bit for bit."""
    expected, found = (load_file(each / part / "model.safetensors") for each in (run, other))
    assert found.keys() == expected.keys()
    assert [name for name, weight in expected.items() if not torch.equal(found[name], weight)] == []
