"""Jobs that tests start: the command, a job that waits before it completes more, and what it has written."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from harness import PATIENCE, ROOT

ROWS = 1500
PER_FILE = 50
PARTS = ROWS // PER_FILE
MOMENTS = (0, PARTS // 3)  # complete parts when a process is killed


def command(source: Path, out: Path, bundle: Path, *options: str, module: str = "cloze.service.bulk") -> list[str]:
    words = [str(source), str(out), "--bundle", str(bundle), "--rows-per-file", str(PER_FILE), "--precision", "fp32"]
    return [sys.executable, "-m", module, *words, *options]


def run(source: Path, out: Path, bundle: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(source, out, bundle, *options), capture_output=True, text=True, timeout=PATIENCE)


def start(source: Path, out: Path, bundle: Path, parts: int, *options: str) -> subprocess.Popen[bytes]:
    """Start a job that completes so many parts, and waits before it completes more."""
    let(out, parts)
    words = command(source, out, bundle, *options, module="gated")
    path = os.pathsep.join(map(str, (ROOT, Path(__file__).parent)))
    environ = os.environ | {"PYTHONPATH": path}
    return subprocess.Popen(words, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def let(out: Path, parts: int) -> None:
    """Let so many parts be completed in all; tests/bulk/gated.py waits for that."""
    folder = Path(f"{out}.gate")
    folder.mkdir(exist_ok=True)
    new = folder / "new"
    new.write_text(str(parts))
    new.rename(folder / "let")


def complete(out: Path) -> int:
    return len(list(out.glob("vectors/**/*.parquet")))


def vectors(out: Path) -> pa.Table:
    """All rows, by id; no id may be there twice."""
    table = pq.read_table(out / "vectors").sort_by("id")
    ids = table.column("id").to_pylist()
    assert len(ids) == len(set(ids))
    return table


def check_same(out: Path, undisturbed: pa.Table) -> None:
    found = vectors(out)
    assert found.column("id") == undisturbed.column("id")
    left, right = (np.stack(table.column("embedding").to_pylist()) for table in (found, undisturbed))
    np.testing.assert_allclose(left, right, atol=1e-6)
    assert not list(out.rglob("*.partial"))
