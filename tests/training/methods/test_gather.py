"""Two processes, each with half the rows, against one process with all."""

from pathlib import Path
from typing import Any

import pytest
import torch
from contrastive_methods import METHODS, add_masked_head, build, gradients
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from two_processes import in_two

from training.loop.gradient_cache import backward_in_chunks
from training.methods.contrastive import Contrastive
from training.methods.gather import average_gradients, gather, many, own
from training.model.views import View

COUNT = 4  # rows; two a process
Gradients = dict[str, Tensor]


def drawn(objective: Contrastive, rows: list[tuple[str, ...]]) -> dict[str, View]:
    """Views of all rows with the step's random choices made, so that any part of the rows meets the same ones."""
    torch.manual_seed(1)
    views = objective.draw(objective.views(rows))
    objective.draw = lambda views: views
    return views


def share_of_two(rank: int, folder: Path) -> dict[str, Any]:
    """Gradients after averaging, of the plain pass and of GradCache, for each method; and the gather by itself."""
    found: dict[str, Any] = {"gather": gathered(rank)}
    for case, (name, rows, words) in METHODS.items():
        objective = build(name, folder, dropout=False, **words)
        views = drawn(objective, rows[:COUNT])
        half = slice(rank * COUNT // 2, (rank + 1) * COUNT // 2)
        mine = {name: {key: tensor[half] for key, tensor in view.items()} for name, view in views.items()}
        wrapped = DistributedDataParallel(objective)  # as in training: it would wait for an idle weight
        loss = wrapped(**mine)["loss"]
        loss.backward()
        plain = gradients(objective)
        cached_loss = backward_in_chunks(objective, mine, 1)["loss"]
        average_gradients(objective)
        found[case] = {"plain": (loss.detach(), plain), "cached": (cached_loss, gradients(objective))}
    return found


def gathered(rank: int) -> dict[str, Tensor]:
    rows = (torch.arange(6.0).view(2, 3) + 10 * rank).requires_grad_()
    whole = gather(rows)
    weights = torch.arange(12.0).view(4, 3) * (rank + 1)  # what each process asks of every row
    (whole * weights).sum().backward()
    return {"whole": whole.detach(), "own": own(whole.detach()), "gradient": rows.grad, "many": torch.tensor(many())}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> Path:
    return add_masked_head(tiny_bert, tmp_path_factory.mktemp("masked"))


@pytest.fixture(scope="module")
def shares(tmp_path_factory: pytest.TempPathFactory, encoder: Path) -> list[dict[str, Any]]:
    return in_two(share_of_two, tmp_path_factory.mktemp("shares"), encoder)


@pytest.mark.parametrize("way", ["plain", "cached"])
@pytest.mark.parametrize("case", METHODS)
def test_the_gradient_is_that_of_one_process_on_all_rows(
    case: str, way: str, shares: list[dict[str, Any]], encoder: Path
) -> None:
    name, rows, words = METHODS[case]
    objective = build(name, encoder, dropout=False, **words)
    loss = objective(**drawn(objective, rows[:COUNT]))["loss"]
    loss.backward()
    expected = gradients(objective)
    assert any(gradient.abs().max() > 1e-3 for gradient in expected.values())
    assert expected.keys() == {key for key, weight in objective.named_parameters() if weight.requires_grad}
    for share in shares:
        shared_loss, shared = share[case][way]
        torch.testing.assert_close(shared_loss, loss.detach(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(shared, expected, atol=1e-5, rtol=1e-5)


def test_rows_come_in_the_order_of_ranks_and_gradients_are_summed(shares: list[dict[str, Any]]) -> None:
    first = torch.arange(6.0).view(2, 3)
    for rank, share in enumerate(shares):
        found = share["gather"]
        torch.testing.assert_close(found["whole"], torch.cat([first, first + 10]))
        torch.testing.assert_close(found["own"], first + 10 * rank)
        torch.testing.assert_close(found["gradient"], 3 * torch.arange(12.0).view(4, 3)[2 * rank : 2 * rank + 2])
        assert found["many"]


def test_one_process_gathers_itself() -> None:
    rows = torch.rand(3, 2, requires_grad=True)
    assert gather(rows) is rows
    assert own(rows) is rows
    assert not many()
