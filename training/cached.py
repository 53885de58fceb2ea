"""GradCache (arXiv:2101.06983): the gradient of a large contrastive batch with the memory of a small chunk.

Every chunk is encoded without gradient; the loss over all vectors gives a gradient for each; every chunk is encoded
once more, with gradient, and takes its share. The second pass begins from the random state of the first: the same
dropout, and so the gradient that one pass over all chunks would give.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from training.contrastive import Contrastive
from training.objective import View
from training.trimmed import trimmed

__all__ = ["backward_in_chunks"]


def backward_in_chunks(
    objective: Contrastive,
    views: dict[str, View],
    size: int,
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> dict[str, Tensor]:
    """Add the loss's gradient to the weights', `size` rows of a view at a time; what `forward` returns, detached.

    `autocast` gives a context for each pass: in one for all, weights cast without gradient would serve the second.
    """
    with autocast():
        views = objective.draw(views)
    passes = [(name, rows, chunk) for name, view in views.items() for rows, chunk in trimmed(view, size)]
    states, parts = [], {name: [] for name in views}
    for name, _, chunk in passes:
        states.append(_RandomState(objective.encoder.device))
        with autocast(), torch.no_grad():
            parts[name].append(objective.encode(name, chunk))
    order = {name: torch.cat([rows for of, rows, _ in passes if of == name]) for name in views}  # (n)
    vectors = {name: torch.cat(parts[name])[order[name].argsort()].requires_grad_() for name in views}  # leaves
    with autocast():
        outputs = objective.loss(vectors, views)
    outputs["loss"].backward()
    for (name, rows, chunk), state in zip(passes, states, strict=True):
        with state.restored(), autocast():
            again = objective.encode(name, chunk)
        if again.requires_grad:  # a frozen encoder's does not
            again.backward(_gradient(vectors[name])[rows])
    return {name: value.detach() for name, value in outputs.items()}


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


class _RandomState:
    """The generators of the CPU and of `device` as they are now."""

    def __init__(self, device: torch.device) -> None:
        self._devices = [device] if device.type == "cuda" else []
        self._states = [torch.cuda.get_rng_state(one) for one in self._devices]
        self._cpu = torch.get_rng_state()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """As they were then, within the context; as they are now, after it."""
        with torch.random.fork_rng(self._devices):
            torch.set_rng_state(self._cpu)
            for device, state in zip(self._devices, self._states, strict=True):
                torch.cuda.set_rng_state(state, device)
            yield
