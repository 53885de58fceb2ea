"""Rows of files: the lines of a .txt, and the records of a .csv, .tsv or .jsonl, in UTF-8, compressed or not.

The first row of a .csv or .tsv names the columns, and every value is a text. In both, a cell that contains the
separator, a quote or a line break is quoted, and a quote inside it is written twice. Semicolons separate the cells if
the first line has some and no comma (or tab). A row with fewer cells than the first has None for the missing ones.
Empty lines of a .csv, .tsv or .jsonl are skipped, and so are rows of several empty cells and empty columns at the end.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import PurePath
from typing import IO, Any, Final, TypeAlias, cast

from cloze.encoding.errors import ClozeError

Row: TypeAlias = dict[str, Any] | str
"""A row's values by column, or the reason why it cannot be read."""

SEPARATORS: Final = {".csv": ",", ".tsv": "\t"}
SEMICOLON: Final = ";"  # used by programs in a locale with decimal commas
ENDINGS: Final = (".jsonl", *SEPARATORS, ".txt")
COMPRESSIONS: Final = (".gz", ".bz2", ".xz", ".zst")
SEPARATED: Final = re.compile(r"sep=(.)\r?\n?$")
MAX_LINE: Final = 2**26  # bytes of a line, or characters of a cell; a longer one is not a text
BOM: Final = b"\xef\xbb\xbf"
OF_UTF16: Final = (b"\xff\xfe", b"\xfe\xff")
OTHER_ENCODING: Final = "convert it to UTF-8"
UNREADABLE: Final = (OSError, EOFError, lzma.LZMAError, zlib.error)

csv.field_size_limit(MAX_LINE)


class RowsError(ClozeError):
    """The rest of a file cannot be read."""


def ending_of(name: str) -> str:
    """Return the ending of a file's name in lower case, without the compression's; empty if it has none."""
    path = PurePath(name.lower())
    return PurePath(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix


def uncompressed(raw: IO[bytes], name: str) -> IO[bytes]:
    """Return a stream of the file's decompressed contents."""
    compression = PurePath(name).suffix.lower()
    if compression == ".zst":
        from pyarrow import CompressedInputStream  # here, because it is large; Python has zstd itself since 3.14

        return cast(IO[bytes], io.BufferedReader(CompressedInputStream(raw, "zstd")))
    opened: dict[str, Callable[[IO[bytes]], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    return cast(IO[bytes], opened[compression](raw)) if compression in opened else raw


def read_rows(stream: IO[bytes], name: str) -> Iterator[tuple[int, Row]]:
    """Yield each row, after the number of its last line. `name` has one of ENDINGS. Raises RowsError."""
    ending = ending_of(name)
    if ending in SEPARATORS:
        yield from _cells(stream, name, SEPARATORS[ending])
        return
    parse = _record if ending == ".jsonl" else _text
    for number, line in read_lines(stream, name):
        if ending == ".txt" or line.strip():
            yield number, parse(line)


def read_lines(stream: IO[bytes], name: str) -> Iterator[tuple[int, bytes]]:
    """Yield the number of each line, from 1, and the line with its end. Raises RowsError."""
    number = 0
    try:
        while read := stream.readline(MAX_LINE):
            if len(read) == MAX_LINE:
                raise RowsError(f"{name} has a line of more than {MAX_LINE} bytes; is it a file of texts?")
            if not number:
                if read.startswith(OF_UTF16):
                    raise RowsError(f"{name} is UTF-16; {OTHER_ENCODING}")
                read = read.removeprefix(BOM)
            for line in read.splitlines(keepends=True):  # also at \r
                number += 1
                yield number, line
    except UNREADABLE as error:
        raise RowsError(f"{name}, after line {number}: cannot be read ({error})") from error


def _text(line: bytes) -> Row:
    try:
        return {"text": line.rstrip(b"\r\n").decode()}
    except UnicodeDecodeError as error:
        return _not_utf8(error.object[error.start])


def _record(line: bytes) -> Row:
    try:
        text = line.decode()
        record = json.loads(text)
        if "\\u" in text:
            json.dumps(record, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        return _not_utf8(error.object[error.start])
    except UnicodeEncodeError as error:
        return f"an unpaired surrogate ({error}); remove it"
    except (ValueError, RecursionError) as error:
        return f"not JSON ({error}); write an object per line"
    if not isinstance(record, dict):
        return f"{text.strip():.60} is not a JSON object; write one per line"
    return record


def _cells(stream: IO[bytes], name: str, separator: str) -> Iterator[tuple[int, Row]]:
    lines = (line.decode("utf-8", "surrogateescape") for _, line in read_lines(stream, name))
    opening = list[str]()
    for line in lines:
        if separated := SEPARATED.match(line):  # Excel's own hint, before the table
            separator, line = separated[1], "\n"
        opening.append(line)
        if line.strip():
            break
    header = opening[-1] if opening else ""
    if separator not in header and SEMICOLON in header:
        separator = SEMICOLON
    # strict, so that a stray quote is an error and does not join lines until the next one
    records = csv.reader(chain(opening, lines), delimiter=separator, strict=True)
    try:
        names = next((record for record in records if any(record)), [])
        while names and not names[-1]:  # columns whose cells were emptied
            names.pop()
        if reason := _reason(names):
            raise RowsError(f"{name}, line {records.line_num}: {reason}")
        if len(set(names)) < len(names):
            raise RowsError(f"{name} has two columns with the same name ({', '.join(names)}); rename one of them")
        for record in records:
            if any(record) or len(record) == 1:
                yield records.line_num, _named(names, record)
    except csv.Error as error:
        raise RowsError(
            f"{name}, line {records.line_num}: {error}; check the quoting: a text that begins with a quote, or "
            'contains the separator, must be in quotes, and a quote inside it is written twice: "she said ""yes"""'
        ) from error


def _named(names: list[str], record: list[str]) -> Row:
    while len(record) > len(names) and not record[-1]:
        record.pop()
    if len(record) > len(names):
        return (
            f'{len(record)} cells, more than the {len(names)} columns of the first line; put "quotes" around a text '
            "that holds the separator"
        )
    missing = [None] * (len(names) - len(record))
    return _reason(record) or dict(zip(names, [*record, *missing], strict=True))


def _reason(cells: list[str]) -> str | None:
    """Return why cells that were read with surrogateescape are not UTF-8; None if they are."""
    text = "".join(cells)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return _not_utf8(ord(text[error.start]) - 0xDC00)  # the byte that the surrogate stands for
    return None


def _not_utf8(byte: int) -> str:
    return f"not UTF-8 (byte {byte:#04x}); {OTHER_ENCODING}"
