"""CoSENT: closed forms, a naive loop, sentence-transformers' own loss, and training on a file."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
import torch.nn.functional as F
from contrastive_methods import SCORED, build
from pyarrow import parquet
from recipes import arguments, load_recipe
from sentence_transformers.sentence_transformer.losses import CoSENTLoss
from torch import Tensor

from cloze.training.errors import CorpusError
from cloze.training.fit import main
from cloze.training.loop.prepare import prepare
from cloze.training.methods.losses import cosent, cosine_similarity
from cloze.training.methods.scored import Scored


def loss_of(first: Tensor, second: Tensor, scores: Tensor, scale: float) -> Tensor:
    return cosent(cosine_similarity(first, second), scores, scale)


def test_the_loss_of_known_similarities() -> None:
    """Three pairs, of which the first has the highest score and the two others the same one."""
    similarities, scores = torch.tensor([0.5, 0.3, 0.9]).double(), torch.tensor([4.0, 1.0, 1.0])
    expected = math.log(1 + math.exp(20 * (0.3 - 0.5)) + math.exp(20 * (0.9 - 0.5)))
    assert cosent(similarities, scores, 20.0).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("n", [2, 7])
def test_equal_similarities_cost_the_logarithm_of_the_compared_pairs(n: int) -> None:
    assert cosent(torch.full((n,), 0.3), torch.arange(n), 20.0).item() == pytest.approx(math.log(1 + n * (n - 1) / 2))


def test_equal_scores_cost_nothing_and_have_a_gradient_of_zero() -> None:
    similarities = torch.rand(4, requires_grad=True)
    loss = cosent(similarities, torch.ones(4), 20.0)
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(similarities.grad, torch.zeros(4))


@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_the_loss_equals_a_loop_over_the_formula(scale: float) -> None:
    torch.manual_seed(0)
    first, second = torch.randn(2, 9, 6, dtype=torch.float64)
    scores = torch.randint(4, (9,))

    def similarity(i: int) -> float:
        return F.cosine_similarity(first[i], second[i], dim=0).item()

    total = 1.0
    for i in range(9):
        for j in range(9):
            if scores[i] > scores[j]:
                total += math.exp(scale * (similarity(j) - similarity(i)))
    assert loss_of(first, second, scores, scale).item() == pytest.approx(math.log(total), rel=1e-9)


@pytest.mark.parametrize("scores", [[0.1, 0.9, 0.5, 0.5, 0.0], [3.0, 3.0, 3.0, 3.0, 3.0], [5, 4, 3, 2, 1]])
def test_values_and_gradients_are_those_of_sentence_transformers(scores: list[float]) -> None:
    torch.manual_seed(1)
    ours = torch.randn(2, 5, 8).requires_grad_()
    same = ours.detach().clone().requires_grad_()
    loss = loss_of(*ours, torch.tensor(scores), 20.0)
    expected = CoSENTLoss(None, scale=20.0).compute_loss_from_embeddings(list(same), torch.tensor(scores))
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(ours.grad, same.grad)


def test_a_vector_of_zeros_has_no_gradient() -> None:
    vectors = torch.randn(2, 3, 4)
    vectors[0, 1] = 0
    vectors.requires_grad_()
    loss = loss_of(*vectors, torch.arange(3), 20.0)
    loss.backward()
    assert loss.isfinite()
    assert not vectors.grad[0, 1].any()
    assert vectors.grad.isfinite().all()


@pytest.mark.parametrize("pooling", ["cls", "mean", "mask"])
def test_the_served_vectors_are_ranked(pooling: str, tiny_bert: Path) -> None:
    template = 'This "[X]" means [MASK].' if pooling == "mask" else "[X]"
    objective = build("scored", tiny_bert, dropout=False, pooling=[pooling], template=[template])
    assert isinstance(objective, Scored)
    first, second, scores = zip(*SCORED, strict=True)
    vectors = [torch.from_numpy(objective.encoder.embed(texts)) for texts in (first, second)]
    expected = loss_of(*vectors, torch.tensor([float(score) for score in scores]), 2.0)
    torch.testing.assert_close(objective(**objective.views(SCORED))["loss"].detach(), expected)
    assert (
        dict(objective.named_parameters()).keys() == dict(objective.encoder.named_parameters(prefix="encoder")).keys()
    )


def test_cuts_are_those_of_shorter_vectors(tiny_bert: Path) -> None:
    objective = build("scored", tiny_bert, dropout=False, dimensions=["8", "32"])
    first, second, scores = zip(*SCORED, strict=True)
    vectors = [torch.from_numpy(objective.encoder.embed(texts)) for texts in (first, second)]
    targets = torch.tensor([float(score) for score in scores])
    losses = [loss_of(*(each[:, :size] for each in vectors), targets, 2.0) for size in (8, 32)]
    torch.testing.assert_close(objective(**objective.views(SCORED))["loss"].detach(), torch.stack(losses).mean())


THINGS = ["dog", "man", "letter", "city", "rain", "guitar"]


def pairs() -> list[tuple[str, str, float]]:
    """Pairs whose score is higher if they share a word."""
    return [
        (f"The {a} and the {b} run.", f"Nothing but a {c}.", 0.5 + 4 * (c in (a, b)))
        for a in THINGS
        for b in THINGS
        for c in THINGS[:2]
    ]


def write(path: Path, rows: list[tuple[Any, ...]]) -> Path:
    names = ["sentence1", "sentence2", "score"]
    records = [dict(zip(names, row, strict=True)) for row in rows]
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(records), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    else:
        lines = [",".join(map(str, row)) for row in (names, *rows)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def keys(corpus: Path, encoder: Path, **more: object) -> dict[str, object]:
    fixed = {"encoder": encoder, "corpus": corpus, "batch_size": 8, "learning_rate": 1e-3, "log_steps": 1}
    return fixed | {"held_out": 0, "save_steps": 2, "max_steps": 6} | more


@pytest.mark.parametrize("ending", [".csv", ".jsonl", ".parquet"])
def test_a_score_may_be_a_number_or_a_text(ending: str, tiny_bert: Path, tmp_path: Path) -> None:
    path = write(tmp_path / f"pairs{ending}", pairs())
    recipe = load_recipe("scored", keys(path, tiny_bert, min_words=3))
    corpus, _, _ = prepare(recipe)
    assert [(first, second, float(score)) for first, second, score in corpus.rows] == pairs()


def test_a_few_steps_on_a_batch_lower_its_loss(tiny_bert: Path) -> None:
    objective = build("scored", tiny_bert, dropout=False)
    optimiser, losses = torch.optim.AdamW(objective.parameters(), lr=3e-3), []
    for _ in range(20):
        loss = objective(**objective.views(SCORED))["loss"]
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]  # with this scale, no loss comes close to 0


def test_scores_that_rank_nothing_are_refused(tiny_bert: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.csv", [("A dog.", "Rain.", 2)] * 9)
    with pytest.raises(CorpusError, match=r"every row has the score 2\.0, so there is nothing to rank"):
        main(["scored", *arguments(keys(path, tiny_bert)), "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


def test_a_batch_of_equal_scores_changes_no_weight(tiny_bert: Path) -> None:
    objective = build("scored", tiny_bert)
    outputs = objective(**objective.views([(first, second, "2.0") for first, second, _ in SCORED]))
    outputs["loss"].backward()
    assert outputs["loss"].item() == 0
    assert not any(weight.grad.any() for weight in objective.parameters() if weight.grad is not None)


def test_the_order_of_the_rows_is_of_no_importance() -> None:
    torch.manual_seed(0)
    first, second, scores = torch.randn(6, 4), torch.randn(6, 4), torch.rand(6)
    order = random.Random(0).sample(range(6), 6)
    shuffled = loss_of(first[order], second[order], scores[order], 20.0)
    torch.testing.assert_close(shuffled, loss_of(first, second, scores, 20.0))
