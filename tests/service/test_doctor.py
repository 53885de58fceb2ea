"""What `cloze doctor` prints of a machine, of made-up machines, and of a bundle."""

import re
from functools import partial
from pathlib import Path

import onnxruntime
import pytest
from tiny_bundle import write_bundle

from cloze.command import run
from cloze.service.doctor import DoctorOptions, _gpu, _memory, _verdict, _versions, main


def facts(output: str) -> dict[str, str]:
    """What each line but the last states, by its name."""
    lines = [re.fullmatch(r"(\w+): +(\S.*)", line) for line in output.splitlines()[:-1]]
    assert all(lines), output
    return {line[1]: line[2] for line in lines if line}


def test_a_machine_without_a_bundle(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloze.service.doctor.default_bundle", lambda: None)
    main([])
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1].startswith("next: give a bundle")
    found = facts(printed)
    assert list(found) == ["cloze", "processor", "CPUs", "memory", "packages", "training", "GPU"]
    assert re.match(r"\d+\.\d+\.\d+, Python 3\.\d+\.\d+, ", found["cloze"])
    assert re.match(r"\d+ of \d+ are available: \d+ batches at a time of \d+ threads each", found["CPUs"])
    assert re.search(r"\bonnxruntime \d", found["packages"])
    assert "CPUExecutionProvider" in found["GPU"]


def test_a_bundle_is_loaded_as_the_service_does_and_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = write_bundle(tmp_path / "tiny")
    main(["--bundle", str(bundle), "--provider", "cpu"])
    printed = capsys.readouterr().out
    assert printed.endswith("\nready\n")
    found = facts(printed)
    assert found["bundle"] == "'This sentence of \"[X]\" means [MASK].', pooling mask, fp32"
    assert re.fullmatch(r"fp32 on cpu, loaded and checked in \d+\.\d\d s", found["graph"])
    # below 0 where this process, which other tests have used, returned memory meanwhile
    assert re.fullmatch(r"-?\d+ MiB, the process \d+ before", found["takes"])
    assert re.fullmatch(r"[1-9]\d* texts of 32 tokens a second, one batch of 8 at a time", found["speed"])


def test_a_bundle_that_cannot_be_served_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = write_bundle(tmp_path / "tiny")
    (bundle / "onnx" / "model.onnx").unlink()
    for words in (["--bundle", str(bundle)], ["--bundle", str(tmp_path / "none")], ["--bundel", "x"]):
        assert run(partial(main, words)) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_the_memory_that_is_available(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable: 2097152 kB\n")
    assert re.fullmatch(r"\d+\.\d GiB, 2\.0 GiB of it available", _memory(tmp_path / "meminfo"))
    assert re.fullmatch(r"\d+\.\d GiB", _memory(tmp_path / "none"))
    assert _memory(tmp_path / "none", 2**31).endswith(" GiB, 2.0 GiB allowed to this container")


def test_gpus_are_those_of_the_driver(tmp_path: Path) -> None:
    for number in "01":
        (tmp_path / number).mkdir()
        (tmp_path / number / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ: 12\n")
    assert _gpu(tmp_path).startswith("NVIDIA H100 80GB HBM3, NVIDIA H100 80GB HBM3; ONNX Runtime offers ")
    assert _gpu(tmp_path / "none").startswith("no NVIDIA driver; ")


def test_the_last_line_is_ready_or_one_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none, one = tmp_path / "none", tmp_path / "one"
    (one / "0").mkdir(parents=True)
    (one / "0" / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\n")
    given = DoctorOptions(bundle=tmp_path)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    assert _verdict(given, none) == "ready"
    assert "'.[gpu]'" in _verdict(given, one)
    assert _verdict(given.model_copy(update={"provider": "cpu"}), one) == "ready"
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    assert _verdict(given, one) == "ready"


def test_packages_that_are_not_installed_are_left_out() -> None:
    assert re.fullmatch(r"numpy \S+", _versions(["numpy", "no-such-package"]))
    assert _versions(["no-such-package"]) == "none is installed"
