"""Models of the hub, from a stand-in: what is fetched, and what each failure says."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import TOKEN, Hub, commit_of, hub_server
from huggingface_hub import constants

from cloze.adoption.hub import HubError, explain_hub_error, fetch, model_folder
from cloze.training.errors import EncoderError
from cloze.training.model.encoder import SentenceEncoder

FILES = ("modules.json", "1_Pooling/config.json", "2_Dense/model.safetensors", "tokenizer.json", "model.safetensors")
LEFT = (
    "modeling.py",
    "openvino/openvino_model.xml",
    "checkpoint-9/model.safetensors",
    "tf_model.h5",
    "pytorch_model.bin",
)
DENSE = "2_Dense/pytorch_model.bin"  # which may have no other weights than these
GRAPHS = ("onnx/model.onnx", "onnx/model_O4.onnx", "onnx/model.onnx_data")


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with hub_server() as server:
        for revision in ("main", "v1"):
            folder = tmp_path_factory.mktemp(revision)
            for name in (*FILES, DENSE, *LEFT, *GRAPHS):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(f"{revision}: {name}", encoding="utf-8")
            server.folders.setdefault("rain/model", {})[revision] = folder
        pickled = tmp_path_factory.mktemp("pickled")
        for name in ("config.json", "pytorch_model.bin", "training_args.bin"):
            (pickled / name).write_text(name, encoding="utf-8")
        server.folders["rain/pickled"] = {"main": pickled}
        server.folders["rain/private"] = server.folders["rain/gated"] = server.folders["rain/model"]
        server.private.add("rain/private")
        server.gated.add("rain/gated")
        yield server


@pytest.fixture(autouse=True)
def home(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The client reads its variables once, when it is imported."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    use(hub.url, monkeypatch)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return cache


def use(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + template[template.index("/{repo_id}") :])


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_configuration_and_weights_are_fetched_and_no_code(hub: Hub) -> None:
    assert names(fetch("rain/model")) == {*FILES, DENSE}
    assert not any(path.endswith(".py") for path in hub.asked)


def test_the_graph_is_fetched_instead_of_the_weights() -> None:
    weights = {"model.safetensors"}
    assert names(fetch("rain/model", graph=True)) == {*FILES, "onnx/model.onnx", "onnx/model.onnx_data"} - weights


def test_weights_of_torch_are_fetched_where_there_are_no_others() -> None:
    assert names(fetch("rain/pickled")) == {"config.json", "pytorch_model.bin"}


def test_a_revision_is_a_branch_or_a_commit(hub: Hub) -> None:
    for revision in ("v1", commit_of(hub.folders["rain/model"]["v1"])):
        assert (fetch("rain/model", revision) / "modules.json").read_text() == "v1: modules.json"
    assert (fetch("rain/model") / "modules.json").read_text() == "main: modules.json"


def test_what_was_fetched_is_there_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch("rain/model")
    use("http://127.0.0.1:9", monkeypatch)
    assert fetch("rain/model") == folder
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch("rain/model") == folder
    with pytest.raises(HubError, match="is not complete in the local cache"):
        fetch("rain/model", graph=True)


def test_a_token_opens_a_private_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert names(fetch("rain/private")) == names(fetch("rain/gated")) == {*FILES, DENSE}


UNKNOWN = (
    "or it is private, and there is no folder of that name; check the name, or set HF_TOKEN to a token that may read it"
)
FAILURES = {
    "rain/none": f"{{url}} has no repository rain/none, {UNKNOWN}",
    "rain/private": f"{{url}} has no repository rain/private, {UNKNOWN}",
    "rain/gated": "rain/gated is gated at {url}; accept its terms at {url}/rain/gated, and set HF_TOKEN to your token",
    "rain model/": "'rain model/' is not a valid name on the hub, and there is no such folder; give NAME, OWNER/NAME "
    "or a folder",
    "rain/model": "rain/model has no revision 'v9' at {url}; name a branch, a tag or a commit",
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_one_line_with_the_next_step(name: str, hub: Hub) -> None:
    with pytest.raises(HubError) as failure:
        fetch(name, "v9" if name == "rain/model" else None)
    assert str(failure.value) == FAILURES[name].format(url=hub.url)


@pytest.mark.parametrize("name", ["rain/none", "rain/private", "rain/gated"])
def test_an_encoder_of_training_fails_with_the_same_line(name: str, hub: Hub) -> None:
    """There transformers asks the hub, by huggingface_hub."""
    with pytest.raises(EncoderError) as failure:
        SentenceEncoder.load(name, template="[X]", pooling="mean")
    own = "; or give cloze-mini, the model that comes with Cloze"
    assert str(failure.value) == FAILURES[name].format(url=hub.url) + own


def test_an_encoder_of_a_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    use("http://127.0.0.1:9", monkeypatch)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)  # before it tries again
    with pytest.raises(EncoderError, match=r"^the hub http://127\.0\.0\.1:9 could not be reached for rain/model \("):
        SentenceEncoder.load("rain/model", template="[X]", pooling="mean")


def test_a_hub_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    use("http://127.0.0.1:9", monkeypatch)
    with pytest.raises(
        HubError,
        match=r"^the hub http://127\.0\.0\.1:9 could not be reached for rain/model \(.*\), and there is no folder of "
        "that name; check the network and HF_ENDPOINT, or give a folder$",
    ):
        fetch("rain/model")


def test_offline_mode_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError) as failure:
        fetch("rain/model")
    assert str(failure.value) == (
        f"rain/model is not complete in the local cache {home}, and HF_HUB_OFFLINE is set; unset it, or give a folder"
    )


def test_a_cache_that_cannot_be_written_is_one_line(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.write_text("a file, in which no folder can be made", encoding="utf-8")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "cache"))
    with pytest.raises(
        HubError, match=rf"{home}.* cannot be written \(Not a directory\).*; set HF_HOME to a writable folder"
    ):
        fetch("rain/model")


def test_folders_are_not_fetched(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(hub.folders["rain/model"]["main"], tmp_path / "model")
    before = len(hub.asked)
    assert model_folder(str(tmp_path / "model")) == tmp_path / "model"
    with pytest.raises(HubError, match="nowhere' is not a folder; give the folder of a model, or its name on the hub"):
        model_folder(str(tmp_path / "nowhere"))
    with pytest.raises(HubError, match=r"--revision is 'v1', but .*model is a folder: omit --revision"):
        model_folder(str(tmp_path / "model"), "v1")
    monkeypatch.chdir(tmp_path)
    assert (model_folder("cloze-mini") / "embedding.json").is_file()
    with pytest.raises(HubError, match="'model/misspelt' is not a folder"):
        model_folder("model/misspelt")
    assert len(hub.asked) == before


def test_other_errors_are_not_the_hubs() -> None:
    assert explain_hub_error(ValueError("of a file"), "rain/model") is None
