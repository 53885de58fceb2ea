"""What is kept of former vectors."""

import numpy as np
import pytest
from numpy.typing import NDArray

from cloze.service.inference.model import OVERHEAD, Cache
from cloze.service.inference.model import _key as key_of

GRAPH, OTHER = "0" * 64, "1" * 64
ENTRY = 4 * 8 + OVERHEAD


def row(value: float) -> NDArray[np.float32]:
    return np.full(8, value, dtype=np.float32)


def test_the_least_recently_used_goes_first() -> None:
    cache = Cache(2 * ENTRY)
    for name in (b"a", b"b"):
        cache.add(name, row(ord(name)))
    assert cache.get(b"a") is not None
    cache.add(b"c", row(3))
    assert cache.get(b"b") is None
    assert np.array_equal(cache.get(b"a"), row(ord("a")))
    assert (len(cache), cache.currsize) == (2, 2 * ENTRY)


@pytest.mark.parametrize("limit", [0, ENTRY - 1])
def test_without_room_nothing_is_kept(limit: int) -> None:
    cache = Cache(limit)
    cache.add(b"a", row(1))
    assert cache.get(b"a") is None
    assert (len(cache), cache.currsize) == (0, 0)


def test_a_copy_is_kept_not_the_batch() -> None:
    cache, batch = Cache(ENTRY), np.ones((1000, 8), dtype=np.float32)
    cache.add(b"a", batch[0])
    batch[:] = 2
    kept = cache.get(b"a")
    assert kept is not None
    assert kept.base is None
    assert np.array_equal(kept, row(1))


def test_graph_and_ids_are_the_key() -> None:
    assert key_of(GRAPH, [1, 2, 3]) == key_of(GRAPH, [1, 2, 3])
    assert (
        len({key_of(GRAPH, [1, 2, 3]), key_of(OTHER, [1, 2, 3]), key_of(GRAPH, [1, 2]), key_of(GRAPH, [1, 3, 2])}) == 4
    )
