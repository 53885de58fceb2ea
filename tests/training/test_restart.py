"""Training that torchrun starts again, by the same command, after a process or a node is lost."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from killed_runs import assert_same_weights, killed_at
from patience import PATIENCE
from recipes import arguments, load_recipe
from transformers import Trainer
from two_processes import in_two

from encoding.command import run as run_command
from training.errors import RecipeError, RunError
from training.fit import main
from training.loop import processes, training_run
from training.loop.callbacks import Journal
from training.loop.run_folder import Run
from training.methods import OBJECTIVES
from training.recipes.keys import Recipe

STEPS = 40
Words = dict[str, list[str]]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> Words:
    """Keys of a short run, with dropout."""
    folder = tmp_path_factory.mktemp("restart")
    things = ["dog", "man", "letter", "city", "rain", "guitar"]
    lines = [f"The {a} and the {b} run." for a in things for b in things]
    (folder / "text.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    pairs = "Two dogs run.\tA dog runs.\t4.5\nRain.\tA city.\t1.0\nRain.\tThe guitar.\t0.5\n"
    (folder / "dev.tsv").write_text("sentence1\tsentence2\tscore\n" + pairs, encoding="utf-8")
    keys = {"encoder": tiny_bert, "corpus": folder / "text.txt", "dev": folder / "dev.tsv", "batch_size": 8}
    keys |= {"max_steps": STEPS, "eval_steps": 5, "log_steps": 1, "learning_rate": 1e-3}
    return {key: [str(value)] for key, value in keys.items()}


def log(run: Path) -> list[dict[str, Any]]:
    """The entries of the log, without times."""
    lines = (run / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [{key: value for key, value in json.loads(line).items() if "train_" not in key} for line in lines]


def assert_same(run: Path, other: Path) -> None:
    """Runs with the same weights, bit for bit, and the same losses and scores."""
    assert_same_weights(other, run)
    assert log(run) == log(other)


@pytest.mark.parametrize("step", [3, 7])
def test_with_restarts_the_same_command_begins_and_continues(
    step: int, words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the first checkpoint it begins again."""
    command = ["simcse", *arguments(words | {"max_steps": ["10"]})]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert main([*command, "--out", str(whole)]) == 0
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with killed_at(step):
        main([*command, "--out", str(killed)])
    capsys.readouterr()
    assert main([*command, "--out", str(killed)]) == 0
    assert (f"continuing from {killed / 'checkpoint-5'}" in capsys.readouterr().err) == (step > 5)
    assert_same(killed, whole)
    assert main([*command, "--out", str(killed)]) == 0
    assert f"{killed} is finished; nothing to do" in capsys.readouterr().err
    assert run_command(lambda: main([*command, "--seed", "7", "--out", str(killed)])) == 2
    assert f"{killed} was trained with another seed; choose another --out" in capsys.readouterr().err
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    assert run_command(lambda: main([*command, "--out", str(killed)])) == 2
    assert f"{killed} is a run; continue it with --resume" in capsys.readouterr().err


def test_restarts_with_the_store_of_ended_processes_are_refused(
    words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = {"TORCHELASTIC_MAX_RESTARTS": "1", "TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": "2"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "recipe.toml").touch()
    for command in (["simcse", *arguments(words), "--out", str(tmp_path / "run")], ["--resume", str(tmp_path)]):
        assert run_command(lambda words=command: main(words)) == 2
        assert "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun" in capsys.readouterr().err


def two_with_trouble(rank: int, words: Words, folder: Path) -> dict[str, Any]:
    """What each process finds: of a folder that is its own, of a batch that does not divide, and at a slow save."""
    short = load_recipe("simcse", words | {"max_steps": ["5"]})
    mlm = load_recipe("mlm", words | {"accumulation_steps": ["2"], "batch_size": ["6"]})
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "PATIENCE", 0.0)
        found["apart"] = refusal(RunError, short, Run(folder / f"node-{rank}" / "run"))
    found["uneven"] = refusal(RecipeError, mlm, Run(folder / "uneven"))
    with pytest.MonkeyPatch.context() as patch:
        saved: list[str] = []
        patch.setattr(training_run, "Journal", listing(saved))
        if rank == 1:
            patch.setattr(Trainer, "_save_rng_state", slow(Trainer._save_rng_state))
        fit(short, Run(folder / "slow"))
        found["saved"] = saved
    return found


def refusal(kind: type[Exception], recipe: Recipe, run: Run) -> str:
    with pytest.raises(kind) as caught:
        fit(recipe, run)
    return str(caught.value)


def fit(recipe: Recipe, run: Run) -> None:
    training_run.fit(OBJECTIVES[recipe.method], recipe, run)


def listing(names: list[str]) -> type[Journal]:
    """A journal that lists the checkpoint when the Trainer holds it for saved."""

    class Listing(Journal):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            names.extend(path.name for path in (self.run.path / f"checkpoint-{state.global_step}").iterdir())

    return Listing


def slow(save: Any) -> Any:
    def saved(*arguments: Any) -> None:
        time.sleep(1)
        save(*arguments)

    return saved


def test_two_processes_refuse_what_cannot_be_one_run(words: Words, tmp_path: Path) -> None:
    found = in_two(two_with_trouble, tmp_path, words, tmp_path)
    for rank, each in enumerate(found):
        apart = f"{tmp_path}/node-{rank}/run is not the same folder for all processes (not for rank 1); "
        assert each["apart"] == apart + "choose an --out on a file system that all nodes share"
        uneven = "batch_size is 6 and is split among 2 processes, in 2 parts each; write a multiple of 4"
        assert each["uneven"] == uneven
    assert not (tmp_path / "node-1").exists()
    assert {"rng_state_0.pth", "rng_state_1.pth", "trainer_state.json"} <= set(found[0]["saved"])


@contextmanager
def torchrun(log: Path, *arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """`arguments` for torchrun, its output in the file `log`; at the end neither it nor its processes are left."""
    command = [sys.executable, "-m", "torch.distributed.run", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        for each in [*family, process]:
            each.kill()
        process.wait()


def worker(launcher: subprocess.Popen[bytes], rank: int) -> psutil.Process:
    """The process that torchrun started with this rank."""
    return next(each for each in psutil.Process(launcher.pid).children() if each.environ().get("RANK") == str(rank))


def wait_for_checkpoint(run: Path, launcher: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not any(run.glob("checkpoint-*/trainer_state.json")):
        assert launcher.poll() is None, log.read_text(encoding="utf-8")
        assert time.monotonic() < deadline, "the run does not get on"
        time.sleep(0.002)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, words: Words) -> Path:
    """A run of two processes that nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    in_two(undisturbed, folder, words, folder / "run")
    return folder / "run"


def undisturbed(rank: int, words: Words, folder: Path) -> None:
    fit(load_recipe("simcse", words), Run(folder))


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_restarts_a_killed_process_and_the_weights_are_the_same(
    rank: int, words: Words, whole: Path, tmp_path: Path
) -> None:
    run, output = tmp_path / "run", tmp_path / "output"
    options = ["--standalone", "--nproc-per-node", 2, "--max-restarts", 1]
    command = ["-m", "training.fit", "simcse", *arguments(words), "--out", run]
    with torchrun(output, *options, *command) as launcher:
        wait_for_checkpoint(run, launcher, output)
        worker(launcher, rank).send_signal(signal.SIGKILL)
        assert not (run / "run.json").exists()
        assert launcher.wait(PATIENCE) == 0, output.read_text(encoding="utf-8")
    text = output.read_text(encoding="utf-8")
    assert text.count(f"continuing from {run}/checkpoint-") == 1
    assert text.count("finished: ") == 1
    assert_same(run, whole)
