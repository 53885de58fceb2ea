"""Vectors of all processes, with gradient: the in-batch negatives of a run under torchrun.

Every process takes the loss of the joined batch. The backward pass of the gather sums what all processes ask of a
shard, DistributedDataParallel averages over processes, and so the gradient is that of one process on the joined batch,
for encoder and heads alike, whatever the loss and whatever the number of processes.
"""

import torch
import torch.distributed
from torch import Tensor
from torch.distributed.nn.functional import all_gather

__all__ = ["gather"]


def gather(rows: Tensor) -> Tensor:
    """Rows (n, ...) of this process -> rows (processes x n, ...) in the order of ranks; the same where there is one."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return rows
    return torch.cat(all_gather(rows.contiguous()))
