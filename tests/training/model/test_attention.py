"""Attention for training in bf16 on a CPU, against torch's own in fp32."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from cloze.training.model.attention import train_on_cpu
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.views import view

TEXTS = ["rain", "two dogs run in the rain", "a letter"]


@pytest.fixture
def encoder(tiny_bert: Path) -> SentenceEncoder:
    return SentenceEncoder.load(str(tiny_bert), template="[X]", pooling="mean")


def gradient(encoder: SentenceEncoder, precision: torch.dtype) -> Tensor:
    """Of all weights, in one row, of a sum that depends on every vector in another way."""
    encoder.zero_grad()
    with torch.autocast("cpu", precision, enabled=precision == torch.bfloat16):
        vectors = encoder.vectors(view(encoder.text_encoder, TEXTS), encoder.text_encoder)
    (vectors * torch.randn(vectors.shape, generator=torch.Generator().manual_seed(0))).sum().backward()
    return torch.cat([each.grad.flatten() for each in encoder.parameters() if each.grad is not None])


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the fused kernel stays")
def test_the_gradient_is_that_of_the_fused_kernel(encoder: SentenceEncoder) -> None:
    fused = gradient(encoder, torch.float32)
    train_on_cpu(encoder.backbone)
    assert torch.equal(gradient(encoder, torch.float32), fused)
    plain = gradient(encoder, torch.bfloat16)
    assert cosine_similarity(plain, fused, dim=0) > 0.9995
    torch.testing.assert_close(plain.norm(), fused.norm(), rtol=0.01, atol=0)


def test_padding_changes_nothing(encoder: SentenceEncoder) -> None:
    train_on_cpu(encoder.backbone)
    with torch.autocast("cpu", torch.bfloat16):
        together = encoder.vectors(view(encoder.text_encoder, TEXTS), encoder.text_encoder)
        alone = [encoder.vectors(view(encoder.text_encoder, [text]), encoder.text_encoder) for text in TEXTS]
    torch.testing.assert_close(together, torch.cat(alone), atol=0.01, rtol=0)


def test_dropout_is_kept(encoder: SentenceEncoder) -> None:
    """Two passes of attention with dropout alone differ in training, and not in evaluation."""
    train_on_cpu(encoder.backbone)
    for module in encoder.backbone.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    batch = view(encoder.text_encoder, TEXTS)
    for layer in encoder.backbone.encoder.layer:
        layer.attention.self.dropout.p = 0.5

    def changed(training: bool) -> bool:
        encoder.train(training)
        with torch.autocast("cpu", torch.bfloat16):
            first, second = (encoder.vectors(batch, encoder.text_encoder) for _ in range(2))
        return not torch.equal(first, second)

    assert changed(True)
    assert not changed(False)
