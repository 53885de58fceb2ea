"""A batch in trimmed parts against the same batch in one piece."""

from pathlib import Path

import pytest
import torch
from contrastive_methods import METHODS, add_masked_head, build
from recipes import load_recipe
from torch import Tensor

from cloze.training.methods import objective_of
from cloze.training.methods.objective import Objective
from cloze.training.model import views as module
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.views import View, encode_trimmed, trimmed, view

TEXTS = ["rain", "two dogs run " * 12, "", "a letter", "the old friend in the city", "dogs", "a man"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> Path:
    return add_masked_head(tiny_bert, tmp_path_factory.mktemp("masked"))


@pytest.fixture
def texts(tiny_bert: Path) -> tuple[SentenceEncoder, View]:
    encoder = SentenceEncoder.load(str(tiny_bert), template="[X]", pooling="cls")
    return encoder, view(encoder.text_encoder, TEXTS)


def test_each_row_gets_what_it_gets_in_one_batch(encoder: Path) -> None:
    keys = {"encoder": [str(encoder)], "teacher": [str(encoder)], "corpus": ["unused.txt"]}
    recipe = load_recipe("distill", keys)
    source = SentenceEncoder.load(recipe.encoder, template=recipe.template, pooling=recipe.pooling)
    whole, seen = view(source.text_encoder, TEXTS), list[tuple[int, ...]]()

    def encode(part: View) -> Tensor:
        seen.append(tuple(part["input_ids"].shape))
        return source(**part)

    with torch.no_grad():
        torch.testing.assert_close(encode_trimmed(encode, whole, 2), source(**whole), atol=1e-6, rtol=0)
    assert [rows for rows, _ in seen] == [2, 2, 2, 1]
    assert sum(rows * length for rows, length in seen) < whole["input_ids"].numel() * 0.7


def test_only_tokens_are_cut(texts: tuple[SentenceEncoder, View]) -> None:
    """Whatever else has as many columns as the longest text has tokens."""
    _, whole = texts
    length = whole["input_ids"].shape[1]
    rates = torch.arange(len(TEXTS) * length).view(len(TEXTS), length)
    for rows, part in trimmed(whole | {"rates": rates, "answers": whole["input_ids"]}, 3, ["answers"]):
        assert torch.equal(part["rates"], rates[rows])
        assert part["attention_mask"].any(0).all()
        assert torch.equal(part["answers"], part["input_ids"])


def test_a_small_batch_stays_whole(texts: tuple[SentenceEncoder, View]) -> None:
    encoder, whole = texts
    calls: list[int] = []

    def encode(part: View) -> Tensor:
        calls.append(len(part["input_ids"]))
        return encoder(**part)

    encode_trimmed(encode, whole)
    assert calls == [len(TEXTS)]
    calls.clear()
    encode_trimmed(encode, {name: tensor.repeat(50, 1) for name, tensor in whole.items()})
    assert len(calls) == module.PARTS
    assert sum(calls) == 50 * len(TEXTS)


def step(objective: Objective, views: dict[str, View]) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(1)  # of what a method draws
    loss = objective(**views)["loss"]
    loss.backward()
    found = {name: weight.grad.clone() for name, weight in objective.named_parameters() if weight.grad is not None}
    objective.zero_grad()
    return loss.detach(), found


@pytest.mark.parametrize("case", [*METHODS, "diffcse", "mlm"])
def test_loss_and_gradients_are_those_of_one_batch(case: str, encoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if case == "mlm":
        keys = {"encoder": [str(encoder)], "corpus": ["unused.txt"], "batch_size": ["5"], "masked_share": ["0.5"]}
        recipe = load_recipe("mlm", keys)
        torch.manual_seed(0)
        source = SentenceEncoder.load(recipe.encoder, template=recipe.template, pooling=recipe.pooling)
        objective: Objective = objective_of("mlm")(source, recipe).eval()
        rows = METHODS["simcse"][1]
    else:
        name, rows, words = METHODS.get(case, ("diffcse", METHODS["simcse"][1], {"generator": [str(encoder)]}))
        objective = build(name, encoder, dropout=False, **words)
    if case == "diffcse":
        objective.editor.generator.eval()  # its dropout is drawn part by part
    views = objective.views(rows)
    expected, gradient = step(objective, views)
    monkeypatch.setattr(module, "CPU_TOKENS", 1)
    found, same = step(objective, views)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(same, gradient, atol=1e-5, rtol=1e-4)  # sums in another order
    assert max(one.abs().max() for one in gradient.values()) > 1e-3
