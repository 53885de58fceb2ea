"""The shipped model gives the reference vectors on this CPU and on an old one that qemu-user emulates."""

import base64
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from patience import PATIENCE
from reference.vectors import FILE, ROOT, TEXTS, embed

from training.export.quantise import WEIGHT_LEVELS

LEAST_COSINE = 0.9999
QEMU = shutil.which("qemu-x86_64")
# SSE4.2 and no AVX, the third kind of x86. The machines of CI have the other two: AVX2 with and without AVX-512.
OLD = "Nehalem"


def test_this_machine_gives_the_reference_vectors() -> None:
    hold(embed())


@pytest.mark.long
@pytest.mark.qemu
@pytest.mark.skipif(QEMU is None, reason="qemu-user is not installed")
def test_an_old_cpu_gives_the_reference_vectors(tmp_path: Path) -> None:
    script = Path(__file__).parent / "reference" / "vectors.py"
    interpreter = Path(sys.executable).resolve()  # qemu runs a program, no link to one
    environment = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": str(tmp_path),
        "OPENBLAS_CORETYPE": OLD,  # OpenBLAS asks the real CPU; nothing here uses it
    }
    command = [str(QEMU), "-cpu", OLD, str(interpreter), str(script), "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    hold(np.frombuffer(base64.b64decode(json.loads(done.stdout)), dtype=np.float32).reshape(len(TEXTS), -1))


def hold(vectors: NDArray[np.float32]) -> None:
    """Check that every vector equals its reference, and that README's similarities agree to three decimals."""
    reference = np.load(FILE)
    assert vectors.shape == reference.shape
    cosines = (vectors * reference).sum(1)
    assert cosines.min() >= LEAST_COSINE, dict(zip(TEXTS, cosines, strict=True))
    guitar, *others = (TEXTS.index(text) for text in README_TEXTS)
    np.testing.assert_allclose(vectors[others] @ vectors[guitar], reference[others] @ reference[guitar], atol=5e-4)


README_TEXTS = (
    "A man is playing the guitar.",
    "Someone plays an instrument.",
    "The man is cooking dinner.",
    "Shares fell sharply on Monday.",
)


def test_no_sum_of_two_products_overflows_sixteen_bits() -> None:
    """AVX2 and SSE add pairs of unsigned by signed products in 16 bits; larger sums would differ between CPUs."""
    assert np.iinfo(np.int16).max >= 2 * 255 * WEIGHT_LEVELS
