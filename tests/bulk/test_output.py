"""The output folder: complete parts, what is left of a killed process, and other jobs' folders."""

import json
import resource
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cloze.encoding.errors import OptionError
from cloze.service.bulk import Embed
from cloze.service.bulk.lock import Lock
from cloze.service.bulk.output import SHARD, Counts, Output, OutputError
from cloze.service.bulk.source import Failure

MANIFEST = {"model": {"sha256": "ab"}, "dtype": "float32", "rows_per_file": 4}


@pytest.fixture
def output(tmp_path: Path) -> Output:
    made = Output.at(str(tmp_path / "out"), 4)
    made.begin(MANIFEST)
    return made


@pytest.fixture(scope="module")
def embedded(bundle: Path) -> pa.Table:
    texts = ["a man", "poison", "dogs " * 40]
    return Embed(bundle, threads=1)(pa.table({"id": ["a", "b", "c"], "text": texts}))


def test_a_part_is_two_files_and_its_counts(output: Output, embedded: pa.Table) -> None:
    failures = [Failure("x:9", "not JSON"), Failure("b", "not finite")]
    counts = output.write(2, 7, embedded, failures)
    assert counts == Counts(rows=2, tokens=sum(embedded.column("tokens").to_pylist()[::2]), truncated=1, failed=2)
    assert output.finished() == {(2, 7): counts}
    root = Path(output.root)
    written = pq.read_table(root / "vectors/00002-000/part-000007.parquet")
    assert written.column_names == ["id", "text", "embedding", "tokens", "truncated"]
    assert written.column("embedding").to_pylist() == embedded.column("embedding").take([0, 2]).to_pylist()
    errors = pq.read_table(root / "errors/00002-000/part-000007.parquet").to_pylist()
    assert errors == [failure._asdict() for failure in failures]
    assert [path.name for path in root.rglob("*") if path.is_file()].count("job.json") == 1


def test_a_part_in_which_every_row_failed_is_finished(output: Output, embedded: pa.Table) -> None:
    counts = output.write(0, 0, embedded.slice(1, 1), [Failure("b", "not finite")])
    assert counts == Counts(rows=0, tokens=0, truncated=0, failed=1)
    assert output.finished() == {(0, 0): counts}


def test_a_part_without_failures_has_no_file_of_errors(output: Output, embedded: pa.Table) -> None:
    output.write(0, 0, embedded.slice(0, 1), [])
    assert not (Path(output.root) / "errors").exists()


def test_a_row_that_failed_before_and_not_again_is_in_one_file(output: Output, embedded: pa.Table) -> None:
    """A killed process may have written the failures, and not the vectors."""
    output.write(0, 0, embedded.slice(0, 1), [Failure("c", "not JSON")])
    (Path(output.root) / "vectors/00000-000/part-000000.parquet").unlink()
    output.write(0, 0, embedded.take([0, 2]), [])
    assert not (Path(output.root) / "errors/00000-000/part-000000.parquet").exists()


def test_a_folder_has_a_limit_of_rows(tmp_path: Path, embedded: pa.Table) -> None:
    output = Output.at(str(tmp_path / "out"), SHARD // 2)
    for number in (0, 1, 2):
        output.write(0, number, embedded.slice(0, 1), [])
    assert sorted(path.name for path in (tmp_path / "out/vectors").iterdir()) == ["00000-000", "00000-001"]


def test_writing_a_part_again_changes_nothing(output: Output, embedded: pa.Table) -> None:
    first = output.write(0, 0, embedded, [])
    assert output.write(0, 0, embedded, []) == first
    assert len(list(Path(output.root).rglob("*.parquet"))) == 1


def test_a_file_of_others_is_no_part(output: Output, embedded: pa.Table) -> None:
    output.write(0, 0, embedded, [])
    folder = Path(output.root) / "vectors"
    shutil.copy(folder / "00000-000" / "part-000000.parquet", folder / "all.parquet")
    assert list(output.finished()) == [(0, 0)]


def test_half_a_file_is_not_complete(output: Output, embedded: pa.Table) -> None:
    output.write(0, 0, embedded, [])
    output.write(0, 1, embedded, [])
    path = Path(output.root) / "vectors/00000-000/part-000001.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    assert list(output.finished()) == [(0, 0)]


def test_what_a_killed_process_left_is_removed(output: Output, embedded: pa.Table) -> None:
    output.write(0, 0, embedded, [])
    left = Path(output.root) / "vectors/00000-000/part-000001.parquet.0123.partial"
    left.write_bytes(b"PAR1")
    assert list(output.finished()) == [(0, 0)]
    Output.at(output.root, 4).begin(MANIFEST)
    assert not left.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": {"sha256": "cd"}},
            r"was started with model \{'sha256': 'ab'\}, but model is now \{'sha256': 'cd'\}",
        ),
        ({"dtype": "int8"}, "was started with dtype 'float32', but dtype is now 'int8'; choose another folder"),
        ({"rows_per_file": 8}, "was started with rows_per_file 4, but rows_per_file is now 8"),
    ],
)
def test_another_job_cannot_go_on(output: Output, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Output.at(output.root, 4).begin(MANIFEST | changes)
    Output.at(output.root, 4).begin(MANIFEST)


def test_a_refused_job_changes_nothing(output: Output, embedded: pa.Table) -> None:
    output.write(0, 0, embedded, [])
    half = Path(output.root) / "vectors/00000-000/part-000001.parquet.0123.partial"  # of the job that runs
    half.write_bytes(b"PAR1")
    before = contents(output)
    with pytest.raises(OptionError, match="was started with dtype 'float32', but dtype is now 'int8'"):
        Output.at(output.root, 4).begin(MANIFEST | {"dtype": "int8"})
    assert contents(output) == before


def test_the_lock_does_not_count_as_output(tmp_path: Path) -> None:
    output = Output.at(str(tmp_path / "out"), 4)
    with Lock(output.filesystem, output.root):
        output.begin(MANIFEST)
        output.begin(MANIFEST)
        assert output.finished() == {}
    assert list(contents(output)) == ["job.json"]


def contents(output: Output) -> dict[str, bytes]:
    root = Path(output.root)
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OptionError, match="is not empty, and is not the output of a job; choose another folder"):
        Output.at(str(tmp_path), 4).begin(MANIFEST)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(OutputError, match=r"cannot be written: .*; choose another folder"):
        Output.at(str(tmp_path / "notes.txt"), 4).begin(MANIFEST)
    (tmp_path / "job.json").write_text("{")
    with pytest.raises(OutputError, match=r"job\.json cannot be read"):
        Output.at(str(tmp_path), 4).manifest()
    for content in ("[]", '"precision"'):
        (tmp_path / "job.json").write_text(content)
        with pytest.raises(OutputError, match=r"job\.json is not the record of a job of Cloze; choose another folder"):
            Output.at(str(tmp_path), 4).manifest()


def test_a_url_that_no_file_system_knows() -> None:
    with pytest.raises(OutputError, match="none://a/b cannot be used"):
        Output.at("none://a/b", 4)


def test_no_room_leaves_no_half_file(output: Output, embedded: pa.Table) -> None:
    output.write(0, 0, embedded, [])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # a write beyond it fails, as on a full disk
    try:
        with pytest.raises(OutputError, match=r"cannot be written: .*the complete parts are kept: free space"):
            output.write(0, 1, embedded, [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(output.finished()) == [(0, 0)]
    assert not list(Path(output.root).rglob("*.partial"))
    assert json.loads((Path(output.root) / "job.json").read_text()) == MANIFEST


def test_counts_add_up() -> None:
    assert Counts.total([]) == Counts()
    assert Counts.total([Counts(1, 2, 3, 4), Counts(10, 20, 30, 40)]) == Counts(11, 22, 33, 44)
