"""A tiny bundle, whose vectors are known in numpy, and a whole job on many texts."""

import re
from pathlib import Path

import pyarrow as pa
import pytest
from jobs import PARTS, ROWS, complete, run, vectors
from made_once import made_once
from tiny_bundle import write_bundle


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("bundles") / "tiny")


@pytest.fixture(scope="session")
def texts(shared: Path) -> Path:
    def write(path: Path) -> None:
        letters = "abcdefghijklmnopqrstuvwxyz"
        lines = (f"man {' '.join(letters[int(digit)] for digit in str(row))}\n" for row in range(ROWS))
        path.write_text("".join(lines))

    return made_once(shared / "job-texts.txt", write)


@pytest.fixture(scope="session")
def undisturbed(texts: Path, bundle: Path, shared: Path) -> pa.Table:
    """The vectors of `texts`, by a job that nothing disturbs."""

    def embed(out: Path) -> None:
        found = run(texts, out, bundle)
        assert (found.returncode, complete(out)) == (0, PARTS), found.stderr
        assert re.search(
            rf"embedded {ROWS} rows with \d+ tokens \(0 truncated\) in .*; starting Ray and ", found.stdout
        )
        assert re.search(rf"100%\|.*\| {ROWS}/{ROWS} rows \[.* left, +[\d.]+ rows/s\]$", found.stderr.rstrip())

    found = vectors(made_once(shared / "undisturbed-job", embed))
    assert len(found) == ROWS
    return found
