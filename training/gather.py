"""Vectors of all processes, with gradient: the in-batch negatives of a run under torchrun.

Every process takes the loss of the joined batch. The backward pass of the gather sums what all processes ask of a
shard, DistributedDataParallel averages over processes, and so the gradient is that of one process on the joined batch,
for encoder and heads alike, whatever the loss and whatever the number of processes.
"""

from typing import Any

import torch
from torch import Tensor, distributed

__all__ = ["average_gradients", "gather", "many", "own"]


def many() -> bool:
    """Whether this is one of several processes."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def gather(rows: Tensor) -> Tensor:
    """Rows (n, ...) of this process -> rows (processes x n, ...) in the order of ranks; the same where there is one."""
    return _Gather.apply(rows) if many() else rows


def own(rows: Tensor) -> Tensor:
    """Rows of all processes -> those of this process, of which it may take a loss of its own: the mean counts."""
    return rows.chunk(distributed.get_world_size())[distributed.get_rank()] if many() else rows


def average_gradients(module: torch.nn.Module) -> None:
    """What DistributedDataParallel does to gradients, where a backward pass went around it."""
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
