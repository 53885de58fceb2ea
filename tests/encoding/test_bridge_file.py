"""The file of a bridge, and the map that it holds."""

from pathlib import Path

import numpy as np
import pytest

from cloze.encoding.bridge import About, Bridge, BridgeError

ABOUT = About(
    kind="affine",
    old="0" * 16,
    new="1" * 16,
    fitted=10,
    queries=2,
    searched=10,
    recall=0.9,
    least=0.8,
    most=1.0,
)
MATRIX = np.array([[0, 2, 0], [1, 0, 0]], dtype=np.float32)
OFFSET = np.array([0, 0, 5], dtype=np.float32)


def test_a_vector_of_any_length_is_mapped_by_its_direction() -> None:
    found = Bridge(ABOUT, MATRIX, OFFSET)(np.array([[3, 4], [0, 0], [0, 0.5]], dtype=np.float32))
    np.testing.assert_allclose(found, [[0.8, 1.2, 5], [0, 0, 5], [1, 0, 5]], atol=1e-6)
    assert found.dtype == np.float32


def test_a_vector_has_the_same_bits_in_every_batch() -> None:
    rng = np.random.default_rng(0)
    bridge = Bridge(ABOUT, rng.normal(size=(384, 384)).astype(np.float32), rng.normal(size=384).astype(np.float32))
    vectors = rng.normal(size=(100, 384)).astype(np.float32)
    together = bridge(vectors)
    np.testing.assert_array_equal(together, np.concatenate([bridge(vectors[row : row + 1]) for row in range(100)]))
    np.testing.assert_array_equal(together, bridge(vectors[::-1])[::-1])
    units = vectors.astype(np.float64) / np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    np.testing.assert_allclose(together, units @ bridge.matrix + bridge.offset, atol=2e-5)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "bridge"
    Bridge(ABOUT, MATRIX, OFFSET).write(path)
    found = Bridge.load(path)
    assert found.about == ABOUT
    np.testing.assert_array_equal(found.matrix, MATRIX)
    np.testing.assert_array_equal(found.offset, OFFSET)
    assert len(found.sha256) == 64
    assert [each.name for each in tmp_path.iterdir()] == ["bridge"]


def save(path: Path, **arrays: object) -> None:
    about = np.frombuffer(ABOUT.model_dump_json().encode(), dtype=np.uint8)
    with path.open("wb") as file:
        np.savez(file, **({"matrix": MATRIX, "offset": OFFSET, "about": about} | arrays))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"matrix": MATRIX.astype(np.float64)}, "has a matrix of float64"),
        ({"matrix": MATRIX[0]}, "has a matrix of float32"),
        ({"offset": OFFSET[:2]}, "do not match, or whose values are not finite"),
        ({"matrix": MATRIX * np.nan}, "do not match, or whose values are not finite"),
        ({"about": np.frombuffer(b"{}", dtype=np.uint8)}, "is not a bridge that this version of Cloze can read"),
        ({"matrix": np.array([[print]])}, "is not a bridge that this version of Cloze can read"),  # would need pickle
    ],
)
def test_a_file_that_does_not_hold_together_is_one_line(
    tmp_path: Path, arrays: dict[str, object], message: str
) -> None:
    save(tmp_path / "bridge", **arrays)
    with pytest.raises(BridgeError, match=message):
        Bridge.load(tmp_path / "bridge")


def test_another_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no bridge")
    np.save(tmp_path / "array.npy", MATRIX)
    save(tmp_path / "whole")
    (tmp_path / "half").write_bytes((tmp_path / "whole").read_bytes()[:300])
    (tmp_path / "empty").touch()
    for name in ("text", "array.npy", "half", "empty"):
        with pytest.raises(BridgeError, match="is not a bridge that this version of Cloze can read; make it again"):
            Bridge.load(tmp_path / name)
    for name in ("absent", ""):
        with pytest.raises(BridgeError, match="cannot be read"):
            Bridge.load(tmp_path / name)
