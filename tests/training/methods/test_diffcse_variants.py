"""The variants of DiffCSE's Tables 3, 5 and 15: what is edited, what the discriminator does, contrast and projector."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from contrastive_methods import ROWS, add_masked_head, build, gradients
from recipes import arguments, load_recipe
from torch import Tensor

from cloze.encoding.errors import ClozeError
from cloze.training.data.corpus import read_corpus
from cloze.training.errors import EncoderError
from cloze.training.fit import main
from cloze.training.loop.gradient_cache import backward_in_chunks
from cloze.training.loop.prepare import prepare
from cloze.training.methods.diffcse import DiffCSE
from cloze.training.methods.edits import Edited
from cloze.training.methods.losses import corrected_words, edit_detection, info_nce
from cloze.training.model.views import View

PAIRS = [(text, ROWS[(place + 1) % len(ROWS)][0]) for place, (text,) in enumerate(ROWS)]

VARIANTS: dict[str, dict[str, object]] = {
    "without contrast": {"contrast": False},
    "next sentence": {"edited": "next"},
    "same and next sentence": {"edited": "both"},
    "conditional MLM": {"task": "mlm"},
    "conditional MLM, next": {"task": "mlm", "edited": "next"},
    "conditional MLM, both": {"task": "mlm", "edited": "both"},
    "corrective LM": {"task": "correction"},
    "without BatchNorm": {"projector": "tanh"},
    "SimCSE with BatchNorm": {"detection_weight": 0},
    "additional positives": {"task": "positive", "masked_share": 0.15},
    "additional negatives": {"task": "negative", "masked_share": 0.15},
    "additional negatives, delete": {"task": "negative", "masked_share": 0.15, "edits": "delete"},
}
"""The rows of Table 3, then those of Tables 5 and 15 that another recipe does not have."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> Path:
    """A tiny encoder with a masked-word head, which is its own generator."""
    return add_masked_head(tiny_bert, tmp_path_factory.mktemp("masked"))


@pytest.fixture
def make(folder: Path) -> Any:
    def objective(dropout: bool = True, **keys: object) -> DiffCSE:
        words = {key: value if isinstance(value, bool) else str(value).split() for key, value in keys.items()}
        made = build("diffcse", folder, dropout, generator=[str(folder)], **words)
        assert isinstance(made, DiffCSE)
        return made

    return objective


def rows_for(objective: DiffCSE) -> list[tuple[str, ...]]:
    return PAIRS if objective.recipe.next_sentences else ROWS


def shown(objective: DiffCSE, ids: Tensor) -> list[str]:
    return objective.encoder.tokenizer.batch_decode(ids, skip_special_tokens=True)


def conditioned(objective: DiffCSE, ids: Tensor, attention: Tensor, condition: Tensor) -> Tensor:
    """The last layer of one sentence alone, (L, d): the embeddings with the vector at [CLS], then layer by layer."""
    backbone = objective.discriminator.backbone
    embedded = backbone.embeddings(ids[: int(attention.sum())].unsqueeze(0))
    states = torch.cat([condition.view(1, 1, -1), embedded[:, 1:]], dim=1)
    for layer in backbone.encoder.layer:
        states = layer(states)
    return states[0]


def word_probabilities(objective: DiffCSE, hidden: Tensor) -> Tensor:
    """The softmax over the vocabulary of one hidden state (d)."""
    guesser = objective.discriminator
    shaped = guesser.head.norm(F.gelu(guesser.head.dense(hidden)))
    return (guesser.backbone.get_input_embeddings().weight @ shaped + guesser.head.bias).softmax(0)


# Words to guess


def test_corrected_words_of_known_scores() -> None:
    """Without knowledge a kept word has 1/2 + 1/2V, an edited one 1/2V; with certainty a kept word costs nothing."""
    scores, seen, answers = torch.zeros(2, 8), torch.tensor([3, 4]), torch.tensor([3, 5])
    kept, edited = -math.log(1 / 2 + 1 / 16), math.log(16)
    assert corrected_words(scores, torch.zeros(2), seen, answers).tolist() == pytest.approx([kept, edited])
    assert corrected_words(scores[:1], torch.tensor([99.0]), seen[:1], answers[:1]).item() == pytest.approx(0, abs=1e-6)
    assert corrected_words(scores[1:], torch.tensor([-99.0]), seen[1:], answers[1:]).item() == pytest.approx(
        math.log(8)
    )


@pytest.mark.parametrize("n", [1, 6])
def test_corrected_words_equals_a_loop_over_the_probabilities(n: int) -> None:
    torch.manual_seed(n)
    scores, copied = torch.randn(n, 5), torch.randn(n)
    seen, answers = torch.randint(5, (n,)), torch.randint(5, (n,))
    expected = []
    for i in range(n):
        copy = 1 / (1 + math.exp(-copied[i].item()))
        drawn = math.exp(scores[i, answers[i]].item()) / sum(math.exp(score) for score in scores[i].tolist())
        expected.append(-math.log(copy * (seen[i] == answers[i]).item() + (1 - copy) * drawn))
    assert corrected_words(scores, copied, seen, answers).tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("edited", ["same", "both"])
def test_conditional_mlm_is_the_mean_cross_entropy_of_the_masked_words(edited: str, make: Any) -> None:
    """One masked word after the other, each sentence alone."""
    objective = make(dropout=False, task="mlm", edited=edited, condition="cls")
    views = objective.draw(objective.views(rows_for(objective)))
    vectors = {name: torch.randn(len(ROWS), 32) for name in views}
    losses, right = [], []
    for name, view in views.items():
        for row, place in (view["labels"] >= 0).nonzero().tolist():
            ids, attention = view["edited_ids"][row], view["edited_mask"][row]
            hidden = conditioned(objective, ids, attention, vectors[name][row])[place]
            probabilities, answer = word_probabilities(objective, hidden), view["labels"][row, place]
            losses.append(-probabilities[answer].log())
            right.append((probabilities.argmax() == answer).float())
    outputs = objective.loss(vectors, views)
    torch.testing.assert_close(outputs["guessing"], torch.stack(losses).mean().detach())
    torch.testing.assert_close(outputs["accuracy"], torch.stack(right).mean())
    torch.testing.assert_close(outputs["loss"], outputs["contrast"] + 0.005 * outputs["guessing"])


def test_corrective_lm_restores_every_token_of_the_edited_sentence(make: Any) -> None:
    """One token after the other, [CLS] and padding left out, each sentence alone."""
    objective = make(dropout=False, task="correction", condition="cls", guessing="sampled", masked_share=0.5)
    views = objective.draw(objective.views(ROWS))
    vectors = {name: torch.randn(len(ROWS), 32) for name in views}
    losses, copied = [], []
    for name, view in views.items():
        for row in range(len(ROWS)):
            length = int(view["attention_mask"][row].sum())
            hidden = conditioned(objective, view["edited_ids"][row], view["edited_mask"][row], vectors[name][row])
            for place in range(1, length):
                word, seen = view["input_ids"][row, place], view["edited_ids"][row, place]
                copy = objective.discriminator.copy(hidden[place]).sigmoid().squeeze()
                drawn = (1 - copy) * word_probabilities(objective, hidden[place])[word]
                losses.append(-((copy if seen == word else 0) + drawn).log())
                copied += [(copy > 0.5).float()] if seen == word else []
    outputs = objective.loss(vectors, views)
    torch.testing.assert_close(outputs["correction"], torch.stack(losses).mean().detach())
    torch.testing.assert_close(outputs["copied_kept"], torch.stack(copied).mean())


def test_masked_words_are_a_share_of_the_text_and_no_special_token(make: Any) -> None:
    objective = make(task="mlm", masked_share=0.3)
    assert objective.editor.generator is None
    counts = torch.zeros(2)
    for _ in range(100):
        for view in objective.draw(objective.views(ROWS)).values():
            chosen, ids = view["labels"] >= 0, view["input_ids"]
            special = torch.isin(ids, torch.tensor(objective.encoder.tokenizer.all_special_ids))
            assert not (chosen & special).any()
            assert torch.equal(view["labels"][chosen], ids[chosen])
            assert torch.equal(view["edited_ids"][~chosen], ids[~chosen])
            counts += torch.tensor([chosen.sum(), (~special).sum()])
    share, total = (counts[0] / counts[1]).item(), counts[1].item()
    assert abs(share - 0.3) < 4 * math.sqrt(0.3 * 0.7 / total)


@pytest.mark.parametrize("task", ["mlm", "correction"])
def test_guessers_begin_with_the_encoders_masked_word_head(task: str, make: Any, folder: Path, tiny_bert: Path) -> None:
    from cloze.training.model.masked_words import MaskedHead

    head = make(task=task).discriminator.head.state_dict()
    assert all(torch.equal(head[key], weight) for key, weight in MaskedHead.load(str(folder)).state_dict().items())
    with pytest.raises(EncoderError, match="has no masked-word head"):
        build("diffcse", tiny_bert, generator=[str(folder)], task=[task])


def test_a_few_steps_restore_the_words(make: Any) -> None:
    objective = make(task="correction", detection_weight=1)
    optimizer = torch.optim.AdamW(objective.parameters(), lr=3e-3)
    losses = []
    for _ in range(40):
        outputs = objective(**objective.views(ROWS))
        optimizer.zero_grad()
        outputs["loss"].backward()
        optimizer.step()
        losses.append(outputs["correction"].item())
    assert sum(losses[-10:]) < 0.6 * sum(losses[:10])


# The sentence that is edited


@pytest.mark.parametrize("task", ["detection", "mlm", "correction"])
@pytest.mark.parametrize(("edited", "columns"), [("same", (0, 0)), ("next", (1, 1)), ("both", (0, 1))])
def test_a_view_has_the_edit_of_the_same_or_the_next_sentence(
    task: str, edited: str, columns: tuple[int, int], make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective = make(task=task, edited=edited)
    given: list[list[str]] = []

    def noted(*words: Any, **_: Any) -> Edited:
        texts = shown(objective, words[-2])
        given.extend(texts[first : first + len(rows)] for first in range(0, len(texts), len(rows)))
        return Edited(words[-2], words[-1], words[-1])

    for kind in ("edit", "mask", "correct"):
        monkeypatch.setattr(objective.editor, kind, noted)
    rows = rows_for(objective)
    views = objective.draw(objective.views(rows))
    expected = [[row[column].lower() for row in rows] for column in columns]
    assert given == expected
    for view, texts in zip(views.values(), expected, strict=True):
        assert shown(objective, view["edited_ids"]) == texts
        assert shown(objective, view["input_ids"]) == [row[0].lower() for row in rows]  # what is encoded


def test_edits_of_the_next_sentence_are_found_by_the_vector_of_the_first(make: Any) -> None:
    objective = make(dropout=False, edited="next", condition="cls")
    views = objective.draw(objective.views(PAIRS))
    vectors = {name: torch.randn(len(PAIRS), 32) for name in views}
    scores, labels = [], []
    for name, view in views.items():
        changed = (view["edited_ids"] != view["next_ids"]).long()
        assert torch.equal(view["labels"], changed)
        assert changed.any()
        scores.append(objective.discriminator(view["edited_ids"], view["next_mask"], vectors[name]).flatten(0, 1))
        labels.append(changed.flatten())
    expected = edit_detection(torch.cat(scores), torch.cat(labels))
    torch.testing.assert_close(objective.loss(vectors, views)["detection"], expected.detach())


def test_next_sentences_are_consecutive_lines_of_one_file(tmp_path: Path) -> None:
    """An empty or long line, or the end of a file, comes between; every pair is counted or its first row is."""
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text("a\nb\nc\n\nd\ne e e\nf\ng\n", encoding="utf-8")
    second.write_text("h\ni\n", encoding="utf-8")
    paths = [str(first), str(second)]
    corpus = read_corpus(paths, max_words=2, next_sentences=True)
    assert list(corpus.rows) == [("a", "b"), ("b", "c"), ("f", "g"), ("h", "i")]
    assert [source.sentences for source in corpus.sources] == [3, 1]
    assert (corpus.empty, corpus.outside, corpus.last) == (1, 1, 4)
    assert str(corpus) == "4 rows from 2 files; left out: 1 empty, 1 by length, 4 without a next sentence"
    sampled = read_corpus(paths, max_words=2, sample=2, next_sentences=True)
    assert len(sampled) == 2
    assert set(sampled.rows) < set(corpus.rows)


def test_next_rows_of_a_table_are_read_too(tmp_path: Path) -> None:
    table = tmp_path / "a.csv"
    table.write_text("text,other\none,x\ntwo,y\nthree,z\n", encoding="utf-8")
    corpus = read_corpus([str(table)], ["text"], next_sentences=True)
    assert list(corpus.rows) == [("one", "two"), ("two", "three")]


@pytest.mark.parametrize(("edited", "width"), [("same", 1), ("next", 2), ("both", 2)])
def test_a_run_reads_next_sentences_where_the_recipe_edits_them(
    edited: str, width: int, folder: Path, tmp_path: Path
) -> None:
    text = tmp_path / "a.txt"
    text.write_text("".join(f"{row[0]}\n" for row in ROWS), encoding="utf-8")
    keys = {"encoder": folder, "generator": folder, "corpus": text, "batch_size": 2, "edited": edited}
    recipe = load_recipe("diffcse", {key: [str(value)] for key, value in keys.items()})
    corpus, _, _ = prepare(recipe)
    texts = [row[0] for row in ROWS]
    assert list(corpus.rows) == [tuple(texts[place : place + width]) for place in range(len(texts) - width + 1)]


# Contrast and projector


@pytest.mark.parametrize("condition", ["projected", "cls"])
def test_without_contrast_the_task_is_all(condition: str, make: Any) -> None:
    objective = make(contrast=False, condition=condition, detection_weight=0.5)
    outputs = objective(**objective.views(ROWS))
    assert outputs.keys() == {"loss", "detection", "accuracy_edited", "accuracy_kept"}
    torch.testing.assert_close(outputs["loss"], 0.5 * outputs["detection"])
    outputs["loss"].backward()
    assert objective.encoder.backbone.encoder.layer[-1].output.dense.weight.grad.abs().sum() > 0
    assert not [key for key, weight in objective.named_parameters() if weight.grad is None]


def test_without_batch_norm_the_projector_is_simcses_head(make: Any) -> None:
    objective = make(projector="tanh")
    assert not [part for part in objective.modules() if isinstance(part, torch.nn.BatchNorm1d)]
    views, raw = objective.draw(objective.views(ROWS)), torch.randn(2, len(ROWS), 32)
    seen: list[Tensor] = []
    objective.discriminator.register_forward_hook(lambda _module, given, _output: seen.append(given[2]))
    contrast = objective.loss({"first": raw[0], "second": raw[1]}, views)["contrast"]
    dense = objective.projector[0]
    h = (raw @ dense.weight.T + dense.bias).tanh()
    torch.testing.assert_close(contrast, info_nce(h[0], h[1], 0.5).detach())
    torch.testing.assert_close(torch.cat(seen), h.flatten(0, 1))


@pytest.mark.parametrize("task", ["detection", "mlm"])
def test_without_batch_norm_chunks_have_the_gradients_of_one_pass(task: str, make: Any) -> None:
    objective = make(projector="tanh", task=task, detection_weight=1, mini_batch_size=2, dropout=False)
    views = objective.draw(objective.views(ROWS))
    objective.draw = lambda given: given
    objective(**views)["loss"].backward()
    expected = gradients(objective)
    backward_in_chunks(objective, views, 2)
    torch.testing.assert_close(gradients(objective), expected, atol=1e-5, rtol=1e-5)


def test_without_discriminator_and_batch_norm_it_is_simcse(make: Any, folder: Path) -> None:
    losses = []
    for objective in (make(detection_weight=0, projector="tanh"), build("simcse", folder)):
        torch.manual_seed(3)
        losses.append(objective(**objective.views(ROWS))["loss"])
    torch.testing.assert_close(*losses)


def test_without_a_weight_there_is_no_discriminator_and_no_generator(folder: Path) -> None:
    objective = build("diffcse", folder, detection_weight=["0"], generator=["nowhere/at/all"])
    assert {key.split(".")[0] for key in objective.state_dict()} == {"encoder", "projector"}
    assert objective(**objective.views(ROWS)).keys() == {"loss", "contrast"}


# The whole


@pytest.mark.parametrize("name", VARIANTS)
def test_every_part_of_a_variant_is_trained(name: str, make: Any) -> None:
    """As DistributedDataParallel needs: a weight without gradient would make it wait."""
    objective = make(**VARIANTS[name])
    outputs = objective(**objective.views(rows_for(objective)))
    outputs["loss"].backward()
    assert outputs["loss"].isfinite()
    assert all(not value.requires_grad for key, value in outputs.items() if key != "loss")
    assert not [key for key, weight in objective.named_parameters() if weight.grad is None]


@pytest.mark.parametrize(
    "name", ["same and next sentence", "conditional MLM, next", "corrective LM", "additional negatives, delete"]
)
def test_a_variant_trains_as_a_user_runs_it(name: str, folder: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("".join(f"{row[0]}\n" for row in ROWS * 3), encoding="utf-8")
    keys = {"encoder": folder, "corpus": corpus, "out": tmp_path / "run", "batch_size": 4, "max_steps": 2}
    words = arguments(keys | {"generator": folder} | VARIANTS[name])
    assert main(["diffcse", *words]) == 0
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"contrast": False, "detection_weight": 0}, "detection_weight is 0, .* write contrast = true"),
        ({"task": "mlm", "detection_weight": 0}, "detection_weight is 0, which leaves only the contrastive loss"),
        ({"edited": "next", "detection_weight": 0}, "detection_weight is 0, .* edited = 'same'"),
        ({"task": "correction", "edits": "replace delete"}, "task is 'correction', but edits names replace, delete"),
        ({"task": "mlm", "edits": "insert"}, "task is 'mlm', but edits names insert; only replaced words"),
        ({"contrast": False, "dimensions": "8 32"}, "contrast is false; remove dimensions"),
        ({"mini_batch_size": 2}, "mini_batch_size is 2, .* or write projector = 'tanh'"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(keys: dict[str, object], message: str, make: Any) -> None:
    with pytest.raises(ClozeError, match=message):
        make(**keys)


def test_a_tokenizer_without_mask_token_cannot_guess(make: Any, folder: Path) -> None:
    objective = make()
    objective.encoder.tokenizer.mask_token = None
    recipe = objective.recipe.model_copy(update={"task": "mlm"})
    with pytest.raises(EncoderError, match="its tokenizer has no mask token; write task = 'detection'"):
        DiffCSE(objective.encoder, recipe)


def test_views_of_next_sentences_are_encoded_in_parts_of_their_own_length(make: Any) -> None:
    """The next sentence is longer than the first: trimming the first to its length must not cut it."""
    from cloze.training.model.views import encode_trimmed

    objective = make(dropout=False, edited="next")
    rows = [("Rain.", "She wrote a letter to the city and a dog ran over the field."), PAIRS[0]]
    views: dict[str, View] = objective.draw(objective.views(rows))
    view = views["first"]
    assert view["next_ids"].shape[1] > view["input_ids"].shape[1]
    vectors = encode_trimmed(partial(objective.encode, "first"), view, 1)
    torch.testing.assert_close(vectors, objective.encoder(view["input_ids"], view["attention_mask"]))


# Edited sentences as further positives or negatives


@pytest.mark.parametrize("task", ["positive", "negative"])
def test_edited_sentences_are_positives_or_negatives_of_their_own(make: Any, task: str) -> None:
    """The loss of each row by a loop over the cosines, with the same edits."""
    objective = make(dropout=False, task=task, projector="tanh", edits="delete", masked_share=0.4)
    assert objective.discriminator is None
    torch.manual_seed(3)
    views = objective.draw(objective.views(ROWS))
    assert not torch.equal(views["edited"]["attention_mask"].sum(1), views["first"]["attention_mask"].sum(1))
    first, second, edited = (
        F.normalize(objective.projector(objective.encoder.vectors(views[name], objective.text_encoder)), dim=-1)
        for name in ("first", "second", "edited")
    )
    losses = []
    for row in range(len(ROWS)):
        to_second, to_edited = (
            (first[row] @ other.T / objective.recipe.temperature).exp() for other in (second, edited)
        )
        if task == "negative":
            losses.append(-torch.log(to_second[row] / (to_second.sum() + to_edited.sum())))
        else:
            both = [-torch.log(each[row] / each.sum()) for each in (to_second, to_edited)]
            losses.append(sum(both) / 2)
    torch.manual_seed(3)
    found = objective(**objective.views(ROWS))
    assert set(found) == {"loss", "contrast"}
    torch.testing.assert_close(found["loss"], torch.stack(losses).mean(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("keys", [{"contrast": False}, {"edited": "next"}])
def test_compared_edits_need_the_contrast_and_the_same_sentence(make: Any, keys: dict[str, object]) -> None:
    with pytest.raises(ClozeError, match="task is 'positive', which compares the edited sentence with its own"):
        make(task="positive", **keys)
