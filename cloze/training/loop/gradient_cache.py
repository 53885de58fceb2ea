"""GradCache (arXiv:2101.06983): the gradient of a large contrastive batch with the memory of a small chunk.

Every chunk is first encoded without gradient. The loss over all results gives a gradient for each result. Then every
chunk is encoded again, with gradient, and the gradient of its result is backpropagated. The second pass begins from the
random state of the first. Its dropout is therefore the same, and it gives the gradient that one pass over all chunks
would give.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from cloze.training.methods.contrastive import BatchObjective
from cloze.training.model.views import Pass, View, trimmed


class _Chunk(NamedTuple):
    """Some rows of a view, and the pass that they go through."""

    argument: str  # of the loss
    run: Pass
    name: str  # of the view
    rows: Tensor
    view: View


def backward_in_chunks(
    objective: BatchObjective,
    views: dict[str, View],
    size: int,
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> dict[str, Tensor]:
    """Add the gradient of the loss to that of the weights, `size` rows at a time; return the detached outputs.

    `autocast` gives a context for each pass: a single one would reuse weights that were cast without gradient.
    """
    with autocast():
        views = objective.draw(views)
    passes = objective.passes()
    chunks = [
        _Chunk(argument, run, name, rows, part)
        for argument, run in passes.items()
        for name, view in views.items()
        for rows, part in trimmed(view, size, objective.tokenwise)
    ]
    states, results = [], []
    for chunk in chunks:
        states.append(_RandomState(chunk.view["input_ids"].device))
        with autocast(), torch.no_grad():
            results.append(chunk.run(chunk.name, chunk.view))
    leaves = {argument: {name: _leaf(chunks, results, argument, name) for name in views} for argument in passes}
    with autocast():
        outputs = objective.loss(views=views, **leaves)
    outputs["loss"].backward()
    for chunk, state in zip(chunks, states, strict=True):
        with state.restored(), autocast():
            again = chunk.run(chunk.name, chunk.view)
        if again.requires_grad:  # False for a frozen encoder
            again.backward(_gradient(leaves[chunk.argument][chunk.name])[chunk.rows])
    return {name: value.detach() for name, value in outputs.items()}


def _leaf(chunks: list[_Chunk], results: list[Tensor], argument: str, name: str) -> Tensor:
    """The results of one pass over one view, in the view's order, as a leaf that takes a gradient."""
    of_view = [
        (chunk.rows, result)
        for chunk, result in zip(chunks, results, strict=True)
        if (chunk.argument, chunk.name) == (argument, name)
    ]
    order = torch.cat([rows for rows, _ in of_view]).argsort()
    return torch.cat([result for _, result in of_view])[order].requires_grad_()


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


class _RandomState:
    """The current state of the random generators of the CPU and of `device`."""

    def __init__(self, device: torch.device) -> None:
        self._devices = [device] if device.type == "cuda" else []
        self._states = [torch.cuda.get_rng_state(device) for device in self._devices]
        self._cpu = torch.get_rng_state()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore that state within the context."""
        with torch.random.fork_rng(self._devices):
            torch.set_rng_state(self._cpu)
            for device, state in zip(self._devices, self._states, strict=True):
                torch.cuda.set_rng_state(state, device)
            yield
