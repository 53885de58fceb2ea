"""Token weights: their values, a mean by them against a naive loop, every graph, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from test_graph_weights import write

from cloze.training.errors import EncoderError
from cloze.training.export.graph import fuse, trace
from cloze.training.export.layers import one_row
from cloze.training.export.quantise import quantise, vocabulary_feeds
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.graph_encoder import GraphEncoder
from cloze.training.model.pooling import pool
from cloze.training.model.token_weights import STEP, WEIGHTS_FILE, TokenWeights

TEXTS = ["Two dogs run.", "", "A man is playing the guitar on a stage in the city.", "rain over the old city " * 30]
MEAN: dict[str, Any] = {"template": "[X]", "pooling": "mean", "max_tokens": 48}
NAMES = ("rows", "fused", "int8")


def weighed(folder: Path, **settings: Any) -> SentenceEncoder:
    """With weights that differ much, also between tokens of one text, and biases that are not 0."""
    encoder = SentenceEncoder.load(str(folder), **MEAN | settings)
    torch.manual_seed(0)
    for name, parameter in encoder.backbone.named_parameters():
        torch.nn.init.normal_(parameter, mean=float(name.endswith("LayerNorm.weight")), std=0.1)
    weights = np.random.default_rng(1).uniform(0.02, 1, (encoder.word_embeddings.num_embeddings, 1))
    encoder.token_weights = TokenWeights(weights)
    return encoder


def test_a_weight_is_that_of_sif() -> None:
    """a / (a + p): 4, 3 and 1 of 8 tokens; a special token is not counted and weighs 1, and so does an unseen one."""
    found = TokenWeights.of_counts(np.array([50, 4, 3, 1, 0]), 0.25, [0]).table.squeeze(1)
    expected = np.array([1, 0.25 / 0.75, 0.25 / 0.625, 0.25 / 0.375, 1])
    np.testing.assert_allclose(found.numpy(), expected, atol=STEP / 2)
    assert torch.equal(found / STEP, (found / STEP).round())
    assert TokenWeights.of_counts(np.array([1, 1]), 1e-9, []).table.tolist() == [[STEP], [STEP]]  # never 0
    assert TokenWeights.of_counts(np.array([1, 0]), 0.03, [0]).table.tolist() == [[1], [1]]  # nothing was counted


def naive(encoder: SentenceEncoder, text: str) -> NDArray[np.float64]:
    """The weighted mean of a text's last states, one token after another."""
    assert encoder.token_weights is not None
    batch = encoder.text_encoder.batch([text])
    with torch.no_grad():
        states = encoder.hidden(torch.from_numpy(batch.input_ids), torch.from_numpy(batch.attention_mask))[0]
    total, sizes = np.zeros(states.shape[-1]), 0.0
    for token, state in zip(batch.input_ids[0], states.double().numpy(), strict=True):
        weight = float(encoder.token_weights.table[token])
        total, sizes = total + weight * state, sizes + weight
    return total / sizes


def test_the_mean_of_a_batch_is_that_of_a_naive_loop(tiny_bert: Path) -> None:
    encoder = weighed(tiny_bert)
    expected = np.array([naive(encoder, text) for text in TEXTS])
    np.testing.assert_allclose(encoder.embed(TEXTS), expected, atol=1e-5)
    plain = SentenceEncoder.load(str(tiny_bert), **MEAN)
    plain.backbone.load_state_dict(encoder.backbone.state_dict())
    assert np.abs(plain.embed(TEXTS) - expected).max() > 0.01
    assert np.abs(encoder.within('"[X]"').embed(TEXTS) - plain.within('"[X]"').embed(TEXTS)).max() > 0.01


def test_other_poolings_have_no_weights(tiny_bert: Path) -> None:
    encoder = weighed(tiny_bert, pooling="cls")
    expected = encoder.embed(TEXTS)
    encoder.token_weights = None
    np.testing.assert_array_equal(encoder.embed(TEXTS), expected)


def test_the_vector_of_the_template_is_weighed_too(tiny_bert: Path) -> None:
    """Denoised, an empty text is the template alone, whose vector is subtracted."""
    encoder = weighed(tiny_bert, template='It says "[X]"!', denoising=True)
    vectors = encoder.embed(TEXTS)
    assert np.abs(vectors[TEXTS.index("")]).max() < 1e-5 < np.abs(vectors[0]).max()


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_has_the_weights(name: str, tiny_bert: Path, tmp_path: Path) -> None:
    encoder = weighed(tiny_bert)
    text_encoder = encoder.text_encoder
    if name == "fused":
        model = fuse(trace(encoder, "fusible"), encoder)
    elif name == "int8":
        model = quantise(trace(encoder, "exact"), vocabulary_feeds(text_encoder), one_row(encoder))
    else:
        model = trace(encoder, "rows")
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    graph = GraphEncoder(tmp_path / "model.onnx", text_encoder)
    found, expected = graph.embed(TEXTS), encoder.embed(TEXTS)
    errors = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert errors.max() < {"rows": 1e-5, "fused": 1e-5, "int8": 0.1}[name]
    if name == "int8":  # exactly the same in any batch, whose padding changes the order of sums
        np.testing.assert_array_equal(np.concatenate([graph.embed([text]) for text in TEXTS]), found)
        bundle = write(encoder, tiny_bert, tmp_path / "bundle", {"int8": model})
        again = SentenceEncoder.load(str(bundle), max_tokens=48)
        assert again.token_weights is not None
        assert torch.equal(again.token_weights.table, encoder.token_weights.table)  # type: ignore[union-attr]
        np.testing.assert_allclose(again.embed(TEXTS), expected, atol=0.1 * np.linalg.norm(expected, axis=1).max())


def test_what_is_added_is_rounded_after_the_weights() -> None:
    """So that sums are exact: a product of a state and a weight has more bits than each of them."""
    states, weights = torch.tensor([[[1.4], [2.3]]]), torch.tensor([[[0.5], [0.25]]])
    found = pool(states, torch.ones(1, 2), "mean", token_weights=weights, rounded=torch.round)
    assert found.tolist() == [[pytest.approx((round(0.7) + round(0.575)) / 0.75)]]


def test_weights_are_saved_and_read_back(tiny_bert: Path, tmp_path: Path) -> None:
    encoder = weighed(tiny_bert)
    encoder.save(tmp_path / "model")
    again = SentenceEncoder.load(str(tmp_path / "model"))
    np.testing.assert_array_equal(again.embed(TEXTS), encoder.embed(TEXTS))


@pytest.mark.parametrize("table", [np.ones((3, 1)), np.ones(101), None])
def test_weights_of_another_vocabulary_are_refused(table: Any, tiny_bert: Path, tmp_path: Path) -> None:
    encoder = weighed(tiny_bert)
    encoder.save(tmp_path / "model")
    path = tmp_path / "model" / WEIGHTS_FILE
    if table is None:
        path.write_bytes(b"torn")
    else:
        save_file({"table": table}, path)
    with pytest.raises(EncoderError, match=f"{WEIGHTS_FILE} does not fit this encoder"):
        SentenceEncoder.load(str(tmp_path / "model"))
    save_file({"table": np.zeros((encoder.word_embeddings.num_embeddings, 1))}, path)
    with pytest.raises(EncoderError, match="positive ones are expected"):
        SentenceEncoder.load(str(tmp_path / "model"))
