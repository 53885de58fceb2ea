"""Cut, normalise, compare, write: worked by hand and held against numpy and json."""

import json

import numpy as np
import pytest

from service.vectors import cosines, finish, to_json


def rows(*values: list[float]) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def test_normalised() -> None:
    np.testing.assert_allclose(finish(rows([3, 4], [0, -2]), normalize=True), [[0.6, 0.8], [0, -1]], rtol=1e-7)


def test_dimensions_are_cut_before_normalising() -> None:
    np.testing.assert_allclose(finish(rows([3, 4, 12]), normalize=True, dimensions=2), [[0.6, 0.8]], rtol=1e-7)
    assert finish(rows([3, 4, 12]), normalize=False, dimensions=2).tolist() == [[3, 4]]


def test_a_row_of_zeros_stays_zeros() -> None:
    assert finish(rows([0, 0]), normalize=True).tolist() == [[0, 0]]
    assert cosines(rows([0, 0], [1, 0])) == [0]


def test_large_numbers_do_not_overflow() -> None:
    np.testing.assert_allclose(finish(rows([3e30, 4e30]), normalize=True), [[0.6, 0.8]], rtol=1e-6)


def test_cosines() -> None:
    assert cosines(rows([1, 0], [2, 0], [0, 5], [-3, 0], [1, 1])) == pytest.approx([1, 0, -1, 0.5**0.5])


def test_cosines_stay_within_one() -> None:
    same = np.random.default_rng(0).normal(size=384).astype(np.float32)
    assert all(-1 <= value <= 1 for value in cosines(np.stack([same] * 50 + [-same] * 50)))


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 200])
def test_json_gives_the_same_float32(count: int) -> None:
    vectors = np.random.default_rng(count).normal(size=(count, 7)).astype(np.float32)
    assert np.array_equal(np.array(json.loads(to_json(vectors)), dtype=np.float32), vectors)


def test_json_of_a_cut_array() -> None:
    assert json.loads(to_json(finish(rows([1, 2, 3], [4, 5, 6]), normalize=False, dimensions=2))) == [[1, 2], [4, 5]]
