"""Whitening by hand, WK pooling against its QR form, flows that are invertible volumes, and words that are left out."""

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from cloze.training.evaluation.postprocessing import (
    Flow,
    Removal,
    fit_flow,
    flow_vectors,
    static_averages,
    whiten,
    wk_pooling,
)
from cloze.training.model.encoder import SentenceEncoder


def test_whitening_by_hand() -> None:
    """The covariance is diag(8/3, 2/3)."""
    found = whiten(np.array([[2.0, 0], [-2, 0], [0, 1], [0, -1]]))
    np.testing.assert_allclose(np.abs(found), [[1.2247449, 0]] * 2 + [[0, 1.2247449]] * 2, atol=1e-7)


def test_whitened_vectors_have_the_identity_as_covariance() -> None:
    chance = np.random.default_rng(0)
    vectors = chance.normal(size=(50, 4)) @ chance.normal(size=(4, 4)) + 3
    np.testing.assert_allclose(np.cov(whiten(vectors).T), np.eye(4), atol=1e-9)
    flat = whiten(np.c_[vectors, vectors[:, 0]])  # a direction without variance is left out
    np.testing.assert_allclose(np.cov(flat.T), np.eye(4), atol=1e-6)


def naive_wk(states: NDArray[np.float64]) -> NDArray[np.float64]:
    """The paper's algorithm for one sentence, layers (k, L, d), with a QR decomposition per token and layer."""
    k, length, _ = states.shape
    words, importance = [], []
    for token in range(length - 1):
        layers = states[:, token]
        alignment, novelty = np.zeros(k), np.zeros(k)
        for layer in range(k):
            left = layers[layer - 2 : layer] if layer >= 2 else layers[:0]
            window = np.concatenate([left, layers[layer + 1 : layer + 3], layers[layer : layer + 1]])
            triangle = np.linalg.qr(window.T)[1]
            around, own = triangle[:-1, :-1], triangle[:, -1]
            mean = (around / np.linalg.norm(around, axis=0)).mean(1)
            alignment[layer] = 1 / (2 * len(window) * mean @ own[:-1] / np.linalg.norm(own[:-1]))
            novelty[layer] = abs(own[-1]) / np.linalg.norm(own)
        weights = alignment / alignment.sum() + novelty / novelty.sum()
        words.append(weights / weights.sum() @ layers)
        unit = layers / np.linalg.norm(layers, axis=1, keepdims=True)
        importance.append(np.var((unit[1:] * unit[:-1]).sum(1)))
    found: NDArray[np.float64] = np.array(importance) @ np.array(words) / np.sum(importance)
    return found


@pytest.mark.parametrize("depth", [6, 12])
def test_wk_pooling_is_its_qr_form(depth: int) -> None:
    """From a third of the depth on; the last token and the padding behind it do not count."""
    chance = np.random.default_rng(depth)
    base = chance.normal(size=(1, 2, 7, 16))
    states = base + 0.5 * chance.normal(size=(depth + 1, 2, 7, 16))  # layers that are alike, as a model's are
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    found = wk_pooling([torch.from_numpy(layer) for layer in states], mask)
    for row, length in enumerate((7, 4)):
        np.testing.assert_allclose(found[row], naive_wk(states[depth // 3 :, row, :length]), atol=1e-10)


def test_a_flow_reports_the_change_of_volume() -> None:
    """The determinant of the Jacobian matrix, at any point of a trained flow."""
    vectors = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    flow = fit_flow(vectors, 3)
    jacobian = torch.autograd.functional.jacobian(lambda one: flow(one[None])[0][0], vectors[5])
    torch.testing.assert_close(flow(vectors)[1], torch.linalg.slogdet(jacobian)[1], atol=1e-4, rtol=1e-4)


def test_a_flow_becomes_likelier_and_is_the_same_again() -> None:
    chance = np.random.default_rng(0)
    vectors = (chance.normal(size=(300, 8)) @ chance.normal(size=(8, 8)) + 3).astype(np.float32)
    inputs = torch.from_numpy(vectors)
    torch.manual_seed(0)
    untrained = Flow(inputs).log_likelihood(inputs).mean().item()
    trained = fit_flow(inputs, 20)
    assert trained.log_likelihood(inputs).mean().item() > untrained + 0.5
    np.testing.assert_array_equal(flow_vectors(vectors, 2), flow_vectors(vectors, 2))


def test_a_new_flow_gives_its_vectors_mean_0_and_variance_1() -> None:
    vectors = 5 + 3 * torch.randn(500, 8, generator=torch.Generator().manual_seed(0))
    latent = Flow(vectors)(vectors)[0]
    torch.testing.assert_close(latent.mean(0), torch.zeros(8), atol=1e-4, rtol=0)
    assert latent.std(0).max() < 2


PIECES = ["[CLS]", "the", "dog", "##s", ".", "A", "runs"]


def test_kinds_of_tokens_are_left_out_one_after_the_other() -> None:
    words = np.eye(7, dtype=np.float32)
    sequences = [[1, 2, 3, 4], [1, 1, 6, 4], [1]]
    removal = Removal(PIECES, len(PIECES), "##")
    removal.frequent(sequences, 1)  # "the", four times
    np.testing.assert_allclose(
        removal.averages(words, sequences),
        [(words[2] + words[3] + words[4]) / 3, (words[6] + words[4]) / 2, np.zeros(7)],
    )
    removal.subwords()
    np.testing.assert_allclose(removal.averages(words, sequences)[0], (words[2] + words[4]) / 2)
    removal.punctuation()
    np.testing.assert_allclose(removal.averages(words, sequences), [words[2], words[6], np.zeros(7)])


def test_a_byte_level_text_begins_with_a_word() -> None:
    removal = Removal(["dog", "Ġdog", "s", "Ġthe"], 4, None)
    removal.subwords()
    words = np.eye(4, dtype=np.float32)
    np.testing.assert_allclose(removal.averages(words, [[0, 2, 3, 0]])[0], (words[0] + words[3]) / 2)


def test_an_uncased_model_has_no_row_for_case(tiny_bert: Path, tiny_roberta: Path) -> None:
    texts = ["A man is playing the guitar on a stage.", "Two dogs run over the green field."]
    rows = ["static -freq", "static -freq -sub", "static -freq -sub -case", "static -freq -sub -case -pun"]
    roberta = SentenceEncoder.load(str(tiny_roberta), template="[X]", pooling="mean")
    assert list(static_averages(roberta, texts, 2)) == rows
    bert = SentenceEncoder.load(str(tiny_bert), template="[X]", pooling="mean")
    found = static_averages(bert, texts, 3)
    assert list(found) == [row.replace(" -case", "") for row in rows if not row.endswith("-case")]
    piece = bert.tokenizer.convert_tokens_to_ids
    words = bert.word_embeddings.weight.detach().numpy()
    kept = ["two", "dogs", "run", "over", "green", "field"]  # "a", "the" and the period are the most frequent
    np.testing.assert_allclose(found["static -freq -sub -pun"][1], words[piece(kept)].mean(0), atol=1e-6)
