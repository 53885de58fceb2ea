"""Reading files: every kind and compression, parts that are always the same, and rows that cannot be read."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from pyarrow import fs

from cloze.encoding.errors import OptionError
from cloze.service.bulk.source import Part, Source, SourceError

ROWS = [{"text": f"text {number}, with a comma", "place": number} for number in range(10)]


def write(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    kind = next(
        each for each in map(str.lower, path.suffixes) if each in (".parquet", ".jsonl", ".csv", ".tsv", ".txt")
    )
    if kind == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=4)
        return path
    form = {
        ".jsonl": json.dumps,
        ".csv": lambda row: f'"{row["text"]}",{row["place"]}',
        ".tsv": lambda row: f"{row['text']}\t{row['place']}",
        ".txt": lambda row: row["text"],
    }[kind]
    header = {".csv": ["text,place"], ".tsv": ["text\tplace"]}.get(kind, [])
    content = ("\n".join([*header, *map(form, rows)]) + "\n").encode()
    compress = {".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix, bytes)
    path.write_bytes(compress(content))
    return path


def read(source: Source) -> list[Part]:
    return [part for file in range(len(source.files)) for part in source.parts(file)]


def rows(source: Source) -> list[dict[str, Any]]:
    return [row for part in read(source) for row in part.table.to_pylist()]


def reasons(source: Source) -> dict[str, str]:
    return {failure.id: failure.reason for part in read(source) for failure in part.failures}


def test_the_output_is_no_input_by_any_name(tmp_path: Path) -> None:
    (tmp_path / "texts" / "out").mkdir(parents=True)
    for path in ("texts/a.txt", "texts/b.txt", "texts/out/c.txt"):
        write(tmp_path / path)
    (tmp_path / "link").symlink_to("texts")
    for folder, out in (("texts", "texts/out"), ("link", "texts/out"), ("texts", "link/out")):
        found = Source.find(str(tmp_path / folder), out=str(tmp_path / out))
        assert [file.name for file in found.files] == ["a.txt", "b.txt"]


@pytest.mark.parametrize(
    "name",
    [
        "a.parquet",
        "a.PARQUET",
        "a.jsonl",
        "a.csv",
        "a.tsv",
        "a.txt",
        "a.jsonl.gz",
        "a.csv.zst",
        "a.txt.gz",
        "a.txt.zst",
    ],
)
def test_every_kind_of_file(tmp_path: Path, name: str) -> None:
    source = Source.find(str(write(tmp_path / name)), rows_per_part=3)
    found = rows(source)
    assert [row["text"] for row in found] == [row["text"] for row in ROWS]
    assert [row["id"] for row in found] == [f"{name}:{number}" for number in range(1, 11)]
    if ".txt" not in name:
        assert [int(row["place"]) for row in found] == list(range(10))
    assert sum(part.bytes for part in read(source)) == pytest.approx(source.files[0].size, rel=0.03)


def test_the_bytes_of_a_part_are_those_of_its_rows(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text\n" * 6 + "a longer text\n")
    source = Source.find(str(tmp_path / "a.txt"), rows_per_part=3)
    assert [part.bytes for part in source.parts(0)] == [15, 15, 14]
    assert [part.bytes for part in source.parts(0, {0}.__contains__)] == [15, 14]


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.txt.gz"])
def test_parts_are_the_same_however_many_are_skipped(tmp_path: Path, name: str) -> None:
    source = Source.find(str(write(tmp_path / name)), rows_per_part=3)
    whole = {part.number: part.table for part in source.parts(0)}
    for gone in (set(), {0}, {1, 2}, set(whole) - {2}, set(whole)):
        left = {part.number: part.table for part in source.parts(0, gone.__contains__)}
        assert left == {number: table for number, table in whole.items() if number not in gone}


def test_a_part_ends_with_its_row_group(tmp_path: Path) -> None:
    parts = read(Source.find(str(write(tmp_path / "a.parquet")), rows_per_part=3))
    assert [len(part.table) for part in parts] == [3, 1, 3, 1, 2]
    assert [part.number for part in parts] == [0, 1, 2, 3, 4]


def test_a_folder_a_pattern_and_a_url(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt.gz", "deep/c.txt", ".hidden.txt", "_SUCCESS.txt", "notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"text\n")
    write(tmp_path / "a.txt.gz")
    everything = ["a.txt.gz", "b.txt", "deep/c.txt"]
    for location in (str(tmp_path), f"file://{tmp_path}"):
        assert [file.name for file in Source.find(location).files] == everything
    for pattern in (f"{tmp_path}/*.txt", f"file://{tmp_path}/[ab].txt*"):
        assert "b.txt" in {Path(file.path).name for file in Source.find(pattern).files}
    for start in ("", "file://"):
        assert [file.name for file in Source.find(f"{start}{tmp_path}/**/[a-z].txt").files] == ["b.txt", "deep/c.txt"]
    (tmp_path / "with blank").mkdir()
    (tmp_path / "with blank" / "d.txt").write_bytes(b"text\n")
    found = Source.find(f"file://{tmp_path}/with%20blank/*.txt").files
    assert [file.path for file in found] == [f"{tmp_path}/with blank/d.txt"]  # and not those of other folders
    assert [file.name for file in Source.find(f"file://{tmp_path}/b*?txt").files] == ["b.txt"]


def test_the_query_of_a_url_with_a_pattern_goes_to_its_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a.txt")
    asked = list[str]()

    def from_uri(uri: str) -> tuple[fs.FileSystem, str]:
        asked.append(uri)
        return fs.LocalFileSystem(), str(tmp_path)

    monkeypatch.setattr("cloze.service.bulk.source.fs.FileSystem", SimpleNamespace(from_uri=from_uri))
    found = Source.find("s3://bucket/texts/*.txt?endpoint_override=minio:9000&scheme=http")
    assert [file.name for file in found.files] == ["a.txt"]
    assert asked == ["s3://bucket/texts?endpoint_override=minio:9000&scheme=http"]


def test_what_the_job_writes_is_no_input(tmp_path: Path) -> None:
    write(tmp_path / "b.txt")
    write(tmp_path / "c.txt")
    write(tmp_path / "out.txt")
    (tmp_path / "out" / "vectors").mkdir(parents=True)
    write(tmp_path / "out" / "vectors" / "d.txt")
    for location in (str(tmp_path), f"{tmp_path}/**/*.txt", f"file://{tmp_path}"):
        found = Source.find(location, out=str(tmp_path / "out")).files
        assert sorted(Path(file.path).name for file in found) == ["b.txt", "c.txt", "out.txt"]


def test_lists_and_objects_without_a_value_become_texts(tmp_path: Path) -> None:
    rows = [{"text": "a", "tags": [], "more": {"x": None, "y": [1]}}] * 1000
    path = write(tmp_path / "a.jsonl", [*rows, {"text": "b", "tags": ["new"], "more": {"x": "z", "y": []}}])
    *_, last = Source.find(str(path), rows_per_part=500).parts(0)
    assert (last.table.to_pylist()[-1]["tags"], last.failures) == (["new"], [])
    assert last.table.to_pylist()[-1]["more"] == {"x": "z", "y": []}


def test_columns_to_keep(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"key": 7 + n, "words": "a", "x": 1.5, "y": None} for n in range(3)])
    source = Source.find(str(path), text_column="words")
    assert source.schema == pa.schema(
        [("key", pa.int64()), ("words", pa.string()), ("x", pa.float64()), ("y", pa.string())]
    )
    few = Source.find(str(path), text_column="words", id_column="key", columns=("x",))
    [part] = read(few)
    assert part.table.column_names == ["key", "words", "x"]
    assert few.row_id(part.table, 1) == "8"


def test_lines_that_are_not_rows(tmp_path: Path) -> None:
    lines = [
        b'{"text": "a", "n": 1}',
        b"{",
        b"[1]",
        b'{"text": "\xff"}',
        b'{"text": 5, "n": 1}',
        b'{"text": "b", "n": "c"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*lines, b'{"text": null, "n": 2.0}', b'{"n": 3}']))
    source = Source.find(str(tmp_path / "a.jsonl"))
    assert [row["text"] for row in rows(source)] == ["a", None, None]
    found = reasons(source)
    assert list(found) == [f"a.jsonl:{number}" for number in (2, 3, 4, 5, 6)]
    assert found["a.jsonl:2"].startswith("not JSON")
    assert found["a.jsonl:3"] == "[1] is not a JSON object; write one per line"
    assert found["a.jsonl:5"] == "the column 'text' is 5, not of type string"
    assert found["a.jsonl:6"] == "the column 'n' is 'c', not of type double"


def test_rows_of_a_csv_that_are_not_like_the_header(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbftext,n\na,1\nb\nc,1,2\n"d\ne",2\n\xff,3\n'
    (tmp_path / "a.csv").write_bytes(content)
    source = Source.find(str(tmp_path / "a.csv"))
    assert [(row["text"], row["n"]) for row in rows(source)] == [("a", "1"), ("b", None), ("d\ne", "2")]
    found = reasons(source)
    assert list(found) == ["a.csv:3", "a.csv:5"]
    assert found["a.csv:3"].startswith("3 cells, more than the 2 columns of the first line")
    assert found["a.csv:5"] == "not UTF-8 (byte 0xff); convert it to UTF-8"


def test_texts_that_are_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\nt\xffwo\n\nfour")
    source = Source.find(str(tmp_path / "a.txt"))
    assert [(row["id"], row["text"]) for row in rows(source)] == [
        ("a.txt:1", "one"),
        ("a.txt:3", ""),
        ("a.txt:4", "four"),
    ]
    assert reasons(source) == {"a.txt:2": "not UTF-8 (byte 0xff); convert it to UTF-8"}


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("a.txt", b"", {}, "is empty"),
        ("a.pdf", b"x", {}, "has an unknown ending; the known ones are .parquet, .jsonl"),
        ("a.jsonl", b"{\n", {}, "can be read; line 1"),
        ("a.csv", b"words\nx\n", {}, "there is no column 'text'; the columns are words"),
        ("a.csv", b"text,text\na,b\n", {}, "has two columns with the same name \\(text, text\\); rename one of them"),
        ("a.csv", b"text,id\na,b\n", {}, "the input already has a column 'id'; write --id-column id"),
        ("a.csv", b"text,n\na,b\n", {"id_column": "key"}, "there is no column 'key'; the columns are text, n"),
        ("a.csv", b"text,tokens\na,b\n", {}, "the column 'tokens' exists already"),
        ("a.csv", b'text,n\n"a,b\n', {}, "line 2: unexpected end of data; check the quoting"),
        ("a.jsonl", b'{"text": 5}\n{"text": "a"}\n{"text": 6}\n', {}, "the column 'text' is of type int64, not text"),
        ("a.parquet", b"PAR1 but not really", {}, "cannot be read: "),
        ("a.txt.gz", gzip.compress(b"text\n" * 9999, mtime=0)[:40], {}, r"cannot be read \(Compressed file ended"),
        ("a.txt.zst", b"not zstd at all", {}, "cannot be read"),
        ("a.csv", "text\na\n".encode("utf-16"), {}, "is UTF-16; convert it to UTF-8"),
        ("a.csv", "text,Straße\na,b\n".encode("cp1252"), {}, r"line 1: not UTF-8 \(byte 0xdf\); convert it"),
        ("a.tsv", b'text\tn\n"Hello" he said.\t1\n', {}, r"a.tsv, line 2: .* must be in quotes, .* is written twice"),
        (
            "a.jsonl",
            b'{"text":"a","meta":{"x":1}}\n\n{"text":"a","meta":{"x":"s"}}\n',
            {},
            r"a.jsonl, line 3: the column 'meta' is {'x': 's'}, which differs in type from the rows before it; .* "
            "--columns",
        ),
        (
            "a.jsonl",
            b'{"text":"a","tags":[1,"x"]}\n',
            {},
            r"line 1: the column 'tags' is \[1, 'x'\], which parquet cannot store; write it as text",
        ),
        ("a.jsonl", b'{"text":"a","meta":{}}\n' * 2, {}, "the column 'meta' holds empty objects"),
        ("a.jsonl", b'{"text":"a","meta":[{"x":{}}]}\n' * 2, {}, "the column 'meta' holds empty objects"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, name: str, content: bytes, options: Any, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(OptionError, match=message):
        read(Source.find(str(tmp_path / name), **options))


@pytest.mark.parametrize("other", ['{"x": {}}', '{"x": 1}', '[1, "x"]', "18446744073709551616e0"])
def test_only_the_columns_that_are_kept_have_a_type(tmp_path: Path, other: str) -> None:
    lines = f'{{"text": "a", "other": {other}}}\n{{"text": "b", "other": "s"}}\n\n{{"text": "c"}}\n\n'
    (tmp_path / "a.jsonl").write_text(lines)
    source = Source.find(str(tmp_path / "a.jsonl"), columns=("text",))
    assert [row["text"] for row in rows(source)] == ["a", "b", "c"]
    assert not reasons(source)


def test_numbers_wider_than_64_bits(tmp_path: Path) -> None:
    """Without a sign they are of a type of their own; a wider one fails its row alone."""
    values = [2**64 - 1, 1, -1]
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "a", "key": {value}}}\n' for value in values[:2]))
    source = Source.find(str(tmp_path / "a.jsonl"))
    assert [row["key"] for row in rows(source)] == values[:2]
    lines = [f'{{"text": "a", "key": {value}}}\n' for value in (*values[1:], *[1] * 1000, values[0])]
    (tmp_path / "b.jsonl").write_text("".join(lines))
    source = Source.find(str(tmp_path / "b.jsonl"))
    assert len(rows(source)) == 1002
    assert reasons(source) == {"b.jsonl:1003": "the column 'key' is 18446744073709551615, not of type int64"}


KINDS = [
    ("1", "true", "int64"),
    ("1.5", "true", "double"),
    ("true", "1", "bool"),
    ('["x"]', '"http://x"', "list<item: string>"),
    ('{"k": 1}', "[]", "struct<k: int64>"),
]
LATER = [  # a number with a fraction makes the column one of such numbers, if it is among the first rows
    ("1", "2.5", "int64"),
    ("[1]", "[1.5]", "list<item: int64>"),
    ('{"k": 1}', '{"k": 2.5}', "struct<k: int64>"),
]


@pytest.mark.parametrize(
    ("before", "usual", "other", "column_type"),
    [*((2, *kinds) for kinds in KINDS), *((1000, *kinds) for kinds in KINDS + LATER)],
)
def test_a_value_of_another_kind_fails_its_row_alone(
    tmp_path: Path, before: int, usual: str, other: str, column_type: str
) -> None:
    """Also one that pyarrow would convert: 2.5 to 2, and a text to a list of its letters."""
    lines = [f'{{"text": "a", "more": {value}}}\n' for value in (*[usual] * before, other, usual, "null")]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    source = Source.find(str(tmp_path / "a.jsonl"))
    found = rows(source)
    assert [row["more"] for row in found] == [*[json.loads(usual)] * (before + 1), None]
    shown = repr(json.loads(other))
    assert reasons(source) == {f"a.jsonl:{before + 1}": f"the column 'more' is {shown}, not of type {column_type}"}


def test_a_whole_number_may_be_written_as_another(tmp_path: Path) -> None:
    lines = [f'{{"text": "a", "whole": {whole}, "other": {other}}}\n' for whole, other in ((1, 0.5), (2.0, 3))]
    (tmp_path / "a.jsonl").write_text("".join(lines * 600))
    source = Source.find(str(tmp_path / "a.jsonl"), columns=("whole", "other"))
    assert [(row["whole"], row["other"]) for row in rows(source)] == [(1, 0.5), (2, 3)] * 600


def test_a_column_that_is_nested_too_deeply_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"text": "a", "more": {"[" * 900}{"]" * 900}}}\n')
    with pytest.raises(
        SourceError, match="the column 'more' is nested more than 100 levels deep; name the columns to keep"
    ):
        Source.find(str(tmp_path / "a.jsonl"))
    assert [row["text"] for row in rows(Source.find(str(tmp_path / "a.jsonl"), columns=("text",)))] == ["a"]


def test_texts_of_parquet_may_be_held_in_several_ways(tmp_path: Path) -> None:
    ways = [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]
    for number, way in enumerate(ways):
        table = pa.table({"text": pa.array([f"text {number}"]).cast(way), "place": [number]})
        pq.write_table(table, tmp_path / f"{number}.parquet")
    found = rows(Source.find(str(tmp_path)))
    assert [(row["text"], row["place"]) for row in found] == [(f"text {number}", number) for number in range(3)]


def test_a_later_file_of_parquet_may_have_nulls(tmp_path: Path) -> None:
    strict = pa.schema([pa.field("text", pa.string(), False), pa.field("place", pa.int64(), False)])
    pq.write_table(pa.table({"text": ["a"], "place": [1]}, schema=strict), tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": ["b", None], "place": [None, 2]}), tmp_path / "b.parquet")
    parts = read(Source.find(str(tmp_path)))
    for part in parts:
        pq.write_table(part.table, tmp_path / "out")
    assert [row["place"] for part in parts for row in part.table.to_pylist()] == [1, None, 2]


def test_categories_of_two_sizes_are_refused_before_the_first_is_read(tmp_path: Path) -> None:
    for name, size in (("a", pa.int8()), ("b", pa.int16())):
        tags = pa.array(["x"]).cast(pa.dictionary(size, pa.string()))
        pq.write_table(pa.table({"text": ["a"], "tag": tags}), tmp_path / f"{name}.parquet")
    with pytest.raises(
        SourceError, match=r"b\.parquet has dictionary<.*int16.* in the column 'tag', which is dictionary"
    ):
        Source.find(str(tmp_path))


def test_nothing_is_there(tmp_path: Path) -> None:
    for location in (str(tmp_path / "none.txt"), str(tmp_path), f"{tmp_path}/*.txt", f"file://{tmp_path}/none"):
        with pytest.raises(SourceError, match="does not exist, or has no files of texts"):
            Source.find(location)
    with pytest.raises(SourceError, match=r"cannot be listed: .*none://"):
        Source.find("none://a/b.txt")


def test_files_of_other_columns(tmp_path: Path) -> None:
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / "a.csv").write_text("text,key\na,1\n")
    (tmp_path / "csv" / "b.csv").write_text("key,words\n1,a\n")
    with pytest.raises(
        SourceError, match=r"b\.csv does not have the column 'text', which is string in the files before it"
    ):
        read(Source.find(str(tmp_path / "csv")))
    write(tmp_path / "a.parquet")
    write(tmp_path / "b.parquet", [{"text": "a", "place": "not a number"}])
    with pytest.raises(
        SourceError, match=r"b\.parquet has string in the column 'place', which is int64 in the files before"
    ):
        Source.find(f"{tmp_path}/*.parquet")  # and not when its turn comes
    write(tmp_path / "b.parquet", [{"text": "a"}])
    with pytest.raises(
        SourceError, match=r"b\.parquet does not have the column 'place', which is int64 in the files before"
    ):
        Source.find(f"{tmp_path}/*.parquet")


def test_a_file_without_rows_may_be_the_first(tmp_path: Path) -> None:
    """As the partitions of a distributed job are."""
    (tmp_path / "a.csv").write_text("text,key\n")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b""))
    with pytest.raises(SourceError, match="has no rows"):
        Source.find(str(tmp_path))
    (tmp_path / "c.csv").write_text("text,key\na,1\n")
    assert [row["text"] for row in rows(Source.find(str(tmp_path)))] == ["a"]


def test_two_columns_of_a_parquet_file_with_one_name(tmp_path: Path) -> None:
    table = pa.table([pa.array(["a"]), pa.array([1]), pa.array([2])], names=["text", "x", "x"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(SourceError, match=r"a\.parquet has two columns named 'x'; rename one of them"):
        Source.find(str(tmp_path / "a.parquet"))


def test_a_line_without_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloze.encoding.rows.MAX_LINE", 100)
    (tmp_path / "a.txt").write_bytes(b"a" * 101)
    with pytest.raises(SourceError, match=f"^{tmp_path}/a.txt has a line of more than 100 bytes"):
        read(Source.find(str(tmp_path / "a.txt")))
