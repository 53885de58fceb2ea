"""The encoder as it is served by itself: its figures beside a run's, its vectors as what a run learns."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from killed_runs import killed_at
from numpy.typing import NDArray
from recipes import arguments, load_recipe
from safetensors.torch import load_file
from test_adopt import model_of
from tiny_graphs import export_graphs_of
from two_processes import in_two

from cloze.training.evaluation.measures import units
from cloze.training.fit import main
from cloze.training.loop import prepare as preparing
from cloze.training.loop import run as loop
from cloze.training.methods import distill, teacher
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.run_folder import Run

THINGS = ("dog", "man", "letter", "city", "rain", "guitar")
TEXTS = [f"The {a} and the {b} run over the field." for a in THINGS for b in THINGS]
PAIRS = "sentence1,sentence2,score\nTwo dogs run.,A dog runs.,5\nTwo dogs run.,It rains.,{}\nA man.,A city.,1\n"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> Path:
    """An encoder that is read by the mean of its tokens."""
    folder = tmp_path_factory.mktemp("served") / "mean"
    SentenceEncoder.load(str(tiny_bert), template="[X]", pooling="mean").save(folder)
    return folder


def mask_keys(folder: Path, encoder: Path, **keys: Any) -> dict[str, Any]:
    (folder / "texts.txt").write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    known = {"encoder": str(encoder), "corpus": str(folder / "texts.txt"), "max_tokens": 40, "frozen_layers": 0}
    return known | {"precision": "fp32", "batch_size": 8, "max_steps": 4, "eval_steps": 2, "log_steps": 1} | keys


def test_an_encoder_learns_to_give_its_own_vectors_at_the_mask(served: Path, tmp_path: Path) -> None:
    keys = mask_keys(tmp_path, served, epochs=60, learning_rate=0.003, eval_steps=60, held_out=8, warmup_steps=0)
    del keys["max_steps"]
    assert main(["mask", *arguments(keys), "--out", str(tmp_path / "run")]) == 0
    found = Run(tmp_path / "run").provenance()
    before = SentenceEncoder.load(str(served), template="[X] means [MASK].", pooling="mask")
    trained = SentenceEncoder.load(str(tmp_path / "run"))
    assert (trained.config.template, trained.config.pooling) == ("[X] means [MASK].", "mask")
    parent = units(SentenceEncoder.load(str(served)).embed(TEXTS))

    def distance(encoder: SentenceEncoder) -> float:
        return float(1 - (units(encoder.embed(TEXTS)) * parent).sum(1).mean())

    assert distance(trained) < 0.05 < distance(before)
    assert found["held_out_cosine_distance"] < 0.1
    assert not (tmp_path / "run" / "prepared").exists()


def test_the_teacher_embeds_each_text_once_and_a_resumed_run_finds_the_vectors(
    served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher, "TEXTS", 10)
    recipe = load_recipe("mask", mask_keys(tmp_path, served))
    with killed_at(1):
        loop.fit(recipe, Run(tmp_path / "again"))
    files = sorted((tmp_path / "again" / "prepared").iterdir(), key=lambda file: -len(np.load(file)))
    assert [np.load(file).shape for file in files] == [(10, 32), (10, 32), (10, 32), (6, 32)]
    kept = files[0].stat().st_mtime_ns
    files[3].unlink()
    asked: list[str] = []
    embed = SentenceEncoder.embed

    def noted(encoder: SentenceEncoder, texts: list[str], *rest: Any, **others: Any) -> NDArray[np.float32]:
        asked.extend(texts)
        return embed(encoder, texts, *rest, **others)

    def stop(*_: Any, **__: Any) -> None:
        assert files[0].stat().st_mtime_ns == kept
        raise KeyboardInterrupt

    monkeypatch.setattr(SentenceEncoder, "embed", noted)
    monkeypatch.setattr(loop, "training_arguments", stop)
    with pytest.raises(KeyboardInterrupt):
        loop.fit(recipe, Run(tmp_path / "again"), resume=True)
    assert len(asked) == 6


def _train(rank: int, folder: str) -> dict[str, torch.Tensor]:
    teacher.TEXTS = 10  # type: ignore[misc]
    recipe = load_recipe("mask", mask_keys(Path(folder) / str(rank), Path(folder) / "mean"))
    loop.fit(recipe, Run(Path(folder) / "run"))
    return load_file(Path(folder) / "run" / "model" / "model.safetensors")


@pytest.mark.long
def test_two_processes_share_the_embedding(served: Path, tmp_path: Path) -> None:
    (tmp_path / "mean").symlink_to(served)
    for name in ("0", "1", "alone"):
        (tmp_path / name).mkdir()
    loop.fit(load_recipe("mask", mask_keys(tmp_path / "alone", served)), Run(tmp_path / "one"))
    expected = load_file(tmp_path / "one" / "model" / "model.safetensors")
    for found in in_two(_train, tmp_path, str(tmp_path)):
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, atol=1e-4, rtol=1e-3, msg=name)


def test_a_model_with_layers_behind_its_pooling_teaches_with_them(tiny_bert: Path, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Dense

    folder = model_of(tmp_path / "dense", tiny_bert, "bert", "max", Dense(32, 24))
    recipe = load_recipe("mask", mask_keys(tmp_path, folder))
    student = SentenceEncoder.load(str(folder), template=recipe.template, pooling="mask")
    objective = distill.Distill(student, recipe)
    target = objective.views([(text,) for text in TEXTS])["student"]["target"].numpy()
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS, normalize_embeddings=True)
    np.testing.assert_allclose(target @ target.T, expected @ expected.T, atol=1e-2)


def run_with_dev(folder: Path, encoder: Path, second: float, *words: str, **keys: Any) -> tuple[dict[str, Any], Run]:
    """A run of SimCSE at [MASK] whose dev data has two pairs and a third one with the score `second`."""
    (folder / "dev.csv").write_text(PAIRS.format(second), encoding="utf-8")
    keys = mask_keys(folder, encoder, dev=str(folder / "dev.csv"), **keys)
    assert main(["simcse", *arguments(keys), *words, "--out", str(folder / "run")]) == 0
    run = Run(folder / "run" / "seed-0" if "--seeds" in words else folder / "run")
    return run.provenance(), run


def spearman_of(encoder: SentenceEncoder, dev: Path) -> float:
    from cloze.training.evaluation.sts import load_pairs, spearman

    return spearman(encoder.embed, load_pairs(dev))


def test_the_parents_own_figure_stands_beside_step_0(
    served: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its own template and pooling, not those of the recipe."""
    words = ["--template", "rain [X] [MASK]", "--pooling", "mask"]
    found, run = run_with_dev(tmp_path, served, 0, *words, learning_rate=1e-9)
    parent = spearman_of(SentenceEncoder.load(str(served)), tmp_path / "dev.csv")
    start = SentenceEncoder.load(str(served), template="rain [X] [MASK]", pooling="mask")
    assert found["parent_score"] == pytest.approx(parent)
    assert found["before_training"] == pytest.approx(spearman_of(start, tmp_path / "dev.csv"))
    assert found["below_parent"] is (found["dev_score"] < parent)
    shown = capsys.readouterr().err
    assert f"the encoder with its own template and pooling: spearman {parent:.4g}" in shown
    assert f"; the encoder with its own template and pooling {parent:.4g})" in shown
    assert [entry["parent"] for entry in run.logged() if "parent" in entry] == [{"spearman": pytest.approx(parent)}]


def test_a_run_that_ends_below_its_parent_says_so_in_its_last_line(
    served: Path,
    tiny_bert: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def better(*_: Any, **__: Any) -> dict[str, float]:
        return {"spearman": 101.0}

    monkeypatch.setattr(loop, "_parent_figures", better)
    found, run = run_with_dev(tmp_path, served, 0)
    assert found["below_parent"] is True
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(
        f"warning: {run.path} scores lower than {served} with its own template and pooling: dev_spearman "
    )
    from cloze.training.export import __main__ as export

    export_graphs_of(tiny_bert, monkeypatch)
    export.main([str(run.path), str(tmp_path / "bundle"), "--precision", "fp32"])
    assert last in capsys.readouterr().err.splitlines()


def test_the_weights_before_training_are_kept_if_no_step_is_better(
    served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cloze.training.evaluation.dev import DevData

    scores = iter([50.0, 60.0, 40.0, 59.0])  # the parent, step 0, steps 2 and 4
    monkeypatch.setattr(DevData, "score", lambda *_: {"spearman": next(scores)})
    found, run = run_with_dev(tmp_path, served, 0)
    assert (found["best_step"], found["dev_score"], found["before_training"]) == (0, 60.0, 60.0)
    assert found["below_parent"] is False
    weights = load_file(run.model / "model.safetensors")
    for name, weight in load_file(served / "model.safetensors").items():
        torch.testing.assert_close(weights[name], weight, atol=0, rtol=0)


def test_an_untrained_head_is_not_the_parent(served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cloze.training.evaluation.dev import DevData

    scores = iter([60.0, 50.0, 40.0, 45.0])  # the parent, step 0, steps 2 and 4
    monkeypatch.setattr(DevData, "score", lambda *_: {"spearman": next(scores)})
    found, run = run_with_dev(tmp_path, served, 0, "--kept-head", "tanh")
    assert (found["best_step"], found["below_parent"]) == (0, True)
    assert SentenceEncoder.load(str(run.model)).head is not None


def test_layers_that_a_run_cannot_include_are_reported(
    tiny_bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from sentence_transformers.base.modules import Dense

    folder = model_of(tmp_path / "dense", tiny_bert, "bert", "cls", Dense(32, 24))
    keys = mask_keys(tmp_path, folder, max_steps=1, eval_steps=1)
    note = f"note: {folder} has layers after its pooling (Dense), which a run cannot include"
    assert main(["simcse", *arguments(keys), "--out", str(tmp_path / "own")]) == 0
    assert note in capsys.readouterr().err
    assert main(["simcse", *arguments(keys), "--pooling", "mean", "--out", str(tmp_path / "other")]) == 0
    assert note not in capsys.readouterr().err
    prompted = json.dumps([{"type": "prompted_transformer.PromptedTransformer", "path": ""}])
    SentenceEncoder.load(str(tmp_path / "own")).save(tmp_path / "saved")
    (tmp_path / "saved" / "modules.json").write_text(prompted, encoding="utf-8")  # as `cloze convert` writes it
    keys["encoder"] = str(tmp_path / "saved")
    assert main(["simcse", *arguments(keys), "--out", str(tmp_path / "third")]) == 0


def test_seeds_that_end_below_their_parent_say_so(
    served: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_parent_figures", lambda *_, **__: {"spearman": 101.0})
    run_with_dev(tmp_path, served, 0, "--seeds", "0", "1")
    *_, first, second, last = capsys.readouterr().err.splitlines()
    assert first.startswith(f"warning: {tmp_path / 'run' / 'seed-0'} scores lower than {served}")
    assert second.startswith(f"warning: {tmp_path / 'run' / 'seed-1'} scores lower than {served}")
    assert last == f"finished: {tmp_path / 'run'}"


def test_a_tie_with_step_0_is_won_by_the_step(served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cloze.training.evaluation.dev import DevData

    monkeypatch.setattr(DevData, "score", lambda *_: {"spearman": 50.0})
    found, _ = run_with_dev(tmp_path, served, 0)
    assert (found["best_step"], found["dev_score"]) == (2, 50.0)


def test_gains_are_over_the_parents_own_figures(served: Path, tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text(PAIRS.format(2), encoding="utf-8")
    (tmp_path / "dev.csv").write_text(PAIRS.format(0), encoding="utf-8")
    keys = mask_keys(tmp_path, served, dev_choice="least_gain", template="rain [X] [MASK]", pooling="mask")
    keys["dev"] = [str(tmp_path / "dev.csv"), str(tmp_path / "other.csv")]
    assert main(["simcse", *arguments(keys), "--out", str(tmp_path / "run")]) == 0
    parent, start = Run(tmp_path / "run").logged()[:2]
    gains = [start[f"eval_dev_{name}_spearman"] - parent["parent"][f"{name}_spearman"] for name in ("dev", "other")]
    assert start["eval_dev_least_gain"] == pytest.approx(min(gains))
    assert json.loads((tmp_path / "run" / "run.json").read_text())["parent_score"] == 0


@pytest.mark.parametrize(("template", "warned"), [("[X] means [MASK].", True), ("[X] [MASK]", False)])
def test_an_encoder_that_is_read_so_already_has_nothing_to_learn(
    template: str, warned: bool, tiny_bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    SentenceEncoder.load(str(tiny_bert), template="[X] means [MASK].", pooling="mask").save(tmp_path / "prompt")
    keys = mask_keys(tmp_path, tmp_path / "prompt", template=template)
    assert main(["mask", *arguments(keys), "--dry-run"]) == 0
    assert (
        "already has this template and pooling, so there is nothing to learn; give another" in capsys.readouterr().err
    ) is warned


@pytest.mark.parametrize("has", [True, False])
def test_bf16_on_a_cpu_that_emulates_it_is_said(
    has: bool, served: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "has_bf16", lambda: has)
    assert main(["simcse", *arguments(mask_keys(tmp_path, served, precision="bf16")), "--dry-run"]) == 0
    assert ("which this CPU emulates" in capsys.readouterr().err) is not has


def test_a_corpus_for_too_few_steps_is_said_with_what_to_give(
    served: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = mask_keys(tmp_path, served, batch_size=32)
    del keys["max_steps"]
    assert main(["simcse", *arguments(keys), "--dry-run"]) == 0
    assert (
        "warning: 36 rows in batches of 32 are only 1 steps of training; give --batch-size 8 and --epochs 13 for 50 or "
        "more, or more text" in capsys.readouterr().err
    )


def test_text_alone_seldom_helps_an_encoder_that_was_trained_for_sentences(
    served: Path, tiny_bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    (tmp_path / "pairs.csv").write_text("a,b\n" + "".join(f"{text},{text}\n" for text in TEXTS), encoding="utf-8")
    mlm = {"encoder": str(tiny_bert), "corpus": str(tmp_path / "texts.txt"), "max_steps": 1, "batch_size": 8}
    assert main(["mlm", *arguments(mlm), "--out", str(tmp_path / "mlm")]) == 0
    shown = {}
    for name, encoder, corpus in (
        ("sentences", served, ["--corpus", "texts.txt"]),
        ("masked words", tmp_path / "mlm", ["--corpus", "texts.txt"]),
        ("unread", tiny_bert, ["--corpus", "texts.txt"]),
        ("pairs", served, ["--corpus", "pairs.csv", "--columns", "a", "b"]),
    ):
        capsys.readouterr()
        corpus[1] = str(tmp_path / corpus[1])
        words = ["--encoder", str(encoder), "--batch-size", "8", "--max-steps", "1", "--held-out", "0", *corpus]
        assert main(["simcse", *words, "--out", str(tmp_path / name)]) == 0
        shown[name] = "simcse on text alone seldom makes such an encoder better; cloze adapt" in capsys.readouterr().err
    assert shown == {"sentences": True, "masked words": False, "unread": False, "pairs": False}
