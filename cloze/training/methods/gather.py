"""Vectors of all processes, with gradient: the in-batch negatives of a run under torchrun.

Every process computes the loss of the joined batch. For each shard the backward pass of the gather sums the gradients
of all processes, and DistributedDataParallel averages over processes. So the gradient of encoder and heads is the one
that a single process would compute on the joined batch, whatever the loss and the number of processes.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from cloze.training.evaluation.measures import Embed


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


def gather(*rows: Tensor) -> tuple[Tensor, ...]:
    """Rows (n, ...) of this process -> rows (processes x n, ...) in the order of ranks; unchanged if there is one.

    All tensors of one dtype share one collective in the forward pass and one in the backward pass.
    """
    if not many():
        return rows
    gathered = dict[int, Tensor]()
    for dtype in dict.fromkeys(tensor.dtype for tensor in rows):  # a set could have another order in each process
        places = [place for place, tensor in enumerate(rows) if tensor.dtype == dtype]
        joined = _Gather.apply(*(rows[place] for place in places))  # type: ignore[no-untyped-call]  # torch types none
        gathered |= zip(places, joined, strict=True)
    return tuple(gathered[place] for place in range(len(rows)))


def own(rows: Tensor) -> Tensor:
    """Rows of all processes -> those of this one, so each process may compute its own loss; gradients are averaged."""
    return rows.chunk(distributed.get_world_size())[distributed.get_rank()] if many() else rows


def of_first(draw: Tensor, device: torch.device) -> Tensor:
    """What the first process drew, on the device of the model, for a step with one draw for all rows.

    All processes must call it.
    """
    if many():
        draw = draw.to(device)
        distributed.broadcast(draw, 0)
    return draw


def totals(*numbers: Tensor) -> tuple[Tensor, ...]:
    """The sum of each tensor over all processes, a scalar in fp32, which is exact for counts up to 16 million."""
    (sums,) = gather(torch.stack([tensor.sum().float() for tensor in numbers]).unsqueeze(0))  # (processes, tensors)
    return sums.sum(0).unbind()


def shared(embed: Embed) -> Embed:
    """`embed` for n processes together: each embeds every n-th text, and all get all vectors.

    All processes must call it with the same texts.
    """
    rank, processes = rank_and_count()

    def embed_own(texts: Sequence[str]) -> NDArray[np.float32]:
        parts = [np.empty((0, 0), np.float32)] * processes
        distributed.all_gather_object(parts, embed(texts[rank::processes]))
        vectors = np.empty((len(texts), parts[0].shape[1]), np.float32)
        for first, part in enumerate(parts):
            vectors[first::processes] = part
        return vectors

    return embed_own if many() else embed


def average_gradients(module: torch.nn.Module) -> None:
    """Average the gradients of all processes after a backward pass that bypassed DistributedDataParallel."""
    gradients = [weight.grad for weight in module.parameters() if weight.grad is not None]
    if not many() or not gradients:
        return
    joined = parameters_to_vector(gradients)  # one collective; all weights are fp32
    distributed.all_reduce(joined)
    vector_to_parameters(joined / distributed.get_world_size(), gradients)


class _Gather(torch.autograd.Function):
    """Gathers tensors of one dtype, side by side in one buffer."""

    @staticmethod
    def forward(context: Any, *rows: Tensor) -> tuple[Tensor, ...]:
        joined = torch.cat([tensor.flatten() for tensor in rows])
        shards = joined.new_empty(distributed.get_world_size(), len(joined))
        distributed.all_gather(list(shards), joined)
        parts = shards.split([tensor.numel() for tensor in rows], dim=1)
        gathered = tuple(part.reshape(-1, *tensor.shape[1:]) for part, tensor in zip(parts, rows, strict=True))
        fixed = (
            tensor
            for tensor, needs_gradient in zip(gathered, context.needs_input_grad, strict=True)
            if not needs_gradient
        )
        context.mark_non_differentiable(*fixed)
        return gathered

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        needed = [
            gradient
            for gradient, needs_gradient in zip(gradients, context.needs_input_grad, strict=True)
            if needs_gradient
        ]
        joined = torch.cat([gradient.flatten() for gradient in needed])
        distributed.all_reduce(joined)
        parts = iter(joined.split([gradient.numel() for gradient in needed]))
        return tuple(
            own(next(parts).view_as(gradient)) if needs_gradient else None
            for gradient, needs_gradient in zip(gradients, context.needs_input_grad, strict=True)
        )
