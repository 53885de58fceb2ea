"""Input files: finding them, and reading their rows in parts of a fixed number of rows.

The ending of its name says what a file is: .parquet, or .jsonl, .csv, .tsv and .txt, also with .gz or .zst. A row of a
.txt is a line. Part n of a file always has the same rows, so that a job can go on where another one ended. A row that
cannot be read, such as a line that is not JSON, is returned with the reason.
"""

import csv
import glob
import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice
from os.path import basename, commonpath, relpath
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from encoding.errors import OptionError
from service.bulk.embed import check_columns

COMPRESSIONS: Final = {".gz": "gzip", ".zst": "zstd"}
BUFFER: Final = 2**16  # bytes
MAX_LINE: Final = 2**26  # bytes; what is longer is not a line of text
SAMPLE: Final = 1000  # rows of a .jsonl that decide its columns
BOM: Final = b"\xef\xbb\xbf"

csv.field_size_limit(MAX_LINE)

Row = dict[str, Any] | str  # the columns, or why the row cannot be read


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
    ) -> "Source":
        """Find a file, the files of a folder or of a pattern, or those of a URL such as s3://bucket/folder.

        Raises SourceError where there is none, and OptionError where the first file does not have these columns.
        """
        filesystem, files = _find(location)
        schema = _schema(filesystem, files[0].path)
        check_columns(schema, text_column)
        wanted = {*(columns or schema.names), text_column, *filter(None, [id_column])}
        if missing := sorted(wanted.difference(schema.names)):
            raise OptionError(f"there is no column {missing[0]!r}; the columns are {', '.join(schema.names)}")
        if id_column is None and "id" in wanted:
            raise OptionError("the input has a column 'id': write --id-column id, or keep other columns only")
        kept = pa.schema([field for field in schema if field.name in wanted])
        return cls(filesystem, files, kept, text_column, id_column, rows_per_part)

    def parts(self, file: int, skip: Callable[[int], bool] = lambda number: False) -> Iterator[Part]:
        """Yield the parts of a file, less those that `skip` names. Raises SourceError where it cannot be read."""
        path = self.files[file].path
        try:
            with self.filesystem.open_input_file(path) as raw:
                read = self._parquet_parts if path.endswith(".parquet") else self._text_parts
                yield from read(file, raw, skip)
        except (OSError, pa.ArrowException, UnicodeDecodeError, csv.Error) as error:
            raise SourceError(f"{path} cannot be read: {error}") from error

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
            raise SourceError(f"{path} does not have the columns of {self.files[0].path}; embed it by itself")
        row_bytes = self.files[file].size / max(contents.metadata.num_rows, 1)
        number = first = 0
        for group in range(contents.num_row_groups):
            facts = contents.metadata.row_group(group)
            numbers = range(number, number - (-facts.num_rows // size))
            if not all(map(skip, numbers)):
                batches = contents.iter_batches(size, [group], self.schema.names)
                for own, batch in zip(numbers, batches, strict=True):
                    if not skip(own):
                        table = pa.Table.from_batches([batch]).select(self.schema.names)
                        ids = range(first + (own - number) * size, first + (own - number) * size + len(table))
                        yield Part(file, own, self._with_ids(table, file, ids), [], round(len(table) * row_bytes))
            number, first = numbers.stop, first + facts.num_rows

    def _text_parts(self, file: int, raw: pa.NativeFile, skip: Callable[[int], bool]) -> Iterator[Part]:
        path, size = self.files[file].path, self.files[file].size
        stream = _open(path, raw)
        rows, number, before = _rows(path, stream), 0, 0
        while chunk := list(islice(rows, self.rows_per_part)):
            after = size if raw.closed else _position(stream, raw)  # a reader of .csv closes it at the end
            if not skip(number):
                table, failures = self._table(file, number * self.rows_per_part, chunk)
                yield Part(file, number, table, failures, after - before)
            number, before = number + 1, after

    def _table(self, file: int, first: int, rows: list[Row]) -> tuple[pa.Table, list[Failure]]:
        """Return the rows as a table, and those that are not like the others. `first` is the first row's index."""
        good = [place for place, row in enumerate(rows) if not isinstance(row, str)]
        reasons = {place: row for place, row in enumerate(rows) if isinstance(row, str)}
        try:
            table = pa.Table.from_pylist([rows[place] for place in good], self.schema)
        except (pa.ArrowException, UnicodeEncodeError, OverflowError, TypeError, ValueError):
            reasons |= {place: why for place in good if (why := self._mismatch(rows[place]))}
            good = [place for place in good if place not in reasons]
            table = pa.Table.from_pylist([rows[place] for place in good], self.schema)
        name = self.files[file].name
        failures = [Failure(f"{name}:{first + place + 1}", why) for place, why in sorted(reasons.items())]
        return self._with_ids(table, file, [first + place for place in good]), failures

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


def _find(location: str) -> tuple[fs.FileSystem, tuple[File, ...]]:
    try:
        filesystem, found = _list(location)
    except (OSError, pa.ArrowException, ValueError) as error:
        raise SourceError(f"{location} cannot be listed: {error}") from error
    files = [info for info in found if info.type == fs.FileType.File]
    if not files:
        raise SourceError(f"{location} is not there, or has no files of texts; name a file, a folder or a pattern")
    unknown = [info.path for info in files if _ending(info.path) not in ENDINGS]
    if unknown:
        raise SourceError(
            f"{unknown[0]} is of no known kind; the known endings are {', '.join(ENDINGS)}, with .gz or .zst"
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
                [str(Path(each).absolute()) for each in glob.glob(location, recursive=True)]
            )
    top = filesystem.get_file_info(path)
    if top.type != fs.FileType.Directory:
        return filesystem, [top]
    inside = filesystem.get_file_info(fs.FileSelector(path, recursive=True))
    if pattern:
        return filesystem, [info for info in inside if fnmatchcase(info.path, pattern)]
    return filesystem, [
        info for info in inside if _ending(info.path) in ENDINGS and not _hidden(relpath(info.path, path))
    ]


def _hidden(path: str) -> bool:
    return any(part[0] in "._" for part in path.split("/"))


def _ending(path: str) -> str:
    name = basename(path)
    for compression in COMPRESSIONS:
        name = name.removesuffix(compression)
    return name[name.rfind(".") :] if "." in name else ""


def _schema(filesystem: fs.FileSystem, path: str) -> pa.Schema:
    """Return the columns of a file; those of a .jsonl are found in its first rows."""
    try:
        with filesystem.open_input_file(path) as raw:
            if path.endswith(".parquet"):
                return pq.read_schema(raw).remove_metadata()
            rows = [row for row in islice(_rows(path, _open(path, raw)), SAMPLE) if not isinstance(row, str)]
        if not rows:
            raise SourceError(f"{path} has no row that can be read in its first {SAMPLE} rows")
        names = list(dict.fromkeys(name for row in rows for name in row))
        return pa.schema([(name, _type([row.get(name) for row in rows])) for name in names])
    except (OSError, pa.ArrowException, UnicodeDecodeError, csv.Error) as error:
        raise SourceError(f"{path} cannot be read: {error}") from error


def _type(values: list[Any]) -> pa.DataType:
    """Return the type of most values of one column, so that a stray value fails its own row only."""
    kinds = [type(value) for value in values if value is not None]
    most = max(dict.fromkeys(kinds), key=kinds.count, default=str)
    numbers = {int, float} if most in (int, float) else {most}
    found = pa.array([value for value in values if type(value) in numbers]).type
    return pa.string() if pa.types.is_null(found) else found


def _open(path: str, raw: pa.NativeFile) -> io.BufferedReader:
    compression = COMPRESSIONS.get(path[path.rfind(".") :])
    return io.BufferedReader(pa.CompressedInputStream(raw, compression) if compression else raw, BUFFER)


def _position(stream: io.BufferedReader, raw: pa.NativeFile) -> int:
    """Return the bytes of the file before the next row; for a compressed file, those before the next buffer."""
    return stream.tell() if stream.raw is raw else raw.tell()


def _rows(path: str, stream: io.BufferedReader) -> Iterator[Row]:
    return READERS[_ending(path)](stream, path)


def _lines(stream: io.BufferedReader, path: str) -> Iterator[bytes]:
    first = True
    while line := stream.readline(MAX_LINE):
        if len(line) == MAX_LINE:
            raise SourceError(f"{path} has a line of more than {MAX_LINE} bytes; is it a file of texts?")
        yield line.removeprefix(BOM).rstrip(b"\r\n") if first else line.rstrip(b"\r\n")
        first = False


def _text_rows(stream: io.BufferedReader, path: str) -> Iterator[Row]:
    for line in _lines(stream, path):
        try:
            yield {"text": line.decode()}
        except UnicodeDecodeError as error:
            yield _not_utf8(error)


def _json_rows(stream: io.BufferedReader, path: str) -> Iterator[Row]:
    for line in _lines(stream, path):
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            yield f"not JSON: {error}"
        else:
            yield row if isinstance(row, dict) else "not a JSON object"


def _csv_rows(stream: io.BufferedReader, path: str, delimiter: str = ",") -> Iterator[Row]:
    """The first row names the columns; every value is a text."""
    text = io.TextIOWrapper(stream, "utf-8", errors="surrogateescape", newline="")
    records = csv.reader(text, delimiter=delimiter, strict=True)
    names = [name.removeprefix("\ufeff") for name in next(records, [])]
    if len(set(names)) < len(names):
        raise SourceError(f"two columns of the header have the same name in {path}: {', '.join(names)}")
    for record in records:
        if len(record) != len(names):
            yield f"{len(record)} values; the header has {len(names)} columns"
            continue
        try:
            yield {
                name: value.encode("utf-8", "surrogateescape").decode()
                for name, value in zip(names, record, strict=True)
            }
        except UnicodeDecodeError as error:
            yield _not_utf8(error)


def _tsv_rows(stream: io.BufferedReader, path: str) -> Iterator[Row]:
    return _csv_rows(stream, path, "\t")


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"not UTF-8: byte {error.object[error.start]:#04x} at {error.start}"


READERS: Final[dict[str, Callable[[io.BufferedReader, str], Iterator[Row]]]] = {
    ".jsonl": _json_rows,
    ".csv": _csv_rows,
    ".tsv": _tsv_rows,
    ".txt": _text_rows,
}
ENDINGS: Final = (".parquet", *READERS)
