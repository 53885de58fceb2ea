import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from contrastive_methods import add_masked_head
from recipes import load_recipe
from torch import Tensor

from cloze.training.errors import EncoderError, RecipeError
from cloze.training.fit import main
from cloze.training.methods import objective_of
from cloze.training.methods.losses import info_nce
from cloze.training.methods.simcse import SimCSE
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.masked_words import MaskedHead

TRIPLES = [
    ("Two dogs run.", "Dogs are running over the field.", "Nothing runs here."),
    ("A man is playing the guitar.", "A man plays.", "The man is without a guitar."),
    ("Rain.", "A little rain in the city.", "The rain fell sharply on the stage after all."),
    ("She wrote a letter to the city.", "She wrote.", "Two dogs wrote a letter."),
]
TEXTS = [row[:1] for row in TRIPLES]
THREE = {"columns": ["a", "b", "c"]}
MASKED = {"mlm_weight": ["0.1"], "masked_share": ["0.5"]}


@pytest.fixture(params=["bert", "roberta"])
def folder(request: pytest.FixtureRequest, tiny_bert: Path, tiny_roberta: Path) -> Path:
    return {"bert": tiny_bert, "roberta": tiny_roberta}[request.param]


def build(folder: Path, **words: Any) -> SimCSE:
    recipe = load_recipe("simcse", {"encoder": [str(folder)], "corpus": ["unused.txt"], "batch_size": ["4"]} | words)
    torch.manual_seed(0)
    encoder = SentenceEncoder.load(recipe.encoder, template=recipe.template, pooling=recipe.pooling)
    return objective_of(recipe.method)(encoder, recipe)


def rows_of(*blocks: Tensor) -> tuple[Tensor, ...]:
    """Unit anchors, and for each 2 x 2 block two unit vectors whose cosines with the anchors it is."""
    anchors = torch.eye(2, 2 + 2 * len(blocks), dtype=torch.float64)
    vectors = []
    for number, cosines in enumerate(blocks):
        rest = torch.zeros(2, 2 * len(blocks), dtype=torch.float64)
        rest[:, 2 * number : 2 * number + 2] = torch.diag((1 - (cosines**2).sum(0)).sqrt())
        vectors.append(torch.cat([cosines.T, rest], dim=1))
    return anchors, *vectors


# --- the loss --------------------------------------------------------------------------------------------------------


def test_with_equal_hard_negatives_the_loss_is_a_logarithm() -> None:
    for n, weight in ((2, 0.0), (64, 1.0), (256, -2.0)):
        vectors = torch.ones(n, 8, dtype=torch.float64)
        loss = info_nce(vectors, vectors, 0.05, vectors, weight).item()
        assert loss == pytest.approx(math.log(2 * n - 1 + math.exp(weight)), rel=1e-12)
    same = torch.ones(4, 3)
    assert info_nce(same, same, 0.05, torch.cat([same] * 5)).item() == pytest.approx(math.log(4 * (1 + 5)))


@pytest.mark.parametrize(("weight", "expected"), [(0.0, 1.0463279), (1.0, 1.4160123)])
def test_hard_negatives_of_a_known_matrix(weight: float, expected: float) -> None:
    positive = torch.tensor([[0.9, 0.1], [0.2, 0.8]], dtype=torch.float64)
    negative = torch.tensor([[0.5, 0.3], [0.4, 0.6]], dtype=torch.float64)
    anchors, positives, negatives = rows_of(positive, negative)
    assert info_nce(anchors, positives, 1.0, negatives, weight).item() == pytest.approx(expected, abs=5e-8)


@pytest.mark.parametrize("alpha", [1.0, 3.0])
@pytest.mark.parametrize(
    ("n", "d", "k", "temperature"),
    [(2, 32, 1, 0.05), (5, 3, 1, 1.0), (16, 32, 1, 0.05), (4, 6, 2, 0.1), (4, 6, 5, 0.1)],
)
def test_hard_negatives_equal_a_loop_over_equation_5(n: int, d: int, k: int, temperature: float, alpha: float) -> None:
    torch.manual_seed(n * d)
    first, second, *others = torch.randn(2 + k, n, d, dtype=torch.float64)

    def score(left: Tensor, right: Tensor) -> float:
        return math.exp(F.cosine_similarity(left, right, dim=0).item() / temperature)

    total = 0.0
    for i in range(n):
        below = sum(score(first[i], second[j]) for j in range(n))
        below += sum((alpha if i == j else 1.0) * score(first[i], other[j]) for other in others for j in range(n))
        total -= math.log(score(first[i], second[i]) / below)
    loss = info_nce(first, second, temperature, torch.cat(others), math.log(alpha))
    assert loss.item() == pytest.approx(total / n, rel=1e-9)


def test_every_row_has_all_hard_negatives_and_no_order() -> None:
    torch.manual_seed(0)
    first, second, third = torch.randn(3, 6, 4)
    loss = info_nce(first, second, 0.1, third, 0.5)
    order = torch.randperm(6)
    torch.testing.assert_close(info_nce(first[order], second[order], 0.1, third[order], 0.5), loss)
    torch.testing.assert_close(info_nce(2 * first, 3 * second, 0.1, 4 * third, 0.5), loss)
    assert not torch.allclose(info_nce(first, second, 0.1, third[order], 0.5), loss)  # a row's own weighs more
    torch.testing.assert_close(info_nce(first, second, 0.1, third[order]), info_nce(first, second, 0.1, third))


# --- views -----------------------------------------------------------------------------------------------------------


def test_one_column_is_seen_twice_two_are_pairs_and_a_third_is_a_hard_negative(folder: Path) -> None:
    objective = build(folder)

    def texts(columns: int) -> dict[str, list[str]]:
        views = objective.views([row[:columns] for row in TRIPLES])
        decode = objective.encoder.tokenizer.batch_decode
        return {name: decode(view["input_ids"], skip_special_tokens=True) for name, view in views.items()}

    lower = str.lower if "bert" in objective.encoder.backbone.config.model_type[:4] else str
    expected = [[lower(text) for text in column] for column in zip(*TRIPLES, strict=True)]
    assert texts(1) == {"first": expected[0], "second": expected[0]}
    assert texts(2) == {"first": expected[0], "second": expected[1]}
    assert texts(3) == {"first": expected[0], "second": expected[1], "negative1": expected[2]}
    views = objective.views([(*row, *row) for row in TRIPLES])
    assert list(views) == ["first", "second", "negative1", "negative2", "negative3", "negative4"]
    assert objective.loss({name: objective.encode(name, view) for name, view in views.items()}, views)["loss"] > 0


@pytest.mark.parametrize("weight", ["0.0", "1.5"])
def test_the_loss_of_triplets_is_of_their_vectors_behind_the_head(weight: str, folder: Path) -> None:
    objective = build(folder, negative_weight=[weight], **THREE).eval()
    columns = []
    for column in zip(*TRIPLES, strict=True):
        vectors = torch.from_numpy(objective.encoder.embed(column))  # one by one, without padding of other columns
        columns.append(objective.head(vectors))
    expected = info_nce(columns[0], columns[1], 0.05, columns[2], float(weight))
    loss = objective(**objective.views(TRIPLES))["loss"]
    torch.testing.assert_close(loss, expected, atol=1e-4, rtol=1e-4)
    pairs = objective(**objective.views([row[:2] for row in TRIPLES]))["loss"]
    torch.testing.assert_close(pairs, info_nce(columns[0], columns[1], 0.05), atol=1e-4, rtol=1e-4)
    assert pairs < loss


def test_triplets_reach_the_encoder_and_the_head(tiny_bert: Path) -> None:
    objective = build(tiny_bert, **THREE).train()
    objective(**objective.views(TRIPLES))["loss"].backward()
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in objective.head.parameters())
    assert all(weight.grad is not None for weight in objective.encoder.parameters())


def test_a_weight_without_hard_negatives_is_refused(tiny_bert: Path) -> None:
    for columns in ({}, {"columns": ["a", "b"]}):
        with pytest.raises(
            RecipeError,
            match=r"negative_weight is 1.0, but columns names [02]; hard negatives are in the third and later columns",
        ):
            build(tiny_bert, negative_weight=["1.0"], **columns)


# --- masked words ----------------------------------------------------------------------------------------------------


def test_masking_leaves_the_contrastive_views_as_they_are(folder: Path) -> None:
    objective = build(folder, **MASKED)
    views = objective.views(TEXTS)
    before = {name: view["input_ids"].clone() for name, view in views.items()}
    drawn = objective.draw(views)
    for name, ids in before.items():
        assert torch.equal(views[name]["input_ids"], ids)
        assert torch.equal(drawn[name]["input_ids"], ids)
    masked, answers = drawn["first"]["masked_ids"], drawn["first"]["answers"]
    chosen = answers != -100
    assert chosen.any()
    assert torch.equal(answers[chosen], before["first"][chosen])
    assert torch.equal(masked[~chosen], before["first"][~chosen])
    assert not torch.equal(masked, before["first"])


def test_the_masked_loss_is_the_cross_entropy_of_the_chosen_words(folder: Path) -> None:
    """Written out: each chosen place, its hidden state, the head's scores over the vocabulary."""
    objective = build(folder, **MASKED).eval()
    torch.manual_seed(3)
    views = objective.draw(objective.views(TEXTS))
    vectors, guesses = ({name: run(name, view) for name, view in views.items()} for run in objective.passes().values())
    outputs = objective.loss(vectors, views, guesses)
    embeddings = objective.encoder.backbone.get_input_embeddings().weight
    losses = []
    for name in ("first", "second"):  # each column is masked on its own
        masked = views[name]
        hidden = objective.encoder.hidden(masked["masked_ids"], masked["attention_mask"])
        for row, place in (masked["answers"] >= 0).nonzero().tolist():
            scores = objective.masked_word_loss.head(hidden[row, place], embeddings)
            losses.append(-scores.log_softmax(-1)[views[name]["input_ids"][row, place]])
    assert not torch.equal(views["first"]["answers"], views["second"]["answers"])
    expected = torch.stack(losses).mean()
    assert len(losses) > 3
    torch.testing.assert_close(outputs["guessing"], expected.detach())
    torch.testing.assert_close(outputs["loss"], outputs["contrast"] + 0.1 * expected)
    torch.testing.assert_close(outputs["contrast"], build(folder).eval()(**objective.views(TEXTS))["loss"])


def test_the_masked_loss_begins_with_the_encoders_head(tiny_bert: Path, tmp_path: Path) -> None:
    folder = add_masked_head(tiny_bert, tmp_path)
    objective = build(folder, mlm_weight=["0.1"])
    kept = MaskedHead.load(str(folder)).state_dict()
    assert objective.masked_word_loss
    for name, weight in objective.masked_word_loss.head.state_dict().items():
        torch.testing.assert_close(weight, kept[name])


def test_the_masked_loss_reaches_encoder_and_masked_head(tiny_bert: Path) -> None:
    objective = build(tiny_bert, **MASKED).train()
    views = objective.draw(objective.views(TEXTS))
    objective.guess("first", views["first"]).sum().backward()
    moved = {key for key, weight in objective.named_parameters() if weight.grad is not None and weight.grad.any()}
    assert "encoder.backbone.encoder.layer.0.attention.self.query.weight" in moved
    assert "encoder.backbone.embeddings.word_embeddings.weight" in moved
    assert {f"masked_word_loss.head.{name}" for name in ("dense.weight", "norm.weight", "bias")} <= moved
    assert not any(key.startswith("head.") for key in moved)


def test_a_batch_in_which_nothing_is_masked_costs_the_contrast_alone(
    tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(ids: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        return ids, torch.zeros_like(ids, dtype=torch.bool)

    monkeypatch.setattr("cloze.training.methods.simcse.mask_tokens", nothing)
    objective = build(tiny_bert, **MASKED).train()
    outputs = objective(**objective.views(TEXTS))
    outputs["loss"].backward()
    assert outputs["guessing"].item() == 0
    assert outputs["loss"].item() == outputs["contrast"].item()
    assert all(weight.grad.isfinite().all() for weight in objective.parameters())


def test_a_share_of_the_words_is_masked_and_the_head_is_no_part_of_what_is_served(
    tiny_bert: Path, tmp_path: Path
) -> None:
    objective = build(tiny_bert, mlm_weight=["0.1"])
    ids = objective.views(TEXTS * 500)["first"]["input_ids"]
    torch.manual_seed(0)
    answers = objective.draw({"first": {"input_ids": ids, "attention_mask": ids}})["first"]["answers"]
    words = ~torch.isin(ids, torch.tensor(objective.encoder.tokenizer.all_special_ids))
    count = int(words.sum())
    share = int((answers >= 0).sum()) / count
    assert share == pytest.approx(0.15, abs=4 * math.sqrt(0.15 * 0.85 / count))
    assert not (answers[~words] >= 0).any()
    objective.save(tmp_path)
    again = SentenceEncoder.load(str(tmp_path))
    assert (
        again.state_dict().keys()
        == SentenceEncoder.load(str(tiny_bert), template="[X]", pooling="cls").state_dict().keys()
    )


def test_masked_words_need_a_mask_token(tiny_bert: Path) -> None:
    objective = build(tiny_bert)
    objective.encoder.tokenizer.mask_token = None
    recipe = objective.recipe.model_copy(update={"mlm_weight": 0.1})
    with pytest.raises(EncoderError, match="no mask token; write mlm_weight = 0"):
        SimCSE(objective.encoder, recipe)


def test_halves_of_a_batch_joined_cost_what_the_whole_costs(tiny_bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As two processes: `gather` joins what each half hands to it, the counts of masked words among them."""
    objective = build(tiny_bert, negative_weight=["1.0"], **MASKED, **THREE).eval()
    torch.manual_seed(5)
    views = objective.draw(objective.views(TRIPLES))
    results = {
        pass_: {name: run(name, view).detach() for name, view in views.items()}
        for pass_, run in objective.passes().items()
    }
    counts = (views["first"]["answers"] >= 0).sum(1)
    assert counts[:2].sum() != counts[2:].sum()

    def half(rows: slice, gather: Callable[..., tuple[Tensor, ...]]) -> Tensor:
        for module in ("cloze.training.methods.contrastive", "cloze.training.methods.gather"):
            monkeypatch.setattr(f"{module}.gather", gather)
        own = {name: {key: value[rows] for key, value in view.items()} for name, view in views.items()}
        shares = {pass_: {name: value[rows] for name, value in of.items()} for pass_, of in results.items()}
        return objective.loss(views=own, **shares)["loss"]

    sent: list[tuple[Tensor, ...]] = []
    half(slice(2, 4), lambda *rows: sent.append(rows) or rows)
    joined = half(slice(0, 2), lambda *rows: tuple(map(torch.cat, zip(rows, sent.pop(0), strict=True))))
    whole = half(slice(0, 4), lambda *rows: rows)
    torch.testing.assert_close(joined, whole)


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", [[], ["--negative-weight", "1.0", "--mlm-weight", "0.1"], ["--columns", "sent0", "sent1"]]
)
def test_supervised_simcse_trains_on_a_file_of_triplets(words: list[str], tiny_bert: Path, tmp_path: Path) -> None:
    corpus, run = tmp_path / "nli.csv", tmp_path / "run"
    lines = [",".join(f'"{text}"' for text in row) for row in TRIPLES * 3]
    corpus.write_text("\n".join(["sent0,sent1,hard_neg", *lines]) + "\n", encoding="utf-8")
    keys = ["--encoder", str(tiny_bert), "--corpus", str(corpus), "--batch-size", "4", "--max-steps", "2"]
    assert main(["simcse-supervised", *keys, *words, "--out", str(run)]) == 0
    trained = SentenceEncoder.load(str(run / "model"))
    parent = SentenceEncoder.load(str(tiny_bert), template="[X]", pooling="cls")
    assert not torch.allclose(torch.from_numpy(trained.embed(["Rain."])), torch.from_numpy(parent.embed(["Rain."])))
