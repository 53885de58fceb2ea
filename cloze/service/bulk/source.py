"""Find input files, and read their rows in parts of a fixed number of rows.

The ending of a file's name decides its kind: .parquet, or .jsonl, .csv, .tsv or .txt, which may be compressed: .gz,
.bz2, .xz or .zst. A row of a .txt is a line. Part n of a file always has the same rows, so that a job can resume where
an earlier one stopped. A row that cannot be read, such as a line that is not JSON, is returned with the reason.
"""

import glob
import io
import posixpath
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice
from os.path import basename, commonpath, normpath, realpath, relpath
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from cloze.encoding.errors import OptionError
from cloze.encoding.rows import COMPRESSIONS, ENDINGS, SEPARATORS, Row, RowsError, ending_of, read_rows, uncompressed
from cloze.service.bulk.embed import check_columns

BUFFER: Final = 2**16  # bytes
FOOTERS: Final = 16  # of parquet files, read at once
DEEPEST: Final = 100  # levels of nested lists and objects
SAMPLE: Final = 1000  # first rows of a text file, which decide its columns
PARQUET: Final = ".parquet"
KINDS: Final[tuple[tuple[Callable[[pa.DataType], bool], tuple[type, ...]], ...]] = (  # of JSON values
    (pa.types.is_string, (str,)),
    (pa.types.is_boolean, (bool,)),
    (pa.types.is_integer, (int,)),
    (pa.types.is_floating, (int, float)),
)


class SourceError(OptionError):
    """The input cannot be read."""


class File(NamedTuple):
    """One input file: its path, its name in generated ids, and its size in bytes."""

    path: str
    name: str
    size: int


class Failure(NamedTuple):
    """The id of a row without a vector, and the reason."""

    id: str
    reason: str


class Part(NamedTuple):
    """Rows of one file. `table` has the readable ones. The part takes about `bytes` bytes of the file."""

    file: int
    number: int
    table: pa.Table
    failures: list[Failure]
    bytes: int


@dataclass(frozen=True)
class Source:
    """Files with the same columns. `schema` has the columns to keep; a column `id` is added if none is named."""

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
        """Find a file, the files in a folder, those that match a pattern, or those at a URL such as s3://bucket/folder.

        Files in the folder `out`, where the job writes, are not input. The first file with rows decides the columns.
        Raises SourceError if there is none, and OptionError if it does not have these columns.
        """
        filesystem, files = _find(location, out)
        found = next(filter(None, (_columns(filesystem, file.path) for file in files)), None)
        if found is None:
            raise SourceError(f"{location} has no rows; name a file, a folder or a pattern with texts")
        names, schema_of = found
        wanted = {*(columns or names), text_column, *filter(None, [id_column])}
        if missing := sorted(wanted.difference(names)):
            raise OptionError(f"there is no column {missing[0]!r}; the columns are {', '.join(names)}")
        if id_column is None and "id" in wanted:
            raise OptionError(
                "the input already has a column 'id'; write --id-column id, or name other columns with --columns"
            )
        schema = schema_of([name for name in names if name in wanted])
        check_columns(schema, text_column)
        _check_parquet(filesystem, [file.path for file in files if _is_parquet(file.path)], schema)
        return cls(filesystem, files, schema, text_column, id_column, rows_per_part)

    def parts(self, file: int, skip: Callable[[int], bool] = lambda number: False) -> Iterator[Part]:
        """Yield the parts of a file, except those that `skip` names. Raises SourceError if it cannot be read."""
        path = self.files[file].path
        with _opened(self.filesystem, path) as raw:
            read = self._parquet_parts if _is_parquet(path) else self._text_parts
            yield from read(file, raw, skip)

    def identity(self) -> dict[str, Any]:
        """Return what determines the rows of each part, for the output folder's record of the job."""
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
        contents, size = pq.ParquetFile(raw), self.rows_per_part
        row_bytes = self.files[file].size / max(contents.metadata.num_rows, 1)
        number = first = 0
        for group in range(contents.num_row_groups):
            facts = contents.metadata.row_group(group)
            numbers = range(number, number - (-facts.num_rows // size))
            if not all(map(skip, numbers)):
                batches = contents.iter_batches(size, [group], self.schema.names)
                for part_number, batch in zip(numbers, batches, strict=True):
                    if not skip(part_number):
                        table = _as_in(self.schema, pa.Table.from_batches([batch]))
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
            if with_header and record is not None and (lacking := set(self.schema.names) - record.keys()):
                raise _other_columns(path, self.schema.field(min(lacking)))
            end = stream.tell()
            if not skip(number):
                table, failures = self._table(file, number * self.rows_per_part, chunk)
                yield Part(file, number, table, failures, end - start)
            number, start = number + 1, end

    def _table(self, file: int, first: int, rows: list[Row]) -> tuple[pa.Table, list[Failure]]:
        """Return the rows as a table, and the failures of those that do not fit. `first` is the first row's index."""
        reasons = {index: row for index, row in enumerate(rows) if isinstance(row, str)}
        reasons |= self._mismatches(rows, reasons, _fits)
        try:
            table = self._table_of(rows, reasons)
        except (pa.ArrowException, UnicodeEncodeError, OverflowError, TypeError, ValueError):
            reasons |= self._mismatches(rows, reasons, _converts)
            table = self._table_of(rows, reasons)
        good = [index for index in range(len(rows)) if index not in reasons]
        name = self.files[file].name
        failures = [Failure(f"{name}:{first + index + 1}", reason) for index, reason in sorted(reasons.items())]
        return self._with_ids(table, file, [first + index for index in good]), failures

    def _table_of(self, rows: list[Row], reasons: Container[int]) -> pa.Table:
        return pa.Table.from_pylist([row for index, row in enumerate(rows) if index not in reasons], self.schema)

    def _mismatches(
        self, rows: list[Row], reasons: Container[int], checker: Callable[[pa.DataType], Callable[[Any], bool]]
    ) -> dict[int, str]:
        """Return the reason why a value does not fit its column, by the index of its row."""
        found: dict[int, str] = {}
        good = {index: row for index, row in enumerate(rows) if index not in reasons}
        for field in self.schema:
            fits = checker(field.type)
            values = ((index, row.get(field.name)) for index, row in good.items())  # type: ignore[union-attr]
            for index, value in values:
                if not fits(value):
                    found.setdefault(index, f"the column {field.name!r} is {value!r:.100}, not of type {field.type}")
        return found

    def _with_ids(self, table: pa.Table, file: int, rows: Iterable[int]) -> pa.Table:
        if self.id_column is not None:
            return table
        return table.add_column(0, "id", pa.array([f"{self.files[file].name}:{row + 1}" for row in rows], pa.string()))


def _fits(column_type: pa.DataType) -> Callable[[Any], bool]:
    """Return what checks a JSON value of a column: pyarrow would make 2.5 the integer 2, and a text its letters."""
    if pa.types.is_list(column_type):
        of_items, fits = _kinds(column_type.value_type), _fits(column_type.value_type)
        return lambda value: (
            value is None or (isinstance(value, list) and (of_items >= set(map(type, value)) or all(map(fits, value))))
        )
    if pa.types.is_struct(column_type):
        fields = [column_type.field(index) for index in range(column_type.num_fields)]
        checks = [(field.name, _fits(field.type)) for field in fields]
        return lambda value: (
            value is None or (isinstance(value, dict) and all(fits(value.get(name)) for name, fits in checks))
        )
    kinds = _kinds(column_type)
    if pa.types.is_integer(column_type):
        return lambda value: type(value) in kinds or (type(value) is float and value.is_integer())
    return lambda value: not kinds or type(value) in kinds


def _kinds(column_type: pa.DataType) -> set[type]:
    """Return the types of JSON values that a column of single values always takes; none if it is another column."""
    kinds = next((kinds for is_of, kinds in KINDS if is_of(column_type)), None)
    return {*kinds, type(None)} if kinds else set()


def _converts(column_type: pa.DataType) -> Callable[[Any], bool]:
    def converts(value: Any) -> bool:
        try:
            pa.array([value], column_type)
        except (pa.ArrowException, UnicodeEncodeError, OverflowError, TypeError, ValueError):
            return False
        return True

    return converts


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
        raise SourceError(f"{location} does not exist, or has no files of texts; name a file, a folder or a pattern")
    unknown = [info.path for info in files if not _is_known(info.path)]
    if unknown:
        raise SourceError(
            f"{unknown[0]} has an unknown ending; the known ones are {', '.join((PARQUET, *ENDINGS))}, and "
            f"{', '.join(COMPRESSIONS)} after any of them except {PARQUET}"
        )
    files = sorted((info for info in files if info.size), key=lambda info: info.path)
    if not files:
        raise SourceError(f"{location} is empty; name a file, a folder or a pattern with texts")
    root = commonpath([info.path for info in files]) if len(files) > 1 else ""
    names = [relpath(info.path, root) if root else basename(info.path) for info in files]
    return filesystem, tuple(File(info.path, name, info.size) for info, name in zip(files, names, strict=True))


def _list(location: str) -> tuple[fs.FileSystem, list[fs.FileInfo]]:
    """Return the files that a location names: all known files of a folder, or the file or the matches of a pattern even
    if their kind is unknown.
    """
    pattern = list[str]()
    if "://" in location:
        address, mark, query = location.partition("?")  # s3:// may have its endpoint in the query
        if "=" not in query:  # a pattern, as in part-??.txt
            address, mark, query = location, "", ""
        fixed, star, _ = address.partition("*")
        folder = fixed.rpartition("/")[0] if star else address
        filesystem, path = fs.FileSystem.from_uri(f"{folder}{mark}{query}")
        pattern = unquote(address[len(folder) + 1 :]).split("/") if star else []
    else:
        filesystem, path = fs.LocalFileSystem(), str(Path(location).absolute())
        if glob.has_magic(location) and not Path(location).exists():
            return filesystem, filesystem.get_file_info(
                [str(Path(match).absolute()) for match in glob.glob(location, recursive=True)]
            )
    top = filesystem.get_file_info(path)
    if top.type != fs.FileType.Directory:
        return filesystem, [top]
    inside = filesystem.get_file_info(fs.FileSelector(path, recursive=True))
    if pattern:
        return filesystem, [info for info in inside if _matches(posixpath.relpath(info.path, path).split("/"), pattern)]
    seen = [info for info in inside if info.type == fs.FileType.File and not _hidden(relpath(info.path, path))]
    known = [info for info in seen if _is_known(info.path)]
    if others := sorted({info.path for info in seen} - {info.path for info in known}):
        example = relpath(others[0], path)
        print(f"{location}: skipped {len(others):,} files with unknown endings, such as {example}", file=sys.stderr)
    return filesystem, known


def _matches(path: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether the parts of a path match those of a pattern. `**` matches any number of parts, no `*` hidden ones."""
    if not pattern or not path:
        return not path and all(part == "**" for part in pattern)
    hidden = path[0].startswith(".") and not pattern[0].startswith(".")
    if pattern[0] == "**":
        return _matches(path, pattern[1:]) or (not hidden and _matches(path[1:], pattern))
    return not hidden and fnmatchcase(path[0], pattern[0]) and _matches(path[1:], pattern[1:])


def _is_known(path: str) -> bool:
    return _is_parquet(path) or ending_of(path) in ENDINGS


def _is_parquet(path: str) -> bool:
    return path.lower().endswith(PARQUET)  # parquet compresses its own columns


def _hidden(path: str) -> bool:
    return any(part[0] in "._" for part in path.split("/"))


def _columns(filesystem: fs.FileSystem, path: str) -> tuple[list[str], Callable[[Sequence[str]], pa.Schema]] | None:
    """Return the columns of a file, and a function to get the types of some of them; a .jsonl's first rows decide.

    Return None for a text file without rows, such as an empty partition.
    """
    if _is_parquet(path):
        with _opened(filesystem, path) as raw:
            schema = pq.read_schema(raw).remove_metadata()
        twice = next((name for name in schema.names if schema.names.count(name) > 1), None)
        if twice is not None:
            raise SourceError(f"{path} has two columns named {twice!r}; rename one of them")
        return schema.names, lambda names: pa.schema([schema.field(name) for name in names])
    rows = _sample(filesystem, path)
    if not rows:
        return None
    return list(dict.fromkeys(name for _, row in rows for name in row)), lambda names: pa.schema(
        [(name, _type(path, name, [(line, row.get(name)) for line, row in rows])) for name in names]
    )


def _sample(filesystem: fs.FileSystem, path: str) -> list[tuple[int, dict[str, Any]]]:
    """Return the readable ones of the first rows, with their line numbers. Raises SourceError if no row is readable."""
    with _opened(filesystem, path) as raw:
        rows = list(islice(read_rows(uncompressed(io.BufferedReader(raw, BUFFER), path), path), SAMPLE))
    records = [(line, row) for line, row in rows if not isinstance(row, str)]
    if rows and not records:
        (line, reason), *_ = rows
        raise SourceError(f"{path}: none of the first {SAMPLE} rows can be read; line {line}: {reason}")
    return records


def _check_parquet(filesystem: fs.FileSystem, paths: Sequence[str], schema: pa.Schema) -> None:
    """Check that each file has the columns, before any is embedded. Raises SourceError."""

    def read(path: str) -> pa.Schema:
        with _opened(filesystem, path) as raw:
            return pq.read_schema(raw)

    with ThreadPoolExecutor(FOOTERS) as pool:
        for path, found in zip(paths, pool.map(read, paths), strict=True):
            for field in schema:
                other = found.field(field.name).type if field.name in found.names else None
                if other is None or not _is_as(other, field.type):
                    raise _other_columns(path, field, other)


def _is_as(other: pa.DataType, column_type: pa.DataType) -> bool:
    """Whether a column has a type, or is text of another type that can be cast to this one."""
    if column_type not in (pa.string(), pa.large_string()):
        return bool(other == column_type)
    kind = other.value_type if pa.types.is_dictionary(other) else other
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _as_in(schema: pa.Schema, table: pa.Table) -> pa.Table:
    """Return the columns of a schema, cast to its types. Any of them may have nulls, in a later file if not in this."""
    columns = [table.column(field.name).cast(field.type) for field in schema]
    return pa.table(columns, schema=pa.schema([field.with_nullable(True) for field in schema]))


def _other_columns(path: str, field: pa.Field, other: pa.DataType | None = None) -> SourceError:
    has = f"has {other} in the column" if other is not None else "does not have the column"
    return SourceError(
        f"{path} {has} {field.name!r}, which is {field.type} in the files before it; embed it in a separate job"
    )


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
    """Return the type of most values of a column, so that a stray value fails only its own row.

    Raises SourceError if those values have no common type.
    """
    kinds = [type(value) for _, value in values if value is not None]
    commonest = max(dict.fromkeys(kinds), key=kinds.count, default=str)
    numbers = {int, float} if commonest in (int, float) else {commonest}
    kept = [(line, value) for line, value in values if type(value) in numbers]
    column_type = _common([value for _, value in kept])
    if column_type is not None and _depth(column_type) > DEEPEST:
        raise SourceError(
            f"{path}: the column {name!r} is nested more than {DEEPEST} levels deep; name the columns to keep "
            "with --columns"
        )
    if column_type is None:
        ends = (end for end in range(1, len(kept)) if _common([value for _, value in kept[: end + 1]]) is None)
        end = next(ends, 0)
        line, value = kept[end]
        why = (
            "differs in type from the rows before it; write one type"
            if end
            else "parquet cannot store; write it as text"
        )
        raise SourceError(
            f"{path}, line {line}: the column {name!r} is {value!r:.100}, which {why}, or name the columns to keep "
            "with --columns"
        )
    if _has_empty_struct(column_type):
        raise SourceError(
            f"{path}: the column {name!r} holds empty objects, which parquet cannot store; name the columns to keep "
            "with --columns"
        )
    return _texts_for_null(column_type)


def _texts_for_null(column_type: pa.DataType) -> pa.DataType:
    """Return the type, with text as the type of values that the first rows did not have, such as in an empty list."""
    if pa.types.is_null(column_type):
        return pa.string()
    if pa.types.is_list(column_type):
        return pa.list_(_texts_for_null(column_type.value_type))
    if pa.types.is_struct(column_type):
        fields = (column_type.field(index) for index in range(column_type.num_fields))
        return pa.struct([field.with_type(_texts_for_null(field.type)) for field in fields])
    return column_type


def _common(values: list[Any]) -> pa.DataType | None:
    """Return the common type of the values; None if there is none."""
    try:
        return pa.array(values).type
    except OverflowError:  # wider than int64
        with suppress(pa.ArrowException, OverflowError, TypeError):
            return pa.array(values, pa.uint64()).type
    except (pa.ArrowException, TypeError):
        pass
    return None


def _depth(column_type: pa.DataType) -> int:
    """How deep lists and objects are nested, computed level by level."""
    depth, level = 0, [column_type]
    while level:
        depth, level = depth + 1, [kind.field(index).type for kind in level for index in range(kind.num_fields)]
    return depth


def _has_empty_struct(column_type: pa.DataType) -> bool:
    inside = [column_type.field(index).type for index in range(column_type.num_fields)]
    return (pa.types.is_struct(column_type) and not inside) or any(map(_has_empty_struct, inside))
