"""GradCache against the pass that keeps every activation, and its place in the training loop."""

from functools import partial
from pathlib import Path

import pytest
import torch
from contrastive_methods import METHODS, ROWS, add_masked_head, build, gradients
from torch import Tensor

from cloze.training.errors import RecipeError
from cloze.training.loop.gradient_cache import backward_in_chunks
from cloze.training.methods.contrastive import BatchObjective
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.views import View, encode_trimmed


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> Path:
    return add_masked_head(tiny_bert, tmp_path_factory.mktemp("masked"))


def plain(objective: BatchObjective, views: dict[str, View], size: int | None) -> Tensor:
    """The same passes in the same order, every activation kept."""
    views = objective.draw(views)
    results = {
        argument: {
            name: encode_trimmed(partial(run, name), view, size, objective.tokenwise) for name, view in views.items()
        }
        for argument, run in objective.passes().items()
    }
    loss = objective.loss(views=views, **results)["loss"]
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize(
    ("case", "size"), [*((case, 2) for case in METHODS), *(("promptbert", size) for size in (1, 5, 64))]
)
def test_cached_gradients_are_those_of_one_pass(case: str, size: int, encoder: Path) -> None:
    name, rows, words = METHODS[case]
    objective = build(name, encoder, **words)
    torch.manual_seed(1)
    loss = plain(objective, objective.views(rows), size)
    expected, after = gradients(objective), torch.get_rng_state()
    torch.manual_seed(1)
    outputs = backward_in_chunks(objective, objective.views(rows), size)
    torch.testing.assert_close(outputs["loss"], loss)
    assert not any(value.requires_grad for value in outputs.values())
    torch.testing.assert_close(gradients(objective), expected, atol=1e-5, rtol=1e-5)
    assert any(gradient.abs().max() > 1e-3 for gradient in expected.values())
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("case", METHODS)
def test_views_that_are_read_together_have_the_gradients_of_a_pass_each(case: str, encoder: Path) -> None:
    name, rows, words = METHODS[case]
    objective = build(name, encoder, dropout=False, **words)
    torch.manual_seed(1)
    loss = plain(objective, objective.views(rows), None)
    expected = gradients(objective)
    torch.manual_seed(1)
    together = objective(**objective.views(rows))["loss"]
    together.backward()
    torch.testing.assert_close(together.detach(), loss, atol=1e-6, rtol=0)
    torch.testing.assert_close(gradients(objective), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("case", "passes"), [("simcse", 1), ("masked words", 2), ("promptbert", 4), ("sg-opt", 1)])
def test_views_of_one_shape_that_are_read_alike_are_one_pass(case: str, passes: int, encoder: Path) -> None:
    """PromptBERT's two templates are a pass each, and so are the templates alone; SG's frozen copy is another model."""
    name, rows, words = METHODS[case]
    objective, sizes = build(name, encoder, **words), list[int]()
    objective.encoder.backbone.register_forward_hook(lambda *_: sizes.append(1))
    objective(**objective.views(rows))
    assert len(sizes) == passes


@pytest.mark.parametrize("case", ["simcse", "triplets", "nested", "promptbert", "sg-opt"])
def test_without_dropout_cached_gradients_are_those_of_forward(case: str, encoder: Path) -> None:
    name, rows, words = METHODS[case]
    objective = build(name, encoder, dropout=False, **words)
    objective(**objective.views(rows))["loss"].backward()
    expected = gradients(objective)
    backward_in_chunks(objective, objective.views(rows), 2)
    torch.testing.assert_close(gradients(objective), expected, atol=1e-5, rtol=1e-5)


def test_without_its_random_state_the_second_pass_would_be_another(
    encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from contextlib import nullcontext

    objective = build("simcse", encoder)
    torch.manual_seed(1)
    plain(objective, objective.views(ROWS), 2)
    expected = gradients(objective)
    monkeypatch.setattr("cloze.training.loop.gradient_cache._RandomState.restored", lambda _: nullcontext())
    torch.manual_seed(1)
    backward_in_chunks(objective, objective.views(ROWS), 2)
    found = gradients(objective)
    assert any(not torch.allclose(found[key], value, atol=1e-3) for key, value in expected.items())


def test_the_bias_of_a_template_is_computed_once_a_step(encoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objective = build("promptbert", encoder)
    calls = []
    bias = SentenceEncoder.template_bias
    monkeypatch.setattr(SentenceEncoder, "template_bias", lambda *words: calls.append(1) or bias(*words))
    backward_in_chunks(objective, objective.views(ROWS), 1)
    assert len(calls) == 2  # one for each template


def test_under_autocast_the_second_pass_still_reaches_the_weights(encoder: Path) -> None:
    def autocast() -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16)

    objective = build("simcse", encoder, dropout=False)
    with autocast():
        loss = objective(**objective.views(ROWS))["loss"]
    loss.backward()
    expected = gradients(objective)
    backward_in_chunks(objective, objective.views(ROWS), 2, autocast)
    found = gradients(objective)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.cosine_similarity(found[key].flatten(), value.flatten(), dim=0) > 0.99 or value.abs().max() < 1e-3


def test_batch_norm_refuses_chunks(encoder: Path) -> None:
    with pytest.raises(RecipeError, match="mini_batch_size is 2, but method 'diffcse' has BatchNorm"):
        build("diffcse", encoder, mini_batch_size=["2"])
