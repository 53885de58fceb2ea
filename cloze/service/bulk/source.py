"""Input files: finding them, and reading their rows in parts of a fixed number of rows.

The ending of its name says what a file is: .parquet, or .jsonl, .csv, .tsv and .txt, also compressed: .gz, .bz2, .xz or
.zst. A row of a .txt is a line. Part n of a file always has the same rows, so that a job can go on where another one
ended. A row that cannot be read, such as a line that is not JSON, is returned with the reason.
"""

import glob
import io
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice
from os.path import basename, commonpath, normpath, realpath, relpath
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from cloze.encoding.errors import OptionError
from cloze.encoding.rows import COMPRESSIONS, ENDINGS, SEPARATORS, Row, RowsError, ending_of, read_rows, uncompressed
from cloze.service.bulk.embed import check_columns

BUFFER: Final = 2**16  # bytes
SAMPLE: Final = 1000  # rows of a file of text that decide its columns
PARQUET: Final = ".parquet"


class SourceError(OptionError):
    """The input cannot be read."""


class File(NamedTuple):
    """One input file: its path, its name in generated ids, and its size in bytes."""

    path: str
    name: str
    size: int


class Failure(NamedTuple):
    """A row without a vector, by its id, and why."""

    id: str
    reason: str


class Part(NamedTuple):
    """Rows of one file: `table` has those that could be read. They take about `bytes` of the file."""

    file: int
    number: int
    table: pa.Table
    failures: list[Failure]
    bytes: int


@dataclass(frozen=True)
class Source:
    """Files of the same columns. `schema` has the columns that are kept; a column `id` is added where none is named."""

    filesystem: fs.FileSystem
    files: tuple[File, ...]
    schema: pa.Schema
    text_column: str
    id_column: str | None
    rows_per_part: int

    @classmethod
    def find(
        cls,
        location: str,
        *,
        text_column: str = "text",
        id_column: str | None = None,
        columns: tuple[str, ...] = (),
        rows_per_part: int = 8192,
        out: str = "",
    ) -> "Source":
        """Find a file, the files of a folder or of a pattern, or those of a URL such as s3://bucket/folder.

        Those in the folder `out`, which the job writes, are none of them. The first file with rows decides the columns.
        Raises SourceError where there is none, and OptionError where it does not have these columns.
        """
        filesystem, files = _find(location, out)
        found = next(filter(None, (_columns(filesystem, file.path) for file in files)), None)
        if found is None:
            raise SourceError(f"{location} has no rows")
        names, schema_of = found
        wanted = {*(columns or names), text_column, *filter(None, [id_column])}
        if missing := sorted(wanted.difference(names)):
            raise OptionError(f"there is no column {missing[0]!r}; the columns are {', '.join(names)}")
        if id_column is None and "id" in wanted:
            raise OptionError("the input has a column 'id': write --id-column id, or keep other columns only")
        schema = schema_of([name for name in names if name in wanted])
        check_columns(schema, text_column)
        return cls(filesystem, files, schema, text_column, id_column, rows_per_part)

    def parts(self, file: int, skip: Callable[[int], bool] = lambda number: False) -> Iterator[Part]:
        """Yield the parts of a file, less those that `skip` names. Raises SourceError where it cannot be read."""
        path = self.files[file].path
        with _opened(self.filesystem, path) as raw:
            read = self._parquet_parts if _is_parquet(path) else self._text_parts
            yield from read(file, raw, skip)

    def identity(self) -> dict[str, Any]:
        """Return what decides which rows a part has, for the output folder's record of the job."""
        return {
            "id_column": self.id_column,
            "rows_per_file": self.rows_per_part,
            "columns": {field.name: str(field.type) for field in self.schema},
            "input": [[file.name, file.size] for file in self.files],
        }

    def row_id(self, table: pa.Table, row: int) -> str:
        return str(table.column(self.id_column or "id")[row].as_py())

    def _parquet_parts(self, file: int, raw: pa.NativeFile, skip: Callable[[int], bool]) -> Iterator[Part]:
        """Parts end where a row group ends, so that a group whose parts are all skipped is not read."""
        path, contents, size = self.files[file].path, pq.ParquetFile(raw), self.rows_per_part
        if any(name not in contents.schema_arrow.names for name in self.schema.names) or not all(
            contents.schema_arrow.field(field.name).type == field.type for field in self.schema
        ):
            raise self._other_columns(path)
        row_bytes = self.files[file].size / max(contents.metadata.num_rows, 1)
        number = first = 0
        for group in range(contents.num_row_groups):
            facts = contents.metadata.row_group(group)
            numbers = range(number, number - (-facts.num_rows // size))
            if not all(map(skip, numbers)):
                batches = contents.iter_batches(size, [group], self.schema.names)
                for part_number, batch in zip(numbers, batches, strict=True):
                    if not skip(part_number):
                        table = pa.Table.from_batches([batch]).select(self.schema.names)
                        start = first + (part_number - number) * size
                        ids = range(start, start + len(table))
                        yield Part(
                            file, part_number, self._with_ids(table, file, ids), [], round(len(table) * row_bytes)
                        )
            number, first = numbers.stop, first + facts.num_rows

    def _text_parts(self, file: int, raw: pa.NativeFile, skip: Callable[[int], bool]) -> Iterator[Part]:
        path = self.files[file].path
        stream = io.BufferedReader(raw, BUFFER)
        content = uncompressed(stream, path)
        rows, number, start = (row for _, row in read_rows(content, path)), 0, 0
        with_header = ending_of(path) in SEPARATORS
        while chunk := list(islice(rows, self.rows_per_part)):
            record = next((row for row in chunk if not isinstance(row, str)), None)  # in a .csv each has all columns
            if with_header and record is not None and not record.keys() >= set(self.schema.names):
                raise self._other_columns(path)
            end = stream.tell()
            if not skip(number):
                table, failures = self._table(file, number * self.rows_per_part, chunk)
                yield Part(file, number, table, failures, end - start)
            number, start = number + 1, end

    def _other_columns(self, path: str) -> SourceError:
        columns = ", ".join(f"{field.name} ({field.type})" for field in self.schema)
        return SourceError(f"{path} does not have the columns {columns} of the files before it; embed it by itself")

    def _table(self, file: int, first: int, rows: list[Row]) -> tuple[pa.Table, list[Failure]]:
        """Return the rows as a table, and those that are not like the others. `first` is the first row's index."""
        good = [index for index, row in enumerate(rows) if not isinstance(row, str)]
        reasons = {index: row for index, row in enumerate(rows) if isinstance(row, str)}
        try:
            table = pa.Table.from_pylist([rows[index] for index in good], self.schema)
        except (pa.ArrowException, UnicodeEncodeError, OverflowError, TypeError, ValueError):
            reasons |= {index: reason for index in good if (reason := self._mismatch(rows[index]))}
            good = [index for index in good if index not in reasons]
            table = pa.Table.from_pylist([rows[index] for index in good], self.schema)
        name = self.files[file].name
        failures = [Failure(f"{name}:{first + index + 1}", reason) for index, reason in sorted(reasons.items())]
        return self._with_ids(table, file, [first + index for index in good]), failures

    def _mismatch(self, row: Row) -> str | None:
        for field in self.schema:
            value = row.get(field.name)  # type: ignore[union-attr]
            try:
                pa.array([value], field.type)
            except (pa.ArrowException, UnicodeEncodeError, OverflowError, TypeError, ValueError):
                return f"the column {field.name!r} is {value!r:.100}, not of type {field.type}"
        return None

    def _with_ids(self, table: pa.Table, file: int, rows: Iterable[int]) -> pa.Table:
        if self.id_column is not None:
            return table
        return table.add_column(0, "id", pa.array([f"{self.files[file].name}:{row + 1}" for row in rows], pa.string()))


def _find(location: str, out: str) -> tuple[fs.FileSystem, tuple[File, ...]]:
    try:
        filesystem, infos = _list(location)
    except (OSError, pa.ArrowException, ValueError) as error:
        raise SourceError(f"{location} cannot be listed: {error}") from error
    files = [info for info in infos if info.type == fs.FileType.File]
    if out and len(files) > 1:
        resolved = realpath if isinstance(filesystem, fs.LocalFileSystem) else normpath
        files = [info for info in files if not resolved(info.path).startswith(f"{resolved(out)}/")]
    if not files:
        raise SourceError(f"{location} is not there, or has no files of texts; name a file, a folder or a pattern")
    unknown = [info.path for info in files if not _is_known(info.path)]
    if unknown:
        raise SourceError(
            f"{unknown[0]} is of no known kind; the known endings are {', '.join((PARQUET, *ENDINGS))}, all but the "
            f"first also with {', '.join(COMPRESSIONS)}"
        )
    files = sorted((info for info in files if info.size), key=lambda info: info.path)
    if not files:
        raise SourceError(f"{location} is empty")
    root = commonpath([info.path for info in files]) if len(files) > 1 else ""
    names = [relpath(info.path, root) if root else basename(info.path) for info in files]
    return filesystem, tuple(File(info.path, name, info.size) for info, name in zip(files, names, strict=True))


def _list(location: str) -> tuple[fs.FileSystem, list[fs.FileInfo]]:
    """Return what a location names: all known files of a folder, but a file or a pattern whatever it is called."""
    if "://" in location:
        fixed, star, _ = location.partition("*")
        filesystem, path = fs.FileSystem.from_uri(fixed.rpartition("/")[0] if star else location)
        pattern = f"{path}/{location[len(fixed.rpartition('/')[0]) + 1 :]}" if star else None
    else:
        filesystem, path, pattern = fs.LocalFileSystem(), str(Path(location).absolute()), None
        if glob.has_magic(location) and not Path(location).exists():
            return filesystem, filesystem.get_file_info(
                [str(Path(match).absolute()) for match in glob.glob(location, recursive=True)]
            )
    top = filesystem.get_file_info(path)
    if top.type != fs.FileType.Directory:
        return filesystem, [top]
    inside = filesystem.get_file_info(fs.FileSelector(path, recursive=True))
    if pattern:
        return filesystem, [info for info in inside if fnmatchcase(info.path, pattern)]
    seen = [info for info in inside if info.type == fs.FileType.File and not _hidden(relpath(info.path, path))]
    known = [info for info in seen if _is_known(info.path)]
    if others := sorted({info.path for info in seen} - {info.path for info in known}):
        example = relpath(others[0], path)
        print(f"{location}: {len(others):,} files of no known kind are left out, such as {example}", file=sys.stderr)
    return filesystem, known


def _is_known(path: str) -> bool:
    return _is_parquet(path) or ending_of(path) in ENDINGS


def _is_parquet(path: str) -> bool:
    return path.lower().endswith(PARQUET)  # which compresses its columns itself


def _hidden(path: str) -> bool:
    return any(part[0] in "._" for part in path.split("/"))


def _columns(filesystem: fs.FileSystem, path: str) -> tuple[list[str], Callable[[Sequence[str]], pa.Schema]] | None:
    """Return the columns of a file, and what gives the types of some of them; of a .jsonl its first rows decide.

    None of a file of texts without rows, as a partition may be.
    """
    if _is_parquet(path):
        with _opened(filesystem, path) as raw:
            schema = pq.read_schema(raw).remove_metadata()
        twice = next((name for name in schema.names if schema.names.count(name) > 1), None)
        if twice is not None:
            raise SourceError(f"{path} has two columns of the name {twice!r}; rename one of them")
        return schema.names, lambda names: pa.schema([schema.field(name) for name in names])
    rows = _sample(filesystem, path)
    if not rows:
        return None
    return list(dict.fromkeys(name for _, row in rows for name in row)), lambda names: pa.schema(
        [(name, _type(path, name, [(line, row.get(name)) for line, row in rows])) for name in names]
    )


def _sample(filesystem: fs.FileSystem, path: str) -> list[tuple[int, dict[str, Any]]]:
    """Return the first rows that can be read, with their lines. Raises SourceError where none of them can be."""
    with _opened(filesystem, path) as raw:
        rows = list(islice(read_rows(uncompressed(io.BufferedReader(raw, BUFFER), path), path), SAMPLE))
    records = [(line, row) for line, row in rows if not isinstance(row, str)]
    if rows and not records:
        (line, reason), *_ = rows
        raise SourceError(f"{path} has no row that can be read in its first {SAMPLE} rows; line {line}: {reason}")
    return records


@contextmanager
def _opened(filesystem: fs.FileSystem, path: str) -> Iterator[pa.NativeFile]:
    try:
        with filesystem.open_input_file(path) as raw:
            yield raw
    except RowsError as error:
        raise SourceError(str(error)) from error
    except (OSError, pa.ArrowException) as error:
        raise SourceError(f"{path} cannot be read: {error}") from error


def _type(path: str, name: str, values: list[tuple[int, Any]]) -> pa.DataType:
    """Return the type of most values of one column, so that a stray value fails its own row only.

    Raises SourceError where these have none together.
    """
    kinds = [type(value) for _, value in values if value is not None]
    commonest = max(dict.fromkeys(kinds), key=kinds.count, default=str)
    numbers = {int, float} if commonest in (int, float) else {commonest}
    kept = [(line, value) for line, value in values if type(value) in numbers]
    column_type = _common([value for _, value in kept])
    if column_type is None:
        ends = (end for end in range(1, len(kept)) if _common([value for _, value in kept[: end + 1]]) is None)
        end = next(ends, 0)
        line, value = kept[end]
        why = "does not fit the rows before" if end else "no column of a parquet file can hold; write it as text"
        raise SourceError(
            f"{path}, line {line}: the column {name!r} is {value!r:.100}, which {why}, or name the columns to keep "
            "with --columns"
        )
    if _has_empty_struct(column_type):
        raise SourceError(
            f"{path}: the column {name!r} holds empty objects, which a parquet file cannot; name the columns to keep "
            "with --columns"
        )
    return _texts_for_null(column_type)


def _texts_for_null(column_type: pa.DataType) -> pa.DataType:
    """Return a type with texts where the first rows had no value, such as in an empty list."""
    if pa.types.is_null(column_type):
        return pa.string()
    if pa.types.is_list(column_type):
        return pa.list_(_texts_for_null(column_type.value_type))
    if pa.types.is_struct(column_type):
        fields = (column_type.field(index) for index in range(column_type.num_fields))
        return pa.struct([field.with_type(_texts_for_null(field.type)) for field in fields])
    return column_type


def _common(values: list[Any]) -> pa.DataType | None:
    """Return a type of all the values; None where there is none."""
    try:
        return pa.array(values).type
    except OverflowError:  # wider than int64
        with suppress(pa.ArrowException, OverflowError, TypeError):
            return pa.array(values, pa.uint64()).type
    except (pa.ArrowException, TypeError):
        pass
    return None


def _has_empty_struct(column_type: pa.DataType) -> bool:
    inside = [column_type.field(index).type for index in range(column_type.num_fields)]
    return (pa.types.is_struct(column_type) and not inside) or any(map(_has_empty_struct, inside))
