"""The head that an encoder keeps: where denoising stands, and that SimCSE serves what it trained."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recipes import load_recipe
from transformers import BertConfig

from cloze.training.methods import objective_of
from cloze.training.methods.contrastive import projection
from cloze.training.methods.losses import info_nce
from cloze.training.methods.simcse import SimCSE
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.heads import HEAD_FILE, ProjectionHead

PAIRS = [("Two dogs run.", "Dogs."), ("A man plays.", "Music."), ("Rain.", "The city"), ("A letter.", "She wrote.")]
TEXTS = ["Two dogs run.", "", "A man is playing the guitar on a stage in the city."]
SMALL = BertConfig(hidden_size=8)


def build(folder: Path, name: str = "simcse", **words: Any) -> SimCSE:
    recipe = load_recipe(name, {"encoder": [str(folder)], "corpus": ["unused.csv"], "batch_size": ["4"]} | words)
    torch.manual_seed(0)
    encoder = SentenceEncoder.load(recipe.encoder, template=recipe.template, pooling=recipe.pooling)
    return objective_of(recipe.method)(encoder, recipe)


def test_a_tanh_sees_the_difference_and_a_transform_each_on_its_own() -> None:
    vectors, bias = torch.randn(2, 3, 8)
    tanh, transform = ProjectionHead("tanh", SMALL), ProjectionHead("transform", SMALL)
    assert torch.equal(tanh(vectors, bias), torch.tanh(tanh[0](vectors - bias)))
    norm = torch.nn.functional.layer_norm
    layers = [norm(torch.nn.functional.gelu(transform[0](given)), (8,), eps=1e-12) for given in (vectors, bias)]
    torch.testing.assert_close(transform(vectors, bias), layers[0] - layers[1])
    torch.testing.assert_close(transform(vectors), layers[0])
    assert not transform(vectors, vectors).any()


def test_the_projection_is_drawn_as_bert_draws(tiny_bert: Path) -> None:
    encoder = SentenceEncoder.load(str(tiny_bert), template="[X]", pooling="cls")
    torch.manual_seed(0)
    linear, tanh = projection(encoder)
    assert linear.weight.std().item() == pytest.approx(0.2, rel=0.05)
    assert not linear.bias.any()
    assert isinstance(tanh, torch.nn.Tanh)


@pytest.mark.parametrize("kind", ["tanh", "transform"])
def test_a_head_is_read_back(kind: str, tmp_path: Path) -> None:
    head = ProjectionHead(kind, SMALL)
    head.save(tmp_path)
    again = ProjectionHead.load(tmp_path, SMALL)
    assert again is not None
    assert again.kind == kind
    assert all(torch.equal(weight, again.state_dict()[key]) for key, weight in head.state_dict().items())


def test_no_head_is_none_and_one_of_another_width_is_refused(tmp_path: Path) -> None:
    assert ProjectionHead.load(tmp_path, SMALL) is None
    ProjectionHead("tanh", SMALL).save(tmp_path)
    with pytest.raises(RuntimeError, match="size mismatch"):
        ProjectionHead.load(tmp_path, BertConfig(hidden_size=16))


@pytest.mark.parametrize("name", ["simcse", "ssimcse"])
@pytest.mark.parametrize("kind", ["tanh", "transform"])
def test_simcse_serves_the_head_it_keeps(name: str, kind: str, masked_bert: Path, tmp_path: Path) -> None:
    objective = build(masked_bert, name, kept_head=[kind], columns=["a", "b"]).eval()
    hidden = [
        objective.encoder.pooled(**view, text_encoder=objective.text_encoder)
        for view in objective.views(PAIRS).values()
    ]
    heads = [torch.nn.Sequential(*objective.encoder.head)(vectors) for vectors in hidden]
    torch.testing.assert_close(objective(**objective.views(PAIRS))["loss"], info_nce(*heads, 0.05))
    objective.save(tmp_path)
    served = SentenceEncoder.load(str(tmp_path)).embed([text for text, _ in PAIRS])
    np.testing.assert_allclose(served, heads[0].detach().numpy(), atol=1e-5)


def test_simcse_forgets_its_head_otherwise(tiny_bert: Path, tmp_path: Path) -> None:
    objective = build(tiny_bert).eval()
    objective.save(tmp_path)
    assert not (tmp_path / HEAD_FILE).exists()
    np.testing.assert_array_equal(
        SentenceEncoder.load(str(tmp_path)).embed(TEXTS),
        SentenceEncoder.load(str(tiny_bert), template="[X]", pooling="cls").embed(TEXTS),
    )


def test_training_goes_on_with_a_kept_head(tiny_bert: Path, tmp_path: Path) -> None:
    first = build(tiny_bert, kept_head=["tanh"])
    with torch.no_grad():
        first.encoder.head[0].bias += 1
    first.save(tmp_path)
    for words in ({"kept_head": ["tanh"]}, {}):
        again = build(tmp_path, **words)
        assert torch.equal(again.encoder.head[0].bias, first.encoder.head[0].bias)
        assert isinstance(again.head, torch.nn.Identity) == bool(words)


def test_the_supervised_recipe_keeps_its_head(tiny_bert: Path) -> None:
    assert build(tiny_bert, "simcse-supervised").encoder.head.kind == "tanh"
