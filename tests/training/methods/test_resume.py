"""A run that is killed and resumed ends as an unbroken one: of each method, and each way to read texts and to train."""

from pathlib import Path
from typing import Any

import pytest
import torch
from killed_runs import assert_same_weights, fit, fit_until_killed, log
from recipes import load_recipe
from safetensors.torch import load_file
from test_ranking import keys_of as ranking_keys
from test_teacher_vectors import random, written

from cloze.training.run_folder import Run

THINGS = ["dog", "man", "letter", "city", "rain", "guitar"]
TEXTS = [f"The {a} and the {b} run." for a in THINGS for b in THINGS]  # an epoch of 4 steps
KEYS = {"encoder": "bert", "corpus": "texts.txt", "batch_size": 8, "max_steps": 4, "max_tokens": 32, "held_out": 0}
KEYS |= {"save_steps": 2, "log_steps": 1, "warmup_steps": 0, "learning_rate": 1e-3}
PAIRS = {"corpus": "rows.csv", "columns": ["a", "b"]}
UNSAVED = {"dev": "dev.tsv", "learning_rate": 0.5, "eval_steps": 1}  # the best step has no checkpoint

RUNS: dict[str, tuple[str, dict[str, Any], int]] = {
    "second epoch": ("simcse", {"max_steps": 8}, 7),
    "like lengths": ("simcse", {"max_steps": 8, "group_by_length": True}, 7),
    "no text twice": ("simcse", PAIRS | {"max_steps": 12, "no_duplicates": True, "batch_size": 4}, 7),
    "files by weight": ("simcse", {"corpus": ["texts.txt", "few.txt"], "weights": [1, 3], "max_steps": 8}, 7),
    "workers": ("simcse", {"workers": 1}, 3),
    "mini-batches, held-out loss": ("simcse", {"mini_batch_size": 4, "held_out": 8, "eval_steps": 2}, 3),
    "best step not saved": ("simcse", UNSAVED, 3),
    "before the thaw": ("simcse", {"frozen_layers": 1, "frozen_share": 0.5, "save_steps": 1}, 2),
    "after the thaw": ("simcse", {"frozen_layers": 1, "frozen_share": 0.5, "save_steps": 1}, 4),
    "LoRA": ("simcse", {"lora_rank": 3}, 3),
    "guide": ("simcse", PAIRS | {"guide": "bert"}, 3),
    "promptbert": ("promptbert", {}, 3),
    "diffcse": ("diffcse", {"generator": "masked"}, 3),
    "sg": ("sg", {"head_width": 16, "held_out": 8, "eval_steps": 2}, 3),
    "mlm": ("mlm", {}, 3),
    "scored": ("scored", {"corpus": "rows.csv", "columns": ["a", "b", "score"]}, 3),
    "teacher vectors": ("distill", {"teacher_vectors": "vectors"}, 3),
    "own vectors": ("mask", {"frozen_layers": 0, "teacher_pooling": "mean"}, 3),
    "ranking": ("ranking", {}, 3),
}
"""A recipe, keys of its own, and the step after whose log it is killed."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path, masked_bert: Path) -> Path:
    found = tmp_path_factory.mktemp("resume")
    (found / "bert").symlink_to(tiny_bert)
    (found / "masked").symlink_to(masked_bert)
    (found / "texts.txt").write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    (found / "few.txt").write_text("".join(f"Nothing {text}\n" for text in TEXTS[::3]), encoding="utf-8")
    rows = [f"{text},Nothing but a {THINGS[place // 6]}.,{place % 5}" for place, text in enumerate(TEXTS)]
    (found / "rows.csv").write_text("a,b,score\n" + "\n".join(rows) + "\n", encoding="utf-8")
    pairs = "Two dogs run.\tA dog runs.\t4.5\nRain.\tA city.\t1.0\nRain.\tThe guitar.\t0.5\n"
    (found / "dev.tsv").write_text(f"sentence1\tsentence2\tscore\n{pairs}", encoding="utf-8")
    written(found / "vectors", TEXTS, random(48))
    return found


@pytest.mark.parametrize("case", RUNS)
def test_a_killed_run_ends_as_an_unbroken_one(
    case: str, folder: Path, tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the weights of the encoder and of all that only training has, bit for bit, in losses and in scores."""
    name, own, step = RUNS[case]
    keys = KEYS | own
    if name == "ranking":
        keys |= ranking_keys(tmp_path, tiny_bert)
        rows = Path(keys["corpus"]).read_text(encoding="utf-8")
        Path(keys["corpus"]).write_text(3 * rows, encoding="utf-8")  # the run is stopped in the middle of an epoch
    monkeypatch.chdir(folder)
    recipe, whole, killed = load_recipe(name, keys), Run(tmp_path / "whole"), Run(tmp_path / "killed")
    fit(recipe, whole)
    fit_until_killed(recipe, killed, step)
    fit(recipe, killed, resume=True)
    assert log(killed.path) == log(whole.path)
    assert_same_weights(whole.path, killed.path)
    steps = keys["max_steps"]
    last, one_before = f"checkpoint-{steps}", f"checkpoint-{steps - keys['save_steps']}"
    assert_same_weights(whole.path, killed.path, last)
    weights, before = (load_file(whole.path / part / "model.safetensors") for part in (last, one_before))
    assert any(not torch.equal(before[key], weight) for key, weight in weights.items())
    if case == "best step not saved":
        assert killed.best.is_file()
        assert killed.provenance()["best_step"] == whole.provenance()["best_step"]
