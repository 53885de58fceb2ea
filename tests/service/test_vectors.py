"""Cut, normalise, compare, write: worked by hand and held against numpy and json."""

import json
from base64 import b64decode
from typing import get_args

import numpy as np
import pytest

from cloze.service.errors import ValidationFailed
from cloze.service.inference import vectors as written
from cloze.service.inference.vectors import Array, Format, cosine_matrix, cosines, finish, pair_cosines, rows

FORMATS = get_args(Format)


def matrix(*values: list[float]) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def to_json(vectors: Array, format: Format = "float") -> bytes:
    return b"".join(written.to_json(vectors, format))


def test_normalised() -> None:
    np.testing.assert_allclose(finish(matrix([3, 4], [0, -2]), normalize=True), [[0.6, 0.8], [0, -1]], rtol=1e-7)


def test_dimensions_are_cut_before_normalising() -> None:
    np.testing.assert_allclose(finish(matrix([3, 4, 12]), normalize=True, dimensions=2), [[0.6, 0.8]], rtol=1e-7)
    assert finish(matrix([3, 4, 12]), normalize=False, dimensions=2).tolist() == [[3, 4]]


def test_a_row_of_zeros_stays_zeros() -> None:
    assert finish(matrix([0, 0]), normalize=True).tolist() == [[0, 0]]
    assert cosines(matrix([0, 0], [1, 0])) == [0]


def test_large_numbers_do_not_overflow() -> None:
    np.testing.assert_allclose(finish(matrix([3e30, 4e30]), normalize=True), [[0.6, 0.8]], rtol=1e-6)


def test_cosines() -> None:
    assert cosines(matrix([1, 0], [2, 0], [0, 5], [-3, 0], [1, 1])) == pytest.approx([1, 0, -1, 0.5**0.5])


def test_cosines_stay_within_one() -> None:
    same = np.random.default_rng(0).normal(size=384).astype(np.float32)
    assert all(-1 <= value <= 1 for value in cosines(np.stack([same] * 50 + [-same] * 50)))


def test_json_gives_the_same_float32() -> None:
    vectors = random(200, 7)
    assert np.array_equal(np.array(json.loads(to_json(vectors)), dtype=np.float32), vectors)


def test_json_of_a_cut_array() -> None:
    assert json.loads(to_json(finish(matrix([1, 2, 3], [4, 5, 6]), normalize=False, dimensions=2))) == [[1, 2], [4, 5]]


def test_pair_cosines() -> None:
    left, right = matrix([1, 0], [0, 2], [3, 0], [0, 0], [1, 1]), matrix([5, 0], [0, -1], [0, 4], [1, 0], [1, 0])
    assert pair_cosines(left, right) == pytest.approx([1, -1, 0, 0, 0.5**0.5])
    assert pair_cosines(left[:0], right[:0]).tolist() == []


def test_cosine_matrix() -> None:
    found = cosine_matrix(matrix([1, 0], [0, 0]), matrix([2, 0], [0, 5], [-1, 1]))
    assert found.tolist() == [pytest.approx([1, 0, -(0.5**0.5)]), [0, 0, 0]]
    assert json.loads(to_json(found)) == found.tolist()


def test_the_cosines_agree() -> None:
    left, right = random(5, 384), random(7, 384)[2:]
    whole = cosine_matrix(left, right)
    np.testing.assert_allclose(pair_cosines(left, right), np.diag(whole), atol=1e-12)
    np.testing.assert_allclose(cosines(np.concatenate([left[:1], right])), whole[0], atol=1e-12)


def test_every_cosine_stays_within_one() -> None:
    same = random(300, 384)
    assert max(pair_cosines(same, same)) <= 1 <= max(pair_cosines(same, same)) + 1e-12
    assert np.abs(cosine_matrix(same, -same)).max() <= 1
    assert pair_cosines(matrix([3e30, 4e30]), matrix([4e30, 3e30])) == pytest.approx([0.96])


@pytest.mark.parametrize(
    ("format", "expected"),
    [
        ("float", [[0.5, -2.0, 0.0], [0.0, 0.0, 0.0]]),
        ("base64", ["AAAAPwAAAMAAAAAA", "AAAAAAAAAAAAAAAA"]),  # 3f000000 c0000000 00000000, little-endian
        ("float16", ["ADgAwAAA", "AAAAAAAA"]),  # 3800 c000 0000, little-endian
        ("int8", [[32, -127, 0], [0, 0, 0]]),  # 31.75
        ("ubinary", [[0b100_00000], [0]]),
        ("binary", [[0], [-128]]),
    ],
)
def test_formats_by_hand(format: Format, expected: list[object]) -> None:
    assert json.loads(to_json(matrix([0.5, -2, 0], [0, 0, 0]), format)) == expected


def test_int8_rounds_half_to_even() -> None:
    values = [[127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5], [-127, 125.5, 0.49, 0.51, 1, -1, 0, 0]]
    expected = [[127, 0, 2, 2, 0, -2, -2, 126], [-127, 126, 0, 1, 1, -1, 0, 0]]
    assert json.loads(to_json(matrix(*values), "int8")) == expected


def test_bits_are_packed_eight_to_a_byte_the_first_highest() -> None:
    signs = [1, -1, 1, 1, -1, -1, -1, 1, -1, 1]  # 1011 0001, 01
    assert json.loads(to_json(matrix(signs), "ubinary")) == [[0b1011_0001, 0b0100_0000]]
    assert json.loads(to_json(matrix(signs), "binary")) == [[0b1011_0001 - 128, 0b0100_0000 - 128]]


@pytest.mark.parametrize("format", FORMATS)
def test_to_json_is_the_list_of_rows(format: Format) -> None:
    for count in (0, 1, 63, 64, 65, 200):  # slices of 64 rows
        vectors = random(count, 20)
        fragments = list(rows(vectors, format))
        assert len(fragments) == count
        assert b"[" + b",".join(fragments) + b"]" == to_json(vectors, format)
        one_by_one = [json.loads(to_json(vectors[row : row + 1], format))[0] for row in range(count)]
        assert json.loads(to_json(vectors, format)) == one_by_one


@pytest.mark.parametrize("format", FORMATS)
def test_dimensions_are_cut_and_normalised_before_the_format(format: Format) -> None:
    cut = finish(random(3, 24), normalize=True, dimensions=16)
    assert to_json(cut, format) == to_json(finish(random(3, 24)[:, :16].copy(), normalize=True), format)
    assert to_json(random(3, 24)[:, :16], format) == to_json(random(3, 24)[:, :16].copy(), format)


def test_base64_gives_back_every_bit() -> None:
    vectors = finish(random(70, 33), normalize=True)
    decoded = [b64decode(row) for row in json.loads(to_json(vectors, "base64"))]
    assert b"".join(decoded) == vectors.astype("<f4").tobytes()
    halves = [np.frombuffer(b64decode(row), dtype="<f2") for row in json.loads(to_json(vectors, "float16"))]
    assert np.array_equal(np.stack(halves), vectors.astype(np.float16))


def test_int8_keeps_the_cosines() -> None:
    vectors = random(50, 384)
    vectors[1::2] = vectors[::2] + 0.5 * vectors[1::2]  # so that the cosines are spread
    integers = np.array(json.loads(to_json(vectors, "int8")), dtype=np.float32)
    assert np.abs(integers).max(axis=1).tolist() == [127] * 50
    np.testing.assert_allclose(cosine_matrix(integers, integers), cosine_matrix(vectors, vectors), atol=1e-2)


def test_the_hamming_distance_counts_the_signs_that_differ() -> None:
    vectors = random(2, 100)
    differ = int(((vectors[0] > 0) != (vectors[1] > 0)).sum())
    for format, dtype in (("ubinary", np.uint8), ("binary", np.int8)):
        left, right = np.array(json.loads(to_json(vectors, format)), dtype=dtype)  # type: ignore[arg-type]
        assert sum(int(byte).bit_count() for byte in (left ^ right).view(np.uint8)) == differ > 0


def test_float16_refuses_what_it_cannot_hold() -> None:
    assert json.loads(to_json(matrix([65504, -65504]), "float16")) == ["/3v/+w=="]  # 7bff fbff
    with pytest.raises(
        ValidationFailed, match="largest value is 70000, and float16 holds at most 65504: ask for normalised"
    ):
        rows(matrix([1, 2], [3, -70000]), "float16")
    with pytest.raises(ValidationFailed, match="float16 holds at most 65504"):
        to_json(matrix([65536, 2]), "float16")
    to_json(finish(matrix([65536, 2]), normalize=True), "float16")
