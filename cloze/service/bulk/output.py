"""The folder that a job writes, on any file system of pyarrow.

    job.json                                     what made the vectors; another job cannot write into the folder
    job.lock                                     the process that writes here now; see service/bulk/lock.py
    vectors/00000-000/part-000000.parquet        the rows of one part of the first file, in its first shard
    errors/00000-000/part-000000.parquet         those rows of the part that have no vector, and why

A file is written under another name and then renamed. The errors of a part are written before its vectors, so a part is
complete when its file of vectors exists. A folder holds at most SHARD rows of one file.
"""

import json
import re
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from os.path import abspath
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from cloze.encoding.errors import ClozeError, OptionError
from cloze.service.bulk.embed import SPACE
from cloze.service.bulk.lock import LOCK
from cloze.service.bulk.source import Failure

SHARD: Final = 10_000_000  # rows of one folder
MANIFEST: Final = "job.json"
PARTIAL: Final = ".partial"
PART: Final = re.compile(r"/(\d+)-\d+/part-(\d+)\.parquet")  # file and number; there may be other files
COUNTS: Final = b"cloze"  # key of a file's metadata


class OutputError(ClozeError):
    """The output cannot be written."""


class Counts(NamedTuple):
    """Rows with a vector, their tokens, how many of them were truncated, and rows without a vector."""

    rows: int = 0
    tokens: int = 0
    truncated: int = 0
    failed: int = 0

    @property
    def all_rows(self) -> int:
        return self.rows + self.failed

    @classmethod
    def total(cls, counts: Iterable["Counts"]) -> "Counts":
        return cls(*map(sum, zip(cls(), *counts, strict=True)))


@dataclass(frozen=True)
class Output:
    """The folder of one job. `rows_per_part` decides which parts share a folder."""

    filesystem: fs.FileSystem
    root: str
    rows_per_part: int

    @classmethod
    def at(cls, location: str, rows_per_part: int) -> "Output":
        """Locate a folder by its path or URL; nothing is written yet. Raises OutputError if it cannot be used."""
        try:
            if "://" in location:
                filesystem, root = fs.FileSystem.from_uri(location)
                return cls(filesystem, root, rows_per_part)
        except (OSError, pa.ArrowException, ValueError) as error:
            raise OutputError(f"{location} cannot be used: {error}; choose another folder") from error
        return cls(fs.LocalFileSystem(), abspath(location), rows_per_part)

    def manifest(self) -> dict[str, Any] | None:
        """Return the record of the job that began this folder; None if there is none."""
        path = f"{self.root}/{MANIFEST}"
        try:
            if self.filesystem.get_file_info(path).type != fs.FileType.File:
                return None
            with self.filesystem.open_input_file(path) as file:
                manifest = json.loads(file.read())
        except (OSError, ValueError) as error:
            raise OutputError(f"{path} cannot be read: {error}; choose another folder") from error
        if not isinstance(manifest, dict):
            raise OutputError(f"{path} is not the record of a job of Cloze; choose another folder")
        return manifest

    def begin(self, manifest: dict[str, Any]) -> None:
        """Write the record of a new job, or check that the job that began the folder was the same.

        The caller has the folder's lock. Raises OptionError if the folder holds something else, or the vectors of
        another job; then nothing is changed.
        """
        former = self.manifest()
        if former is not None:
            self.check_same(former, manifest)
        try:
            self.filesystem.create_dir(self.root, recursive=True)
            inside = self.filesystem.get_file_info(fs.FileSelector(self.root, recursive=True))
            partial = [info.path for info in inside if info.path.endswith(PARTIAL)]
            if former is None:
                if {info.path for info in inside} - {*partial, f"{self.root}/{LOCK}"}:
                    raise OptionError(
                        f"{self.root} is not empty, and is not the output of a job; choose another folder"
                    )
                self._replace(f"{self.root}/{MANIFEST}", json.dumps(manifest, indent=2).encode() + b"\n")
            for path in partial:
                with suppress(FileNotFoundError):  # a worker of a killed job may just have finished it
                    self.filesystem.delete_file(path)
        except OSError as error:
            raise OutputError(f"{self.root} cannot be written: {error}; choose another folder") from error

    def check_same(self, former: dict[str, Any], manifest: dict[str, Any]) -> None:
        """Raise OptionError if the job is not the one that began the folder."""
        for key, value in json.loads(json.dumps(manifest)).items():
            if former.get(key) != value:
                raise OptionError(
                    f"{self.root} was started with {key} {former.get(key)!r:.300}, but {key} is now {value!r:.300}; "
                    "choose another folder, or give the options of the first job"
                )

    def finished(self) -> dict[tuple[int, int], Counts]:
        """Return the counts of every complete part, by file and number. An unreadable part is not complete."""
        folder = f"{self.root}/vectors"
        if self.filesystem.get_file_info(folder).type != fs.FileType.Directory:
            return {}
        infos = self.filesystem.get_file_info(fs.FileSelector(folder, recursive=True))
        matches = ((PART.fullmatch(info.path.removeprefix(folder)), info.path) for info in infos)
        parts = {(int(match[1]), int(match[2])): path for match, path in matches if match}
        with ThreadPoolExecutor(16) as pool:
            counts = pool.map(self._counts, parts.values())
            return {
                place: part_counts for place, part_counts in zip(parts, counts, strict=True) if part_counts is not None
            }

    def write(self, file: int, number: int, table: pa.Table, failures: list[Failure]) -> Counts:
        """Write one part: rows with the columns of `Embed`. Raises OutputError if it cannot be written."""
        rows = [row for row, error in enumerate(table.column("error").to_pylist()) if error is None]
        good = table.take(pa.array(rows, pa.int64())) if len(rows) < len(table) else table
        counts = Counts(len(good), _sum(good.column("tokens")), _sum(good.column("truncated")), len(failures))
        path = f"{file:05}-{number * self.rows_per_part // SHARD:03}/part-{number:06}.parquet"
        try:
            if failures:
                columns = {
                    "id": [failure.id for failure in failures],
                    "reason": [failure.reason for failure in failures],
                }
                self._write(f"errors/{path}", pa.table(columns, pa.schema({"id": pa.string(), "reason": pa.string()})))
            else:  # remove those that an interrupted process wrote for this part
                self._remove(f"{self.root}/errors/{path}")
            metadata = {COUNTS: json.dumps(counts._asdict()), SPACE: (good.schema.metadata or {}).get(SPACE, b"")}
            self._write(f"vectors/{path}", good.drop_columns(["error"]).replace_schema_metadata(metadata))
        except OSError as error:
            raise OutputError(
                f"{self.root} cannot be written: {error}; the complete parts are kept: free space, and start again"
            ) from error
        return counts

    def _write(self, name: str, table: pa.Table) -> None:
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, use_dictionary=False)  # the vectors' numbers do not repeat
        self._replace(f"{self.root}/{name}", sink.getvalue())

    def _replace(self, path: str, content: Any) -> None:
        folder, _, _ = path.rpartition("/")
        self.filesystem.create_dir(folder, recursive=True)
        partial = f"{path}.{uuid.uuid4().hex}{PARTIAL}"
        try:
            with self.filesystem.open_output_stream(partial) as stream:
                stream.write(content)
            self.filesystem.move(partial, path)
        except OSError:
            self._remove(partial)
            raise

    def _remove(self, path: str) -> None:
        if self.filesystem.get_file_info(path).type == fs.FileType.File:
            self.filesystem.delete_file(path)

    def _counts(self, path: str) -> Counts | None:
        try:
            with self.filesystem.open_input_file(path) as file:
                return Counts(**json.loads(pq.read_metadata(file).metadata[COUNTS]))
        except (OSError, pa.ArrowException, KeyError, TypeError, ValueError):
            return None


def _sum(column: pa.ChunkedArray) -> int:
    return sum(column.to_pylist())
