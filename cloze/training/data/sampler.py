"""The order of the corpus in each epoch.

An epoch's order depends only on the seed and the epoch, so that a resumed run continues at the same place and all
processes agree. The epochs of different seeds have different orders.
"""

import math
from abc import abstractmethod
from collections.abc import Container, Iterator, Sequence
from heapq import heappop, heappush
from itertools import chain, islice, repeat

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Sampler
from transformers.trainer_pt_utils import get_length_grouped_indices

from cloze.training.errors import CorpusError


class EpochSampler(Sampler[int]):
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
        # not seed + epoch, as in accelerate: epoch 1 of a seed would be epoch 0 of the next one
        (state,) = np.random.SeedSequence((self.seed, self.epoch)).generate_state(1, np.uint64)
        return self.order(torch.Generator().manual_seed(int(state)))

    @abstractmethod
    def order(self, generator: torch.Generator) -> Iterator[int]:
        """The indices of one epoch."""


class RandomSampler(EpochSampler):
    """All orders are equally likely."""

    def order(self, generator: torch.Generator) -> Iterator[int]:
        yield from torch.randperm(self.size, generator=generator).tolist()


class LengthGroupedSampler(EpochSampler):
    """Texts of similar length together, so that little of a batch is padding.

    Blocks of 50 random batches are sorted by length and cut into batches; all full batches are then shuffled.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        super().__init__(len(lengths), seed)
        self.lengths = list(lengths)
        self.batch_size = batch_size

    def order(self, generator: torch.Generator) -> Iterator[int]:
        indices = get_length_grouped_indices(self.lengths, self.batch_size, generator=generator)
        full_batches = len(indices) // self.batch_size
        for batch in torch.randperm(full_batches, generator=generator).tolist():
            yield from indices[batch * self.batch_size : (batch + 1) * self.batch_size]
        yield from indices[full_batches * self.batch_size :]


class DistinctSampler(EpochSampler):
    """Batches in which no text occurs twice, in whatever column: it would be a negative of itself.

    A row that does not fit waits for the next batch. At the end, rows that cannot fill a batch are dropped. The batches
    that are then missing come from a new order of all rows, as in sentence-transformers' NoDuplicatesBatchSampler. So
    an epoch has as many batches as one in random order.
    """

    def __init__(self, rows: Sequence[Sequence[str]], batch_size: int, seed: int) -> None:
        """Raises CorpusError if the first order of the rows gives no batch."""
        super().__init__(len(rows), seed)
        self.rows = rows
        self.batch_size = batch_size
        next(iter(self))

    def order(self, generator: torch.Generator) -> Iterator[int]:
        batches = chain.from_iterable(map(self._batches, repeat(generator)))  # endless
        yield from chain.from_iterable(islice(batches, self.size // self.batch_size))

    def _batches(self, generator: torch.Generator) -> Iterator[list[int]]:
        """The full batches of one order of all rows. Raises CorpusError if there is none.

        A row that does not fit is only tried again in a batch without the text that kept it out, so that a text of many
        rows costs no more than others.
        """
        fresh, waiting = enumerate(torch.randperm(self.size, generator=generator).tolist()), _Waiting()
        for count in range(self.size):
            batch, texts = list[int](), set[str]()
            while len(batch) < self.batch_size and (candidate := waiting.oldest(texts) or next(fresh, None)):
                row = self.rows[candidate[1]]
                kept_out = next((text for text in row if text in texts), None)
                if kept_out is None:
                    batch.append(candidate[1])
                    texts.update(row)
                else:
                    waiting.add(kept_out, candidate)
            waiting.end_batch()
            if len(batch) == self.batch_size:
                yield batch
            elif count:
                return
            else:
                raise CorpusError(
                    f"no_duplicates: only {len(batch)} rows have no text in common, and batch_size is "
                    f"{self.batch_size}; lower it, or remove duplicates from the corpus"
                )


class _Waiting:
    """Rows that wait for the next batch, by a text that kept them out. A row is its place in the order and its index.

    `_first` has the place of the first row of each text; outdated entries are skipped.
    """

    def __init__(self) -> None:
        self._rows: dict[str, list[tuple[int, int]]] = {}  # heaps
        self._first: list[tuple[int, str]] = []  # a heap
        self._kept_out: set[str] = set()

    def add(self, text: str, row: tuple[int, int]) -> None:
        heappush(self._rows.setdefault(text, []), row)
        self._kept_out.add(text)

    def oldest(self, texts: Container[str]) -> tuple[int, int] | None:
        """Take the first row that none of the batch's `texts` is known to keep out; None if there is none."""
        while self._first:
            place, text = heappop(self._first)
            rows = self._rows.get(text)
            if rows is None or rows[0][0] != place:
                continue
            if text in texts:
                self._kept_out.add(text)
                continue
            row = heappop(rows)
            if rows:
                heappush(self._first, (rows[0][0], text))
            else:
                del self._rows[text]
            return row
        return None

    def end_batch(self) -> None:
        for text in self._kept_out:
            heappush(self._first, (self._rows[text][0][0], text))
        self._kept_out.clear()


class WeightedSampler(EpochSampler):
    """Draws from each file in proportion to its weight: a part of it, or all of it, once or more, and then a part.

    `counts` has the number of texts per epoch by file, rounded so that they add up to the size (largest remainder).
    """

    def __init__(self, files: NDArray[np.int64], weights: Sequence[float], seed: int) -> None:
        super().__init__(len(files), seed)
        self.places = [torch.from_numpy(np.flatnonzero(files == number)) for number in range(len(weights))]
        shares = np.array(weights) if math.isfinite(sum(weights)) else np.array(weights) / max(weights)
        exact = self.size * shares / sum(shares)
        self.counts = np.floor(exact).astype(int)
        largest = np.argsort(self.counts - exact, kind="stable")
        self.counts[largest[: self.size - self.counts.sum()]] += 1

    def order(self, generator: torch.Generator) -> Iterator[int]:
        indices = torch.cat(
            [_draw(places, int(count), generator) for places, count in zip(self.places, self.counts, strict=True)]
        )
        yield from indices[torch.randperm(len(indices), generator=generator)].tolist()


def _draw(places: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw `count` of the places (n), each equally often or once more."""
    if not count:
        return places[:0]
    passes = [torch.randperm(len(places), generator=generator) for _ in range(-(-count // len(places)))]
    return places[torch.cat(passes)[:count]]


class WholeBatches(Sampler[int]):
    """Another sampler's order without the last, short batch, which would be a smaller step if gradients accumulate."""

    def __init__(self, sampler: EpochSampler, batch_size: int) -> None:
        self.sampler = sampler
        self.size = len(sampler) // batch_size * batch_size

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return islice(iter(self.sampler), self.size)
