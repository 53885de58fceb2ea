"""What is done to vectors on their way out: cut, normalise, compare, write as JSON. Numpy only."""

import numpy as np
import orjson
from numpy.typing import NDArray

__all__ = ["cosines", "finish", "to_json"]

Vectors = NDArray[np.float32]

ROWS = 64  # written at once; between two slices other threads get their turn


def finish(vectors: Vectors, *, normalize: bool, dimensions: int | None = None) -> Vectors:
    """Cut to the first `dimensions`, then give each row length 1; a row of zeros stays as it is."""
    cut = vectors[:, :dimensions]
    return _units(cut).astype(np.float32) if normalize else np.ascontiguousarray(cut)


def cosines(vectors: Vectors) -> list[float]:
    """The cosine of the first row with each other row, within [-1, 1]."""
    units = _units(vectors)
    cosine: list[float] = np.clip(units[1:] @ units[0], -1.0, 1.0).tolist()
    return cosine


def to_json(vectors: Vectors) -> bytes:
    """A list of lists, each number as short as float32 allows."""
    slices = (vectors[row : row + ROWS] for row in range(0, len(vectors), ROWS))
    return b"[" + b",".join(orjson.dumps(part, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1] for part in slices) + b"]"


def _units(vectors: Vectors) -> NDArray[np.float64]:
    wide = vectors.astype(np.float64)  # squares of large float32 would overflow
    lengths = np.linalg.norm(wide, axis=1, keepdims=True)
    return wide / np.where(lengths > 0, lengths, 1)
