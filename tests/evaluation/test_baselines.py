"""Layers that are the encoder's own, every baseline by name, and models without layers."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from suite_data import numbers
from transformers import set_seed

from cloze.training.errors import RunError
from cloze.training.evaluation.measures import Pairs
from cloze.training.evaluation.sts import spearman
from cloze.training.evaluation.suites.baselines import BaselineTask, pooled_layers
from cloze.training.evaluation.suites.own import ScoredPairsTask
from cloze.training.evaluation.suites.space import AnisotropyTask
from cloze.training.evaluation.tables import show
from cloze.training.evaluation.task import Score, Subject, score_tasks
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.masked_words import MaskedHead, save_masked_lm

TEXTS = ["two dogs run", "a man in the rain", "she wrote a letter", "the markets", "a green field"]
POOLINGS = ("mean", "cls", "max")
PAIRS = Pairs(TEXTS, TEXTS[1:] + TEXTS[:1], [3.0, 1.0, 2.0, 5.0, 4.0])


def test_the_last_layer_is_the_encoders_own(tiny_bert: Path) -> None:
    encoder = SentenceEncoder.load(str(tiny_bert), template="[X]", pooling="mean")
    layers = pooled_layers(encoder, TEXTS)
    assert list(layers) == ["static", *(f"layer {n} {each}" for n in range(3) for each in POOLINGS), "WK pooling"]
    np.testing.assert_allclose(layers["layer 2 mean"], encoder.embed(TEXTS), atol=1e-5)
    text_encoder = encoder.text_encoder
    ids = text_encoder.encode(TEXTS)[0].ids
    words = encoder.word_embeddings.weight.detach().numpy()[ids]
    np.testing.assert_allclose(layers["static"][0], words.mean(0), atol=1e-6)
    input_ids, attention_mask = map(torch.from_numpy, text_encoder.pad([ids]))
    states = encoder.hidden(input_ids, attention_mask)[0].detach().numpy()
    np.testing.assert_allclose(layers["layer 2 cls"][0], states[0], atol=1e-5)
    np.testing.assert_allclose(layers["layer 2 max"][0], states.max(0), atol=1e-5)


def test_every_baseline_is_scored(tiny_bert: Path) -> None:
    encoder = SentenceEncoder.load(str(tiny_bert), template="[X]", pooling="mean")
    subject = Subject("tiny", encoder.embed, encoder.embed, "digest", model=encoder)
    scores = {score.metric: score.value for score in BaselineTask("set", PAIRS, 2).run(subject)}
    assert list(scores) == [
        "static",
        *(f"layer {number} {pooling}" for number in range(3) for pooling in POOLINGS),
        *("static -freq", "static -freq -sub", "static -freq -sub -pun"),
        *("first-last", "last-two", "whitening", "BERT-flow", "WK pooling"),
    ]
    assert scores["layer 2 mean"] == pytest.approx(spearman(encoder.embed, PAIRS))
    vectors = BaselineTask("set", PAIRS, 2).vectors(encoder, [*PAIRS.left])
    assert all(np.isfinite(rows).all() for rows in vectors.values())


def test_an_encoder_of_one_layer_has_no_wk_pooling(tiny_bert: Path) -> None:
    encoder = SentenceEncoder.load(str(tiny_bert), template="[X]", pooling="mean")
    del encoder.backbone.encoder.layer[1:]
    encoder.backbone.config.num_hidden_layers = 1
    vectors = BaselineTask("set", PAIRS, 2).vectors(encoder, [*PAIRS.left])
    assert "WK pooling" not in vectors
    assert all(np.isfinite(rows).all() for rows in vectors.values())


def test_the_table_has_a_row_per_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    figures = {("a", "static"): 40.0, ("a", "layer 0 max"): 50.0, ("b", "static"): 45.0, ("b", "layer 0 max"): 60.0}
    show("path", {"tiny": [Score("baselines", *names, value, {}) for names, value in figures.items()]})
    lines = [re.findall(r"[\w.:]+(?: [\w.]+)*", line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["baselines: tiny"]
    assert [line for line in lines[1:] if line] == [
        ["a", "b", "Avg."],
        ["static", "40.00", "45.00", "42.50"],
        ["layer 0 max", "50.00", "60.00", "55.00"],
    ]


def test_a_model_without_layers_is_scored_by_the_other_suites(capsys: pytest.CaptureFixture[str]) -> None:
    other = ScoredPairsTask("set", Pairs(["1 0", "1 0"], ["1 0", "0 1"], [5.0, 1.0]))
    scores = score_tasks(numbers(), [BaselineTask("a", PAIRS), BaselineTask("b", PAIRS), other])
    assert {score.suite for score in scores} == {"pairs"}
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("skipped: numbers does not expose its layers, so it has no baselines")
    with pytest.raises(RunError, match="numbers does not expose its layers"):
        score_tasks(numbers(), [BaselineTask("a", PAIRS)])


def test_the_rows_of_an_untied_head_are_averaged_and_a_tied_one_has_none(tiny_bert: Path, tmp_path: Path) -> None:
    set_seed(1)
    for tied in (True, False):
        encoder = SentenceEncoder.load(str(tiny_bert), template="[X]", pooling="mean")
        head, folder = MaskedHead(encoder.backbone.config, tied), tmp_path / str(tied)
        encoder.save(folder)
        save_masked_lm(encoder.backbone, head, folder)
        vectors = BaselineTask("set", PAIRS, 2).vectors(SentenceEncoder.load(str(folder)), TEXTS)
        assert ("head" in vectors) is not tied
    assert head.weight is not None
    ids = encoder.text_encoder.encode(TEXTS)[1].ids
    np.testing.assert_allclose(vectors["head"][1], head.weight.detach().numpy()[ids].mean(0), atol=1e-6)


def test_anisotropy_of_sentences_and_of_their_averaged_words(tiny_bert: Path) -> None:
    encoder = SentenceEncoder.load(str(tiny_bert), template="[X]", pooling="mean")
    subject = Subject("tiny", encoder.embed, encoder.embed, "digest", model=encoder)
    found = {score.metric: score.value for score in AnisotropyTask("Wikipedia", TEXTS).run(subject)}

    def mean_cosine(vectors: NDArray[np.float32]) -> float:
        cosine = [
            float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))
            for place, one in enumerate(vectors)
            for other in vectors[place + 1 :]
        ]
        return sum(cosine) / len(cosine)

    static = pooled_layers(encoder, TEXTS)["static"]
    assert found["anisotropy"] == pytest.approx(mean_cosine(encoder.embed(TEXTS)), abs=1e-5)
    assert found["anisotropy of averaged word vectors"] == pytest.approx(mean_cosine(static), abs=1e-5)
