import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cloze.training.methods.losses import SELF_GUIDED, info_nce, parameter_drift


def similarity(u: Tensor, v: Tensor, temperature: float) -> float:
    """The paper's phi."""
    return math.exp(F.cosine_similarity(u, v, dim=0).item() / temperature)


def base_loop(c: Tensor, h: Tensor, t: float) -> float:
    everyone, partner = [*c, *h], [*h, *c]
    total = 0.0
    for m, x in enumerate(everyone):
        z = sum(similarity(x, other, t) for n, other in enumerate(everyone) if n != m)
        total -= math.log(similarity(x, partner[m], t) / z)
    return total / len(everyone)


def opt1_loop(c: Tensor, h: Tensor, t: float) -> float:
    total, b = 0.0, len(c)
    for i in range(b):
        z = sum(similarity(c[i], c[j], t) for j in range(b) if j != i) + sum(similarity(c[i], x, t) for x in h)
        total -= math.log(similarity(c[i], h[i], t) / z)
    return total / b


def opt2_loop(c: Tensor, h: Tensor, t: float) -> float:
    total = 0.0
    for i in range(len(c)):
        total -= math.log(similarity(c[i], h[i], t) / sum(similarity(c[i], x, t) for x in h))
    return total / len(c)


def opt3_loop(c: Tensor, h: Tensor, t: float) -> float:
    total, (b, layers) = 0.0, h.shape[:2]
    for i in range(b):
        for k in range(layers):
            positive = similarity(c[i], h[i, k], t)
            others = sum(similarity(c[i], h[m, n], t) for m in range(b) if m != i for n in range(layers))
            total -= math.log(positive / (positive + others))
    return total / (b * layers)


@pytest.mark.parametrize(
    ("variant", "loop", "views"),
    [("base", base_loop, ()), ("opt1", opt1_loop, ()), ("opt2", opt2_loop, ()), ("opt3", opt3_loop, (4,))],
)
def test_each_loss_equals_a_loop_over_its_equation(
    variant: str, loop: Callable[..., float], views: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    for b, d, temperature in ((2, 32, 0.01), (5, 3, 1.0), (16, 32, 0.1)):
        c, h = torch.randn(b, d, dtype=torch.float64), torch.randn(b, *views, d, dtype=torch.float64)
        assert SELF_GUIDED[variant](c, h, temperature).item() == pytest.approx(loop(c, h, temperature), rel=1e-9)


@pytest.mark.parametrize(
    ("variant", "others", "orthonormal"),
    [("base", 30, 0.5514447), ("opt1", 30, 0.5514447), ("opt2", 15, 0.3132617), ("opt3", 15 * 13, 0.5514447)],
)
def test_of_known_vectors(variant: str, others: int, orthonormal: float) -> None:
    """Equal ones cost the logarithm of the choice: no negative of the paper's sums is dropped, none is added."""
    c, h = torch.ones(16, 8, dtype=torch.float64), torch.ones(16, 13, 8, dtype=torch.float64)
    for temperature in (0.01, 1.0):
        loss = SELF_GUIDED[variant](c, h if variant == "opt3" else h[:, 0], temperature)
        assert loss.item() == pytest.approx(math.log(1 + others), rel=1e-12)
    c = torch.eye(2, dtype=torch.float64)
    h = c.unsqueeze(1).expand(2, 2, 2) if variant == "opt3" else c
    assert SELF_GUIDED[variant](c, h, 1.0).item() == pytest.approx(orthonormal, abs=1e-7)


def test_a_pair_alone_is_free_under_opt2() -> None:
    assert SELF_GUIDED["opt2"](torch.randn(1, 4), torch.randn(1, 4), 0.01).item() == 0


def test_opt3_leaves_a_sentences_other_layers_out() -> None:
    """h_01 moves so that only its cosine with c_0 changes: row (0, 1) alone may feel it, not row (0, 0)."""
    torch.manual_seed(0)
    c, h = torch.zeros(3, 6, dtype=torch.float64), torch.randn(3, 2, 6, dtype=torch.float64)
    c[:, :3] = torch.eye(3)
    near, far = torch.tensor([0.8, 0, 0, 0.6, 0, 0]).double(), torch.tensor([0.6, 0, 0, 0.8, 0, 0]).double()
    losses = []
    for moved in (near, far):
        h[0, 1] = moved
        losses.append(SELF_GUIDED["opt3"](c, h, 0.5).item())
    others = sum(similarity(c[0], h[m, n], 0.5) for m in (1, 2) for n in (0, 1))
    rows = [math.log(1 + others / math.exp(cosine / 0.5)) for cosine in (0.8, 0.6)]
    assert losses[1] - losses[0] == pytest.approx((rows[1] - rows[0]) / 6, rel=1e-6)


def test_opt3_of_one_layer_is_opt2() -> None:
    torch.manual_seed(0)
    c, h = torch.randn(7, 5), torch.randn(7, 5)
    torch.testing.assert_close(SELF_GUIDED["opt3"](c, h.unsqueeze(1), 0.05), info_nce(c, h, 0.05))


@pytest.mark.parametrize("variant", SELF_GUIDED)
def test_no_scale_no_order_and_finite_gradients(variant: str) -> None:
    torch.manual_seed(0)
    c = torch.randn(6, 4, requires_grad=True)
    h = torch.randn(6, 3, 4, requires_grad=True)
    chosen = h if variant == "opt3" else h[:, 0]
    order = torch.randperm(6)
    loss = SELF_GUIDED[variant](c, chosen, 0.01)
    torch.testing.assert_close(SELF_GUIDED[variant](3 * c, 0.5 * chosen, 0.01), loss)
    torch.testing.assert_close(SELF_GUIDED[variant](c[order], chosen[order], 0.01), loss)
    for gradient in torch.autograd.grad(loss, (c, h)):
        assert gradient.isfinite().all()
        assert gradient.any()


def test_drift_is_the_sum_of_squares_and_has_a_gradient_at_zero() -> None:
    moved = [torch.tensor([3.0, 4.0], requires_grad=True), torch.tensor([[1.0]], requires_grad=True)]
    origin = [torch.zeros(2), torch.zeros(1, 1)]
    drift = parameter_drift(moved, origin)
    assert drift.item() == 26
    assert [gradient.tolist() for gradient in torch.autograd.grad(drift, moved)] == [[6, 8], [[2]]]
    still = parameter_drift(moved, [weight.detach().clone() for weight in moved])
    assert still.item() == 0
    assert not any(gradient.any() for gradient in torch.autograd.grad(still, moved))
