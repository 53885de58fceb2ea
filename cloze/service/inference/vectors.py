"""The last steps for vectors: cut, normalise, compare, and write them as JSON or as bytes.

float            JSON numbers, as short as float32 allows
base64, float16  base64 of the row as little-endian float32, float16
int8, uint8      JSON integers: each row scaled so that its largest magnitude is 127; uint8 is the same plus 128
binary, ubinary  JSON integers: a bit for each dimension, 1 if it is above 0, eight to a byte, the first highest,
                 zeros after the last; ubinary gives the bytes 0…255, binary the same minus 128

As bytes, the rows follow each other as the same numbers, little-endian; float and base64 are then both float32.
"""

from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from cloze.service.errors import ValidationFailed

Vectors = NDArray[np.float32]
Array = NDArray[Any]

Format = Literal["float", "base64", "float16", "int8", "uint8", "binary", "ubinary"]


class Raw(NamedTuple):
    """Rows as bytes, and what numpy needs to read them: the type's name, the shape."""

    parts: list[bytes]
    dtype: str
    shape: tuple[int, int]


ROWS: Final = 64  # written at once; between two slices, other threads can run
FLOAT16_MAX: Final = 65504


def finish(vectors: Vectors, *, normalize: bool, dimensions: int | None = None) -> Vectors:
    """Cut to the first `dimensions`, then give each row length 1; a row of zeros stays as it is."""
    cut = vectors[:, :dimensions]
    return _units(cut).astype(np.float32) if normalize else np.ascontiguousarray(cut)


def chunk_means(vectors: Vectors, owners: Sequence[int], lengths: Sequence[int]) -> Vectors:
    """For each text, the mean of its chunks' unit vectors, weighted by their lengths, (texts, d).

    `owners` has the index of each row's text, in ascending order, and `lengths` the characters of each row's chunk.
    """
    weights = np.maximum(lengths, 1).astype(np.float32)[:, None]
    starts = np.flatnonzero(np.diff(owners, prepend=-1))
    sums = np.add.reduceat(finish(vectors, normalize=True) * weights, starts, axis=0)
    return (sums / np.add.reduceat(weights, starts, axis=0)).astype(np.float32)


def cosines(vectors: Vectors) -> NDArray[np.float64]:
    """The cosine of the first row with every other row, within [-1, 1]."""
    return cosine_matrix(vectors[:1], vectors[1:])[0]  # type: ignore[no-any-return]


def pair_cosines(left: Vectors, right: Vectors) -> NDArray[np.float64]:
    """The cosine of each left row with the right row at the same index, within [-1, 1]."""
    return np.clip((_units(left) * _units(right)).sum(axis=1), -1.0, 1.0)  # type: ignore[no-any-return]


def cosine_matrix(left: Vectors, right: Vectors) -> NDArray[np.float64]:
    """The cosine of every left row with every right row, shape (left, right), within [-1, 1]."""
    return np.clip(_units(left) @ _units(right).T, -1.0, 1.0)


def to_json(vectors: Array, format: Format = "float") -> Iterator[bytes]:
    """Yield the list of `rows`, in parts. Raises ValidationFailed if the format cannot hold a value."""
    write = _base64_rows if format in _BYTES else _dumped_rows
    return chain((b"[",), with_commas(map(write, _packed(vectors, format))), (b"]",))


def to_bytes(vectors: Array, format: Format = "float") -> Raw:
    """Return the rows as bytes, one after the other. Raises ValidationFailed if the format cannot hold a value."""
    parts = list(_packed(vectors, "base64" if format == "float" else format))
    return Raw([part.tobytes() for part in parts], parts[0].dtype.name, (len(vectors), parts[0].shape[1]))


def with_commas(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the parts, with a comma before all but the first."""
    for place, part in enumerate(parts):
        yield b"," + part if place else part


def rows(vectors: Array, format: Format = "float") -> Iterator[bytes]:
    """Yield each row's JSON, a list or a string. Raises ValidationFailed if the format cannot hold a value."""
    parts = _packed(vectors, format)
    write = _base64 if format in _BYTES else _dumps
    return (write(row) for part in parts for row in part)


def pack(vectors: Array, format: Format) -> Array:
    """Return the vectors in the format's own numbers. Raises ValidationFailed if it cannot hold a value."""
    _check(vectors, format)
    return np.ascontiguousarray(_PACK[format](vectors))


def _packed(vectors: Array, format: Format) -> Iterator[Array]:
    """Return the rows in the format's own numbers, ROWS at a time."""
    _check(vectors, format)  # before the first row is written
    return (np.ascontiguousarray(_PACK[format](vectors[row : row + ROWS])) for row in range(0, len(vectors), ROWS))


def _check(vectors: Array, format: Format) -> None:
    largest = float(np.abs(vectors).max(initial=0)) if format == "float16" else 0.0
    if largest > FLOAT16_MAX:
        raise ValidationFailed(
            f"the largest value is {largest:g}, and float16 holds at most {FLOAT16_MAX}: ask for normalised vectors, "
            "or for float or base64",
            "encoding_format",
        )


def _int8(vectors: Array) -> Array:
    wide = vectors.astype(np.float64)
    largest = np.abs(wide).max(axis=1, keepdims=True, initial=0)
    return np.rint(wide * 127 / np.where(largest > 0, largest, 1)).astype(np.int8)


def _uint8(vectors: Array) -> Array:
    return (_int8(vectors).astype(np.int16) + 128).astype(np.uint8)


def _ubinary(vectors: Array) -> Array:
    return np.packbits(vectors > 0, axis=1)


def _binary(vectors: Array) -> Array:
    return (_ubinary(vectors).astype(np.int16) - 128).astype(np.int8)


def _base64(row: Array) -> bytes:
    return b'"' + b64encode(row.tobytes()) + b'"'


def _base64_rows(part: Array) -> bytes:
    return b",".join(map(_base64, part))


def _dumped_rows(part: Array) -> bytes:
    return _dumps(part)[1:-1]


def _dumps(array: Array) -> bytes:
    return orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)


def _units(vectors: Vectors) -> NDArray[np.float64]:
    wide = vectors.astype(np.float64)  # squares of large float32 would overflow
    lengths = np.sqrt(np.add.reduce(wide * wide, axis=1, keepdims=True))
    return wide / np.where(lengths > 0, lengths, 1)


_BYTES: Final = ("base64", "float16")
_PACK: Final[dict[Format, Callable[[Array], Array]]] = {
    "float": lambda vectors: vectors,
    "base64": lambda vectors: vectors.astype("<f4"),
    "float16": lambda vectors: vectors.astype("<f2"),
    "int8": _int8,
    "uint8": _uint8,
    "binary": _binary,
    "ubinary": _ubinary,
}
