"""The command as a user runs it, on a tiny encoder: kill -9, Ctrl-C, bad input."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness import ROOT
from killed_runs import killed_at
from patience import PATIENCE
from recipes import arguments
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from cloze.command import run as run_command
from cloze.encoding.errors import ClozeError
from cloze.training import run_folder
from cloze.training.errors import RunError
from cloze.training.fit import main
from cloze.training.loop.trainer import ObjectiveTrainer
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.run_folder import Run

DYING = Path(__file__).with_name("dying_processes.py")
STEPS = 15


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "sentences.txt"
    things = ["dog", "man", "letter", "city", "rain", "guitar", "market", "friend"]
    lines = [f"The {a} and the {b} run {c} times." for a in things for b in things for c in range(4)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dev") / "dev.tsv"
    rows = [
        ("Two dogs run.", "A dog runs.", 4.5),
        ("Two dogs run.", "The market fell.", 0.3),
        ("Rain.", "A city.", 1.0),
    ]
    path.write_text("sentence1\tsentence2\tscore\n" + "".join(f"{a}\t{b}\t{c}\n" for a, b, c in rows), encoding="utf-8")
    return path


@pytest.fixture
def words(tiny_bert: Path, text: Path, dev: Path) -> list[str]:
    options = {"encoder": tiny_bert, "corpus": text, "dev": dev, "batch_size": 8, "max_steps": STEPS}
    options |= {"eval_steps": 5, "log_steps": 1, "learning_rate": 0.001, "max_tokens": 40}
    options |= {"group_by_length": "true"}
    return arguments(options)


def start(*arguments: object, **variables: str) -> subprocess.Popen[str]:
    """Python with these arguments."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | variables
    command = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)


def end(process: subprocess.Popen[str]) -> str:
    """What it wrote, once it has ended."""
    try:
        out, err = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return out + err


def steps(folder: Path) -> list[int]:
    """Steps whose loss is in the log, in order."""
    path = folder / "log.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    entries = [json.loads(line) for line in lines if line.endswith("\n")]
    return [entry["step"] for entry in entries if "loss" in entry]


def signal_after(process: subprocess.Popen[str], number: int, reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    try:
        while not reached():
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline, "the run does not get on"
            time.sleep(0.002)
    except BaseException:
        process.kill()
        process.communicate()
        raise
    process.send_signal(number)


def weights(folder: Path) -> dict[str, list[float]]:
    return {key: value.tolist() for key, value in load_file(folder / "model" / "model.safetensors").items()}


def test_a_run_killed_and_resumed_ends_with_the_same_weights(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the killed run needs a process of its own."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert main(["promptbert", *words, "--out", str(whole)]) == 0
    environment = {"DIES": '{"0": 12}', "DEAD": str(tmp_path)}
    process = start(DYING, "promptbert", *words, "--out", killed, **environment)
    output = end(process)
    assert process.returncode == -signal.SIGKILL, output
    assert not (killed / "model").exists()
    assert max(steps(killed)) == 11  # a step's loss is logged after its end
    # what a kill in the middle of saving leaves
    torn = killed / "checkpoint-999"
    torn.mkdir()
    (torn / "trainer_state.json").write_text('{"global_step": 9', encoding="utf-8")
    assert main(["--resume", str(killed)]) == 0
    assert steps(killed) == list(range(1, STEPS + 1))
    assert weights(killed) == weights(whole)
    assert not torn.exists()
    log = (json.loads(line) for line in (whole / "log.jsonl").read_text(encoding="utf-8").splitlines())
    scores = {entry["step"]: entry["eval_dev_spearman"] for entry in log if "eval_dev_spearman" in entry}
    provenance = json.loads((killed / "run.json").read_text(encoding="utf-8"))
    assert sorted(scores) == list(range(0, STEPS + 1, 5))
    assert provenance["dev_score"] == max(score for step, score in scores.items() if step)
    assert provenance["steps"] == STEPS
    assert provenance["seeds"] == [42]
    assert main(["--resume", str(killed)]) == 0
    assert "finished; nothing to do" in capsys.readouterr().err
    assert SentenceEncoder.load(str(killed / "model")).config.template == 'This sentence of "[X]" means [MASK].'


def test_ctrl_c_saves_and_resume_goes_on(tmp_path: Path, words: list[str]) -> None:
    folder = tmp_path / "run"
    command = ["-m", "cloze.training.fit", "simcse", *words, "--eval-steps", "1000", "--max-steps", "100000"]
    process = start(*command, "--out", folder)
    signal_after(process, signal.SIGINT, lambda: len(steps(folder)) >= 3)
    output = end(process)
    assert process.returncode == 130, output
    assert f"continue with: cloze fit --resume {folder}" in output
    checkpoint = next(folder.glob("checkpoint-*"))
    last = max(steps(folder))
    assert checkpoint.name == f"checkpoint-{last}"
    with killed_at(last + 2):
        main(["--resume", str(folder)])
    assert steps(folder) == list(range(1, last + 3))


@pytest.mark.parametrize(("peak", "shown"), [(2_500_000_000, "memory: 2.50 GB\n"), (None, "memory: unknown\n")])
def test_dry_run_shows_each_view_and_keeps_nothing(
    peak: int | None,
    shown: str,
    tmp_path: Path,
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cloze.training.loop.dry_run.peak_memory", lambda: peak)
    assert main(["promptbert", *words, "--dry-run", "--out", str(tmp_path / "run")]) == 0
    output = capsys.readouterr().err
    assert "view first: (8, " in output
    assert "view second: (8, " in output
    assert '[CLS] this sentence of " the ' in output
    assert ("memory: " if torch.cuda.is_available() else shown) in output
    assert "sentences per second" in output
    assert not (tmp_path / "run").exists()


def test_without_arguments_the_recipes_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    output = capsys.readouterr().out
    assert "promptbert-same " in output
    assert "cloze fit promptbert --corpus" in output


def test_help_shows_presets_and_keys(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # argparse would break a line within google-bert

    def help_text(*words: str) -> str:
        with pytest.raises(SystemExit, match="0"):
            main([*words, "--help"])
        return " ".join(capsys.readouterr().out.split())

    assert "usage: cloze fit RECIPE " in help_text()
    assert "--temperature X divides the cosines in the KL divergence (default: 0.05)" in help_text("distill")
    simcse = help_text("simcse")
    assert "usage: cloze fit simcse " in simcse
    assert "--resume PATH" in simcse
    assert "--preset bert-large --encoder google-bert/bert-large-uncased --learning-rate 1e-05" in simcse
    assert "(default: google-bert/bert-base-uncased)" in simcse
    assert "(default: google-bert/bert-large-uncased)" in help_text("simcse", "--preset", "bert-large")
    ssimcse = help_text("ssimcse")
    assert (
        "--rates [X ...] parameters of the distribution; uniform: the lowest and the highest rate (default: [0.0, 0.2])"
        in ssimcse
    )
    assert "--attention-dropout, --no-attention-dropout also draw the rates" in ssimcse
    assert "--method" not in ssimcse


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simcse", "--corpus", "gone.txt"], "error: gone.txt does not exist"),
        (
            ["simcse", "--corpus", "{text}", "--encoder", "no/such"],
            "or give cloze-mini, the model that comes with Cloze",
        ),
        (
            ["mlm", "--corpus", "{text}", "--encoder", "cloze-mini", "--head", "kept"],
            "cloze-mini' is a bundle, which has no masked-word head; give it one: cloze pretrain",
        ),
        (["simcse", "--corpus", "{text}", "--dev", "gone.csv"], "error: gone.csv is not a file"),
        (["simcse", "--corpus", "{text}", "--batch-size", "100000"], "fewer than one batch of 100000"),
        (["mlm", "--corpus", "{text}", "--columns", "a", "b"], "columns names 2, but method 'mlm' reads 1"),
        (["simcse", "--corpus", "{pairs}", "--columns", "a", "b", "c"], "line 2: no column 'c'; it has a, b"),
        (["simcse", "--corpus", "{pairs}"], "has columns a, b; name the column to read"),
        (["simcse", "--corpus", "{empty}"], "no sentences remain from {empty}: 0 rows from 1 files; left out: 3 empty"),
        (["simcse", "--corpus", "{text}", "--seeds", "0-9"], "--seeds compares dev scores, but dev is not set"),
        (["--resume", "{text}"], "is not a run folder"),
        (["--resume", "{text}", "--seed", "3"], "omit RECIPE and its keys"),
        (["--corpus", "{text}", "simcse"], "RECIPE comes before its keys: cloze fit RECIPE --corpus"),
        (["--dry-run"], "RECIPE is missing: cloze fit RECIPE --dry-run"),
    ],
)
def test_bad_input_is_one_line_and_leaves_no_run(
    tmp_path: Path, text: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pairs.csv").write_text("a,b\nA dog.,A man.\n", encoding="utf-8")
    (tmp_path / "empty.txt").write_text("\n \n\t\n", encoding="utf-8")
    files = {"{text}": text, "{pairs}": tmp_path / "pairs.csv", "{empty}": tmp_path / "empty.txt"}
    for mark, path in files.items():
        arguments, message = [word.replace(mark, str(path)) for word in arguments], message.replace(mark, str(path))
    words = arguments
    if "--resume" not in words:
        words += ["--out", str(tmp_path / "run")]
    assert run_command(lambda: main(words)) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last
    assert not (tmp_path / "run").exists()


def test_rows_with_an_empty_sentence_are_left_out_and_counted(
    tmp_path: Path, tiny_bert: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ["a,b,c", *(f"A dog {n}.,A man {n}.,Rain {n}." for n in range(6)), "A dog.,A man.,", "A dog.,A man.", ",b,c"]
    (tmp_path / "rows.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    keys = ["--encoder", str(tiny_bert), "--corpus", str(tmp_path / "rows.csv"), "--columns", "a", "b", "c"]
    assert main(["simcse", *keys, "--batch-size", "3", "--max-steps", "1", "--out", str(tmp_path / "run")]) == 0
    assert "corpus: 6 rows from 1 files; left out: 3 empty, 0 by length" in capsys.readouterr().err


def test_what_can_be_known_is_known_before_the_model_is_loaded(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SentenceEncoder, "load", lambda *_, **__: pytest.fail("the model was loaded"))
    rows = tmp_path / "rows.csv"
    rows.write_text("a,b\nA dog.,\n", encoding="utf-8")
    for words, message in (
        (["--corpus", rows, "--columns", "a", "b", "c"], "no column"),
        (["--corpus", rows, "--columns", "a", "b"], "no sentences remain"),
        (["--corpus", text, "--batch-size", "1000000"], "batch"),
        (["--corpus", text, "--dev", "gone.csv"], r"gone\.csv"),
        (["--corpus", text, "--learning-rat", "1"], "learning-rat"),
    ):
        with pytest.raises(ClozeError, match=message):
            main(["simcse", *map(str, words), "--out", str(tmp_path / "run")])


def test_a_folder_in_the_way_is_left_alone(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.txt").write_text("years of work", encoding="utf-8")
    assert run_command(lambda: main(["simcse", *words, "--out", str(tmp_path)])) == 2
    assert f"{tmp_path} is not an empty folder; choose another --out" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    assert run_command(lambda: main(["simcse", *words, "--out", str(tmp_path / "thesis.txt" / "run")])) == 2
    assert "run cannot be written to (Not a directory); choose another folder" in capsys.readouterr().err


def test_a_disk_without_room_is_refused_before_training(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _disk(monkeypatch, free=[1_000_000])
    assert run_command(lambda: main(["simcse", *words, "--out", str(tmp_path / "run")])) == 2
    message = capsys.readouterr().err
    assert "run will take up to" in message
    assert "its disk has only 0.00 GB for it; free space, or choose another --out" in message
    assert not (tmp_path / "run").exists()


def test_a_disk_that_fills_up_says_how_to_go_on(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch raises a RuntimeError without the cause, which the room on the disk shows."""
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        _disk(patch, free=[10**12, 0])
        patch.setattr("transformers.trainer.torch.save", _refused)
        assert run_command(lambda: main(["simcse", *words, "--out", str(run)])) == 2
    assert f"free space and continue with --resume {run}" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        _disk(patch, free=[10**12, 10**12])
        patch.setattr("transformers.trainer.torch.save", _refused)
        with pytest.raises(RuntimeError, match="iostream error"):
            main(["--resume", str(run)])
    assert main(["--resume", str(run)]) == 0


def test_a_file_that_vanishes_is_not_part_of_the_folders_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of torchrun writes and renames files while another one measures. A broken link vanishes at once."""
    (tmp_path / ".data.json.partial").symlink_to(tmp_path / "gone")
    (tmp_path / "run.json").write_bytes(b"1234")
    _disk(monkeypatch, free=[6, 5])
    with Run(tmp_path).space_for(10):  # 6 free, and 4 that the folder has already
        pass
    with pytest.raises(RunError), Run(tmp_path).space_for(10):
        pass


def _disk(monkeypatch: pytest.MonkeyPatch, free: list[int]) -> None:
    """A disk with so many bytes free, each time it is asked."""
    answers = iter(free)
    monkeypatch.setattr("cloze.training.run_folder.shutil.disk_usage", lambda _: SimpleNamespace(free=next(answers)))


def _refused(*_: object) -> None:
    raise RuntimeError("basic_ios::clear: iostream error")


TORCH_FULL = "[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"
SAFETENSORS_FULL = "Error while serializing: I/O error: No space left on device (os error 28)"
NO_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1 GiB is free."
)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "full"),
        OSError(errno.EDQUOT, "full"),
        SafetensorError(SAFETENSORS_FULL),
        RuntimeError(TORCH_FULL),
        RuntimeError("basic_ios::clear: iostream error"),
    ],
    ids=repr,
)
def test_what_a_full_disk_raises_is_explained(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _disk(monkeypatch, free=[10**12, 0])
    with (
        pytest.raises(RunError, match=r"its disk has only 0\.00 GB for it; free space"),
        Run(tmp_path).space_for(10**9),
    ):
        raise error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(NO_MEMORY),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        OSError(errno.EIO, "a bad sector"),
        SafetensorError("Error while serializing: I/O error: (os error 13)"),
    ],
    ids=repr,
)
def test_other_errors_do_not_blame_a_disk_that_has_little_room(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _disk(monkeypatch, free=[10**12, 0])
    with pytest.raises(type(error)) as caught, Run(tmp_path).space_for(10**9):
        raise error
    assert caught.value is error


def test_torch_says_of_a_full_disk_what_is_expected_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/full is Linux's full disk. Not for safetensors, which would put a file in its place."""
    _disk(monkeypatch, free=[10**12, 0])
    with pytest.raises(RunError, match="free space"), Run(tmp_path).space_for(10**9):
        torch.save({"weights": torch.zeros(1 << 20)}, "/dev/full")


@pytest.mark.parametrize(
    ("recipe", "advice"),
    [
        ("simcse", "choose a lower batch_size or a lower mini_batch_size"),
        ("mlm", "choose a lower batch_size or a higher accumulation_steps"),
        ("diffcse", "choose a lower batch_size"),  # BatchNorm sees all rows of a batch
    ],
)
@pytest.mark.parametrize("rehearsed", [False, True])
def test_a_gpu_without_enough_memory_is_one_line(
    rehearsed: bool,
    recipe: str,
    advice: str,
    tmp_path: Path,
    words: list[str],
    masked_bert: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def step(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError(NO_MEMORY)

    monkeypatch.setattr(ObjectiveTrainer, "training_step", step)
    _disk(monkeypatch, free=[10**12, 0])  # which is not to blame
    words = [recipe, *words, "--encoder", str(masked_bert), "--out", str(tmp_path / "run"), *["--dry-run"] * rehearsed]
    words += ["--generator", str(masked_bert)] * (recipe == "diffcse")
    code = run_command(lambda: main(words))
    last = capsys.readouterr().err.splitlines()[-1]
    assert (code, last) == (2, f"error: CUDA out of memory. Tried to allocate 2.00 GiB; {advice}")


def test_a_link_to_nothing_is_refused_before_the_model_is_loaded(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "out").symlink_to("/mnt/none")
    with pytest.raises(RunError, match=r"out is a link to /mnt/none, which does not exist; choose another --out"):
        main(["simcse", *words, "--out", str(tmp_path / "out")])


def test_a_word_that_is_not_utf_8_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(lambda: main(["simcse", *words, "--corpus", os.fsdecode(b"caf\xe9.txt")])) == 2
    expected = r"error: 'caf\udce9.txt' of the command line is not UTF-8; rename the file that it names"
    assert capsys.readouterr().err == f"{expected}\n"


def test_a_run_in_the_way_says_how_to_continue(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.toml").write_text("", encoding="utf-8")
    assert run_command(lambda: main(["simcse", *words, "--out", str(tmp_path)])) == 2
    assert f"{tmp_path} is a run; continue it with --resume {tmp_path}" in capsys.readouterr().err


def test_a_model_that_training_broke_is_not_kept(
    tmp_path: Path, tiny_bert: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In fewer steps than log_steps no loss is looked at."""
    keys = ["--encoder", str(tiny_bert), "--corpus", str(text), "--max-steps", "1", "--learning-rate", "1e38"]
    assert run_command(lambda: main(["simcse", *keys, "--out", str(tmp_path / "run")])) == 2
    assert "weights are not finite" in capsys.readouterr().err
    assert not (tmp_path / "run" / "model").exists()


def test_a_run_prints_a_line_a_log_and_nothing_of_its_libraries(
    tmp_path: Path, words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["simcse", *words, "--max-steps", "10", "--out", str(tmp_path / "run")]) == 0
    shown = capfd.readouterr()
    lines = shown.err.splitlines()
    assert shown.out == ""
    assert lines[0].startswith("corpus: 256 rows")
    assert lines[1].startswith("template and pooling: ")
    assert lines[2].startswith("step 0: dev_spearman ")
    assert [line.split(":")[0] for line in lines[3:-1]] == [
        f"step {step}" for step in range(1, 11) for _ in range(2 if step % 5 == 0 else 1)
    ]
    assert lines[3].startswith("step 1: loss ")
    assert lines[-1].startswith("finished: ")


def test_resuming_on_other_text_is_refused(
    tmp_path: Path, tiny_bert: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_bytes(text.read_bytes())
    out = tmp_path / "run"
    keys = ["--encoder", str(tiny_bert), "--corpus", str(corpus), "--max-steps", "1", "--batch-size", "4"]
    assert main(["simcse", *keys, "--out", str(out)]) == 0
    (out / "run.json").unlink()  # as if it had been killed just before
    corpus.write_text(corpus.read_text(encoding="utf-8") + "One more.\n", encoding="utf-8")
    assert run_command(lambda: main(["--resume", str(out)])) == 2
    assert "the text has changed since" in capsys.readouterr().err


@pytest.mark.parametrize("changed", ["encoder", "generator", "dev"])
def test_resuming_with_another_model_or_dev_data_is_refused(
    tmp_path: Path, masked_bert: Path, text: Path, capsys: pytest.CaptureFixture[str], changed: str
) -> None:
    """The text is the same, and the run would go on from its checkpoint as if nothing had happened."""
    models = {name: shutil.copytree(masked_bert, tmp_path / name) for name in ("encoder", "generator")}
    dev = tmp_path / "dev.csv"
    dev.write_text("sentence1,sentence2,score\na man,a dog,1\na man,a man,5\nno,yes,2\n", encoding="utf-8")
    out = tmp_path / "run"
    keys = [f"--{name}={folder}" for name, folder in models.items()]
    keys += ["--corpus", str(text), "--max-steps", "1", "--batch-size", "4", "--dev", str(dev)]
    assert main(["diffcse", *keys, "--out", str(out)]) == 0
    (out / "run.json").unlink()
    if changed == "dev":
        dev.write_text(dev.read_text(encoding="utf-8").replace("yes,2", "yes,3"), encoding="utf-8")
    else:
        weights = load_file(models[changed] / "model.safetensors")
        next(iter(weights.values())).add_(1)
        save_file(weights, models[changed] / "model.safetensors", {"format": "pt"})
    assert run_command(lambda: main(["--resume", str(out)])) == 2
    name = dev if changed == "dev" else models[changed]
    assert f"{changed} {name} has changed since {out} began; restore it, or train anew" in capsys.readouterr().err


def test_a_run_whose_further_documents_are_gone_is_not_resumed(
    tmp_path: Path, tiny_bert: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "".join(f"query {number},a document of {number}\n" for number in range(8))
    (tmp_path / "pairs.csv").write_text(f"query,document\n{rows}", encoding="utf-8")
    for name in ("one", "two"):
        (tmp_path / f"more-{name}.csv").write_text(f"document\nthe text {name}\n", encoding="utf-8")
    SentenceEncoder.load(str(tiny_bert), template="[X]", pooling="mean").save(tmp_path / "encoder")
    keys = ["--encoder", tmp_path / "encoder", "--corpus", tmp_path / "pairs.csv", "--columns", "query", "document"]
    keys += ["--documents", tmp_path / "more-*.csv", "--max-steps", 1, "--batch-size", 4, "--max-tokens", 32]
    keys += ["--out", tmp_path / "run"]
    assert main(["ranking", *map(str, keys)]) == 0
    (tmp_path / "run" / "run.json").unlink()
    (tmp_path / "more-two.csv").unlink()
    assert run_command(lambda: main(["--resume", str(tmp_path / "run")])) == 2
    assert "more-two.csv has changed since" in capsys.readouterr().err


def test_more_tokens_than_the_encoder_has_places_for_are_refused(
    tmp_path: Path, tiny_bert: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ["--encoder", str(tiny_bert), "--corpus", str(text), "--max-tokens", "65", "--out", str(tmp_path / "run")]
    assert run_command(lambda: main(["simcse", *keys])) == 2
    assert "max_tokens is 65; the encoder has positions for 64" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("words", [["simcse", "--help"], ["simcse", "--bach-size", "8"], []])
def test_help_and_wrong_keys_do_not_wait_for_torch(words: list[str]) -> None:
    script = f"""
import contextlib, sys
from cloze.training.fit import main
with contextlib.suppress(SystemExit, Exception):
    main({words!r})
print(sorted({{"torch", "transformers", "scipy"}} & set(sys.modules)))
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE)
    assert found.stdout.splitlines()[-1] == "[]", found.stderr


@pytest.mark.parametrize(("place", "known"), [("cloze/training", True), (".venv/site-packages/training", False)])
def test_a_run_names_no_commit_but_that_of_cloze(
    place: str, known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment is often in the repository of another project."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.com"]
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "-m", "x"], check=True)
    (tmp_path / place).mkdir(parents=True)
    monkeypatch.setattr(run_folder, "__file__", str(tmp_path / place / "run_folder.py"))
    assert (run_folder._commit() is not None) == known
