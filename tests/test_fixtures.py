"""Runs, their recipes and a bundle that version 0.2 wrote: every later version reads them and gives the same vectors.

tests/fixtures has them: `run` is PromptBERT for four steps on the sentences of conftest.py and their random BERT,
`bundle` its export in fp32 and int8, and `stopped` a run from its model that was killed after step 3, with the
checkpoint of step 2. They are not to be written again; a new format gets new ones beside them.
"""

import json
import shutil
from pathlib import Path

import httpx
import numpy as np
import pytest
from live import served

from cloze.encoding.bundle import Bundle
from cloze.encoding.canaries import CANARY_TEXTS, Canaries
from cloze.service.app import create_app
from cloze.service.settings import Settings
from cloze.training.average import main as average
from cloze.training.encoder_source import encoder_folder
from cloze.training.export.__main__ import main as export
from cloze.training.fit import main as fit
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.graph_encoder import GraphEncoder
from cloze.training.recipes.command import load_recipe

FIXTURES = Path(__file__).with_name("fixtures")
RUN, BUNDLE = FIXTURES / "run", FIXTURES / "bundle"


def stored(precision: str) -> np.ndarray:
    return np.asarray(Canaries.read(BUNDLE).vectors[precision])


def test_the_recipe_of_the_run_is_read() -> None:
    recipe = load_recipe(str(RUN / "recipe.toml"), {})
    assert (recipe.method, recipe.max_steps, recipe.pooling) == ("promptbert", 4, "mask")


def test_the_run_has_the_vectors_that_were_exported_from_it(tmp_path: Path) -> None:
    encoder = SentenceEncoder.load(encoder_folder(str(RUN)))
    np.testing.assert_allclose(encoder.embed(CANARY_TEXTS), stored("fp32"), atol=1e-5, rtol=0)
    export([str(RUN), str(tmp_path / "bundle")])
    bundle = Bundle.load(tmp_path / "bundle")
    assert bundle.spec.weights == Bundle.load(BUNDLE).spec.weights
    np.testing.assert_allclose(GraphEncoder.of(bundle, "fp32").embed(CANARY_TEXTS), stored("fp32"), atol=1e-5, rtol=0)


def test_the_stopped_run_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(FIXTURES / "stopped", tmp_path / "stopped")
    (tmp_path / "stopped" / "texts.txt").rename(tmp_path / "texts.txt")
    shutil.copytree(RUN / "model", tmp_path / "bert")
    monkeypatch.chdir(tmp_path)
    assert fit(["--resume", "stopped"]) == 0
    lines = [json.loads(line) for line in Path("stopped/log.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    expected = {1: 5.376583, 2: 9.530120, 3: 6.700755, 4: 8.048310}  # of version 0.2, resumed and not interrupted
    assert losses == pytest.approx(expected, rel=1e-3)


def test_the_run_is_averaged(tmp_path: Path) -> None:
    average([str(RUN), str(RUN), "--weights", "1", "1", "--out", str(tmp_path / "mean")])
    mean = SentenceEncoder.load(encoder_folder(str(tmp_path / "mean")))
    np.testing.assert_allclose(mean.embed(CANARY_TEXTS), stored("fp32"), atol=1e-5, rtol=0)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_the_bundle_is_served_with_its_vectors(precision: str) -> None:
    settings = Settings(bundle=BUNDLE, precision=precision, threads=1)
    with served(create_app(settings)) as url:
        found = httpx.post(f"{url}/embed", json={"inputs": list(CANARY_TEXTS)}).json()
    expected = stored(precision)
    expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(found, expected, atol=1e-5 if precision == "fp32" else 0.02, rtol=0)
