import random

import pytest

from training.data.sampler import LengthGroupedSampler, NeighbourSampler

LENGTHS = random.Random(0).choices(range(1, 101), k=203)


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


def test_neighbours_stay_together_in_runs_of_random_order() -> None:
    order = list(NeighbourSampler(203, 8, seed=0))
    assert sorted(order) == list(range(203))
    starts = [index for index in order if index % 8 == 0]
    assert starts != sorted(starts)
    for start in starts:
        place = order.index(start)
        run = order[place : place + 8]
        assert run[: min(8, 203 - start)] == list(range(start, min(203, start + 8)))
    other = NeighbourSampler(203, 8, seed=0)
    other.set_epoch(1)
    assert list(other) != order == list(NeighbourSampler(203, 8, seed=0))
