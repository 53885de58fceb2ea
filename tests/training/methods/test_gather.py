"""Two processes, each with half the rows, against one process with all."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from contrastive_methods import METHODS, add_masked_head, build, gradients
from contrastive_methods import ROWS as EVERY
from numpy.typing import NDArray
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel
from two_processes import in_two

from cloze.training.loop.gradient_cache import backward_in_chunks
from cloze.training.methods.contrastive import BatchObjective
from cloze.training.methods.gather import average_gradients, gather, many, own, shared
from cloze.training.model.views import View

COUNT = 4  # rows; two a process
ROWS, SEED = EVERY[1:], 2  # of DiffCSE: with it, more words of one half than of the other are to guess
TASKS = ("detection", "mlm", "correction")  # of DiffCSE's discriminator
Gradients = dict[str, Tensor]


def drawn(objective: BatchObjective, rows: list[tuple[str, ...]], seed: int = 1) -> dict[str, View]:
    """Views of all rows with the step's random choices made, so that any part of the rows meets the same ones."""
    torch.manual_seed(seed)
    views = objective.draw(objective.views(rows))
    objective.draw = lambda views: views
    return views


def diffcse(task: str, folder: Path) -> BatchObjective:
    """Without dropout; `detection` has BatchNorm in training mode, which sees the rows of both processes."""
    words = {"task": [task]} if task == "detection" else {"task": [task], "projector": ["tanh"]}
    objective = build("diffcse", folder, dropout=False, generator=[str(folder)], detection_weight=["1"], **words)
    if task == "detection":
        objective.projector.train()
    return objective


def halves(views: dict[str, View], rank: int) -> dict[str, View]:
    half = slice(rank * COUNT // 2, (rank + 1) * COUNT // 2)
    return {name: {key: tensor[half] for key, tensor in view.items()} for name, view in views.items()}


def share_of_two(rank: int, folder: Path) -> dict[str, Any]:
    """Gradients after averaging, of the plain pass and of GradCache, for each method; and the gather by itself.

    DiffCSE, whose BatchNorm refuses GradCache, has only the plain pass. `collectives` are those that Python calls: the
    ones of DistributedDataParallel are not among them.
    """
    found: dict[str, Any] = {"gather": gathered(rank)}
    for task in TASKS:
        objective = diffcse(task, folder)
        wrapped = DistributedDataParallel(objective)
        with collectives() as calls:
            wrapped(**halves(drawn(objective, ROWS, SEED), rank))["loss"].backward()
        found[task] = {"gradients": gradients(objective), "collectives": calls}
    found["draws"] = draws(rank, folder)
    for case, (name, rows, words) in METHODS.items():
        objective = build(name, folder, dropout=False, **words)
        views = drawn(objective, rows[:COUNT])
        mine = halves(views, rank)
        wrapped = DistributedDataParallel(objective)  # as in training: it would wait for an idle weight
        with collectives() as plain_calls:
            loss = wrapped(**mine)["loss"]
            loss.backward()
        plain = gradients(objective)
        with collectives() as cached_calls:
            cached_loss = backward_in_chunks(objective, mine, 1)["loss"]
            average_gradients(objective)
        found[case] = {"plain": (loss.detach(), plain), "cached": (cached_loss, gradients(objective))}
        found[case]["collectives"] = {"plain": plain_calls, "cached": cached_calls}
    return found


def draws(rank: int, folder: Path) -> dict[str, list[Any]]:
    """What a step draws, where each process has its own random numbers."""
    rates: dict[str, list[Any]] = {}
    for scope in ("pass", "op", "sentence"):
        objective = build("ssimcse", folder, scope=[scope])
        torch.manual_seed(rank)
        rates[scope] = [view["rates"].tolist() for view in objective.draw(objective.views(ROWS[:2])).values()]
    combined = build("diffcse", folder, generator=[str(folder)], edits=["replace", "insert", "delete"])
    torch.manual_seed(rank)
    return rates | {"edits": [combined._kind() for _ in range(20)]}


@contextmanager
def collectives() -> Iterator[list[str]]:
    """The names of the collectives that are called within the context."""
    calls: list[str] = []

    def noted(name: str) -> Any:
        original = getattr(distributed, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            calls.append(name)
            return original(*arguments, **keywords)

        return mock.patch.object(distributed, name, call)

    with noted("all_gather"), noted("all_reduce"):
        yield calls


def lengths(texts: Sequence[str]) -> NDArray[np.float32]:
    """A process that is given no text gives no row."""
    assert len(texts) < 3, "of three texts, two at most are one process's"
    return np.array([[len(text), 0] for text in texts], np.float32).reshape(-1, 2)


def gathered(rank: int) -> dict[str, Any]:
    """Tensors of two dtypes, one of which takes no gradient although its dtype could."""
    rows = (torch.arange(6.0).view(2, 3) + 10 * rank).requires_grad_()
    column = (torch.arange(2.0) + 10 * rank).requires_grad_()
    fixed, counts = torch.full((2, 1, 2), float(rank)), torch.tensor([rank, 7, 8])
    with collectives() as calls:
        whole, long, ranks, scores = gather(rows, counts, fixed, column)
        weights = torch.arange(12.0).view(4, 3) * (rank + 1)  # what each process asks of every row
        ((whole * weights).sum() + 2 * scores.sum()).backward()
    assert [each.requires_grad for each in (whole, long, ranks, scores)] == [True, False, False, True]
    return {
        "whole": whole.detach(),
        "own": own(whole.detach()),
        "gradient": rows.grad,
        "scores": (scores.detach(), column.grad),
        "fixed": (long, ranks),
        "calls": calls,
        "many": many(),
        "embedded": [shared(lengths)(texts).tolist() for texts in (["a", "bb", "ccc"], ["a"])],
    }


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> Path:
    return add_masked_head(tiny_bert, tmp_path_factory.mktemp("masked"))


@pytest.fixture(scope="module")
def shares(tmp_path_factory: pytest.TempPathFactory, encoder: Path) -> list[dict[str, Any]]:
    return in_two(share_of_two, tmp_path_factory.mktemp("shares"), encoder)


def test_a_step_has_one_draw_for_all_processes(shares: list[dict[str, Any]]) -> None:
    """Of the rates of a pass (S-SimCSE, section 3.1) and of the kind of an edit; each sentence has its own rate."""
    first, second = (share["draws"] for share in shares)
    for name in ("pass", "op", "edits"):
        assert first[name] == second[name]
    assert first["sentence"] != second["sentence"]
    assert len(set(first["edits"])) == 3


@pytest.mark.parametrize("case", METHODS)
def test_the_gradient_is_that_of_one_process_on_all_rows(
    case: str, shares: list[dict[str, Any]], encoder: Path
) -> None:
    name, rows, words = METHODS[case]
    objective = build(name, encoder, dropout=False, **words)
    loss = objective(**drawn(objective, rows[:COUNT]))["loss"]
    loss.backward()
    expected = gradients(objective)
    assert any(gradient.abs().max() > 1e-3 for gradient in expected.values())
    assert expected.keys() == {key for key, weight in objective.named_parameters() if weight.requires_grad}
    for share in shares:
        for its_loss, its_gradient in (share[case]["plain"], share[case]["cached"]):
            torch.testing.assert_close(its_loss, loss.detach(), atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(its_gradient, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("task", TASKS)
def test_the_gradient_of_diffcse_is_that_of_one_process(task: str, shares: list[dict[str, Any]], encoder: Path) -> None:
    objective = diffcse(task, encoder)
    views = drawn(objective, ROWS, SEED)
    if task != "detection":  # one process has more words to guess than the other
        counts = sum((view["labels"] >= 0).sum(1) for view in views.values())
        assert counts[: COUNT // 2].sum() != counts[COUNT // 2 :].sum()
    objective(**views)["loss"].backward()
    expected = gradients(objective)
    assert expected
    for share in shares:
        torch.testing.assert_close(share[task]["gradients"], expected, atol=1e-5, rtol=1e-4)


def test_rows_come_in_the_order_of_ranks_and_gradients_are_summed(shares: list[dict[str, Any]]) -> None:
    first = torch.arange(6.0).view(2, 3)
    for rank, share in enumerate(shares):
        found = share["gather"]
        torch.testing.assert_close(found["whole"], torch.cat([first, first + 10]))
        torch.testing.assert_close(found["own"], first + 10 * rank)
        torch.testing.assert_close(found["gradient"], 3 * torch.arange(12.0).view(4, 3)[2 * rank : 2 * rank + 2])
        torch.testing.assert_close(found["scores"], (torch.tensor([0.0, 1, 10, 11]), torch.full((2,), 4.0)))
        ranks = torch.tensor([0.0, 0, 1, 1]).view(4, 1, 1).expand(4, 1, 2)
        torch.testing.assert_close(found["fixed"], (torch.tensor([0, 7, 8, 1, 7, 8]), ranks))
        assert found["calls"] == ["all_gather", "all_gather", "all_reduce"]  # one for each dtype, one back
        assert found["many"]
        assert found["embedded"] == [[[1, 0], [2, 0], [3, 0]], [[1, 0]]]


@pytest.mark.parametrize("case", [*METHODS, *TASKS])
def test_a_step_has_one_collective_for_all_tensors(case: str, shares: list[dict[str, Any]]) -> None:
    """Whatever the number of views, of Matryoshka dimensions and of weights. Counts of words are in a second one."""
    once = ["all_gather", "all_reduce"]
    twice = ["all_gather", "all_gather", "all_reduce", "all_reduce"]
    expected = twice if case in ("masked words", "mlm", "correction") else once
    for share in shares:
        if case in TASKS:
            assert share[case]["collectives"] == expected
        else:
            averaged = ["all_reduce"]  # the gradients, which GradCache keeps from DistributedDataParallel
            assert share[case]["collectives"] == {"plain": expected, "cached": expected + averaged}


def test_one_process_gathers_itself() -> None:
    rows = torch.rand(3, 2, requires_grad=True)
    assert gather(rows)[0] is rows
    assert shared(lengths) is lengths
    assert own(rows) is rows
    assert not many()
