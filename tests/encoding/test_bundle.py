"""Bundles: written whole or not at all, and read only where every file is the one that was exported."""

import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloze.encoding import bundle as bundles
from cloze.encoding.bundle import (
    GRAPHS,
    SPEC_FILE,
    Bundle,
    EmbeddingConfig,
    Provenance,
    changing,
    default_bundle,
    load_to_change,
    locate,
    seal,
    sha256,
    staging,
)
from cloze.encoding.errors import BundleError
from cloze.encoding.text import TOKENIZER_FILES

READING = EmbeddingConfig(
    template='This sentence of "[X]" means [MASK].', pooling="mask", max_tokens=32, final_period=False, denoising=False
)
PROVENANCE = Provenance(
    parent="tiny", recipe={"method": "distill"}, data=[], commit=None, seeds=[1], scores={}, parity={"fp32": 0.0}
)
WEIGHTS = "0" * 64
FILES = ("config.json", *TOKENIZER_FILES, "README.md", GRAPHS["int8"])


@pytest.fixture
def bundle(tmp_path: Path, tiny_bert: Path) -> Path:
    out = tmp_path / "bundle"
    with staging(out) as folder:
        fill(folder, tiny_bert)
    return out


def fill(folder: Path, tiny_bert: Path, graph: bytes = b"graph") -> None:
    for name in ("config.json", *TOKENIZER_FILES):
        shutil.copyfile(tiny_bert / name, folder / name)
    (folder / "README.md").write_text("# tiny\n")
    (folder / "onnx").mkdir()
    (folder / GRAPHS["int8"]).write_bytes(graph)
    seal(folder, READING, 32, WEIGHTS, PROVENANCE)


def change(bundle: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((bundle / SPEC_FILE).read_text())
    edit(content)
    (bundle / SPEC_FILE).write_text(json.dumps(content))


def test_loads_what_was_sealed(bundle: Path) -> None:
    loaded = Bundle.load(bundle)
    assert loaded.name == "bundle"
    assert loaded.spec.provenance == PROVENANCE
    assert loaded.spec.dimension == 32
    assert loaded.spec.files == {name: sha256(bundle / name) for name in FILES}
    assert loaded.text_encoder.max_tokens == 32
    assert loaded.precisions == ("int8",)
    assert loaded.graph("int8") == bundle / GRAPHS["int8"]


TEMPLATES = {"query": 'This query "[X]" means [MASK].', "document": 'This text : "[X]" means [MASK].'}


def named(bundle: Path, **fields: object) -> Bundle:
    change(bundle, lambda content: content.update(fields))
    return Bundle.load(bundle)


def test_named_templates_share_the_tokenizer_and_the_limit(bundle: Path) -> None:
    loaded = named(bundle, templates=TEMPLATES)
    assert set(loaded.named) == {"query", "document"}
    for name, encoder in loaded.named.items():
        assert str(encoder.template) == TEMPLATES[name]
        assert (encoder.mask_index, encoder.max_tokens) == (loaded.text_encoder.mask_index, 32)
        alone = loaded.spec.model_copy(update={"template": TEMPLATES[name]}).text_encoder(bundle)
        assert encoder.encode(["two dogs", "", "[MASK] rain " * 40]) == alone.encode(
            ["two dogs", "", "[MASK] rain " * 40]
        )
    assert str(loaded.text_encoder.template) == READING.template


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"templates": {"query": "[X]"}}, r"\[MASK\] 0 times"),
        ({"templates": {"query": "[X] means [MASK] here."}}, r"template query .* at position -4"),
        ({"templates": {"query": "This [MASK] : [X]"}}, "the same words between"),
        (
            {"templates": TEMPLATES, "denoising": True},
            "the bundle cannot have another template; export without denoising",
        ),
        ({"templates": {"query": f"{'this ' * 40}[X] means [MASK]."}}, "raise max_tokens"),
    ],
)
def test_a_named_template_that_cannot_be_used_is_refused(bundle: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BundleError, match=message):
        named(bundle, **fields)


def test_the_space_changes_with_all_that_decides_a_vector(bundle: Path) -> None:
    spec = Bundle.load(bundle).spec
    changes: dict[str, Any] = {
        "weights": "1" * 64,
        "template": 'This sentence of "[X]" means [MASK]!',
        "templates": TEMPLATES,
        "final_period": True,
        "denoising": True,
        "pooling": "cls",
        "dimension": 16,
        "files": spec.files | {"tokenizer.json": "1" * 64},
    }
    spaces = {spec.space, *(spec.model_copy(update={name: value}).space for name, value in changes.items())}
    assert len(spaces) == 1 + len(changes)
    assert all(len(space) == 16 for space in spaces)
    graph = spec.model_copy(update={"files": spec.files | {GRAPHS["int8"]: "1" * 64}})
    assert graph.space == spec.space, "a graph of another precision, or quantised again, is in the same space"


def test_a_precision_that_is_not_there_is_named(bundle: Path) -> None:
    with pytest.raises(BundleError, match=r"no fp32 graph, only int8.*--precision fp32"):
        Bundle.load(bundle).graph("fp32")


def test_an_altered_or_missing_file_is_named_with_the_command(bundle: Path) -> None:
    for name in FILES:
        content = (bundle / name).read_bytes()
        (bundle / name).write_bytes(content + b" ")
        with pytest.raises(BundleError, match=rf"{name} is not the file that was exported.*cloze export"):
            Bundle.load(bundle)
        (bundle / name).unlink()
        with pytest.raises(BundleError, match=rf"{name} is missing.*cloze export RUN OUT"):
            Bundle.load(bundle)
        (bundle / name).write_bytes(content)


def test_every_required_file_must_be_listed(bundle: Path) -> None:
    listed = Bundle.load(bundle).spec.files
    for name in FILES[:-1]:
        change(bundle, lambda content, name=name: content.update(files={k: v for k, v in listed.items() if k != name}))
        with pytest.raises(BundleError, match=f"does not list {name}"):
            Bundle.load(bundle)


def test_a_bundle_without_a_graph_does_not_load(bundle: Path) -> None:
    change(bundle, lambda content: content["files"].pop(GRAPHS["int8"]))
    with pytest.raises(BundleError, match="holds no graph"):
        Bundle.load(bundle)


def test_without_the_contract_it_is_no_bundle(bundle: Path, tmp_path: Path) -> None:
    (bundle / SPEC_FILE).unlink()
    with pytest.raises(BundleError, match="not a finished bundle"):
        Bundle.load(bundle)
    with pytest.raises(BundleError, match="is not a folder"):
        Bundle.load(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["{", "\xff", "[" * 100_000])
def test_a_torn_contract_is_named(bundle: Path, text: str) -> None:
    (bundle / SPEC_FILE).write_bytes(text.encode("latin-1"))
    with pytest.raises(BundleError, match=r"embedding\.json cannot be read .*cloze export"):
        Bundle.load(bundle)


@pytest.mark.parametrize("version", [4, "3"])
def test_another_version_is_refused(bundle: Path, version: object) -> None:
    change(bundle, lambda content: content.update(format_version=version))
    with pytest.raises(BundleError, match=r"format_version .* reads 3; export again"):
        Bundle.load(bundle)


@pytest.mark.parametrize("version", [1, 2])
def test_former_versions_are_read(bundle: Path, version: int) -> None:
    """Version 1 called the pooling otherwise; neither had named templates or the weights' digest."""
    spec = Bundle.load(bundle).spec

    def downgrade(content: dict[str, Any]) -> None:
        del content["templates"], content["weights"]
        content["format_version"] = version
        if version == 1:
            content["read_out"] = content.pop("pooling")

    change(bundle, downgrade)
    found = Bundle.load(bundle).spec
    assert found == spec.model_copy(update={"weights": found.weights})
    assert found.weights != spec.weights


def test_a_file_that_may_not_be_read_is_named(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("cloze.encoding.bundle.sha256", denied)
    with pytest.raises(BundleError, match=r"config\.json cannot be read \(Permission denied\); give the user"):
        Bundle.load(bundle)


def test_a_path_that_the_system_refuses_is_told(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="xxx"):
        Bundle.load(tmp_path / ("x" * 300))


def test_a_list_is_no_contract(bundle: Path) -> None:
    (bundle / SPEC_FILE).write_text("[]")
    with pytest.raises(BundleError, match="format_version None"):
        Bundle.load(bundle)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("colour", "blue"),
        ("max_tokens", "32"),
        ("inputs", ["input_ids"]),
    ],
)
def test_a_wrong_or_unknown_key_is_named(bundle: Path, key: str, value: object) -> None:
    change(bundle, lambda content: content.update({key: value}))
    with pytest.raises(BundleError, match=rf"embedding\.json, {key}"):
        Bundle.load(bundle)


def test_a_missing_key_is_named(bundle: Path) -> None:
    change(bundle, lambda content: content.pop("template"))
    with pytest.raises(BundleError, match=r"embedding\.json, template"):
        Bundle.load(bundle)


def test_a_template_that_does_not_fit_its_pooling_is_refused(bundle: Path) -> None:
    change(bundle, lambda content: content.update(pooling="mean"))
    with pytest.raises(BundleError, match=r"embedding\.json.*remove \[MASK\]"):
        Bundle.load(bundle)


@pytest.mark.parametrize("name", ["/etc/hostname", "onnx/../../secret"])
def test_a_file_outside_the_bundle_is_refused(bundle: Path, name: str) -> None:
    (bundle.parent / "secret").write_text("x")
    change(bundle, lambda content: content["files"].update({name: "0" * 64}))
    with pytest.raises(BundleError, match="is outside the bundle"):
        Bundle.load(bundle)


def alter_in_place(bundle: Path) -> None:
    (bundle / GRAPHS["int8"]).write_bytes(b"other")
    os.utime(bundle / GRAPHS["int8"], (1, 1))


@pytest.mark.parametrize(
    "alter",
    [
        alter_in_place,
        lambda bundle: (bundle / "tokenizer.json").write_bytes(b"longer" * 10_000),
        lambda bundle: change(bundle, lambda content: content.update(max_tokens=31)),
    ],
)
def test_what_changes_after_it_was_read_is_seen(bundle: Path, alter: Callable[[Path], object]) -> None:
    loaded = Bundle.load(bundle)
    assert loaded.unchanged()
    alter(bundle)
    assert not loaded.unchanged()


def test_what_is_removed_after_it_was_read_is_told(bundle: Path) -> None:
    loaded = Bundle.load(bundle)
    sealed = int((bundle / SPEC_FILE).stat().st_mtime)
    shutil.rmtree(bundle)
    assert loaded.created == sealed
    with pytest.raises(BundleError, match=r"config\.json cannot be read"):
        loaded.unchanged()


def test_a_bundle_that_was_replaced_meanwhile_is_not_altered(bundle: Path, tiny_bert: Path) -> None:
    loaded = Bundle.load(bundle)
    with staging(bundle) as folder:
        fill(folder, tiny_bert, b"another graph")
    with pytest.raises(BundleError, match="was replaced after it was read; run the command again"), changing(loaded):
        pass
    assert (bundle / GRAPHS["int8"]).read_bytes() == b"another graph"


def test_files_of_others_stay_in_an_altered_bundle_and_are_not_its_own(bundle: Path, tmp_path: Path) -> None:
    (bundle / ".git" / "refs").mkdir(parents=True)
    (bundle / ".git" / "refs" / "main").write_text("1")
    (bundle / "dangling").symlink_to(tmp_path / "nowhere")
    (bundle / "notes.txt").write_text("mine")
    with changing(Bundle.load(bundle)) as folder:
        (folder / "calibration.json").write_text("{}")
        (folder / "README.md").write_text("# altered\n")
    found = Bundle.load(bundle)
    assert set(found.spec.files) == {*FILES, "calibration.json"}
    assert (bundle / ".git" / "refs" / "main").read_text() == "1"
    assert (bundle / "notes.txt").read_text() == "mine"
    assert (bundle / "dangling").is_symlink()
    (bundle / ".git" / "refs" / "main").write_text("2")
    assert Bundle.load(bundle).spec == found.spec


def test_files_of_others_stay_beside_a_new_bundle(bundle: Path, tiny_bert: Path) -> None:
    """As of a clone of git, in which a model is exported again."""
    (bundle / ".git" / "refs" / "heads").mkdir(parents=True)  # empty, as when the refs are packed
    for name in (".git/packed-refs", "notes.txt"):
        (bundle / name).write_text("mine")
    for damaged in (False, True):
        if damaged:
            (bundle / SPEC_FILE).write_text('{"files": 3}')
        with staging(bundle) as folder:
            fill(folder, tiny_bert, b"new")
        assert Bundle.load(bundle).graph("int8").read_bytes() == b"new"
        assert (bundle / ".git" / "packed-refs").read_text() == "mine"
        assert (bundle / ".git" / "refs" / "heads").is_dir()
        assert (bundle / "notes.txt").exists() != damaged  # it may belong to the bundle


def test_a_half_written_bundle_never_appears(tmp_path: Path, tiny_bert: Path) -> None:
    out = tmp_path / "bundle"

    def fail() -> None:
        with staging(out) as folder:
            fill(folder, tiny_bert)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_failure_leaves_the_former_bundle(bundle: Path, tiny_bert: Path) -> None:
    def fail() -> None:
        with staging(bundle) as folder:
            fill(folder, tiny_bert, b"new")
            raise ValueError("late")

    with pytest.raises(ValueError, match="late"):
        fail()
    assert Bundle.load(bundle).graph("int8").read_bytes() == b"graph"
    assert [path.name for path in bundle.parent.iterdir()] == ["bundle"]


def test_a_bundle_that_cannot_be_moved_leaves_the_former_one(
    bundle: Path, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def refused(path: Path, target: Path) -> Path:
        if path.name == "new":
            raise PermissionError("busy")
        return rename(path, target)

    monkeypatch.setattr(bundles, "exchange", lambda *_: False)  # a file system that cannot

    def replace() -> None:
        with staging(bundle) as folder:
            fill(folder, tiny_bert, b"new")
            monkeypatch.setattr(Path, "rename", refused)

    with pytest.raises(PermissionError, match="busy"):
        replace()
    assert Bundle.load(bundle).graph("int8").read_bytes() == b"graph"
    assert [path.name for path in bundle.parent.iterdir()] == ["bundle"]


def test_a_mount_point_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mount").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "mount")
    message = "mount is a mount point, which cannot be replaced; name a folder in it"
    with pytest.raises(BundleError, match=message), staging(tmp_path / "mount"):
        raise AssertionError


def test_the_bundle_of_the_installation_is_not_altered(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundles, "default_bundle", lambda: bundle)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BundleError, match=rf"cloze-mini is part of the installation.*: cp -r {bundle} my-cloze-mini"):
        load_to_change("cloze-mini")
    assert load_to_change(bundle).path == bundle


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there are two renames")
def test_there_is_a_whole_bundle_at_any_time(bundle: Path, tiny_bert: Path) -> None:
    """Another thread opens the contract all the time, while the bundle is replaced."""
    missing, ended = list[OSError](), threading.Event()

    def read() -> None:
        while not ended.is_set():
            try:
                (bundle / SPEC_FILE).read_bytes()
            except OSError as error:
                missing.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(30):
        with staging(bundle) as folder:
            fill(folder, tiny_bert, f"graph {number}".encode())
    ended.set()
    reader.join()
    assert missing == []
    assert Bundle.load(bundle).graph("int8").read_bytes() == b"graph 29"


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_bundle_is_replaced_whole(
    bundle: Path, tiny_bert: Path, can_exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_exchange:
        monkeypatch.setattr(bundles, "exchange", lambda *_: False)
    with changing(Bundle.load(bundle)) as folder:
        (folder / "calibration.json").write_text("{}")
    with staging(bundle) as folder:
        fill(folder, tiny_bert, b"new")
    assert Bundle.load(bundle).graph("int8").read_bytes() == b"new"
    assert not (bundle / "calibration.json").exists()
    assert [path.name for path in bundle.parent.iterdir()] == ["bundle"]


def test_an_empty_folder_is_filled_and_any_other_is_left_alone(tmp_path: Path, tiny_bert: Path) -> None:
    empty, other, file = tmp_path / "empty", tmp_path / "other", tmp_path / "file"
    empty.mkdir()
    with staging(empty) as folder:
        fill(folder, tiny_bert)
    assert Bundle.load(empty)
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    file.write_text("x")
    for target in (other, file):
        with pytest.raises(BundleError, match="exists and is not a bundle"), staging(target):
            pytest.fail("work would be lost")
    assert (other / "thesis.txt").read_text() == "years of work"


def test_where_no_folder_can_be_the_message_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    target = tmp_path / "file" / "bundle"
    with pytest.raises(BundleError, match=r"bundle cannot be made .*; choose another folder"), staging(target):
        pytest.fail("work would be lost")


def test_parents_are_made(tmp_path: Path, tiny_bert: Path) -> None:
    with staging(tmp_path / "a" / "b") as folder:
        fill(folder, tiny_bert)
    assert Bundle.load(tmp_path / "a" / "b")


def test_the_contract_is_written_last(tmp_path: Path, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise OSError("power cut")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="power cut"):
        fill(tmp_path, tiny_bert)
    with pytest.raises(BundleError, match="not a finished bundle"):
        Bundle.load(tmp_path)


def test_the_default_is_found_by_its_name_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert locate("cloze-mini") == default_bundle() == Path(__file__).parents[2] / "models" / "cloze-mini"
    assert locate("other") == Path("other")
    assert Bundle.load("cloze-mini").name == "cloze-mini"
    Path("cloze-mini").mkdir()
    assert locate("cloze-mini") == Path("cloze-mini")  # the user's own


def test_an_installation_without_the_default_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cloze.encoding.bundle.default_bundle", lambda: None)
    with pytest.raises(BundleError, match="cloze-mini is not part of this installation; name the folder of a bundle"):
        Bundle.load("cloze-mini")
    assert locate("other") == Path("other")
