"""Rows that are held out: which, what they say of each method, and that training does not notice."""

import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from contrastive_methods import METHODS, ROWS, add_masked_head, build
from killed_runs import log
from recipes import arguments, load_recipe
from safetensors.torch import load_file
from two_processes import in_two

from cloze.encoding.bundle import SEARCH_NAMES
from cloze.encoding.errors import ClozeError
from cloze.training.data.corpus import Corpus
from cloze.training.evaluation.measures import alignment, uniformity
from cloze.training.fit import main
from cloze.training.loop import prepare as preparing
from cloze.training.loop import run as loop
from cloze.training.methods import objective_of
from cloze.training.methods.held_out import HeldOut
from cloze.training.methods.objective import Objective
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.run_folder import Run

WORDS = ["dog", "man", "letter", "city", "rain", "guitar", "market", "friend"]
TEXTS = [f"The {a} and the {b} run {c} times." for a in WORDS for b in WORDS for c in range(11)]  # 704


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> Path:
    return add_masked_head(tiny_bert, tmp_path_factory.mktemp("masked") / "bert")


@pytest.fixture
def words(tmp_path: Path, tiny_bert: Path) -> list[str]:
    (tmp_path / "text.txt").write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    keys = {"encoder": tiny_bert, "corpus": tmp_path / "text.txt", "batch_size": 16, "max_steps": 8, "max_tokens": 40}
    return arguments(keys | {"eval_steps": 2, "log_steps": 1, "learning_rate": 1e-3})


def held_out_losses(run: Run) -> dict[int, float]:
    return {entry["step"]: entry["eval_held_out_loss"] for entry in log(run.path) if "eval_held_out_loss" in entry}


def any_objective(name: str, masked: Path) -> Objective:
    if name in METHODS:
        source, _, keys = METHODS[name]
        return build(source, masked, **keys)
    keys = {"encoder": [str(masked)], "corpus": ["unused.txt"], "batch_size": ["5"]}
    keys |= {
        "diffcse": {"generator": [str(masked)]},
        "distill": {"teacher": [str(masked)], "pooling": ["cls"], "max_tokens": ["40"]},
        "mlm": {"max_tokens": ["40"]},
    }[name]
    recipe = load_recipe(name, keys)
    torch.manual_seed(0)
    encoder = SentenceEncoder.load(recipe.encoder, template=recipe.template, pooling=recipe.pooling)
    return objective_of(recipe.method)(encoder, recipe)


@pytest.mark.parametrize("name", [*METHODS, "diffcse", "distill", "mlm"])
def test_every_method_has_a_loss_and_is_not_disturbed(name: str, masked: Path) -> None:
    objective = any_objective(name, masked).eval()
    held_out = HeldOut((METHODS[name][1] if name in METHODS else ROWS) * 2, seed=3)
    torch.manual_seed(7)
    random.seed(7)
    before, weights = torch.get_rng_state(), {key: value.clone() for key, value in objective.state_dict().items()}
    figures = held_out.figures(objective)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, weights[key]) for key, value in objective.state_dict().items())
    assert not objective.training
    assert all(weight.grad is None for weight in objective.parameters())
    assert figures["loss"] > 0
    parts = {"distill": {"cosine_distance", "divergence"}, "mlm": {"accuracy"}}.get(name, set())
    assert set(figures) == {"loss"} | ({"alignment", "uniformity"} if objective.contrastive else parts)
    torch.rand(5)
    assert held_out.figures(objective) == figures


def test_the_loss_is_the_mean_of_equal_batches_and_the_rest_is_of_served_vectors(steady: dict[str, list[str]]) -> None:
    objective = build("simcse", Path(*steady["encoder"]), columns=["a", "b"])
    rows = [(f"The {word} run.", f"A {word}.") for word in WORDS] + [("Rain.", "Nothing.")] * 4
    objective.recipe = objective.recipe.model_copy(update={"batch_size": 5})
    figures = HeldOut(rows, 0).figures(objective)
    with torch.no_grad():
        losses = [float(objective(**objective.views(rows[start : start + 5]))["loss"]) for start in (0, 5)]
    assert figures["loss"] == pytest.approx(sum(losses) / 2)  # the last two rows fill no batch
    first, second = (objective.encoder.embed(column) for column in zip(*rows, strict=True))
    assert figures["alignment"] == pytest.approx(float(alignment(first, second).mean()))
    assert figures["uniformity"] == pytest.approx(uniformity(first))


def test_a_single_text_is_aligned_with_itself_under_dropout(masked: Path) -> None:
    assert HeldOut(ROWS, 0).figures(build("simcse", masked))["alignment"] > 0


def test_rows_are_drawn_by_the_seed() -> None:
    def drawn(seed: int) -> Corpus:
        return Corpus([(str(number),) for number in range(1003)]).hold_out(100, seed)

    one, same, other = drawn(5), drawn(5), drawn(6)
    assert one.held_out == same.held_out != other.held_out
    assert len(one.held_out) == 100
    assert sorted([*one.rows, *one.held_out]) == sorted((str(number),) for number in range(1003))
    assert str(one).endswith("; held out: 100")


def test_without_dev_data_a_share_of_the_corpus_chooses(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path / "run")
    assert main(["simcse", *words, "--out", str(run.path)]) == 0
    shown, found, losses = capsys.readouterr().err, run.provenance(), held_out_losses(run)
    assert "corpus: 672 rows from 1 files; left out: 0 empty, 0 by length; held out: 32" in shown
    assert "step 2: held_out_loss " in shown
    assert list(losses) == [0, 2, 4, 6, 8]
    assert found["chosen_by"] == "held_out_loss"
    assert (found["rows"], found["held_out"], found["dev_score"]) == (672, 32, None)
    assert found["held_out_loss"] == losses[found["best_step"]] == min(losses[step] for step in (2, 4, 6, 8))
    best = load_file(run.best)
    served = load_file(run.model / "model.safetensors")
    assert all(torch.equal(best[f"encoder.backbone.{name}"], weight) for name, weight in served.items())


def test_training_is_the_same_however_often_it_is_evaluated(tmp_path: Path, words: list[str]) -> None:
    losses = []
    for steps in ("1", "8"):
        run = Run(tmp_path / steps)
        assert main(["promptbert", *words, "--eval-steps", steps, "--out", str(run.path)]) == 0
        losses.append([entry["loss"] for entry in log(run.path) if "loss" in entry])
    assert losses[0] == losses[1]


@pytest.fixture
def steady(tmp_path: Path, masked: Path) -> dict[str, list[str]]:
    """Keys of a short run of an encoder without dropout."""
    shutil.copytree(masked, tmp_path / "steady")
    path = tmp_path / "steady" / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    path.write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "rows.csv").write_text("a,b\n" + "".join(f"{text},A {WORDS[0]}.\n" for text in TEXTS[:88]))
    keys = {"encoder": tmp_path / "steady", "corpus": tmp_path / "rows.csv", "batch_size": 8, "held_out": 24}
    keys |= {"max_steps": 4, "eval_steps": 2, "log_steps": 1, "learning_rate": 1e-3}
    return {key: [str(value)] for key, value in keys.items()} | {"columns": ["a", "b"]}


def fit_in_process(rank: int, keys: dict[str, list[str]], folder: Path) -> None:
    recipe = load_recipe("simcse", keys)
    loop.fit(recipe, Run(folder))


@pytest.mark.long
def test_two_processes_find_the_losses_of_one(steady: dict[str, list[str]], tmp_path: Path) -> None:
    one, two = Run(tmp_path / "one"), Run(tmp_path / "two")
    fit_in_process(0, steady, one.path)
    in_two(fit_in_process, tmp_path, steady, two.path)
    assert list(held_out_losses(two)) == [0, 2, 4]
    assert held_out_losses(two) == pytest.approx(held_out_losses(one), rel=1e-4)
    assert two.provenance()["best_step"] == one.provenance()["best_step"]


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ("--held-out 0", "704 rows from 1 files; left out: 0 empty, 0 by length\n"),
        ("--held-out 100", "604 rows from 1 files; left out: 0 empty, 0 by length; held out: 100\n"),
        ("--sentences 600", "600 rows from 1 files; left out: 0 empty, 0 by length\n"),
        ("--batch-size 704", "704 rows from 1 files; left out: 0 empty, 0 by length\n"),
    ],
)
def test_how_many_rows_are_held_out(
    options: str, rows: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simcse", *words, *options.split(), "--max-steps", "1", "--dry-run"]) == 0
    assert f"corpus: {rows}" in capsys.readouterr().err


def test_none_are_held_out_if_they_would_not_do_for_all_processes(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss needs two rows in each; 704 rows give 35."""
    monkeypatch.setattr(preparing, "processes", lambda: SimpleNamespace(num_processes=32))
    assert main(["simcse", *words, "--batch-size", "64", "--max-steps", "1", "--dry-run"]) == 0
    assert "corpus: 704 rows from 1 files; left out: 0 empty, 0 by length\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--held-out 5000",
            "held_out is 5,000, but the corpus has 704 rows, and a batch of 16 must remain; write 688",
        ),
        ("--held-out 1", "held_out is 1, but a loss needs 2 rows or more; raise it, or write 0"),
        ("--held-out 0 --patience 2", "patience is 2, but it counts evaluations, and there are none"),
    ],
)
def test_numbers_that_cannot_be_held_out(options: str, message: str, tmp_path: Path, words: list[str]) -> None:
    with pytest.raises(ClozeError, match=message):
        main(["simcse", *words, *options.split(), "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


def test_patience_counts_losses_that_are_not_lower(tmp_path: Path, words: list[str]) -> None:
    run = Run(tmp_path / "run")
    steady = ["--learning-rate", "1e-30", "--eval-steps", "1", "--patience", "2"]
    assert main(["simcse", *words, *steady, "--out", str(run.path)]) == 0
    assert run.provenance()["steps"] == 3


def test_pairs_are_in_the_templates_of_queries_and_documents(steady: dict[str, list[str]]) -> None:
    keys = {"query_template": ["query: [X]"], "document_template": ["passage: [X]"]}
    objective = build("simcse", Path(*steady["encoder"]), columns=["a", "b"], **keys)
    rows = [(f"The {word} run.", f"A {word}.") for word in WORDS]
    figures, encoder = HeldOut(rows, 0).figures(objective), objective.encoder
    queries, documents = (
        encoder.named(name).embed(column) for name, column in zip(SEARCH_NAMES, zip(*rows, strict=True), strict=True)
    )
    assert not np.allclose(queries, encoder.embed([row[0] for row in rows]))
    assert figures["alignment"] == pytest.approx(float(alignment(queries, documents).mean()))
    assert figures["uniformity"] == pytest.approx(uniformity(queries))
