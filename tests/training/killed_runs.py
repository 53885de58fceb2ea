"""Runs in this process: whole ones, and ones that are killed at a step."""

import json
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

UNLIKE = {"train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "total_flos"}


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


def assert_same_weights(run: Path, other: Path, part: str = "model") -> None:
    """Bit for bit."""
    expected, found = (load_file(each / part / "model.safetensors") for each in (run, other))
    assert found.keys() == expected.keys()
    assert [name for name, weight in expected.items() if not torch.equal(found[name], weight)] == []


def log(run: Path) -> list[dict[str, Any]]:
    """The entries of the log, without what differs between equal runs."""
    entries = map(json.loads, (run / "log.jsonl").read_text(encoding="utf-8").splitlines())
    return [{key: value for key, value in entry.items() if key not in UNLIKE} for entry in entries]
