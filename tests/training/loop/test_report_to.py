"""Where the log of a run goes: its own folder, Weights & Biases, MLflow, or only to log.jsonl."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from killed_runs import fit
from recipes import arguments, load_recipe

from cloze.encoding.errors import ClozeError
from cloze.training.run_folder import Run

Words = dict[str, list[str]]


@pytest.fixture
def words(tiny_bert: Path, tmp_path: Path) -> Words:
    (tmp_path / "text.txt").write_text("A dog runs.\nRain in the city.\n" * 8, encoding="utf-8")
    keys = {"encoder": tiny_bert, "corpus": tmp_path / "text.txt", "batch_size": 4, "max_steps": 2, "log_steps": 1}
    return {key: [str(value)] for key, value in keys.items()}


@pytest.mark.parametrize(("report_to", "written"), [([], False), (["tensorboard"], True), (["none"], False)])
def test_tensorboard_is_written_where_it_is_asked_for(
    report_to: list[str], written: bool, words: Words, tmp_path: Path
) -> None:
    keys = words | ({"report_to": report_to} if report_to else {})
    fit(load_recipe("simcse", keys), Run(tmp_path / "run"))
    assert (tmp_path / "run" / "tensorboard").is_dir() is written
    assert (tmp_path / "run" / "log.jsonl").is_file()


@pytest.mark.parametrize(("package", "install"), [("wandb", "wandb"), ("tensorboard", r"'\.\[report\]'")])
def test_a_missing_package_is_refused_before_work(
    package: str, install: str, words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloze.training.loop.prepare.find_spec", lambda name: None)
    recipe = load_recipe("simcse", words | {"report_to": [package], "encoder": ["no/such"]})
    with pytest.raises(ClozeError, match=f"report_to has {package}, which is not installed: pip install {install}"):
        fit(recipe, Run(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_none_stands_alone(words: Words) -> None:
    with pytest.raises(ClozeError, match="report_to is none, wandb; write none alone"):
        load_recipe("simcse", words | {"report_to": ["none", "wandb"]})


def run_with(words: Words, folder: Path, report_to: str, **variables: str) -> None:
    """The command, in a process of its own, because the libraries keep threads and change the working folder."""
    command = [sys.executable, "-m", "cloze.training.fit", "simcse", *arguments(words), "--report-to", report_to]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3])} | variables
    done = subprocess.run(
        [*command, "--out", str(folder / "mine")], env=environment, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_offline_has_the_log(words: Words, tmp_path: Path) -> None:
    run_with(words, tmp_path, "wandb", WANDB_MODE="offline", WANDB_DIR=str(tmp_path))
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert b"train/loss" in file.read_bytes()
