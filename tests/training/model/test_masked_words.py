"""Equation 3 against a loop over words, its scale, and what denoising changes."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from cloze.encoding.errors import TemplateError
from cloze.training.errors import EncoderError
from cloze.training.evaluation.measures import cosines
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.heads import ProjectionHead
from cloze.training.model.masked_words import MaskedHead, MaskedWords, load_masked_lm, save_masked_lm

TEXTS = ["Two dogs run.", "A man is playing the guitar on a stage.", "", "Rain."]
TEMPLATE = 'This sentence of "[X]" means [MASK].'


def with_head(folder: Path, out: Path, tied: bool) -> str:
    """A masked language model whose every head parameter is random, with a configuration of its own."""
    encoder = SentenceEncoder.load(str(folder), template=TEMPLATE, pooling="mask")
    torch.manual_seed(0)
    head = MaskedHead(encoder.backbone.config, tied)
    for weight in head.parameters():
        nn.init.normal_(weight, std=0.3)
    encoder.save(out)
    save_masked_lm(encoder.backbone, head, out)
    return str(out)


@pytest.fixture(params=["bert", "roberta"])
def source(request: pytest.FixtureRequest, tiny_bert: Path, tiny_roberta: Path, tmp_path: Path) -> str:
    folder, tied = {"bert": (tiny_bert, True), "roberta": (tiny_roberta, False)}[request.param]
    return with_head(folder, tmp_path / "model", tied)


def by_hand(source: str, text: str, k: int) -> tuple[dict[int, float], torch.Tensor]:
    """Equation 3 with transformers' masked language model: token -> probability, and the sentence vector."""
    words = MaskedWords.load(source)
    model = load_masked_lm(source).eval()
    ids = words.encoder.text_encoder.encode([text])[0].ids
    with torch.no_grad():
        scores = model(input_ids=torch.tensor([ids])).logits[0, ids.index(words.encoder.tokenizer.mask_token_id)]
    probabilities = (scores - scores.logsumexp(0)).exp()
    likeliest = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])[:k]
    vector = torch.zeros(model.config.hidden_size)
    for token in likeliest:
        vector += probabilities[token] * model.get_input_embeddings().weight[token].detach()
    return {token: probabilities[token].item() for token in likeliest}, vector


@pytest.mark.parametrize("k", [1, 5, 100])
def test_the_vector_is_the_weighted_sum_of_static_embeddings(source: str, k: int) -> None:
    vectors = MaskedWords.load(source).embed(TEXTS, k)
    assert vectors.dtype == np.float32
    for text, vector in zip(TEXTS, vectors, strict=True):
        torch.testing.assert_close(torch.from_numpy(vector), by_hand(source, text, k)[1], atol=1e-5, rtol=1e-4)


def test_words_are_those_of_the_models_own_softmax_likeliest_first(source: str) -> None:
    words = MaskedWords.load(source)
    for text, found in zip(TEXTS, words.words(TEXTS, 7), strict=True):
        expected = by_hand(source, text, 7)[0]
        assert [word for word, _ in found] == [words.encoder.tokenizer.decode([token]).strip() for token in expected]
        assert [probability for _, probability in found] == pytest.approx(list(expected.values()), rel=1e-4)


def test_the_softmax_is_over_the_whole_vocabulary(source: str) -> None:
    words = MaskedWords.load(source)
    everything = len(words.static)
    assert sum(p for _, p in words.words(TEXTS[:1], everything)[0]) == pytest.approx(1, abs=1e-5)
    assert sum(p for _, p in words.words(TEXTS[:1], 5)[0]) < 0.99


def test_a_head_of_three_words_by_hand() -> None:
    """p = (.5, .3, .2), static embeddings (1, 0), (0, 1), (1, 1): the two likeliest give (.5, .3)."""

    class Fixed(nn.Module):
        def forward(self, hidden: torch.Tensor, static: torch.Tensor) -> torch.Tensor:
            return torch.tensor([[0.5, 0.3, 0.2]]).log().expand(len(hidden), -1)

    words = MaskedWords.__new__(MaskedWords)
    words.head, words.static = Fixed(), torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    words._hidden = lambda texts: torch.zeros(len(texts), 2)  # type: ignore[method-assign]
    np.testing.assert_allclose(words.embed(["x"], 1), [[0.5, 0]], atol=1e-6)
    np.testing.assert_allclose(words.embed(["x"], 2), [[0.5, 0.3]], atol=1e-6)
    np.testing.assert_allclose(words.embed(["x"] * 300, 3), [[0.7, 0.5]] * 300, atol=1e-6)  # more than are held at once
    assert words.top(torch.zeros(1, 2), 2)[1].tolist() == [[0, 1]]


def test_weights_that_sum_to_one_would_change_no_cosine(source: str) -> None:
    words = MaskedWords.load(source)
    vectors = words.embed(TEXTS, 5)
    totals = np.array([[sum(p for _, p in row)] for row in words.words(TEXTS, 5)], dtype=np.float32)
    renormalised = vectors / totals
    assert not np.allclose(vectors, renormalised, rtol=0.05)
    for row in range(len(TEXTS)):
        shifted = np.roll(vectors, row, axis=0), np.roll(renormalised, row, axis=0)
        np.testing.assert_allclose(cosines(vectors, shifted[0]), cosines(renormalised, shifted[1]), atol=1e-6)


def test_denoised_the_head_reads_what_is_left_of_the_mask(source: str) -> None:
    words = MaskedWords.load(source, denoising=True)
    encoder = words.encoder
    text_encoder = encoder.text_encoder
    for text, found in zip(TEXTS, words.words(TEXTS, 4), strict=True):
        ids = text_encoder.encode([text])[0].ids
        with torch.no_grad():
            hidden = encoder.hidden(torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.long))
            place = ids.index(encoder.tokenizer.mask_token_id)
            bias = encoder.template_bias(torch.tensor([len(ids) - text_encoder.template_tokens]), text_encoder)[0]
            likeliest = words.head(hidden[0, place] - bias, words.static).softmax(0).topk(4)
        assert [probability for _, probability in found] == pytest.approx(likeliest.values.tolist(), rel=1e-3)
        names = [encoder.tokenizer.decode([token]).strip() for token in likeliest.indices]
        assert [word for word, _ in found] == names
    assert not np.allclose(words.embed(TEXTS, 4), MaskedWords.load(source).embed(TEXTS, 4), atol=1e-3)


def test_of_an_empty_text_nothing_is_left(source: str) -> None:
    """h - h^ = 0, so the head sees the origin whatever the template."""
    found = [
        MaskedWords.load(source, denoising=True, template=template).words([""], 3)
        for template in (TEMPLATE, "[X] means [MASK].")
    ]
    words = MaskedWords.load(source)
    with torch.no_grad():
        origin = words.head(torch.zeros(words.encoder.dimension), words.static).softmax(0).topk(3).values
    for ((_, first), (_, second), (_, third)), *_ in found:
        assert [first, second, third] == pytest.approx(origin.tolist(), rel=1e-3)


def test_a_kept_sentence_head_is_not_in_the_way(source: str) -> None:
    plain = MaskedWords.load(source).words(TEXTS, 3)
    encoder = SentenceEncoder.load(source)
    encoder.head = ProjectionHead("tanh", encoder.backbone.config)
    assert MaskedWords(encoder, MaskedHead.load(source)).words(TEXTS, 3) == plain


def test_a_model_without_head_template_or_room_says_so(tiny_bert: Path, tmp_path: Path) -> None:
    with pytest.raises(EncoderError, match="has no template of its own; give one: --template"):
        MaskedWords.load(str(tiny_bert))
    with pytest.raises(EncoderError, match="has no masked-word head"):
        MaskedWords.load(str(tiny_bert), template=TEMPLATE)
    source = with_head(tiny_bert, tmp_path / "model", True)
    with pytest.raises(TemplateError, match=r"has \[MASK\] 0 times"):
        MaskedWords.load(source, template="[X]")
    words = MaskedWords.load(source)
    for k in (0, len(words.static) + 1):
        with pytest.raises(EncoderError, match=f"^--top-k is {k}; write 1 to {len(words.static)}"):
            words.words(["x"], k)
    assert math.isclose(words.words(["x"], 1)[0][0][1], words.words(["x"], 5)[0][0][1])
