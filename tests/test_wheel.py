"""The wheel and the source archive: built, checked, installed into an empty environment, used far from the clone."""

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from harness import ROOT, free_port, healthy
from patience import PATIENCE, wait_until

pytestmark = pytest.mark.long

TEXTS = [f"The {animal} sleeps in the {place}." for animal in ("dog", "cat", "horse") for place in ("house", "garden")]

Cloze = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source archive and the wheel that is made of it, as a release has them."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT], check=True)
    return folder


@pytest.fixture(scope="module")
def environment(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel alone, and what it depends on, which is read from the environment of the tests."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(folder)
    python = folder / "bin" / "python"
    (wheel,) = built.glob("*.whl")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    return folder


@pytest.fixture
def cloze(environment: Path, tmp_path: Path) -> Cloze:
    """The installed command, in a folder of somebody's own packages."""
    _packages_of_others(tmp_path)

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        command = [str(environment / "bin" / "cloze"), *words]
        found = subprocess.run(
            command, cwd=tmp_path, env=_environ(tmp_path), capture_output=True, text=True, timeout=20 * PATIENCE
        )
        assert found.returncode == 0, found.stderr
        return found

    return call


def _environ(folder: Path) -> dict[str, str]:
    """No path of the clone's, but one of somebody's own packages, and no hub."""
    return os.environ | {"PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"}


def _packages_of_others(folder: Path) -> None:
    """Packages that have the names of folders of Cloze: whatever is imported of them ends the process."""
    for name in ("encoding", "evaluation", "models", "service", "training"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "__init__.py").write_text(f"raise SystemExit('{name} of another project')\n", encoding="utf-8")


def test_the_archives_are_what_an_index_accepts(built: Path) -> None:
    files = sorted(map(str, built.iterdir()))
    assert len(files) == 2
    for command in (["twine", "check", "--strict", *files], ["check_wheel_contents", files[0]]):
        found = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
        assert found.returncode == 0, found.stdout + found.stderr
    assert max(Path(file).stat().st_size for file in files) < 60e6  # an index takes 100 MB


def test_both_archives_have_the_packages_and_the_default_model(built: Path) -> None:
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as file:
        installed = {name for name in file.namelist() if ".dist-info/" not in name}
    with tarfile.open(source) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    code = {name for name in listing if name.startswith("cloze/")}
    model = {name for name in listing if name.startswith("models/cloze-mini/")}
    assert installed == code | {name.replace("models/", "cloze/", 1) for name in model}
    assert code | model <= packed


def test_it_serves_its_own_model(environment: Path, tmp_path: Path) -> None:
    port = str(free_port())
    url = f"http://127.0.0.1:{port}"
    _packages_of_others(tmp_path)
    command = [str(environment / "bin" / "cloze"), "serve", "--port", port, "--threads", "1"]
    with subprocess.Popen(command, cwd=tmp_path, env=_environ(tmp_path), stderr=subprocess.DEVNULL) as server:
        try:
            wait_until(lambda: server.poll() is not None or healthy(url))
            answer = httpx.post(f"{url}/embed", json={"inputs": TEXTS}, timeout=PATIENCE)
        finally:
            server.terminate()
    assert answer.status_code == 200
    spec = json.loads((ROOT / "models" / "cloze-mini" / "embedding.json").read_text(encoding="utf-8"))
    assert [len(vector) for vector in answer.json()] == [spec["dimension"]] * len(TEXTS)


def test_it_trains_from_its_own_model_and_scores(cloze: Cloze, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("".join(f"{text}\n" for text in TEXTS * 8), encoding="utf-8")
    rows = [f"{TEXTS[at]},{TEXTS[at - 1]},{at}\n" for at in range(len(TEXTS))]
    (tmp_path / "pairs.csv").write_text("sentence1,sentence2,score\n" + "".join(rows), encoding="utf-8")
    words = ["--encoder", "cloze-mini", "--pooling", "mean", "--corpus", "texts.txt", "--batch-size", "4"]
    cloze("fit", "simcse", *words, "--max-steps", "2", "--out", "run")
    known = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    assert (known["parent"], known["steps"]) == ("cloze-mini", 2)
    assert "spearman" in cloze("evaluate", "run", "--pairs", "pairs.csv").stdout
    assert "cloze-mini" in cloze("compare", "cloze-mini", "run", "--pairs", "pairs.csv").stdout


def test_it_embeds_files_and_describes_the_machine(cloze: Cloze, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("".join(f"{text}\n" for text in TEXTS), encoding="utf-8")
    assert f"embedded {len(TEXTS)} rows" in cloze("bulk", "texts.txt", "vectors").stdout
    assert "texts of 32 tokens a second" in cloze("doctor").stdout
