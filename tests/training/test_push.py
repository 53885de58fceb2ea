"""The command `push` as a process, with huggingface_hub's own client, against a stand-in hub."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import OWNER, TOKEN, hub_server
from patience import PATIENCE
from tiny_bundle import write_bundle

ROOT = Path(__file__).parents[2]
NAME = f"{OWNER}/tiny"
XET = {"HF_HUB_DISABLE_XET": "0"}
LFS = {"HF_HUB_DISABLE_XET": "1"}


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "tiny")


def push(url: str, home: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    own = {"HF_ENDPOINT": url, "HF_TOKEN": TOKEN, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    return subprocess.run(
        [sys.executable, "-m", "cloze.training.push", *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **own, **environment},
        timeout=PATIENCE,
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("lfs_bytes", "upload"), [(1000, LFS), (10**9, LFS), (10**9, XET)])
def test_every_file_of_the_bundle_arrives(bundle: Path, tmp_path: Path, lfs_bytes: int, upload: dict[str, str]) -> None:
    with hub_server(lfs_bytes) as hub:
        found = push(hub.url, tmp_path, str(bundle), NAME, "--private", **upload)
        assert (found.returncode, found.stdout) == (0, f"{hub.url}/{NAME}\n"), found.stderr
        assert hub.files == {NAME: contents(bundle)}
        assert bool(hub.objects) == (lfs_bytes == 1000)
        assert hub.private == {NAME: True}
        again = push(hub.url, tmp_path, str(bundle), NAME, "--message", "The same again", **upload)
        assert again.returncode == 0, again.stderr
        assert hub.messages[-1].startswith("The same again")


@pytest.mark.parametrize(
    ("name", "environment", "message"),
    [
        ("tiny", {}, "'tiny' is not a repository; write NAMESPACE/NAME"),
        (f"{OWNER}/a b", {}, f"'{OWNER}/a b' cannot be a repository's name"),
        (NAME, {"HF_TOKEN": "hf_wrong"}, f"refuses {NAME} with status 401 (Invalid username or password.); log in"),
        ("snow/tiny", {}, "refuses snow/tiny with status 403"),
        (NAME, {"HF_HUB_OFFLINE": "1"}, "cannot be uploaded to"),
    ],
)
def test_a_refusal_is_one_line(
    bundle: Path, tmp_path: Path, name: str, environment: dict[str, str], message: str
) -> None:
    with hub_server(10**9) as hub:
        found = push(hub.url, tmp_path, str(bundle), name, **environment)
        assert found.returncode == 2
        assert message in found.stderr
        assert found.stderr.startswith("error: ")
        assert found.stderr.count("\n") == 1
        assert "hf_w" not in found.stderr
        assert not any(hub.files.values())


def test_no_hub_and_no_bundle_are_one_line(bundle: Path, tmp_path: Path) -> None:
    with hub_server(10**9) as hub:
        url = hub.url
    for words, message in ((str(bundle), f"cannot be uploaded to {url}"), (str(tmp_path / "none"), "is not a folder")):
        found = push(url, tmp_path, words, NAME)
        assert found.returncode == 2
        assert message in found.stderr
        assert found.stderr.count("\n") == 1
