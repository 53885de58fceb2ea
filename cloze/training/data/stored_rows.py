"""Rows of texts in a memory-mapped Arrow file: any row can be read at any time, whatever the file's size.

The operating system keeps what is read in memory, and reclaims that memory when it is needed.
"""

import tempfile
from abc import abstractmethod
from collections.abc import Collection, Iterable, Sequence
from itertools import chain, islice
from typing import Any, Final, Self, overload

import numpy as np
from numpy.typing import NDArray

Row = tuple[str, ...]

BATCH: Final = 10_000  # rows


class _Rows(Sequence[Row]):
    """Base class: a slice of rows is a list."""

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self.row(place) for place in range(*index.indices(len(self)))]
        return self.row(range(len(self))[index])

    @abstractmethod
    def row(self, place: int) -> Row:
        """The row at `place`, from 0 to len - 1."""


class StoredRows(_Rows):
    """The rows of an Arrow table with one column per text."""

    def __init__(self, table: Any) -> None:
        self.columns = table.columns

    @classmethod
    def write(cls, rows: Iterable[Row]) -> Self:
        """Write rows of equal width to a temporary file, which is unlinked once it is mapped.

        Raises OSError.
        """
        import pyarrow as pa  # here, because it is large

        rows = iter(rows)
        first = next(rows, ())
        schema = pa.schema([(str(number), pa.string()) for number in range(len(first))])
        with tempfile.NamedTemporaryFile(prefix="cloze-rows-", suffix=".arrow") as file:
            rows = chain([first] if first else [], rows)
            with pa.ipc.new_file(file, schema) as writer:
                while batch := list(islice(rows, BATCH)):
                    writer.write_batch(pa.record_batch(list(map(list, zip(*batch, strict=True))), schema))
            file.flush()
            return cls(pa.ipc.open_file(pa.memory_map(file.name)).read_all())

    def __len__(self) -> int:
        return len(self.columns[0]) if self.columns else 0

    def row(self, place: int) -> Row:
        return tuple(column[place].as_py() for column in self.columns)


class ChosenRows(_Rows):
    """Some of the rows, in another order. `places` (n) are their places among all rows."""

    def __init__(self, rows: Sequence[Row], places: NDArray[np.int64]) -> None:
        self.rows: Sequence[Row] = rows.rows if isinstance(rows, ChosenRows) else rows
        self.places: NDArray[np.int64] = rows.places[places] if isinstance(rows, ChosenRows) else places

    def __len__(self) -> int:
        return len(self.places)

    def row(self, place: int) -> Row:
        return self.rows[int(self.places[place])]


def places_of(rows: Sequence[Row], wanted: Collection[Row]) -> NDArray[np.int64]:
    """The places of all rows that are among the `wanted` ones, in order."""
    if isinstance(rows, ChosenRows):
        return np.flatnonzero(np.isin(rows.places, places_of(rows.rows, wanted)))
    places: Iterable[int] = range(len(rows))
    if isinstance(rows, StoredRows) and rows:
        import pyarrow as pa  # here, because it is large
        from pyarrow import compute

        firsts = pa.array(sorted({row[0] for row in wanted}), pa.string())  # a first filter that does not build rows
        places = np.flatnonzero(compute.is_in(rows.columns[0], value_set=firsts).to_numpy()).tolist()
    return np.array([place for place in places if rows[place] in wanted], np.int64)
