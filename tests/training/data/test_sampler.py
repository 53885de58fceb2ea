import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from sentence_transformers.base.sampler import NoDuplicatesBatchSampler

from cloze.training.data.sampler import (
    DistinctSampler,
    LengthGroupedSampler,
    RandomSampler,
    WeightedSampler,
    WholeBatches,
)
from cloze.training.errors import CorpusError

LENGTHS = random.Random(0).choices(range(1, 101), k=203)


def epoch_seed(seed: int, epoch: int) -> int:
    return int(np.random.SeedSequence((seed, epoch)).generate_state(1, np.uint64)[0])


def order_of(seed: int, epoch: int, size: int = 1000) -> list[int]:
    sampler = RandomSampler(size, seed)
    sampler.set_epoch(epoch)
    return list(sampler)


def test_no_epoch_of_a_seed_has_the_order_of_another_seeds_epoch() -> None:
    """With seed + epoch, epoch 1 of seed 0 would be epoch 0 of seed 1."""
    orders = {tuple(order_of(seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    assert all(sorted(order) == list(range(1000)) for order in orders)


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (1, 0), (0, 1), (2**31 - 1, 10_000)])
def test_the_order_is_that_of_numpys_seed_sequence(seed: int, epoch: int) -> None:
    generator = torch.Generator().manual_seed(epoch_seed(seed, epoch))
    assert order_of(seed, epoch) == torch.randperm(1000, generator=generator).tolist()
    assert order_of(seed, epoch) == order_of(seed, epoch)


def test_the_orders_of_this_version_stay() -> None:
    """A run that is continued after an update would otherwise read some texts twice and others never."""
    assert epoch_seed(0, 1) == 5836529245451711556
    assert order_of(0, 0, 6) == [0, 4, 3, 5, 1, 2]
    assert order_of(0, 1, 6) == [0, 4, 5, 1, 2, 3]
    assert order_of(1, 0, 6) == [2, 1, 4, 3, 5, 0]


@pytest.mark.parametrize(
    "sampler",
    [
        lambda seed: LengthGroupedSampler(LENGTHS, 4, seed),
        lambda seed: DistinctSampler(pairs(203, 100), 4, seed),
        lambda seed: WeightedSampler(FILES, (1, 1, 2), seed),
    ],
)
def test_the_second_epoch_of_a_seed_is_not_the_first_of_the_next(sampler: Callable[[int], Any]) -> None:
    one, next_one = sampler(1), sampler(2)
    one.set_epoch(1)
    assert list(one) != list(next_one)


def test_every_text_once_and_batches_of_like_length() -> None:
    order = list(LengthGroupedSampler(LENGTHS, 4, seed=0))
    assert sorted(order) == list(range(203))
    assert len(LengthGroupedSampler(LENGTHS, 4, seed=0)) == 203
    spreads = [max(lengths) - min(lengths) for lengths in batches(order)]
    at_random = random.Random(0).sample(range(203), 203)
    assert sum(spreads) < 0.2 * sum(max(lengths) - min(lengths) for lengths in batches(at_random))
    longest = [max(lengths) for lengths in batches(order)]
    assert longest != sorted(longest, reverse=True)


@pytest.mark.parametrize("epoch", [0, 3])
def test_the_order_is_that_of_seed_and_epoch(epoch: int) -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sampler = LengthGroupedSampler(LENGTHS, 4, seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(1, epoch) == order(1, epoch)
    assert order(1, epoch) != order(2, epoch)
    assert order(1, epoch) != order(1, epoch + 1)


def batches(order: list[int]) -> list[list[int]]:
    return [[LENGTHS[index] for index in order[start : start + 4]] for start in range(0, 200, 4)]


def pairs(count: int, texts: int) -> list[tuple[str, str]]:
    """Pairs of random texts, of which there are so few that most occur in several rows, in both columns."""
    chance = random.Random(3)
    return [(str(chance.randrange(texts)), str(chance.randrange(texts))) for _ in range(count)]


def cut(order: list[int], size: int) -> list[list[int]]:
    return [order[start : start + size] for start in range(0, len(order), size)]


@pytest.mark.parametrize(("count", "texts", "size"), [(203, 100, 4), (203, 1000, 16), (64, 40, 8), (500, 60, 16)])
def test_no_text_is_twice_in_a_batch(count: int, texts: int, size: int) -> None:
    rows = pairs(count, texts)
    sampler = DistinctSampler(rows, size, seed=0)
    found = cut(list(sampler), size)
    assert len(found) == count // size
    assert all(len(batch) == size for batch in found)
    for batch in found:
        seen = Counter(text for index in batch for text in set(rows[index]))
        assert max(seen.values()) == 1


def test_the_batches_are_those_of_sentence_transformers() -> None:
    """On rows from which one order of them makes all batches, it draws the same order from the same generator."""
    rows = pairs(200, 300)
    columns = dict(zip(("a", "b"), map(list, zip(*rows, strict=True)), strict=True))
    theirs = NoDuplicatesBatchSampler(
        Dataset.from_dict(columns), batch_size=8, drop_last=True, generator=torch.Generator(), seed=5
    )
    ours = DistinctSampler(rows, 8, seed=5)
    for epoch in (0, 1):
        theirs.seed = epoch_seed(5, epoch) - epoch  # to which it adds the epoch
        theirs.set_epoch(epoch)
        ours.set_epoch(epoch)
        assert cut(list(ours), 8) == list(theirs)


def test_without_duplicates_every_row_comes_once() -> None:
    rows = [(str(number), f"{number}, too") for number in range(64)]
    assert sorted(DistinctSampler(rows, 8, seed=0)) == list(range(64))


def test_a_row_that_waited_comes_first() -> None:
    """Two texts, each in half of the rows: every batch has one row of each."""
    rows = [("a",)] * 5 + [("b",)] * 5
    order = list(DistinctSampler(rows, 2, seed=1))
    assert sorted(order) == list(range(10))
    assert all(sorted(rows[index] for index in batch) == [("a",), ("b",)] for batch in cut(order, 2))


def test_a_tail_that_fills_no_batch_is_left_out_and_drawn_anew() -> None:
    """Six rows of one text and two of others make two batches of two; two more come from a second order."""
    rows = [("a",)] * 6 + [("b",), ("c",)]
    order = list(DistinctSampler(rows, 2, seed=0))
    assert len(order) == 8
    assert all(len({rows[index] for index in batch}) == 2 for batch in cut(order, 2))
    assert Counter(order)[6] + Counter(order)[7] >= 4


def test_a_text_twice_in_one_row_is_kept() -> None:
    assert sorted(DistinctSampler([("a", "a"), ("b", "c")], 2, seed=0)) == [0, 1]


def test_rows_without_one_distinct_batch_are_refused() -> None:
    message = "only 2 rows have no text in common, and batch_size is 3; lower it, or remove duplicates"
    with pytest.raises(CorpusError, match=message):
        DistinctSampler([("a", "b"), ("b", "a"), ("c", "b"), ("d", "d")], 3, seed=0)


def test_distinct_batches_are_those_of_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sampler = DistinctSampler(pairs(203, 100), 4, seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(1, 2) == order(1, 2)
    assert order(1, 2) != order(2, 2)
    assert order(1, 2) != order(1, 3)


FILES = np.repeat([0, 1, 2], [100, 60, 40])  # of 200 texts


@pytest.mark.parametrize(
    ("weights", "counts"),
    [
        ((1, 1, 1), (67, 67, 66)),  # 66.67 each: the first two have the texts that are left
        ((5, 3, 2), (100, 60, 40)),  # the files' own sizes: every text once
        ((0.1, 0.2, 0.7), (20, 40, 140)),
        ((0, 1, 0), (0, 200, 0)),
    ],
)
def test_each_file_has_its_share_of_an_epoch(weights: tuple[float, ...], counts: tuple[int, ...]) -> None:
    sampler = WeightedSampler(FILES, weights, seed=0)
    order = list(sampler)
    assert len(order) == len(sampler) == 200
    found = Counter(FILES[order].tolist())
    assert tuple(found[file] for file in range(3)) == counts
    for file, size in enumerate((100, 60, 40)):
        often = Counter(Counter(index for index in order if FILES[index] == file).values())
        least, more = divmod(counts[file], size)  # each text `least` times, and `more` of them once more
        expected = {least + 1: more, least: size - more}
        assert often == {times: number for times, number in expected.items() if times and number}


def test_a_weighted_order_is_mixed_and_that_of_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sampler = WeightedSampler(FILES, (1, 1, 2), seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(2, 0)
    assert order(1, 0) != order(1, 1)
    half = Counter(FILES[order(1, 0)[:100]].tolist())
    assert all(abs(half[file] - expected) < 15 for file, expected in enumerate((25, 25, 50)))


def test_the_counts_of_files_are_rounded_by_the_largest_remainder() -> None:
    """Of 10 texts, the weights 5, 3 and 2.5 are worth 4.76, 2.86 and 2.38."""
    sampler = WeightedSampler(np.repeat([0, 1, 2], [2, 4, 4]), [5, 3, 2.5], seed=0)
    assert sampler.counts.tolist() == [5, 3, 2]


@pytest.mark.parametrize(("count", "size"), [(10, 8), (12, 12), (3, 0)])
def test_a_short_batch_at_the_end_is_left_out(count: int, size: int) -> None:
    order = RandomSampler(count, seed=0)
    whole = WholeBatches(order, 4)
    assert len(whole) == size
    assert [*whole] == [*RandomSampler(count, seed=0)][:size]
