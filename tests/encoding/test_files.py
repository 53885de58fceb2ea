"""A file that is written whole or not at all."""

import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cloze.encoding.errors import OptionError
from cloze.encoding.files import check_new_file, exchange, replacing, write_whole


def test_the_new_text_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    for text in ("seed = 1\n", "seed = 2\n"):
        write_whole(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_leaves_the_old_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "best.safetensors"
    path.write_bytes(b"old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "\ud800")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_of_two_writers_at_a_time_the_later_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    with replacing(path) as first, replacing(path) as second:
        first.write_text("first")
        second.write_text("second")
    assert path.read_text() == "first"  # its block ends last
    assert list(tmp_path.iterdir()) == [path]


def test_two_folders_are_exchanged(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    assert exchange(tmp_path / "one", tmp_path / "other") == (sys.platform == "linux")
    if sys.platform == "linux":
        assert (tmp_path / "one" / "file").read_text() == "other"
        assert (tmp_path / "other" / "file").read_text() == "one"
        with pytest.raises(FileNotFoundError, match="none"):
            exchange(tmp_path / "none", tmp_path / "other")


def test_a_file_of_any_kind_is_replaced_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "best.safetensors"
    path.write_bytes(b"old")
    with replacing(path) as partial:
        partial.write_bytes(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"


def test_a_result_that_could_not_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_new_file(tmp_path / "scores.json")
    assert list(tmp_path.iterdir()) == []
    for path, message in (
        (tmp_path, "is a folder; name a file to write in it"),
        (tmp_path / "none" / "scores.json", "none is not a folder; create it first"),
    ):
        with pytest.raises(OptionError, match=message):
            check_new_file(path)

    def refused(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    with pytest.raises(OptionError, match=r"cannot be written to \(Permission denied\); name a file elsewhere"):
        check_new_file(tmp_path / "scores.json")


def test_a_link_and_a_pipe_are_written_through(tmp_path: Path) -> None:
    """As /dev/stdout is one or the other."""
    (tmp_path / "link").symlink_to("file")
    write_whole(tmp_path / "link", "one")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "one"
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit((tmp_path / "pipe").read_text)
        write_whole(tmp_path / "pipe", "two")
        assert read.result() == "two"
