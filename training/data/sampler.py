"""Orders of the corpus that are not simply random.

An epoch's order depends on the seed and the epoch alone, so that a resumed run continues at the same place.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler
from transformers.trainer_pt_utils import get_length_grouped_indices

__all__ = ["LengthGroupedSampler", "NeighbourSampler"]


class _EpochSampler(Sampler[int]):
    """Every index below `size` once, in an order drawn from the epoch's generator."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """accelerate calls this before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return self.order(torch.Generator().manual_seed(self.seed + self.epoch))

    @abstractmethod
    def order(self, generator: torch.Generator) -> Iterator[int]:
        """The indices of one epoch."""


class LengthGroupedSampler(_EpochSampler):
    """Texts of similar length together, so that little of a batch is padding.

    Blocks of 50 random batches are sorted by length and cut into batches; all full batches are then shuffled.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        super().__init__(len(lengths), seed)
        self.lengths = list(lengths)
        self.batch_size = batch_size

    def order(self, generator: torch.Generator) -> Iterator[int]:
        indices = get_length_grouped_indices(self.lengths, self.batch_size, generator=generator)
        whole = len(indices) // self.batch_size
        for batch in torch.randperm(whole, generator=generator).tolist():
            yield from indices[batch * self.batch_size : (batch + 1) * self.batch_size]
        yield from indices[whole * self.batch_size :]


class NeighbourSampler(_EpochSampler):
    """Runs of consecutive texts: a batch then holds several texts of each of its articles."""

    def __init__(self, size: int, run: int, seed: int) -> None:
        super().__init__(size, seed)
        self.run = run

    def order(self, generator: torch.Generator) -> Iterator[int]:
        for start in torch.randperm(-(-self.size // self.run), generator=generator).tolist():
            yield from range(start * self.run, min(self.size, (start + 1) * self.run))
