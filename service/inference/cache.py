"""An LRU cache of vectors, bounded in bytes and shared by all models.

A vector does not depend on its batch, so a cached vector is the one that the graph would compute again.
"""

from typing import Final

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

Vector = NDArray[np.float32]

OVERHEAD: Final = 512  # bytes of an entry besides its vector's; 470 measured


class Cache(LRUCache[bytes, Vector]):
    """Not thread-safe: it belongs to the event loop. With a limit of 0 bytes it stays empty."""

    @staticmethod
    def getsizeof(vector: Vector) -> int:
        return vector.nbytes + OVERHEAD

    def add(self, key: bytes, vector: Vector) -> None:
        """Store a copy: the vector itself is a view that would keep its whole batch in memory."""
        if self.getsizeof(vector) <= self.maxsize:
            self[key] = vector.copy()
