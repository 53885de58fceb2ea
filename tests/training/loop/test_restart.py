"""Training that torchrun starts again, by the same command, after a process or a node is lost."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT
from killed_runs import assert_same_weights, killed_at, log
from patience import PATIENCE, wait_until
from recipes import arguments, load_recipe
from transformers import Trainer
from two_processes import in_two

from cloze.command import run as run_command
from cloze.training.errors import RecipeError, RunError
from cloze.training.fit import main
from cloze.training.loop import processes
from cloze.training.loop import run as loop
from cloze.training.loop.callbacks import Journal
from cloze.training.recipes.recipe import Recipe
from cloze.training.run_folder import Run

STEPS = 15
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
    keys |= {"max_steps": STEPS, "eval_steps": 5, "save_steps": 5, "log_steps": 1, "learning_rate": 1e-3}
    return {key: [str(value)] for key, value in keys.items()}


def assert_same(run: Path, other: Path) -> None:
    """Runs with the same weights, bit for bit, and the same losses and scores."""
    assert_same_weights(other, run)
    assert log(run) == log(other)


@pytest.mark.parametrize("step", [3, 7])
def test_with_restarts_the_same_command_begins_and_continues(
    step: int, words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the first checkpoint it begins again."""
    command = ["simcse", *arguments(words | {"max_steps": ["10"], "save_steps": ["5"]})]
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


@pytest.mark.parametrize("own", [{"max_steps": ["6"], "warmup_steps": ["9"]}, {"patience": ["2"]}])
def test_a_run_that_is_killed_as_it_ends_trains_no_further(
    own: Words, words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of an epoch of four steps, by its steps or by its patience."""
    score = iter([4.0, 3.0, 2.0, 1.0, 9.0, 9.0])
    monkeypatch.setattr(loop, "_figures", lambda *_, **__: {"eval_dev_spearman": next(score)})
    keys = words | {"save_steps": ["3"], "eval_steps": ["3"]} | own
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert main(["simcse", *arguments(keys), "--out", str(whole)]) == 0
    shutil.copytree(whole, killed)
    shutil.rmtree(killed / "model")
    (killed / "run.json").unlink()
    assert main(["--resume", str(killed)]) == 0
    assert_same_weights(whole, killed)
    assert [entry["step"] for entry in log(killed) if "loss" in entry] == [1, 2, 3, 4, 5, 6]
    steps = [json.loads((run / "run.json").read_text())["steps"] for run in (whole, killed)]
    assert steps == [6, 6]


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
        patch.setattr(loop, "Journal", listing(saved, folder / "first-is-past"))
        save = Trainer._save_rng_state
        patch.setattr(Trainer, "_save_rng_state", (first, second)[rank](save, folder / "first-is-past"))
        fit(short, Run(folder / "slow"))
        found["saved"] = saved
    return found


def refusal(kind: type[Exception], recipe: Recipe, run: Run) -> str:
    with pytest.raises(kind) as caught:
        fit(recipe, run)
    return str(caught.value)


def fit(recipe: Recipe, run: Run) -> None:
    loop.fit(recipe, run)


def listing(names: list[str], past: Path) -> type[Journal]:
    """A journal that lists the checkpoint when the Trainer holds it for saved."""

    class Listing(Journal):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            names.extend(path.name for path in (self.run.path / f"checkpoint-{state.global_step}").iterdir())
            past.touch()

    return Listing


def first(save: Any, past: Path) -> Any:
    """The first process's save: `past` is there as soon as it waits for the other, or goes on without it."""

    def saved(trainer: Trainer, *arguments: Any) -> None:
        save(trainer, *arguments)
        wait = trainer.accelerator.wait_for_everyone
        trainer.accelerator.wait_for_everyone = lambda: (past.touch(), wait())

    return saved


def second(save: Any, past: Path) -> Any:
    """The second process's save, which begins when the first one waits for it, or goes on without it."""

    def saved(*arguments: Any) -> None:
        wait_until(past.exists)
        save(*arguments)

    return saved


def test_two_processes_refuse_what_cannot_be_one_run(words: Words, tmp_path: Path) -> None:
    found = in_two(two_with_trouble, tmp_path, words, tmp_path)
    for rank, each in enumerate(found):
        apart = f"{tmp_path}/node-{rank}/run is not the same folder for all processes (rank 1 does not see it); "
        assert each["apart"] == apart + "choose an --out on a file system that all nodes share"
        uneven = "batch_size is 6, but it is split among 2 processes, in 2 parts each; write a multiple of 4"
        assert each["uneven"] == uneven
    assert not (tmp_path / "node-1").exists()
    assert {"rng_state_0.pth", "rng_state_1.pth", "trainer_state.json"} <= set(found[0]["saved"])


def undisturbed(rank: int, words: Words, folder: Path) -> None:
    fit(load_recipe("simcse", words), Run(folder))


@pytest.mark.long
def test_torchrun_restarts_killed_processes_and_the_weights_are_the_same(words: Words, tmp_path: Path) -> None:
    """The first process dies, which writes the checkpoints."""
    (tmp_path / "whole").mkdir()
    in_two(undisturbed, tmp_path / "whole", words, tmp_path / "whole" / "run")
    run, dead = tmp_path / "run", tmp_path / "dead"
    dead.mkdir()
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    script = Path(__file__).parents[1] / "dying_processes.py"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "DEAD": str(dead), "DIES": '{"0": 12}'}
    result = subprocess.run(
        [sys.executable, *launcher, script, "simcse", *arguments(words), "--out", run],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert result.returncode == 0, result.stderr
    assert len(list(dead.iterdir())) == 1
    continued = re.findall(rf"continuing from {run}/checkpoint-(\d+)", result.stderr)
    assert continued == ["10"]
    assert result.stderr.count("finished: ") == 1
    assert_same(run, tmp_path / "whole" / "run")
