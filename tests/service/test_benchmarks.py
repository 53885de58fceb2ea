"""The benchmarks' arithmetic and client, on figures and a service small enough to know the result."""

import asyncio
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from patience import PATIENCE

from benchmarks import gpu, peers, serving_report, training
from benchmarks.load import Workload, ask, load
from benchmarks.peers import Server, ours
from cloze.machine import versions

WORK = ("short, 1 per request", "mixed, 32 per request", "long, 8 per request")
SPEEDS = {"Cloze, int8": 300.0, "Cloze, fp32": 200.0, "infinity, torch": 100.0, "infinity, ONNX": 50.0}


def figures(speed: float) -> dict[str, float]:
    return {"texts_per_second": speed, "p50": 1 / speed, "p99": 2 / speed, "cpu": 100 / speed}


@pytest.fixture
def results() -> dict[str, Any]:
    """Two rounds; in the second everything but Cloze is half as fast."""
    served = {
        name: [figures(speed), figures(speed / (1 if name.startswith("Cloze") else 2))]
        for name, speed in SPEEDS.items()
    }
    alone = {
        "sentence-transformers, torch": [figures(120), figures(60)],
        "sentence-transformers, onnx int8": [figures(150), figures(75)],
        "Cloze, int8, tokenising and session alone": [figures(400), figures(400)],
    }
    return {
        "rounds": 2,
        "accuracy": {"Cloze, int8": {"least": 0.98, "mean": 0.99, "batch": 0.0, "STS-B dev": 86.5}},
        "servers": {name: {"started": 1.5, "peak_mb": 200.0} for name in SPEEDS},
        "figures": {name: {"1": served, "128": served, "in process": alone} for name in WORK},
    }


def test_ratios_are_taken_round_by_round_against_the_best(results: dict[str, Any]) -> None:
    lines = serving_report.ratios(results).splitlines()[2:]
    assert [line.split(" | ")[1].rstrip(" |") for line in lines] == [
        "4.50 (3.00 to 6.00)",  # 300 / 100, 300 / 50
        "3.00 (2.00 to 4.00)",
        "3.00 (2.00 to 4.00)",  # 300 / 150, 300 / 75
        "2.50 (1.67 to 3.33)",  # 200 / 120, 200 / 60
        "4.50 (3.00 to 6.00)",
        "3.00 (2.00 to 4.00)",
        "2.50 (1.67 to 3.33)",
        "0.25 (0.17 to 0.33)",  # less is better: 1/300 against 1/100
        "1.33 (1.33 to 1.33)",  # 1/300 against 1/400
        "0.25 (0.17 to 0.33)",
    ]


def test_without_infinity_there_are_the_libraries(results: dict[str, Any]) -> None:
    for found in results["figures"].values():
        for level in ("1", "128"):
            found[level] = {name: rows for name, rows in found[level].items() if name.startswith("Cloze")}
    lines = serving_report.ratios(results).splitlines()[2:]
    assert [line.partition("/")[2].partition(" |")[0].strip() for line in lines] == [
        *["best library in process", "best fp32 library in process"] * 2,
        "tokenising and session alone",
    ]


def test_the_tables_and_the_chart(results: dict[str, Any], tmp_path: Path) -> None:
    text = serving_report.tables(results)
    assert "| Cloze, int8 | 300 | 300 | 300 | 86.50 | 0.9800 | 0e+00 |" in text
    assert "| infinity, ONNX | 38 | 38 | 38 |  |  |  |" in text
    assert "| Cloze, fp32 | 5.0 / 10.0 | 5.0 / 10.0 |" in text
    assert "| Cloze, int8 | 1.5 | 200 | 0.33 |" in text
    serving_report.draw(results, tmp_path / "chart.svg")
    assert "infinity, ONNX" in (tmp_path / "chart.svg").read_text(encoding="utf-8")


def test_requests_hold_every_text_once() -> None:
    texts = [str(number) for number in range(100)]
    assert list(chain.from_iterable(Workload(texts, 8).requests(8))) == texts
    assert list(chain.from_iterable(Workload(texts, 8).requests(1))) == texts[:25]


@pytest.fixture
def server(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(peers, "START_SECONDS", PATIENCE)
    started = ours(bundle, "fp32")
    yield started
    started.end()


def test_the_client_gets_each_answer_whole_and_in_order(server: Server) -> None:
    """Over fewer, as many and more connections than requests."""
    texts = ["a man", "two dogs run", "the guitar", "a"] * 5
    expected: list[Any] = []
    for connections in (1, 4, 50):
        bodies, seconds = asyncio.run(ask(server, [server.request([text]) for text in texts], connections))
        rows = [json.loads(body)["data"][0]["embedding"] for body in bodies]
        assert len(seconds) == len(texts)
        assert min(seconds) > 0
        expected = expected or rows
        np.testing.assert_allclose(rows, expected, atol=1e-6)
    assert rows[0] != rows[1]


@pytest.mark.skipif(not shutil.which("wrk"), reason="wrk is not installed")
def test_wrk_measures_a_server(server: Server) -> None:
    work = Workload(["a man", "two dogs run"] * 100, texts_per_request=2)  # more work than a tick of the CPU's clock
    one, many = load(server, work, 1), load(server, work, 8)
    counts = httpx.get(f"http://127.0.0.1:{server.port}/metrics").text
    (texts,) = re.findall(r"^cloze_texts_total{.*} (\S+)$", counts, re.MULTILINE)
    assert float(texts) >= 50 + 200
    for found, texts in ((one, 50), (many, 200)):
        assert found.texts_per_second > 0
        assert found.cpu > 0
        assert 0 < found.p50 <= found.p99 < texts / found.texts_per_second * 8


@pytest.mark.skipif(not shutil.which("wrk"), reason="wrk is not installed")
def test_an_answer_that_is_an_error_ends_the_load(server: Server) -> None:
    server.model = "another"
    with pytest.raises(OSError, match="answered with status 404"):
        load(server, Workload(["a man", "two dogs run"], texts_per_request=1), 2)


def test_the_versions_are_those_of_what_is_installed() -> None:
    assert versions(["numpy", "no-such-package"]).keys() == {"numpy"}


def test_the_training_table() -> None:
    speeds = {"sentence-transformers": [10.0, 20.0, 10.0], "Cloze": [15.0, 20.0, 20.0]}
    line = training.table({"speeds": speeds}).splitlines()[-1]
    assert line == "| Cloze | 20.0 | 1.50 (1.00 to 2.00) |"


# On a GPU


def test_the_seconds_of_a_call_are_a_mean_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = 100.0, 0

    def work() -> None:
        nonlocal now, calls
        now, calls = now + 0.5, calls + 1

    monkeypatch.setattr(gpu, "time", SimpleNamespace(perf_counter=lambda: now))
    assert gpu._seconds(work, "cpu") == 0.5
    assert calls == 3 + gpu.SECONDS / 0.5


def test_a_part_that_fails_is_reported_and_the_next_one_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limits = {}

    def process(command: list[str], timeout: float | None = None, **_: object) -> SimpleNamespace:
        """What the parts would do in processes of their own."""
        if command[0] == "nvidia-smi":
            return SimpleNamespace(stdout="GPU 0: NVIDIA H100 (UUID: 1)\n")
        part = command[command.index("--part") + 1]
        limits[part] = timeout
        if part == "peak":
            raise subprocess.TimeoutExpired(command, limits[part] or 0)
        if part == "session":
            return SimpleNamespace(returncode=1, stderr="Traceback\n  a line\nanother\nValueError: no\n")
        return SimpleNamespace(returncode=0, stdout=f'a warning\n{{"of": "{part}"}}\n')

    fake = SimpleNamespace(run=process, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(gpu, "subprocess", fake)
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path / "gpu.json")])
    gpu.main()
    results = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert results["machine"].startswith("GPU 0: NVIDIA H100; ")
    assert results["peak"] == {"failed": "not finished after 40 s"}
    assert results["session"] == {"failed": ["  a line", "another", "ValueError: no"]}
    assert all(results[part] == {"of": part} for part in ("techniques", "served", "training", "tests"))
    assert limits == {part: gpu.LIMITS[part] for part in gpu.PARTS}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of sentence-transformers
def test_the_parts_run_on_tiny_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if each call took half a second. Training is set up, and makes no step."""
    for name, value in gpu.TINY.items():
        monkeypatch.setattr(gpu, name, value)
    monkeypatch.setattr(gpu, "_seconds", lambda work, device: (work(), 0.5)[1])
    assert gpu.peak("cpu", tmp_path)["tflops"] == 2 * 256**3 / 0.5 / 1e12
    rows = gpu.session("cpu", tmp_path)
    assert [(row["tokens"], row["contender"]) for row in rows] == [
        (tokens, name) for tokens in (16, 32) for name in ("Cloze", "sentence-transformers")
    ]
    assert {row["tokens_per_second"] for row in rows} == {512 / 0.5}
    assert gpu.techniques("cpu", tmp_path) == {"packed layers": 2}
    served = gpu.served("cpu", tmp_path)
    assert served.keys() == {"one text, ms, p50", "1 processes, texts per second", "2 processes, texts per second"}
    assert min(served.values()) > 0
    monkeypatch.setattr(gpu, "_seconds", lambda work, device: 0.5)
    assert gpu.training("cpu", tmp_path) == {"tokens_per_second": 2 * 8 * 16 / 0.5}
