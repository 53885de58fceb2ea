"""SG and SG-OPT on tiny encoders: who is frozen, what guides whom, and that it trains."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from contrastive_methods import leaves
from recipes import arguments, load_recipe

from cloze.encoding.errors import ClozeError
from cloze.training.data.corpus import Corpus
from cloze.training.errors import CorpusError
from cloze.training.fit import main
from cloze.training.loop.prepare import prepare
from cloze.training.loop.trainer import ObjectiveTrainer, training_arguments
from cloze.training.methods import objective_of
from cloze.training.methods.losses import SELF_GUIDED
from cloze.training.methods.sg import SG
from cloze.training.model.encoder import SentenceEncoder

ROWS = [("Two dogs run.",), ("A man is playing the guitar on a stage.",), ("Rain.",), ("She wrote a letter.",)]
PAIRS = [("Two dogs run.", "A dog runs."), ("The city.", "A town of the field."), ("Rain.", "Little rain grows.")]
RECIPES = {"sg": ROWS, "sg-opt": ROWS, "sg-bt": PAIRS, "sg-opt-bt": PAIRS}
SMALL = {"corpus": ["unused.txt"], "head_width": ["48"], "max_tokens": ["32"]}


def build(name: str, folder: Path, **words: list[str]) -> SG:
    recipe = load_recipe(name, {"encoder": [str(folder)]} | SMALL | words)
    torch.manual_seed(0)
    encoder = SentenceEncoder.load(recipe.encoder, template=recipe.template, pooling=recipe.pooling)
    return objective_of(recipe.method)(encoder, recipe)


@pytest.fixture(params=["bert", "roberta"])
def folder(request: pytest.FixtureRequest, tiny_bert: Path, tiny_roberta: Path) -> Path:
    return tiny_bert if request.param == "bert" else tiny_roberta


@pytest.mark.parametrize("name", RECIPES)
def test_all_but_the_embeddings_and_the_copy_are_trained(name: str, folder: Path) -> None:
    objective = build(name, folder).train()
    outputs = objective(**objective.views(RECIPES[name]))
    assert leaves(outputs["loss"]) <= set(map(id, objective.parameters()))
    outputs["loss"].backward()
    idle = {key for key, weight in objective.named_parameters() if weight.grad is None}
    embeddings = dict(objective.encoder.backbone.embeddings.named_parameters(prefix="encoder.backbone.embeddings"))
    assert idle == set(embeddings)
    assert all(weight.grad.any() for weight in objective.head.parameters())
    assert outputs["drift"].item() == 0
    assert all(not value.requires_grad for key, value in outputs.items() if key != "loss")


def test_a_step_moves_the_encoder_away_from_its_copy(tiny_bert: Path) -> None:
    objective = build("sg-opt", tiny_bert).train()
    before = {key: value.clone() for key, value in objective.encoder.backbone.state_dict().items()}
    frozen = objective.views(ROWS)["frozen"]
    guides = objective.encode("frozen", frozen)
    optimiser = torch.optim.SGD([weight for weight in objective.parameters() if weight.requires_grad], lr=0.01)
    objective(**objective.views(ROWS))["loss"].backward()
    optimiser.step()
    tuned = objective.encoder.backbone.state_dict()
    assert torch.equal(objective.encode("frozen", frozen), guides)
    assert all(torch.equal(tuned[key], value) for key, value in before.items() if key.startswith("embeddings."))
    outputs = objective(**objective.views(ROWS))
    expected = sum((tuned[key] - value).square().sum().item() for key, value in before.items())
    assert outputs["drift"].item() == pytest.approx(expected, rel=1e-4)
    assert expected > 0
    torch.testing.assert_close(outputs["loss"], outputs["contrast"] + 0.1 * outputs["drift"])


def test_the_copy_is_in_no_checkpoint_and_stays_the_parent_when_one_is_loaded(tiny_bert: Path) -> None:
    objective = build("sg-opt", tiny_bert)
    trained = {key for key, weight in objective.named_parameters() if weight.requires_grad}
    weights = {key: value + (key in trained) for key, value in objective.state_dict().items()}
    assert set(weights) == {f"encoder.{key}" for key in objective.encoder.state_dict()} | {
        f"head.{key}" for key in objective.head.state_dict()
    }
    frozen = objective.views(ROWS)["frozen"]
    guides = objective.encode("frozen", frozen)
    objective.load_state_dict(weights)
    assert torch.equal(objective.encode("frozen", frozen), guides)


@pytest.mark.parametrize("name", ["sg-opt", "sg-bt"])
def test_the_copy_holds_no_second_copy_of_the_embeddings(name: str, folder: Path) -> None:
    objective = build(name, folder)
    objective.encoder.backbone.encoder.layer[0].requires_grad_(False)  # as frozen_layers does, later
    (frozen,) = objective._frozen
    tuned = dict(objective.encoder.backbone.named_parameters())
    shared = {key for key, weight in frozen.named_parameters() if weight is tuned[key]}
    assert shared == {key for key in tuned if key.startswith("embeddings.")}
    compared = objective._trained(frozen)
    assert [id(weight) for weight, _ in compared] == [id(weight) for weight in tuned.values() if weight.requires_grad]
    assert all(torch.equal(weight, before) and not before.requires_grad for weight, before in compared)


@pytest.mark.parametrize("pooling", ["max", "mean"])
def test_guides_are_every_layer_pooled_over_each_texts_own_tokens(pooling: str, folder: Path) -> None:
    """Each text alone, without padding, without dropout: [CLS] and [SEP] count, padding does not."""
    objective = build("sg-opt", folder, guide_pooling=[pooling]).train()
    view = objective.views(ROWS)["frozen"]
    guides = objective.encode("frozen", view)
    assert guides.shape == (4, 3, 32)
    assert not guides.requires_grad
    plain = SentenceEncoder.load(str(folder), template="[X]", pooling="cls").backbone.eval()
    for row, (ids, attention) in enumerate(zip(view["input_ids"], view["attention_mask"], strict=True)):
        ids = ids[: int(attention.sum())].unsqueeze(0)
        with torch.no_grad():
            states = [plain.embeddings(ids)]
            for layer in plain.encoder.layer:
                states.append(layer(states[-1]))
        for layer, state in enumerate(states):
            expected = state[0].max(0).values if pooling == "max" else state[0].mean(0)
            torch.testing.assert_close(guides[row, layer], expected, atol=1e-5, rtol=1e-5)


def test_the_copy_has_no_dropout_and_the_tuned_encoder_has(tiny_bert: Path) -> None:
    objective = build("sg-opt", tiny_bert).train()
    views = objective.views(ROWS)
    assert torch.equal(*(objective.encode("frozen", views["frozen"]) for _ in range(2)))
    assert not torch.allclose(*(objective.encode("tuned", views["tuned"]) for _ in range(2)))


@pytest.mark.parametrize("dimensions", [(), (8, 32)])
def test_sg_opt_is_opt3_of_the_projected_cls_and_guides(dimensions: tuple[int, ...], folder: Path) -> None:
    objective = build("sg-opt", folder, dimensions=[str(size) for size in dimensions]).eval()
    views = objective.views(ROWS)
    cls = objective.encoder.hidden(**views["tuned"])[:, 0]
    guides = objective.encode("frozen", views["frozen"])
    losses = []
    for size in dimensions or (32,):
        kept = (torch.arange(32) < size).float()
        losses.append(SELF_GUIDED["opt3"](objective.head(cls * kept), objective.head(guides * kept), 0.01))
    torch.testing.assert_close(objective(**views)["contrast"], torch.stack(losses).mean())


@pytest.mark.parametrize("variant", ["base", "opt1", "opt2"])
def test_the_other_losses_take_one_layer_a_sentence(variant: str, tiny_bert: Path) -> None:
    objective = build("sg", tiny_bert, variant=[variant]).eval()
    views = objective.draw(objective.views(ROWS))
    guides = objective.encode("frozen", views["frozen"])
    everyone = build("sg-opt", tiny_bert).encode("frozen", objective.views(ROWS)["frozen"])
    for row, layer in enumerate(views["frozen"]["layer"].tolist()):
        torch.testing.assert_close(guides[row], everyone[row, layer])
    vectors = {name: objective.encode(name, view) for name, view in views.items()}
    expected = SELF_GUIDED[variant](objective.head(vectors["tuned"]), objective.head(guides), 0.01)
    torch.testing.assert_close(objective.loss(vectors, views)["contrast"], expected)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_layers_are_drawn_uniformly_from_those_that_guide(first: int, tiny_bert: Path) -> None:
    objective, layers = build("sg", tiny_bert, first_layer=[str(first)]), 3 - first
    drawn = objective.draw(objective.views(ROWS[:1] * 3000))["frozen"]["layer"]
    counts = torch.bincount(drawn).tolist()  # of the embeddings and two layers
    assert len(counts) == layers
    assert all(abs(count - 3000 / layers) <= 4 * math.sqrt(3000 / layers * (1 - 1 / layers)) for count in counts)


def test_the_first_layers_can_be_left_out(tiny_bert: Path) -> None:
    whole, upper = build("sg-opt", tiny_bert), build("sg-opt", tiny_bert, first_layer=["1"])
    view = whole.views(ROWS)["frozen"]
    torch.testing.assert_close(upper.encode("frozen", view), whole.encode("frozen", view)[:, 1:])
    only = build("sg", tiny_bert, first_layer=["2"])
    guides = only.encode("frozen", only.draw(only.views(ROWS))["frozen"])
    torch.testing.assert_close(guides, whole.encode("frozen", view)[:, 2])


def test_back_translation_is_a_positive_from_the_tuned_encoder(tiny_bert: Path) -> None:
    objective = build("sg-bt", tiny_bert).eval()
    views = objective.views(PAIRS)
    first, second = (objective.encoder(**view) for view in views.values())
    decode = objective.encoder.tokenizer.decode
    assert decode(views["translation"]["input_ids"][0], skip_special_tokens=True) == "a dog runs."
    expected = SELF_GUIDED["base"](objective.head(first), objective.head(second), 0.01)
    torch.testing.assert_close(objective(**views)["contrast"], expected)


def test_with_guidance_the_copy_reads_the_translation(tiny_bert: Path) -> None:
    objective = build("sg-opt-bt", tiny_bert)
    pairs = objective.views(PAIRS)
    first, second = (objective.views([(row[column],) for row in PAIRS]) for column in (0, 1))
    assert torch.equal(pairs["tuned"]["input_ids"], first["tuned"]["input_ids"])
    assert torch.equal(pairs["frozen"]["input_ids"], second["frozen"]["input_ids"])


def test_one_head_of_the_papers_width_starts_as_bert_does(tiny_bert: Path) -> None:
    objective = build("sg-opt", tiny_bert, head_width=["4096"])
    first, second = objective.head[0], objective.head[2]
    assert (first.in_features, first.out_features, second.in_features, second.out_features) == (32, 4096, 4096, 4096)
    for linear in (first, second):
        assert linear.weight.std().item() == pytest.approx(0.2, rel=0.02)
        assert not linear.bias.any()
    vectors = torch.randn(3, 32)
    hidden = F.gelu(F.linear(vectors, first.weight, first.bias))
    torch.testing.assert_close(objective.head(vectors), F.gelu(F.linear(hidden, second.weight, second.bias)))


@pytest.mark.parametrize("variant", ["base", "opt1", "opt2", "opt3"])
def test_without_a_head_the_vectors_themselves_are_compared(variant: str, tiny_bert: Path) -> None:
    """Table 5's last row."""
    objective = build("sg-opt", tiny_bert, variant=[variant], head_width=["0"]).eval()
    assert not list(objective.head.parameters())
    views = objective.draw(objective.views(ROWS))
    vectors = {name: objective.encode(name, view) for name, view in views.items()}
    expected = SELF_GUIDED[variant](vectors["tuned"], vectors["frozen"], 0.01)
    torch.testing.assert_close(objective.loss(vectors, views)["contrast"], expected)
    objective.train()(**objective.views(ROWS))["loss"].backward()
    idle = {key for key, weight in objective.named_parameters() if weight.grad is None}
    assert all(key.startswith("encoder.backbone.embeddings.") for key in idle)


def test_the_schedule_is_the_papers(tiny_bert: Path, tmp_path: Path) -> None:
    objective = build("sg-opt", tiny_bert)
    corpus = Corpus(rows=ROWS * 8)
    arguments = training_arguments(objective.recipe, tmp_path, chooser=None)
    trainer = ObjectiveTrainer(objective, corpus, arguments)
    trainer.create_optimizer_and_scheduler(1079)
    decays = {group["weight_decay"] for group in trainer.optimizer.param_groups}
    assert decays == {0.01, 0.0}
    assert all(group["betas"] == (0.9, 0.9) for group in trainer.optimizer.param_groups)
    rate = trainer.lr_scheduler.lr_lambdas[0]
    assert [5e-5 * rate(step) for step in (0, 54, 108, 1079)] == pytest.approx([0, 2.5e-5, 5e-5, 0])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"first_layer": ["3"]}, "first_layer is 3; .* to 2: lower it"),
        ({"positives": ["translation"]}, "reads two columns, .* columns names 0"),
    ],
)
def test_what_cannot_be_is_refused(words: dict[str, list[str]], message: str, tiny_bert: Path) -> None:
    with pytest.raises(ClozeError, match=message):
        build("sg-opt", tiny_bert, **words)


def test_a_corpus_without_columns_has_no_translations(tiny_bert: Path, tmp_path: Path) -> None:
    text = tmp_path / "sentences.txt"
    text.write_text("Two dogs run.\n" * 20, encoding="utf-8")
    recipe = load_recipe("sg-bt", SMALL | {"encoder": [str(tiny_bert)], "corpus": [str(text)]})
    with pytest.raises(CorpusError, match="has no columns"):
        prepare(recipe)


@pytest.mark.parametrize("name", RECIPES)
def test_it_trains(name: str, tiny_bert: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "pairs.tsv"
    lines = [f"{row[0]} {n}\t{row[-1]} {n}\n" for row in (*ROWS, *PAIRS) for n in range(4)]
    corpus.write_text("sentence\ttranslation\n" + "".join(lines), encoding="utf-8")
    options: dict[str, Any] = {"encoder": tiny_bert, "corpus": corpus, "out": tmp_path / "run"} | {
        "batch_size": 8,
        "max_steps": 4,
        "held_out": 8,
        "warmup_steps": 0,
        "head_width": 48,
        "max_tokens": 32,
    }
    words = arguments(options)
    assert main([name, *words, "--columns", *(["sentence", "translation"] if "bt" in name else ["sentence"])]) == 0
    model = tmp_path / "run" / "model"
    tuned, parent = (
        SentenceEncoder.load(str(path), template="[X]", pooling="cls").backbone.state_dict()
        for path in (model, tiny_bert)
    )
    moved = {key for key in parent if not torch.equal(tuned[key], parent[key])}
    assert moved
    assert not any(key.startswith("embeddings.") for key in moved)
