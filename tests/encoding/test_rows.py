"""The reader of rows, with any bytes and with what other programs write."""

import bz2
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as some

from cloze.encoding.errors import ClozeError
from cloze.encoding.rows import COMPRESSIONS, ENDINGS, Row, RowsError, ending_of, read_rows, uncompressed
from cloze.service.bulk.source import Part, Source
from cloze.training.data.corpus import read_records

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: pa.compress(content, codec="zstd", asbytes=True),
}
CELLS = some.text(some.characters(exclude_categories=["Cs"], exclude_characters="\0\r"), max_size=6)
NAMED = some.sampled_from([*ENDINGS, *(ending + each for ending in ENDINGS for each in COMPRESSIONS)])
SYNTAX = some.sampled_from(
    [b'"', b",", b"\t", b"\n", b"\r", b"{", b"}", b'{"a":1}', b"\xff", b"\xfe", b"\xef\xbb\xbf", b"a"]
)


def read(content: bytes, name: str) -> list[tuple[int, Row]]:
    return list(read_rows(uncompressed(io.BytesIO(content), name), name))


def rows_or_error(reading: Callable[[], list[Any]]) -> tuple[list[Any], str]:
    try:
        return reading(), ""
    except ClozeError as error:
        return [], str(error)


@given(some.binary(max_size=60) | some.lists(SYNTAX, max_size=20).map(b"".join), NAMED)
def test_any_bytes_are_rows_or_one_line_that_says_why_not(content: bytes, name: str) -> None:
    found, error = rows_or_error(lambda: read(content, f"a{name}"))
    assert [line for line, _ in found] == sorted({line for line, _ in found})
    assert all(isinstance(row, dict) or row for _, row in found)
    assert not error or f"a{name}" in error


@pytest.mark.parametrize("compression", COMPRESS)
def test_every_compression(compression: str) -> None:
    content = COMPRESS[compression](b"text,n\na,1\n\n")
    assert read(content, f"a.csv{compression}") == [(2, {"text": "a", "n": "1"})]
    assert ending_of(f"folder/a.b.csv{compression}") == ".csv"
    if compression:
        with pytest.raises(RowsError, match=f"a.txt{compression}, after line 0: cannot be read"):
            read(b"not compressed", f"a.txt{compression}")


@given(some.lists(some.lists(CELLS, min_size=2, max_size=2), max_size=5), some.sampled_from([".csv", ".tsv"]))
def test_what_a_csv_writer_writes_is_read(cells: list[list[str]], ending: str) -> None:
    file = io.StringIO(newline="")
    writer = csv.writer(file, delimiter="\t" if ending == ".tsv" else ",")
    writer.writerows([["one", "other"], *cells])
    rows = [row for _, row in read(file.getvalue().encode(), f"a{ending}")]
    assert rows == [{"one": one, "other": other} for one, other in cells if one or other]


def test_what_excel_leaves_is_left_out() -> None:
    """The line for itself, rows and columns of cells that were emptied, and its endings in capitals."""
    content = "sep=;\r\ntext;n;;\r\nA;1;;\r\n;;;\r\nB;;;\r\n".encode("utf-8-sig")
    assert read(content, "A.CSV") == [(3, {"text": "A", "n": "1"}), (5, {"text": "B", "n": ""})]
    ((_, reason),) = read(b"text;n\nA;1;;x\n", "a.csv")
    assert "4 cells, more than the 2 columns" in str(reason)


def test_semicolons_separate_where_the_header_has_them_alone() -> None:
    assert read(b'\ntext;n\nA; 0,5\n"b;c";2\n', "a.csv") == [
        (3, {"text": "A", "n": " 0,5"}),
        (4, {"text": "b;c", "n": "2"}),
    ]
    assert read(b"text;n\ta\nb\tc\n", "a.tsv") == [(2, {"text;n": "b", "a": "c"})]
    assert read(b"text,n\na;b,c\n", "a.csv") == [(2, {"text": "a;b", "n": "c"})]
    assert read(b"\n\n", "a.csv") == read(b"", "a.csv") == []


@given(some.lists(some.dictionaries(CELLS, some.none() | some.integers(-(2**63), 2**64 - 1) | CELLS), max_size=5))
def test_what_a_json_writer_writes_is_read(records: list[dict[str, Any]]) -> None:
    content = "".join(json.dumps(record) + "\r\n\n" for record in records)
    assert read(content.encode(), "a.jsonl") == [(2 * place + 1, record) for place, record in enumerate(records)]


def test_lines_end_as_on_any_system() -> None:
    assert [row for _, row in read(b"a\rb\r\nc\n\nd", "a.txt")] == [{"text": each} for each in ("a", "b", "c", "", "d")]
    assert [row for _, row in read(b'text\ra\r"b\rc"\r', "a.csv")] == [{"text": "a"}, {"text": "b\rc"}]


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl"])
@pytest.mark.parametrize(
    "content", [b"text\n\xff\n", b'text\n"a\n', b'{"text": "a"}\n{\n', "text\na\n".encode("utf-16-le"), b"text\n\na\n"]
)
def test_training_and_bulk_say_the_same(tmp_path: Path, name: str, content: bytes) -> None:
    """Of a row that cannot be read training stops, and bulk goes on with the others."""
    path = tmp_path / name
    path.write_bytes(content)

    def embedded() -> list[Part]:
        source = Source.find(str(path))
        return list(source.parts(0))

    records, stopped = rows_or_error(lambda: [record for _, record in read_records(path)])
    parts, error = rows_or_error(embedded)
    failures = [failure.reason for part in parts for failure in part.failures]
    if stopped:
        assert error or any(reason in stopped for reason in failures)
    elif not error:  # else the first line names no column called text
        assert [row["text"] for part in parts for row in part.table.to_pylist()] == [row["text"] for row in records]
