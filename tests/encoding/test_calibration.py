"""A calibration: its curve, what is not one, and a bundle that has it."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from tiny_bundle import write_bundle

from cloze.encoding.bundle import SPEC_FILE, Bundle, sha256
from cloze.encoding.calibration import CALIBRATION_FILE, Calibration, Curve
from cloze.encoding.errors import BundleError

CURVE: dict[str, Any] = {
    "method": "isotonic", "cosines": [-0.5, 0, 0.5, 1], "values": [0, 1, 1, 5], "error_before": 0.2, "error": 0.01,
}  # fmt: skip


def test_a_curve_is_linear_between_its_points_and_constant_outside() -> None:
    found = Curve(**CURVE)(np.array([[-1, -0.5, -0.25], [0.25, 0.75, 2]]))
    np.testing.assert_array_equal(found, [[0, 0, 0.5], [1, 3, 5]])


@pytest.mark.parametrize(
    "change",
    [
        {"cosines": [-0.5, 0.5, 0.5, 1]},
        {"values": [0, 2, 1, 5]},
        {"values": [0, 1, 1]},
        {"values": [0, 1, 1, float("nan")]},
        {"cosines": [], "values": []},
        {"method": "spline"},
    ],
)
def test_what_is_not_a_curve_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Curve(**CURVE | change)


def test_a_bundle_reads_its_own_and_keeps_its_vector_space(tmp_path: Path) -> None:
    plain = Bundle.load(write_bundle(tmp_path / "plain"))
    assert plain.calibration is None
    folder = tmp_path / "calibrated"
    shutil.copytree(plain.path, folder)
    made = Calibration(
        meaning="score", lowest=0, highest=5, pairs=100, source="pairs.csv", curves={"fp32": Curve(**CURVE)}
    )
    file = folder / CALIBRATION_FILE
    file.write_text(made.model_dump_json())
    spec = json.loads((folder / SPEC_FILE).read_text())
    spec["files"][CALIBRATION_FILE] = sha256(file)
    (folder / SPEC_FILE).write_text(json.dumps(spec))
    bundle = Bundle.load(folder)
    assert bundle.calibration == made
    assert bundle.spec.space == plain.spec.space
    file.write_text("{}")
    with pytest.raises(BundleError, match=r"calibration\.json is not the file that was exported"):
        Bundle.load(folder)
    with pytest.raises(BundleError, match=r"calibration\.json is not a calibration .*; make it again: `cloze calib"):
        _ = bundle.calibration
