"""Whitening by hand, and layers that are the encoder's own."""

from pathlib import Path

import numpy as np
import pytest
from suite_data import numbers

from training.data.scored_pairs import Pairs, spearman
from training.errors import RunError
from training.evaluate.subject import Subject
from training.evaluate.suites.baselines import BaselineTask, layer_means, whiten
from training.model.encoder import SentenceEncoder

TEXTS = ["two dogs run", "a man in the rain", "she wrote a letter", "the markets", "a green field"]


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


def test_the_last_layer_is_the_encoders_own_mean(tiny_bert: Path) -> None:
    encoder = SentenceEncoder.load(str(tiny_bert), template="[X]", pooling="mean")
    layers = layer_means(encoder, TEXTS)
    assert list(layers) == ["static", "layer 0", "layer 1", "layer 2"]
    np.testing.assert_allclose(layers["layer 2"], encoder.embed(TEXTS), atol=1e-5)
    ids = encoder.pooling.text_encoder.encode(TEXTS)[0].ids
    words = encoder.word_embeddings.weight.detach().numpy()[ids]
    np.testing.assert_allclose(layers["static"][0], words.mean(0), atol=1e-6)


def test_every_baseline_is_scored(tiny_bert: Path) -> None:
    encoder = SentenceEncoder.load(str(tiny_bert), template="[X]", pooling="mean")
    pairs = Pairs(TEXTS, TEXTS[1:] + TEXTS[:1], [3.0, 1.0, 2.0, 5.0, 4.0])
    subject = Subject("tiny", encoder.embed, encoder.embed, "digest", model=encoder)
    scores = {score.metric: score.value for score in BaselineTask("set", pairs).run(subject)}
    assert list(scores) == ["static", "layer 0", "layer 1", "layer 2", "first-last", "whitening"]
    assert scores["layer 2"] == pytest.approx(spearman(encoder.embed, pairs))
    with pytest.raises(RunError, match="numbers shows no layers"):
        BaselineTask("set", pairs).run(numbers())
