"""An LRU cache of vectors, bounded in bytes and shared by all models.

A vector does not depend on its batch, so a cached vector is the one that the graph would compute again.
"""

from typing import Final

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

Vector = NDArray[np.float32]

OVERHEAD: Final = 512  # bytes of an entry besides its vector's; 470 measured


class Cache:
    """Not thread-safe: it belongs to the event loop. With a limit of 0 bytes it stays empty."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._vectors: LRUCache[bytes, Vector] = LRUCache(limit, getsizeof=lambda vector: vector.nbytes + OVERHEAD)

    def __len__(self) -> int:
        return len(self._vectors)

    @property
    def size(self) -> int:
        """Bytes in use."""
        return int(self._vectors.currsize)

    def get(self, key: bytes) -> Vector | None:
        return self._vectors.get(key)

    def add(self, key: bytes, vector: Vector) -> None:
        """Store a copy: the vector itself is a view that would keep its whole batch in memory."""
        if vector.nbytes + OVERHEAD <= self.limit:
            self._vectors[key] = vector.copy()
