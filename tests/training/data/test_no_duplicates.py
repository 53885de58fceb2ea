"""Training on batches in which no text occurs twice: what the method sees, and what is refused."""

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies
from killed_runs import fit
from recipes import arguments, load_recipe

from cloze.command import run as run_command
from cloze.training.data.sampler import DistinctSampler
from cloze.training.data.stored_rows import Row
from cloze.training.fit import main
from cloze.training.methods.simcse import SimCSE
from cloze.training.model.views import View
from cloze.training.recipes.command import recipe_of
from cloze.training.run_folder import Run

THINGS = ["dog", "man", "letter", "city", "rain", "guitar", "field", "text"]


@pytest.fixture
def keys(tmp_path: Path, tiny_bert: Path) -> dict[str, object]:
    """Of a run of three epochs of four batches, on pairs whose second texts occur several times."""
    path = tmp_path / "pairs.csv"
    lines = [f"The {a} and the {b} run.,Nothing but a {a}." for a in THINGS for b in THINGS[:3]]
    path.write_text("a,b\n" + "\n".join(lines) + "\n", encoding="utf-8")
    found = {"encoder": tiny_bert, "corpus": path, "columns": ["a", "b"], "batch_size": 6, "no_duplicates": True}
    return found | {"epochs": 3, "learning_rate": 1e-3, "log_steps": 1, "held_out": 0, "save_steps": 2}


def test_the_method_sees_no_text_twice(
    keys: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[Sequence[Row]] = []
    views = SimCSE.views

    def recorded(self: SimCSE, rows: Sequence[Row]) -> dict[str, View]:
        batches.append(rows)
        return views(self, rows)

    monkeypatch.setattr(SimCSE, "views", recorded)
    fit(load_recipe("simcse", keys), Run(tmp_path / "run"))
    assert len(batches) == 12
    assert all(max(Counter(text for row in rows for text in row).values()) == 1 for rows in batches)
    assert batches[:4] != batches[4:8]


def naive(rows: Sequence[Row], order: Sequence[int], size: int) -> list[list[int]]:
    """Every row that waits is looked at again for each batch."""
    waiting, batches = list(order), list[list[int]]()
    while True:
        batch, texts, left = list[int](), set[str](), list[int]()
        for place, index in enumerate(waiting):
            if len(batch) == size:
                left += waiting[place:]
                break
            if texts.isdisjoint(rows[index]):
                batch.append(index)
                texts.update(rows[index])
            else:
                left.append(index)
        if len(batch) < size:
            return batches
        batches.append(batch)
        waiting = left


@hypothesis.given(strategies.integers(0, 2**31 - 1))
def test_the_batches_are_those_of_a_naive_loop(seed: int) -> None:
    chance = random.Random(seed)
    rows = [(f"a{chance.randrange(40)}", f"b{min(chance.randrange(40), chance.randrange(40))}") for _ in range(200)]
    sampler = DistinctSampler(rows, 8, seed)
    found = list(sampler.order(torch.Generator().manual_seed(seed)))
    order = torch.randperm(200, generator=torch.Generator().manual_seed(seed)).tolist()
    whole = naive(rows, order, 8)[:25]
    assert [found[place : place + 8] for place in range(0, 8 * len(whole), 8)] == whole
    assert len(whole) > 10


def test_a_text_of_many_rows_is_not_read_for_every_batch() -> None:
    class Counted(list[Row]):
        reads = 0

        def __getitem__(self, index: Any) -> Any:
            Counted.reads += 1
            return super().__getitem__(index)

    rows = Counted(
        [(f"text {number}", "the same" if number % 3 == 0 else f"other {number}") for number in range(30_000)]
    )
    order = list(DistinctSampler(rows, 16, 1))
    assert len(order) == 30_000 // 16 * 16
    assert Counted.reads < 10 * len(rows)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"group_by_length": True}, "no_duplicates and group_by_length order the corpus in two ways; choose one"),
        ({"weights": [1]}, "no_duplicates and weights order the corpus in two ways; choose one"),
        (
            {"batch_size": 12, "encoder": "./nowhere"},
            "only 8 rows have no text in common, and batch_size is 12; lower it",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    words: dict[str, object],
    message: str,
    keys: dict[str, object],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command(lambda: main(["simcse", *arguments(keys | words), "--out", str(tmp_path / "run")])) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "expected"), [([], False), (["--no-duplicates"], True), (["--no-no-duplicates"], False)]
)
def test_a_switch_whose_name_begins_with_no(words: list[str], expected: bool) -> None:
    recipe, _ = recipe_of("simcse", ["--corpus", "unused.txt", *words], "cloze.training.fit simcse")
    assert recipe.no_duplicates is expected
