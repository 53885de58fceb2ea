"""Vectors of all processes, with gradient: the in-batch negatives of a run under torchrun.

Every process computes the loss of the joined batch. The backward pass of the gather sums the gradients of all processes
for a shard, and DistributedDataParallel averages over processes. So the gradient is that of one process on the joined
batch, for encoder and heads alike, whatever the loss and the number of processes.
"""

from typing import Any

import torch
from torch import Tensor, distributed

__all__ = ["average_gradients", "gather", "many", "own", "rank_and_count", "total", "wait"]


def many() -> bool:
    """Whether this is one of several processes."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def rank_and_count() -> tuple[int, int]:
    """This process's number, from 0, and how many processes there are."""
    return (distributed.get_rank(), distributed.get_world_size()) if many() else (0, 1)


def wait() -> None:
    """Wait for all processes."""
    if many():
        distributed.barrier()


def gather(rows: Tensor) -> Tensor:
    """Rows (n, ...) of this process -> rows (processes x n, ...) in the order of ranks; unchanged if there is one."""
    if not many():
        return rows
    gathered: Tensor = _Gather.apply(rows)  # type: ignore[no-untyped-call]  # torch types no custom function
    return gathered


def own(rows: Tensor) -> Tensor:
    """Rows of all processes -> those of this one, so each process may compute its own loss; gradients are averaged."""
    return rows.chunk(distributed.get_world_size())[distributed.get_rank()] if many() else rows


def total(numbers: Tensor) -> Tensor:
    """The sum of the numbers of all processes, a scalar."""
    return gather(numbers.sum().view(1)).sum()


def average_gradients(module: torch.nn.Module) -> None:
    """Average the gradients of all processes after a backward pass that bypassed DistributedDataParallel."""
    if not many():
        return
    for weight in module.parameters():
        if weight.grad is not None:
            distributed.all_reduce(weight.grad)
            weight.grad /= distributed.get_world_size()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, rows: Tensor) -> Tensor:
        rows = rows.contiguous()
        shards = [torch.empty_like(rows) for _ in range(distributed.get_world_size())]
        distributed.all_gather(shards, rows)
        return torch.cat(shards)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone(memory_format=torch.contiguous_format)  # summed in place
        distributed.all_reduce(gradient)
        return own(gradient)
