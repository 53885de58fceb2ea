import math

import pytest
import torch
import torch.nn.functional as F

from cloze.training.methods.losses import cosine_distance, cosine_matrix, info_nce, similarity_divergence


def unit_rows(cosines: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two sets of unit vectors whose cosines are the 2 x 2 matrix given."""
    first = torch.eye(2, 4)
    rest = (1 - (cosines**2).sum(0)).sqrt()
    second = torch.cat([cosines.T, torch.diag(rest)], dim=1)
    return first, second


def test_info_nce_of_equal_vectors_is_log_n() -> None:
    for n, temperature in ((64, 0.05), (512, 1.0)):
        vectors = torch.ones(n, 8)
        assert info_nce(vectors, vectors, temperature).item() == pytest.approx(math.log(n), abs=1e-4)


def test_info_nce_of_orthonormal_rows() -> None:
    rows = torch.eye(64, dtype=torch.float64)
    assert info_nce(rows, rows, 0.05).item() == pytest.approx(1.2985e-7, rel=1e-4)


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, 0.4042943), (0.05, 3.12836e-6)])
def test_info_nce_of_a_known_matrix(temperature: float, expected: float) -> None:
    first, second = unit_rows(torch.tensor([[0.9, 0.1], [0.2, 0.8]], dtype=torch.float64).float())
    loss = info_nce(first.double(), second.double(), temperature)
    assert loss.item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("n", "d", "temperature"), [(2, 32, 0.05), (5, 3, 1.0), (16, 32, 0.05)])
def test_info_nce_equals_a_loop_over_the_equation(n: int, d: int, temperature: float) -> None:
    torch.manual_seed(n * d)
    first, second = torch.randn(n, d, dtype=torch.float64), torch.randn(n, d, dtype=torch.float64)
    total = 0.0
    for i in range(n):
        scores = [math.exp(F.cosine_similarity(first[i], second[j], dim=0).item() / temperature) for j in range(n)]
        total -= math.log(scores[i] / sum(scores))
    assert info_nce(first, second, temperature).item() == pytest.approx(total / n, rel=1e-9)


def test_info_nce_knows_no_scale_and_no_order_but_a_direction() -> None:
    torch.manual_seed(0)
    first, second = torch.randn(6, 4), torch.randn(6, 4)
    loss = info_nce(first, second, 0.1)
    order = torch.randperm(6)
    assert torch.allclose(info_nce(3 * first, 0.5 * second, 0.1), loss)
    assert torch.allclose(info_nce(first[order], second[order], 0.1), loss)
    assert not torch.allclose(info_nce(second, first, 0.1), loss)


def test_cosine_matrix_has_every_pair() -> None:
    cosines = cosine_matrix(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[3.0, 3.0]]))
    assert torch.allclose(cosines, torch.full((2, 1), 0.5**0.5))


def test_cosine_distance_of_equal_orthogonal_and_opposite() -> None:
    x, y = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 5.0]])
    assert cosine_distance(x, 7 * x).item() == pytest.approx(0)
    assert cosine_distance(x, y).item() == pytest.approx(1)
    assert cosine_distance(x, -x).item() == pytest.approx(2)


def test_similarity_divergence_equals_a_loop_and_is_zero_for_equal_spaces() -> None:
    torch.manual_seed(1)
    student, teacher = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 7, dtype=torch.float64)

    def shares(vectors: torch.Tensor, i: int) -> list[float]:
        weights = [
            math.exp(F.cosine_similarity(vectors[i], vectors[j], dim=0).item() / 0.5) for j in range(5) if j != i
        ]
        return [weight / sum(weights) for weight in weights]

    total = 0.0
    for i in range(5):
        for p, q in zip(shares(teacher, i), shares(student, i), strict=True):
            total += p * math.log(p / q)
    assert similarity_divergence(student, teacher, 0.5).item() == pytest.approx(total / 5, rel=1e-9)
    assert similarity_divergence(teacher * 3, teacher, 0.5).item() == pytest.approx(0, abs=1e-12)


def test_a_vector_of_zeros_has_no_gradient_and_leaves_the_others_theirs() -> None:
    """Of an anchor of zeros all cosines are 0: its row costs the logarithm of their number, whatever they are."""
    torch.manual_seed(0)
    anchors, positives, negatives = torch.randn(3, 4, 8, dtype=torch.float64)
    anchors[1] = 0
    for rows in (anchors, positives, negatives):
        rows.requires_grad_()
    info_nce(anchors, positives, 0.05, negatives).backward()
    found = [rows.grad.clone() for rows in (anchors, positives, negatives)]
    kept = torch.tensor([0, 2, 3])
    logits = torch.cat([cosine_matrix(anchors[kept], others) for others in (positives, negatives)], dim=1) / 0.05
    expected = torch.autograd.grad(F.cross_entropy(logits, kept, reduction="sum") / 4, [anchors, positives, negatives])
    assert not found[0][1].any()
    assert found[0][kept].any(dim=1).all()
    torch.testing.assert_close(found, list(expected))


def test_a_vector_of_zeros_has_no_gradient_wherever_it_stands() -> None:
    torch.manual_seed(0)
    for place in range(3):
        vectors = torch.randn(3, 4, 8)
        vectors[place, 2] = 0
        vectors.requires_grad_()
        loss = info_nce(vectors[0], vectors[1], 0.05, vectors[2])
        loss.backward()
        assert loss.isfinite()
        assert not vectors.grad[place, 2].any()
        assert vectors.grad.norm(dim=2).max() < 1e3  # 1 / temperature, not 1 / the smallest length of a vector
