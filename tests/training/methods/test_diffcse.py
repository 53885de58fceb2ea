import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recipes import arguments, load_recipe
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForMaskedLM, AutoTokenizer

from cloze.training.errors import EncoderError, RecipeError
from cloze.training.fit import main
from cloze.training.methods import contrastive, diffcse
from cloze.training.methods.diffcse import DiffCSE
from cloze.training.methods.edits import Edited
from cloze.training.methods.losses import edit_detection, info_nce
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.views import View

ROWS = [("Two dogs run.",), ("A man is playing the guitar.",), ("Rain.",), ("She wrote a letter to the city.",)]


@pytest.fixture(scope="session")
def tiny_masked(tiny_bert: Path, tiny_roberta: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random masked language models with the tiny encoders' tokenizers, smaller than these: generators."""
    folders = {"bert": tiny_bert, "roberta": tiny_roberta}
    made = {}
    for family, folder in folders.items():
        made[family] = tmp_path_factory.mktemp(f"masked-{family}")
        torch.manual_seed(1)
        config = AutoConfig.from_pretrained(folder, num_hidden_layers=1)
        AutoModelForMaskedLM.from_config(config).save_pretrained(made[family])
        AutoTokenizer.from_pretrained(folder).save_pretrained(made[family])
    return made


@pytest.fixture
def build(tiny_bert: Path, tiny_roberta: Path, tiny_masked: dict[str, Path]) -> Any:
    """A maker of objectives: family and recipe by name, keys of the recipe as words."""

    def make(family: str = "bert", name: str = "diffcse", **words: str) -> DiffCSE:
        folder = {"bert": tiny_bert, "roberta": tiny_roberta}[family]
        keys = {"encoder": str(folder), "corpus": "unused.txt", "generator": str(tiny_masked[family])} | words
        recipe = load_recipe(name, {key: value.split() for key, value in keys.items()})
        torch.manual_seed(0)
        encoder = SentenceEncoder.load(recipe.encoder, template=recipe.template, pooling=recipe.pooling)
        return DiffCSE(encoder, recipe)

    return make


def spy(module: torch.nn.Module) -> list[tuple[tuple[Tensor, ...], Tensor]]:
    """What the module is given and gives, call by call."""
    calls: list[tuple[tuple[Tensor, ...], Tensor]] = []
    module.register_forward_hook(lambda _module, given, output: calls.append((given, output)))
    return calls


def encoded(objective: DiffCSE) -> list[Tensor]:
    """The vectors of each pass of the encoder, as they come."""
    vectors: list[Tensor] = []
    encode = objective.encode

    def recorded(name: str, view: View) -> Tensor:
        vectors.append(encode(name, view))
        return vectors[-1]

    objective.encode = recorded  # type: ignore[method-assign]
    return vectors


# The loss


def test_edit_detection_of_known_scores() -> None:
    """A kept, an edited and a padded position: log(1 + e^-2) twice and log 2; padding counts."""
    scores, labels = torch.tensor([[[2.0, 0.0], [0.0, 2.0], [0.0, 0.0]]]), torch.tensor([[0, 1, 0]])
    assert edit_detection(scores, labels).item() == pytest.approx(0.3156677, abs=1e-6)
    assert edit_detection(scores[:, :2], labels[:, :2]).item() == pytest.approx(0.1269280, abs=1e-6)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("length", [1, 7])
def test_edit_detection_equals_a_loop_over_the_equation(n: int, length: int) -> None:
    torch.manual_seed(n * length)
    scores = torch.randn(n, length, 2)
    labels = torch.randint(2, (n, length))
    total = 0.0
    for i in range(n):
        for t in range(length):
            kept = 1 / (1 + math.exp(scores[i, t, 1].item() - scores[i, t, 0].item()))  # D(x'', h, t)
            total -= math.log(1 - kept) if labels[i, t] else math.log(kept)
    assert edit_detection(scores, labels).item() == pytest.approx(total / (n * length), abs=1e-6)


def test_a_discriminator_that_knows_nothing_costs_log_2(build: Any) -> None:
    objective = build().train()
    torch.nn.init.zeros_(objective.discriminator.head.weight)
    torch.nn.init.zeros_(objective.discriminator.head.bias)
    assert objective(**objective.views(ROWS))["detection"].item() == pytest.approx(math.log(2), abs=1e-6)


def test_loss_is_contrast_plus_weighted_detection(build: Any) -> None:
    objective = build(detection_weight="0.05").train()
    parts = {name: value.item() for name, value in objective(**objective.views(ROWS)).items() if name != "loss"}
    torch.manual_seed(3)
    outputs = objective(**objective.views(ROWS))
    assert outputs["loss"].item() == pytest.approx(outputs["contrast"].item() + 0.05 * outputs["detection"].item())
    assert parts.keys() == {"contrast", "detection", "accuracy_edited", "accuracy_kept"}


@pytest.mark.parametrize(("edited", "kept"), [(1.0, 1.0), (1.0, 0.0), (0.0, 1.0)])
def test_accuracies_are_of_the_tokens_that_are_there(
    edited: float, kept: float, build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A discriminator that knows the answers, or says edited always, or kept always; of padding it says edited."""
    objective = build().train()
    views = objective.draw(objective.views(ROWS))
    labels = torch.cat([view["labels"] for view in views.values()])  # in one pass

    def say(ids: Tensor, attention: Tensor, _condition: Tensor) -> Tensor:
        said = torch.where(labels.bool(), torch.tensor(int(edited)), torch.tensor(1 - int(kept)))
        return F.one_hot(said.where(attention.bool(), 1), 2).float()

    monkeypatch.setattr(objective.discriminator, "forward", say)
    outputs = objective.loss({name: torch.randn(4, 32) for name in views}, views)
    assert (outputs["accuracy_edited"].item(), outputs["accuracy_kept"].item()) == pytest.approx((edited, kept))


def test_without_detection_it_is_simcse_with_batch_norm(build: Any) -> None:
    """Appendix A's projector written out, over the rows of both views, under equation 1."""
    objective = build(detection_weight="0").train()
    vectors = encoded(objective)
    loss = objective(**objective.views(ROWS))["loss"]
    raw = torch.cat(vectors)  # (2 n, d)
    first, second = (layer.weight for layer in objective.projector if isinstance(layer, torch.nn.Linear))

    def normalise(rows: Tensor) -> Tensor:
        return (rows - rows.mean(0)) / (rows.var(0, correction=0) + 1e-5).sqrt()

    h = normalise(normalise(raw @ first.T).relu() @ second.T)
    torch.testing.assert_close(loss, info_nce(h[:4], h[4:], 0.05), atol=1e-4, rtol=1e-4)


def test_projected_columns_have_mean_0_and_variance_1_over_both_views(build: Any) -> None:
    objective = build().train()
    calls = spy(objective.projector)
    objective(**objective.views(ROWS))
    assert calls
    for _, rows in calls:
        assert rows.shape == (8, 32)
        torch.testing.assert_close(rows.mean(0), torch.zeros(32), atol=1e-5, rtol=0)
        torch.testing.assert_close(rows.var(0, correction=0), torch.ones(32), atol=1e-2, rtol=0)


def test_matryoshka_cuts_the_raw_vectors_and_leaves_the_condition_whole(build: Any) -> None:
    objective = build(dimensions="8 32").train()
    vectors, projections, seen = encoded(objective), spy(objective.projector), spy(objective.discriminator)
    contrast = objective(**objective.views(ROWS))["contrast"]
    raw = torch.cat(vectors)
    assert not projections[0][0][0][:, 8:].any()
    assert torch.equal(projections[1][0][0], raw)
    losses = [info_nce(*rows.chunk(2), 0.05) for _, rows in projections[:2]]
    torch.testing.assert_close(contrast, torch.stack(losses).mean().detach())
    torch.testing.assert_close(torch.cat([given[2] for given, _ in seen]), objective.projector(raw))


def test_batch_norm_has_the_rows_of_all_processes_and_each_detects_its_own(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Process 1 of 2: process 0's vectors come first in the gather and are nothing the discriminator sees."""
    objective = build().train()
    torch.manual_seed(0)
    raw = torch.randn(2, 8, 32)  # both views of both processes
    views = objective.draw(objective.views(ROWS))
    others = raw[:, :4]
    monkeypatch.setattr(contrastive, "gather", lambda *rows: tuple(map(torch.cat, zip(others, rows, strict=True))))
    monkeypatch.setattr(diffcse, "own", lambda rows: rows[4:])
    projections, seen = spy(objective.projector), spy(objective.discriminator)
    contrast = objective.loss({"first": raw[0, 4:], "second": raw[1, 4:]}, views)["contrast"]
    h = objective.projector(raw.flatten(0, 1))
    torch.testing.assert_close(projections[0][1], h)
    torch.testing.assert_close(contrast, info_nce(h[:8], h[8:], 0.05).detach())
    [(given, _)] = seen
    torch.testing.assert_close(given[2], torch.cat([h[4:8], h[12:]]))


# The discriminator


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_the_condition_stands_in_place_of_the_embedded_cls(family: str, build: Any) -> None:
    """Given what the embeddings hold there it is the plain backbone; what id stands there is never seen."""
    objective = build(family).eval()
    discriminator = objective.discriminator
    texts = objective.views(ROWS)["first"]
    ids, attention = texts["input_ids"], texts["attention_mask"]
    embedded = discriminator.backbone.embeddings(input_ids=ids)[:, 0]
    plain = discriminator.head(discriminator.backbone(ids, attention_mask=attention).last_hidden_state)
    torch.testing.assert_close(discriminator(ids, attention, embedded), plain)
    changed = ids.clone()
    changed[:, 0] = 20
    torch.testing.assert_close(discriminator(changed, attention, embedded), plain)
    changed[:, 1] = 20
    assert not torch.allclose(discriminator(changed, attention, embedded), plain)
    assert not torch.allclose(discriminator(ids, attention, embedded.roll(1, dims=1)), plain)
    torch.testing.assert_close(discriminator.backbone.embeddings(input_ids=ids)[:, 0], embedded)  # no hook stays


@pytest.mark.parametrize("condition", ["projected", "cls"])
def test_each_views_edit_is_seen_with_that_views_vector(condition: str, build: Any) -> None:
    objective = build(condition=condition).train()
    views = objective.draw(objective.views(ROWS))
    vectors = {name: torch.randn(4, 32) for name in views}
    projections, seen = spy(objective.projector), spy(objective.discriminator)
    objective.loss(vectors, views)
    expected = projections[-1][1] if condition == "projected" else torch.cat(list(vectors.values()))
    [(given, _)] = seen  # in one pass: both have the same length
    assert torch.equal(given[0], torch.cat([view["edited_ids"] for view in views.values()]))
    assert torch.equal(given[1], torch.cat([view["edited_mask"] for view in views.values()]))
    assert torch.equal(given[2], expected)


def test_edits_of_different_lengths_are_a_pass_each_and_of_one_length_one(build: Any) -> None:
    discriminator = build().eval().discriminator
    ids, conditions = torch.randint(5, 90, (4, 9)), torch.randn(2, 4, 32)
    views = [{"edited_ids": ids[:, :width], "edited_mask": torch.ones(4, width).long()} for width in (9, 9, 7)]
    seen = spy(discriminator)
    first, second = discriminator.outputs(views[:2], list(conditions))
    assert len(seen) == 1
    for view, condition, scores in zip(views, conditions, (first, second), strict=False):
        torch.testing.assert_close(scores, discriminator(view["edited_ids"], view["edited_mask"], condition))
    longer, shorter = discriminator.outputs(views[1:], list(conditions))
    assert (longer.shape, shorter.shape) == ((4, 9, 2), (4, 7, 2))


def test_encoder_and_discriminator_begin_equal_and_share_nothing(build: Any) -> None:
    objective = build()
    encoder = dict(objective.encoder.backbone.named_parameters())
    discriminator = dict(objective.discriminator.backbone.named_parameters())
    assert encoder.keys() == discriminator.keys()
    assert all(torch.equal(encoder[name], discriminator[name]) for name in encoder)
    assert not {weight.data_ptr() for weight in encoder.values()} & {
        weight.data_ptr() for weight in discriminator.values()
    }


@pytest.mark.parametrize("condition", ["projected", "cls"])
def test_detection_alone_teaches_the_encoder_and_never_the_generator(
    condition: str, build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective = build(condition=condition, detection_weight="1").train()
    monkeypatch.setattr(objective, "_contrast", lambda first, second: torch.zeros(()))
    objective(**objective.views(ROWS))["loss"].backward()
    last = objective.encoder.backbone.encoder.layer[-1].output.dense.weight
    assert last.grad.abs().sum() > 0
    assert objective.discriminator.head.weight.grad.abs().sum() > 0
    reached = [layer.weight.grad is not None for layer in objective.projector if isinstance(layer, torch.nn.Linear)]
    assert reached == [condition == "projected"] * 2
    assert all(weight.grad is None for weight in objective.editor.generator.parameters())


# The whole


@pytest.mark.parametrize("family", ["bert", "roberta"])
@pytest.mark.parametrize("name", ["diffcse", "diffcse-insert", "diffcse-delete", "diffcse-combined"])
def test_every_part_but_the_generator_is_trained(family: str, name: str, build: Any) -> None:
    objective = build(family, name).train()
    outputs = objective(**objective.views([*ROWS, ("",)]))
    outputs["loss"].backward()
    assert outputs["loss"].isfinite()
    assert all(not value.requires_grad for key, value in outputs.items() if key != "loss")
    assert not [key for key, weight in objective.named_parameters() if weight.grad is None]


def test_a_few_steps_find_the_edits(build: Any) -> None:
    objective = build(detection_weight="1").train()
    optimizer = torch.optim.AdamW(objective.parameters(), lr=3e-3)
    accuracies, losses = [], []
    for _ in range(40):
        outputs = objective(**objective.views(ROWS))
        optimizer.zero_grad()
        outputs["loss"].backward()
        optimizer.step()
        losses.append(outputs["detection"].item())
        accuracies.append((outputs["accuracy_edited"] + outputs["accuracy_kept"]).item() / 2)
    assert sum(losses[-10:]) < 0.6 * sum(losses[:10])
    assert sum(accuracies[-10:]) / 10 > 0.75  # a discriminator that always says the same has 0.5


def test_a_views_edit_is_drawn_from_the_recipes(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    objective = build(edits="insert delete")
    edit, kinds = objective.editor.edit, []

    def noted(kind: str, ids: Tensor, attention: Tensor) -> Edited:
        kinds.extend([kind] * (len(ids) // len(ROWS)))  # both views at once, where they drew the same
        return edit(kind, ids, attention)

    monkeypatch.setattr(objective.editor, "edit", noted)
    torch.manual_seed(0)
    for _ in range(20):
        objective.draw(objective.views(ROWS))
    steps = set(zip(kinds[::2], kinds[1::2], strict=True))  # each view draws its own
    assert steps == {("insert", "insert"), ("insert", "delete"), ("delete", "insert"), ("delete", "delete")}


def test_what_a_run_leaves_to_serve_is_the_encoder_alone(
    tiny_bert: Path, tiny_masked: dict[str, Path], tmp_path: Path
) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("".join(f"{text}\n" for (text,) in ROWS * 3))
    keys = {"encoder": tiny_bert, "generator": tiny_masked["bert"], "corpus": corpus, "out": tmp_path / "run"}
    words = arguments(keys)
    assert main(["diffcse", *words, "--batch-size", "4", "--max-steps", "2"]) == 0
    with safe_open(tmp_path / "run" / "model" / "model.safetensors", "pt") as file:
        saved = set(file.keys())
    served = SentenceEncoder.load(str(tmp_path / "run" / "model"))
    assert saved == set(served.backbone.state_dict())
    assert (served.config.template, served.config.pooling) == ("[X]", "cls")
    untrained = SentenceEncoder.load(str(tiny_bert), template="[X]", pooling="cls")
    assert (served.embed(["Rain."]) != untrained.embed(["Rain."])).any()


def test_the_generator_is_in_no_checkpoint(build: Any) -> None:
    parts = {key.split(".")[0] for key in build().state_dict()}
    assert parts == {"encoder", "projector", "discriminator"}


def test_the_encoders_own_masked_word_head_edits_where_no_generator_is_named(
    tiny_bert: Path, tiny_masked: dict[str, Path]
) -> None:
    recipe = load_recipe("diffcse-delete", {"encoder": [str(tiny_masked["bert"])], "corpus": ["unused.txt"]})
    encoder = SentenceEncoder.load(recipe.encoder, template="[X]", pooling="cls")
    assert DiffCSE(encoder, recipe).editor.generator is None
    own = DiffCSE(encoder, recipe.model_copy(update={"edits": ("replace",)})).editor.generator
    words = own.get_input_embeddings().weight
    assert torch.equal(words, encoder.backbone.get_input_embeddings().weight)
    bare = SentenceEncoder.load(str(tiny_bert), template="[X]", pooling="cls")
    with pytest.raises(EncoderError, match="has no masked-word head"):
        DiffCSE(bare, recipe.model_copy(update={"edits": ("insert",), "encoder": str(tiny_bert)}))


def test_a_generator_of_another_vocabulary_is_refused(build: Any, tiny_masked: dict[str, Path]) -> None:
    with pytest.raises(EncoderError, match="does not have the encoder's vocabulary"):
        build(generator=str(tiny_masked["roberta"]))


def test_inserted_words_need_positions(build: Any) -> None:
    assert build(max_tokens="64")
    with pytest.raises(
        RecipeError, match="max_tokens is 64, or 84 after words are inserted; the encoder has positions"
    ):
        build(max_tokens="64", edits="replace insert")
