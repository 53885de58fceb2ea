"""Guided negatives: closed forms, a naive loop, sentence-transformers' GISTEmbedLoss, and training with a guide."""

import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from contrastive_methods import PAIRS, ROWS, TRIPLES, build, gradients
from harness import ROOT
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import GISTEmbedLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from torch import Tensor

from cloze.encoding.errors import ClozeError
from cloze.training.data.corpus import Corpus
from cloze.training.errors import RecipeError
from cloze.training.loop.gradient_cache import backward_in_chunks
from cloze.training.methods.contrastive import FromPairs, Guide
from cloze.training.methods.losses import false_negatives, info_nce
from cloze.training.methods.simcse import SimCSE
from cloze.training.model.encoder import SentenceEncoder


@pytest.fixture(scope="module")
def guide(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> Path:
    """Another encoder, which knows its template and its pooling."""
    folder = tmp_path_factory.mktemp("guide")
    encoder = SentenceEncoder.load(str(tiny_bert), template="[X]", pooling="mean")
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in encoder.backbone.parameters():
            weight += 0.1 * torch.randn_like(weight)
    encoder.save(folder)
    return folder


def embed(folder: Path, texts: list[str] | tuple[str, ...]) -> Tensor:
    return torch.from_numpy(SentenceEncoder.load(str(folder), template="[X]", pooling="mean").embed(texts))


def test_what_is_left_out_of_known_cosines() -> None:
    """Cosines of one anchor with its positive, three texts of other rows and two hard negatives."""
    anchors = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    at = [0.8, 0.9, 0.75, 0.8]
    positives = torch.tensor([[cosine, math.sqrt(1 - cosine**2)] for cosine in at])
    hard = torch.tensor([[0.1, 0.9], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    assert false_negatives(anchors, positives, 0.0)[0].tolist() == [False, True, False, True]
    assert false_negatives(anchors, positives, 0.1)[0].tolist() == [False, True, True, True]
    found = false_negatives(anchors, positives, 0.0, hard)[0].tolist()
    assert found == [False, True, False, True, False, True, True, False]


def test_a_row_without_negatives_costs_nothing() -> None:
    vectors = torch.randn(3, 4, requires_grad=True)
    loss = info_nce(vectors, vectors.detach().flip(0), 0.05, left_out=~torch.eye(3, dtype=torch.bool))
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(vectors.grad, torch.zeros(3, 4))


@pytest.mark.parametrize("hard", [0, 1, 2])
@pytest.mark.parametrize("margin", [0.0, 0.3])
def test_the_loss_equals_a_loop_over_the_rows(margin: float, hard: int) -> None:
    torch.manual_seed(hard)
    n, temperature, weight = 6, 0.5, 0.7
    ours, theirs = (torch.randn((2 + hard) * n, 5, dtype=torch.float64) for _ in range(2))

    def cosine(vectors: Tensor, i: int, j: int) -> float:
        return F.cosine_similarity(vectors[i], vectors[n + j], dim=0).item()

    total, left = 0.0, 0
    for i in range(n):
        scores = []
        for j in range((1 + hard) * n):
            if j != i and cosine(theirs, i, j) > cosine(theirs, i, i) - margin:
                left += 1
                continue
            own = weight if j >= n and j % n == i else 0.0
            scores.append(math.exp(cosine(ours, i, j) / temperature + own))
        total -= math.log(math.exp(cosine(ours, i, i) / temperature) / sum(scores))
    first, second, *negatives = ours.split(n)
    anchors, positives, *others = theirs.split(n)
    left_out = false_negatives(anchors, positives, margin, torch.cat(others) if hard else None)
    assert 0 < left == left_out.sum()
    loss = info_nce(first, second, temperature, torch.cat(negatives) if hard else None, weight, left_out)
    assert loss.item() == pytest.approx(total / n, rel=1e-9)


def test_the_text_of_the_positive_is_no_negative_in_another_row() -> None:
    torch.manual_seed(0)
    anchors, positives = torch.randn(64, 384), torch.randn(64, 384)
    positives[7] = positives[50]
    left_out = false_negatives(anchors, positives, 0.0)
    assert left_out[7, 50]
    assert left_out[50, 7]


def sentence_transformer(folder: Path) -> SentenceTransformer:
    transformer = Transformer(str(folder), max_seq_length=32)
    return SentenceTransformer(modules=[transformer, Pooling(32, "mean")], device="cpu").eval()


OTHERS = ["A letter of the man.", "Dogs run.", "The city without rain.", "A field.", "Her old friend has a guitar."]
DISTINCT = [(*pair, other) for pair, other in zip(PAIRS, OTHERS, strict=True)]


@pytest.mark.parametrize("margin", [0.0, 0.05])
@pytest.mark.parametrize("rows", [PAIRS, DISTINCT])
def test_the_value_is_that_of_sentence_transformers(
    rows: list[tuple[str, ...]], margin: float, tiny_bert: Path, guide: Path
) -> None:
    """GISTEmbedLoss without its comparisons of anchors with anchors and of positives with positives.

    It keeps a text that equals the positive of another row, unless rounding decides otherwise: here are none.
    """
    student, teacher = sentence_transformer(tiny_bert), sentence_transformer(guide)
    loss = GISTEmbedLoss(
        student, teacher, temperature=0.5, margin=margin, contrast_anchors=False, contrast_positives=False
    )
    columns = [list(column) for column in zip(*rows, strict=True)]
    expected = loss([student.preprocess(texts) for texts in columns], torch.empty(0))
    first, second, *negatives = (embed(tiny_bert, texts) for texts in columns)
    anchors, positives, *others = (embed(guide, texts) for texts in columns)
    left_out = false_negatives(anchors, positives, margin, *others)
    assert left_out.any()
    torch.testing.assert_close(
        info_nce(first, second, 0.5, *(negatives or [None]), left_out=left_out), expected.detach()
    )


@pytest.mark.parametrize(
    ("name", "rows", "words"),
    [
        ("simcse", PAIRS, {"columns": ["a", "b"]}),
        ("simcse", TRIPLES, {"columns": ["a", "b", "c"], "guide_margin": ["0.02"]}),
        ("simcse", ROWS, {"guide_margin": ["0.1"]}),
        ("promptbert-supervised", TRIPLES, {}),
        ("promptbert", ROWS, {"guide_margin": ["0.1"]}),
        ("simcse", PAIRS, {"columns": ["a", "b"], "mlm_weight": ["0.1"], "dimensions": ["8", "32"]}),
    ],
)
def test_methods_leave_out_what_the_guide_finds(
    name: str, rows: list[tuple[str, ...]], words: dict[str, list[str]], guide: Path, masked_bert: Path
) -> None:
    objective = build(name, masked_bert, dropout=False, guide=[str(guide)], **words)
    assert isinstance(objective, FromPairs)
    columns = list(zip(*rows, strict=True))
    anchors, positives, *others = (embed(guide, texts) for texts in (columns * 2 if len(columns) == 1 else columns))
    left_out = false_negatives(anchors, positives, objective.recipe.guide_margin, *others)
    torch.manual_seed(1)
    outputs = objective(**objective.views(rows))
    assert 0 < outputs["left_out"].item() == pytest.approx(left_out.float().mean().item())

    seen: list[Tensor] = []
    plain = build(
        name, masked_bert, dropout=False, **{key: word for key, word in words.items() if key != "guide_margin"}
    )
    plain.load_state_dict(objective.state_dict())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "cloze.training.methods.contrastive.info_nce",
            lambda *given: seen.append(info_nce(*given[:5], left_out)) or seen[-1],
        )
        plain(**plain.views(rows))
    contrast = outputs.get("contrast", outputs["loss"])
    torch.testing.assert_close(contrast.detach(), torch.stack(seen).mean().detach())


@pytest.mark.parametrize("size", [1, 2])
def test_the_gradient_cache_gives_the_same_gradient(size: int, tiny_bert: Path, guide: Path) -> None:
    objective = build("simcse", tiny_bert, dropout=False, guide=[str(guide)], columns=["a", "b", "c"])
    objective(**objective.views(TRIPLES))["loss"].backward()
    expected = gradients(objective)
    outputs = backward_in_chunks(objective, objective.views(TRIPLES), size)
    assert outputs["left_out"] > 0
    torch.testing.assert_close(gradients(objective), expected, atol=1e-5, rtol=1e-5)


def test_each_text_is_embedded_once_and_the_guide_is_in_no_checkpoint(
    tiny_bert: Path, guide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    embed_texts = SentenceEncoder.embed

    def noted(encoder: SentenceEncoder, texts: Sequence[str]) -> NDArray[np.float32]:
        asked.extend(texts)
        return embed_texts(encoder, texts)

    monkeypatch.setattr(SentenceEncoder, "embed", noted)
    objective = build("simcse", tiny_bert, guide=[str(guide)], columns=["a", "b", "c"])
    assert isinstance(objective, SimCSE)
    assert not any("guide" in key for key in objective.state_dict())
    objective.begin(Corpus(TRIPLES[:2], held_out=TRIPLES[2:]), tmp_path)
    assert sorted(asked) == sorted({text for row in TRIPLES for text in row})
    views = objective.views(TRIPLES[::-1])
    assert len(asked) == len(set(asked))
    monkeypatch.undo()
    torch.testing.assert_close(views["second"]["guide"], embed(guide, [row[1] for row in TRIPLES[::-1]]))


def test_a_guide_may_be_a_bundle_a_run_or_an_encoder_without_configuration(
    tiny_bert: Path, guide: Path, tmp_path: Path
) -> None:
    texts = [row[0] for row in ROWS]
    bundle = ROOT / "models" / "cloze-mini"
    vectors = Guide.load(str(bundle))(texts)
    assert vectors.shape == (len(texts), 384)
    torch.testing.assert_close(Guide.load(str(tiny_bert))(texts), embed(tiny_bert, texts))
    shutil.copytree(guide, tmp_path / "model")
    (tmp_path / "run.json").write_text("{}", encoding="utf-8")
    torch.testing.assert_close(Guide.load(str(tmp_path))(texts), embed(guide, texts))


def test_what_guides_nothing_is_refused(tiny_bert: Path) -> None:
    with pytest.raises(
        RecipeError, match=r"guide_margin is 0\.1, but there is no guide; write one, or guide_margin = 0\.0"
    ):
        build("simcse", tiny_bert, guide_margin=["0.1"])
    with pytest.raises(ClozeError, match="nowhere is not a folder; give a run, a bundle, an encoder's folder or a hub"):
        build("simcse", tiny_bert, guide=["./nowhere"])
