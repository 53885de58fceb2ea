"""The sample of live traffic: its shape against closed forms, and what enters it."""

from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from cloze.service.monitoring.drift import PER_REQUEST, DriftSample, Shape


def fill(space: DriftSample, vectors: object, cut: int = 0) -> None:
    """One request a vector, each of another text."""
    for vector in np.asarray(vectors, dtype=np.float32):
        space.observe(vector[None], [[fill.texts]], [cut])
        fill.texts += 1


fill.texts = 0  # type: ignore[attr-defined]


def shape(space: DriftSample) -> Shape:
    found = space.shape()
    assert found is not None
    return found


def kept(space: DriftSample) -> list[tuple[float, bool]]:
    """The vectors of dimension 1 in the sample, and whether their texts were cut."""
    return [(float(vector[0]), cut) for vector, cut in space._texts.values()]


def by_pairs(vectors: NDArray[np.float64]) -> float:
    """The mean cosine, pair by pair."""
    return float(np.mean([a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in combinations(vectors, 2)]))


def test_orthogonal_vectors() -> None:
    space = DriftSample()
    fill(space, 3 * np.eye(4))
    assert shape(space) == Shape(mean_cosine=pytest.approx(0, abs=1e-12), mean_norm=pytest.approx(3), truncated=0)


def test_equal_directions_of_different_lengths() -> None:
    space = DriftSample()
    fill(space, [[3, 4], [6, 8], [0.3, 0.4]])
    assert shape(space).mean_cosine == pytest.approx(1)
    assert shape(space).mean_norm == pytest.approx((5 + 10 + 0.5) / 3)


def test_opposite_vectors() -> None:
    space = DriftSample()
    fill(space, [[1, 2], [-1, -2]])
    assert shape(space).mean_cosine == pytest.approx(-1)


def test_a_simplex_is_as_far_apart_as_can_be() -> None:
    corners = np.eye(5) - 1 / 5  # any two at -1 / (n - 1)
    space = DriftSample()
    fill(space, corners)
    assert shape(space).mean_cosine == pytest.approx(-1 / 4)


def test_an_isotropic_space_is_about_0_and_a_shift_shows() -> None:
    rng = np.random.default_rng(0)
    n, d = 256, 384
    isotropic, shifted = DriftSample(), DriftSample()
    noise = rng.normal(size=(n, d))
    fill(isotropic, noise)
    fill(shifted, noise + 1)
    bound = 5 / np.sqrt(n * (n - 1) / 2 * d)  # five standard errors: the cosine of a pair has variance 1 / d
    assert abs(shape(isotropic).mean_cosine) < bound
    assert shape(shifted).mean_cosine == pytest.approx(0.5, abs=0.01)  # |μ|² / (|μ|² + σ²), by coordinate
    assert shape(isotropic).mean_norm == pytest.approx(np.sqrt(d), rel=0.01)


def test_the_mean_is_that_of_all_pairs() -> None:
    vectors = np.random.default_rng(1).gamma(0.5, size=(37, 8)).astype(np.float32)
    space = DriftSample()
    fill(space, vectors)
    assert shape(space).mean_cosine == pytest.approx(by_pairs(vectors.astype(np.float64)), abs=1e-9)


def test_less_than_two_vectors_have_no_shape() -> None:
    space = DriftSample()
    assert space.shape() is None
    fill(space, [[1, 0]])
    assert (len(space), space.shape()) == (1, None)
    fill(space, [[0, 0]])  # no direction
    assert (len(space), space.shape()) == (2, None)
    fill(space, [[1, 0]])
    assert shape(space) == Shape(mean_cosine=1, mean_norm=pytest.approx(2 / 3), truncated=0)


def test_a_text_that_comes_again_is_taken_once() -> None:
    space = DriftSample()
    for _ in range(100):
        space.observe(np.array([[1, 0]], dtype=np.float32), [[101, 7, 102]], [0])
    assert (len(space), space.shape()) == (1, None)
    space.observe(np.array([[0, 1]], dtype=np.float32), [[101, 8, 102]], [0])
    assert shape(space).mean_cosine == 0


def test_a_text_may_come_back_once_it_has_been_replaced() -> None:
    space = DriftSample(capacity=1, share=1)
    first, second = [[1]], [[2]]
    space.observe(np.array([[1]], dtype=np.float32), first, [1])
    space.observe(np.array([[2]], dtype=np.float32), second, [0])
    assert kept(space) == [(2, False)]
    space.observe(np.array([[3]], dtype=np.float32), first, [1])
    assert kept(space) == [(3, True)]


def test_a_large_request_gives_no_more_than_a_few() -> None:
    space = DriftSample()
    vectors = np.random.default_rng(0).normal(size=(10_000, 3)).astype(np.float32)
    space.observe(vectors, [[index] for index in range(10_000)], [0] * 10_000)
    assert len(space) == PER_REQUEST


def test_every_text_of_a_small_request_is_taken_with_what_it_lost() -> None:
    space = DriftSample()
    space.observe(np.eye(2, dtype=np.float32), [[1], [2]], [0, 5])
    assert shape(space).truncated == 0.5


def test_a_full_sample_takes_a_share_and_stays_bounded() -> None:
    space = DriftSample(capacity=64, share=0.25)
    fill(space, np.zeros((64, 1)))
    fill(space, np.ones((100, 1)))
    taken = sum(value for value, _ in kept(space))
    assert len(space) == 64
    assert 10 <= taken <= 40  # 25 expected, less those that replaced one another; the dice are seeded
    fill(space, np.ones((4000, 1)))
    assert sum(value for value, _ in kept(space)) == 64  # the old have left


def test_two_spaces_of_one_seed_take_the_same() -> None:
    rng = np.random.default_rng(0)
    one, other = DriftSample(capacity=16), DriftSample(capacity=16)
    for step in range(200):
        vectors = rng.normal(size=(6, 4)).astype(np.float32)
        ids = [[step, row] for row in range(6)]
        one.observe(vectors, ids, [0] * 6)
        other.observe(vectors, ids, [0] * 6)
    assert one.shape() == other.shape()


def test_what_is_kept_does_not_follow_the_caller_array() -> None:
    space = DriftSample()
    vectors = np.eye(2, dtype=np.float32)
    space.observe(vectors, [[1], [2]], [0, 0])
    vectors[:] = 7
    assert shape(space).mean_cosine == 0
