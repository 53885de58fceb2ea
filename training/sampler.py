"""The order of the corpus with texts of like length together, so that little of a batch is padding."""

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler
from transformers.trainer_pt_utils import get_length_grouped_indices

__all__ = ["LengthGroupedSampler", "NeighbourSampler"]


class LengthGroupedSampler(Sampler[int]):
    """Blocks of 50 random batches are sorted by length and cut into batches; all whole batches are then shuffled.

    An epoch's order depends on seed and epoch alone, so a resumed run finds its place again.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        self.lengths = list(lengths)
        self.batch_size = batch_size
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """accelerate calls this before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        indices = get_length_grouped_indices(self.lengths, self.batch_size, generator=generator)
        whole = len(indices) // self.batch_size
        for batch in torch.randperm(whole, generator=generator).tolist():
            yield from indices[batch * self.batch_size : (batch + 1) * self.batch_size]
        yield from indices[whole * self.batch_size :]


class NeighbourSampler(Sampler[int]):
    """Runs of consecutive texts, in random order: a batch then holds texts of one article beside texts of others.

    An epoch's order depends on seed and epoch alone, so a resumed run finds its place again.
    """

    def __init__(self, size: int, run: int, seed: int) -> None:
        self.size = size
        self.run = run
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """accelerate calls this before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        for start in torch.randperm(-(-self.size // self.run), generator=generator).tolist():
            yield from range(start * self.run, min(self.size, (start + 1) * self.run))
