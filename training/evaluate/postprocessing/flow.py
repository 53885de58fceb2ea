"""BERT-flow (arXiv:2011.05864): a small Glow that maps vectors to a standard Gaussian, trained on the vectors alone.

Three levels of three steps; a step is a scale and shift per dimension, a linear mixing of all dimensions, and an
additive coupling 32 wide. After each level half of the dimensions are finished. One pass over the vectors by Adam at
1e-3 with gradients clipped at 1, as in the published code; the encoder is not trained. Unlike Glow's, the prior is the
standard Gaussian on every level.
"""

from itertools import pairwise
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

__all__ = ["EPOCHS", "Flow", "fit_flow", "flow_vectors"]

LEVELS: Final = 3
DEPTH: Final = 3
WIDTH: Final = 32
RATE: Final = 1e-3
EPOCHS: Final = 1
BATCH: Final = 64
SEED: Final = 0


def flow_vectors(vectors: NDArray[np.floating], epochs: int = EPOCHS) -> NDArray[np.float32]:
    """Vectors (n, d) -> latent vectors (n, d) of a flow that was trained on them."""
    inputs = torch.from_numpy(vectors.astype(np.float32))
    flow = fit_flow(inputs, epochs)
    with torch.no_grad():
        latent: NDArray[np.float32] = flow(inputs)[0].numpy()
    return latent


def fit_flow(vectors: Tensor, epochs: int = EPOCHS) -> "Flow":
    """A flow for vectors (n, d), by maximum likelihood; the same one for the same vectors."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        flow = Flow(vectors)
        optimizer = torch.optim.Adam(flow.parameters(), lr=RATE)
        for _ in range(epochs):
            for rows in torch.randperm(len(vectors)).split(BATCH):
                loss = -flow.log_likelihood(vectors[rows]).mean() / vectors.shape[1]
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(flow.parameters(), 1.0)
                optimizer.step()
    return flow.eval()


class Flow(nn.Module):
    """Invertible: vectors (n, d) -> latent vectors (n, d) and the logarithm of the volume's change, a scalar."""

    def __init__(self, vectors: Tensor) -> None:
        """The first scales and shifts give these vectors mean 0 and variance 1 in every step."""
        super().__init__()
        self.steps = nn.ModuleList()
        for number in range(LEVELS * DEPTH):
            step = _Step(vectors)
            self.steps.append(step)
            with torch.no_grad():
                vectors = step(vectors)[0]
            if number % DEPTH == DEPTH - 1:
                vectors = vectors[:, : vectors.shape[1] // 2]

    def forward(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        finished, volume = [], torch.zeros(())
        for number, step in enumerate(self.steps):
            vectors, change = step(vectors)
            volume = volume + change
            if number % DEPTH == DEPTH - 1:
                half = vectors.shape[1] // 2
                finished.append(vectors[:, half:])
                vectors = vectors[:, :half]
        return torch.cat([*finished, vectors], 1), volume

    def log_likelihood(self, vectors: Tensor) -> Tensor:
        """(n, d) -> (n), under the standard Gaussian."""
        latent, volume = self(vectors)
        found: Tensor = -0.5 * (latent.square() + float(np.log(2 * np.pi))).sum(1) + volume
        return found


class _Step(nn.Module):
    def __init__(self, vectors: Tensor) -> None:
        super().__init__()
        d = vectors.shape[1]
        deviation = vectors.std(0).clamp(min=1e-6)
        self.log_scale = nn.Parameter(-deviation.log())
        self.shift = nn.Parameter(-vectors.mean(0) / deviation)
        self.mixing = nn.Parameter(nn.init.orthogonal_(torch.empty(d, d)))
        widths = (d // 2, WIDTH, WIDTH)
        hidden = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
        last = nn.Linear(WIDTH, d - d // 2)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.coupling = nn.Sequential(*hidden, last)

    def forward(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        vectors = (vectors * self.log_scale.exp() + self.shift) @ self.mixing
        half = vectors.shape[1] // 2
        first, second = vectors[:, :half], vectors[:, half:]
        vectors = torch.cat([first, second + self.coupling(first)], 1)
        return vectors, self.log_scale.sum() + torch.linalg.slogdet(self.mixing)[1]
