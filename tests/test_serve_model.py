"""`cloze serve MODEL`: what is not a bundle becomes one, once."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from harness import Process
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tiny_bundle import write_bundle

from cloze.service import adopted
from cloze.service.adopted import bundle_of
from cloze.service.errors import SessionError

TEXTS = ["Two dogs run.", "a man plays the guitar", "Rain over the city."]


class Served(Process):
    program = ("-m", "cloze", "serve")

    def __init__(self, *arguments: str) -> None:
        model, *rest = arguments
        self.program = (*self.program, model)  # type: ignore[misc]
        super().__init__(*rest)


@pytest.fixture(scope="module")
def model(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that sentence-transformers saved."""
    words = Transformer(str(tiny_bert))
    folder = tmp_path_factory.mktemp("models") / "my-model"
    SentenceTransformer(modules=[words, Pooling(words.get_embedding_dimension(), "mean")]).save(str(folder))
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cloze" / "bundles"


def checked(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "cloze", "serve", *arguments, "--check"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_model_of_sentence_transformers_is_served(model: Path, cache: Path) -> None:
    server = Served(str(model))
    try:
        vectors = httpx.post(f"{server.url}/embed", json={"inputs": TEXTS}).json()
        models = [each["id"] for each in httpx.get(f"{server.url}/v1/models").json()["data"]]
    finally:
        server.close()
    expected = SentenceTransformer(str(model)).encode(TEXTS, normalize_embeddings=True)
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    assert models == ["my-model"]
    assert "a bundle is made of" in server.log
    again = checked(str(model))
    assert "my-model (default): '[X]', pooling mean" in again.stdout
    assert "is served as the bundle that was made of it" in again.stderr
    assert "making the graph" not in again.stderr


def test_a_changed_folder_is_another_model(model: Path, cache: Path, tmp_path: Path) -> None:
    changed = tmp_path / "my-model"
    shutil.copytree(model, changed)
    assert checked(str(changed)).returncode == 0
    os.utime(changed / "model.safetensors", (1, 1))
    assert "a bundle is made of" in checked(str(changed)).stderr
    assert len(list(cache.glob("*/my-model/embedding.json"))) == 2


def test_a_name_of_the_hub_is_a_model(
    model: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here from the hub's own cache, without a network."""
    repository = tmp_path / "hub" / "models--rain--my-model"
    shutil.copytree(model, repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40, encoding="utf-8")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = checked("rain/my-model")
    assert "my-model (default): '[X]', pooling mean" in found.stdout, found.stderr
    assert (cache / "hub" / "rain" / "my-model" / "embedding.json").is_file()


def test_what_cannot_be_had_ends_in_one_line_each(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = checked("rain/no-such-model")
    assert found.returncode == 2
    [_, reason, last] = found.stderr.splitlines()
    assert reason.startswith("error: 'rain/no-such-model' ")
    assert last.startswith("error: no bundle could be made of rain/no-such-model: the reason is above; give the folder")
    assert not list(cache.rglob("embedding.json"))


def test_without_torch_the_way_is_said(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adopted, "find_spec", lambda name: None)
    with pytest.raises(
        SessionError, match=r"needs torch: install `cloze\[train\]`, or run `cloze adopt .*my-model OUT`"
    ):
        bundle_of(model)


def test_bundles_and_what_is_unknown_stay_what_they_are(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bundle = write_bundle(tmp_path / "models" / "tiny")
    unknown = (tmp_path / "nowhere", Path("cloze-mini"), Path("a/b/c"), Path("-x/y"), Path("models/misspelt"))
    for path in (bundle, bundle.parent, *unknown):
        assert bundle_of(path) == path
    assert not cache.exists()
