"""The command `cloze` as a process, and what every command of both sides does at its end."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE
from test_imports import WITHOUT, without

from cloze.command import COMMANDS, run
from cloze.encoding.errors import ClozeError

ROOT = Path(__file__).parents[1]
SLOW = {"torch", "transformers", "sklearn", "scipy", "sentence_transformers"}  # to import


def cloze(*words: str) -> subprocess.CompletedProcess[str]:
    """`cloze WORDS`, by the function that the installed script calls."""
    start = "import sys; from cloze.command import main; sys.argv[0] = 'cloze'; sys.exit(main())"
    command = [sys.executable, "-c", start, *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE)


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_lists_all_commands(option: str) -> None:
    found = cloze(option)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("usage: cloze COMMAND")
    assert all(f"\n  {name} " in found.stdout for name in COMMANDS)


def test_without_a_command_it_shows_the_way_and_five_commands() -> None:
    found = cloze()
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert len(lines) <= 16
    assert max(map(len, lines)) <= 110
    shown = re.findall(r"^  cloze (\w+)", found.stdout, re.MULTILINE)
    assert shown == ["serve", "adapt", "fit", "export", "evaluate"]
    (way,) = (line for line in lines if "-->" in line)
    assert way.split(" --> ") == [
        "  your text", "adapt or fit", "run", "export", "bundle", "serve", "vectors over HTTP"
    ]  # fmt: skip
    assert found.stdout.isascii()  # whatever the terminal's encoding
    assert "cloze --help" in lines[-1]


def test_a_command_is_called_what_the_user_typed() -> None:
    found = cloze("average", "--help")
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("usage: cloze average ")
    found = cloze("fit", "simcse", "--batch_size", "8")
    assert (found.returncode, found.stderr) == (
        2,
        "error: unrecognized arguments: --batch_size 8; did you mean --batch-size?\n",
    )
    assert "--bundle" in cloze("serve", "--help").stdout
    swallowed = cloze("evaluate", "--pairs", "pairs.csv", "cloze-mini")
    assert (swallowed.returncode, swallowed.stderr) == (
        2,
        "error: the following arguments are required: PATH; write it before the options: an option with a list takes "
        "every word after it\n",
    )


def test_every_command_is_a_module_that_can_be_run() -> None:
    for module, _ in COMMANDS.values():
        path = ROOT.joinpath("cloze", *module.split("."))
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


def test_an_unknown_command_is_one_line() -> None:
    found = cloze("train")
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr == f"error: cloze has no command 'train'; it has {', '.join(COMMANDS)}\n"


@pytest.mark.parametrize(
    ("name", "missing", "extra", "words"),
    [
        ("fit", "torch", "train", []),
        ("compare", "scipy", "train", ["a.json", "b.json"]),
        ("average", "safetensors", "train", ["a", "b", "--out", "c"]),
        ("calibrate", "sklearn", "train", ["cloze-mini", "--pairs", "a.csv"]),
        ("serve", "uvicorn", "cpu", ["--port", "0"]),
        ("evaluate", "matplotlib", "report", ["cloze-mini", "--data", "no-such-folder", "--report", "no-such-report"]),
    ],
)
def test_a_missing_extra_is_one_line(name: str, missing: str, extra: str, words: list[str]) -> None:
    script = f"""
import contextlib, io
from cloze.command import main
sys.argv = ["cloze", {name!r}, *{words!r}]
with contextlib.redirect_stderr(io.StringIO()) as said:
    try:
        code = main()
    except SystemExit as end:
        code = end.code
print(code, said.getvalue(), end="")
"""
    advice = (
        f"error: cloze {name} needs {missing}, which is not installed: pip install '.[{extra}]' in a clone of Cloze"
    )
    assert without({missing}, script) == f"2 {advice}\n"


def test_a_side_that_an_image_leaves_out_is_one_line() -> None:
    script = "from cloze.command import main; sys.argv = ['cloze', 'fit']; sys.stderr = sys.stdout; print(main())"
    said = "error: cloze fit is not in this installation; use the image or the package that has cloze.training\n2\n"
    assert without({"cloze.training"}, script) == said


def run_module(module: str, missing: str, folder: Path, *words: str) -> tuple[int, str]:
    """Status and stderr of `python -m MODULE WORDS` in a Python where `missing` is not installed."""
    (folder / "sitecustomize.py").write_text(WITHOUT.format(packages={missing}), encoding="utf-8")
    found = subprocess.run(
        [sys.executable, "-m", module, *words], capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE,
        env=os.environ | {"PYTHONPATH": str(folder)},
    )  # fmt: skip
    return found.returncode, found.stderr


@pytest.mark.parametrize("module", ["cloze.training.fit", "training.evaluate"])
def test_a_missing_extra_is_one_line_for_python_too(module: str, tmp_path: Path) -> None:
    """The package `training` is imported before the module that Python is asked to run."""
    advice = "error: training needs torch, which is not installed: pip install '.[train]' in a clone of Cloze\n"
    assert run_module(module, "torch", tmp_path) == (2, advice)


@pytest.mark.parametrize(
    ("module", "command", "missing", "words"),
    [
        ("training.compare", "compare", "scipy", ["a.json", "b.json"]),
        ("cloze.training.evaluation.calibrate", "calibrate", "sklearn", ["cloze-mini", "--pairs", "a.csv"]),
    ],
)
def test_any_missing_package_is_one_line_for_python_too(
    module: str, command: str, missing: str, words: list[str], tmp_path: Path
) -> None:
    advice = (
        f"error: cloze {command} needs {missing}, which is not installed: pip install '.[train]' in a clone of Cloze\n"
    )
    assert run_module(module, missing, tmp_path, *words) == (2, advice)


def test_another_programs_missing_package_keeps_its_traceback(tmp_path: Path) -> None:
    """Its `__init__` imports `training` while Python locates its `__main__`, as `cloze fit` does."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "__init__.py").write_text("import cloze.training\n", encoding="utf-8")
    (tmp_path / "other" / "__main__.py").write_text("import none\n", encoding="utf-8")
    status, said = run_module("other", "none", tmp_path)
    assert (status, said.splitlines()[0]) == (1, "Traceback (most recent call last):")
    assert said.endswith("ModuleNotFoundError: No module named 'none'\n")


def test_neither_side_is_imported_before_it_is_asked_for() -> None:
    others = {"cloze.service", "cloze.training", "torch", "fastapi"}
    script = f"import sys, cloze.command; print({others} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE)
    assert found.stdout == "set()\n"


@pytest.mark.parametrize(("word", "end"), [("--help", (0, 0)), ("--no-such-option", (2, 1, "error:"))])
def test_every_command_refuses_in_one_line_before_it_waits_for_torch(word: str, end: tuple[object, ...]) -> None:
    """One process is asked for all commands: what one of them imports stays imported."""
    script = f"""
import contextlib, io, sys
from cloze.command import COMMANDS, main
for name in COMMANDS:
    sys.argv, said = ["cloze", name, {word!r}], io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        try:
            code = main()
        except SystemExit as end:
            code = end.code or 0
    lines = said.getvalue().splitlines()
    print([name, code, len(lines), *(line.split()[0] for line in lines), *sorted({SLOW} & set(sys.modules))])
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE)
    assert found.stdout.splitlines() == [str([name, *end]) for name in COMMANDS], found.stderr


@pytest.mark.parametrize(("module", "name"), [("training.fit", "fit"), ("service", "serve"), ("cloze", "")])
def test_a_clone_starts_commands_by_python_too(module: str, name: str) -> None:
    found = subprocess.run(
        [sys.executable, "-m", module, "--help"], capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE
    )
    assert (found.returncode, found.stdout) == (0, cloze(*name.split(), "--help").stdout)


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise ClozeError("the file is missing")

    def interrupted() -> None:
        raise KeyboardInterrupt

    def full() -> None:
        with open("/dev/full", "w", encoding="utf-8") as file:
            file.write("text")

    def bug() -> None:
        raise ZeroDivisionError

    assert run(lambda: None) == 0
    assert run(lambda: 130) == 130
    assert run(fail) == 2
    assert capsys.readouterr().err == "error: the file is missing\n"
    assert run(interrupted) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert run(full) == 2
    assert "No space left on device; free space on that disk" in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError):
        run(bug)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        ValueError("Error while serializing: I/O error: No space left on device (os error 28)"),  # as safetensors does
    ],
)
def test_a_full_disk_is_one_line(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise error

    assert run(fail) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.endswith("; free space on that disk, and start the command again\n")
