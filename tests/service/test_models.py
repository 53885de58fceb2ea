"""Several models by name, and their change for others while requests go on: all of it or nothing."""

import asyncio
import errno
import gc
import logging
import os
import shutil
import signal
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import pytest
from harness import PATIENCE, Process, Serve, default_model, open_client, services, until, wait_until
from live import Background, Gate, embed, metrics, served, statuses, unit
from numpy.typing import NDArray
from tiny_bundle import OTHER, graph, not_finite, sequence, vector, write_bundle

from cloze.encoding.bundle import Bundle
from cloze.service.app import create_app
from cloze.service.errors import ModelNotFound
from cloze.service.http.request import RequestContext, lease
from cloze.service.inference.model import Model
from cloze.service.inference.session import Session
from cloze.service.monitoring.logs import RequestRecord
from cloze.service.settings import Settings

ADMIN = "an-admin-key-of-a-test"
HEADERS = {"authorization": f"Bearer {ADMIN}"}
TEXTS = ["a man", "two dogs run", "the guitar"]


def expected(seed: int = 0) -> NDArray[np.float32]:
    """What the tiny bundle of that seed gives for TEXTS."""
    return unit(np.stack([vector(sequence(text), seed=seed) for text in TEXTS]))


def assert_is(found: NDArray[np.float32], seed: int) -> None:
    np.testing.assert_allclose(found, expected(seed), atol=1e-5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of `tiny`, the default, and of `other`."""
    write_bundle(tmp_path / "bundles" / "tiny")
    write_bundle(tmp_path / "bundles" / "other", **OTHER)
    return tmp_path / "bundles"


@pytest.fixture
def settings(folder: Path) -> Settings:
    return Settings(bundle=folder, model="tiny", threads=1, max_batch_tokens=64, admin_keys=ADMIN)


def reload(url: str) -> tuple[int, dict[str, Any]]:
    response = httpx.post(f"{url}/admin/reload", headers=HEADERS, timeout=PATIENCE)
    return response.status_code, response.json()


def test_each_answers_by_its_name(settings: Settings) -> None:
    app = create_app(settings)
    assert list(services(app).models.served) == ["other", "tiny"]

    def found(path: str | None, *body: str | None) -> Model:
        with lease(RequestContext(services(app), RequestRecord("id"), path, frozenset()), *body) as model:
            return model

    assert found(None) is found(None, "") is found("tiny") is found(None, None, "tiny") is default_model(app)
    assert found("other") is found("other", "other") is not found("tiny")
    with pytest.raises(ModelNotFound, match="no model 'x' is served; the served models are other, tiny"):
        found("x")


def test_one_alone_is_the_default(folder: Path, settings: Settings) -> None:
    models = services(create_app(settings.model_copy(update={"bundle": folder / "other", "model": ""}))).models
    assert (list(models.served), models.default) == (["other"], "other")


def test_what_is_no_bundle_is_passed_over(folder: Path, settings: Settings) -> None:
    write_bundle(folder / ".hidden")
    (folder / "notes").mkdir()
    (folder / "README.md").write_text("two models")
    assert list(services(create_app(settings)).models.served) == ["other", "tiny"]


def test_what_cannot_be_entered_is_passed_over(
    folder: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The lost+found of a volume is root's; the tests may run as root, who may enter it."""
    is_file = Path.is_file

    def refused(path: Path) -> bool:
        if path.parent.name == "lost+found":
            raise PermissionError(errno.EACCES, "Permission denied")
        return is_file(path)

    (folder / "lost+found").mkdir()
    monkeypatch.setattr(Path, "is_file", refused)
    assert list(services(create_app(settings)).models.served) == ["other", "tiny"]
    assert f"skipped {folder / 'lost+found'}, which cannot be read" in caplog.text


def test_a_reload_of_what_is_the_same_does_nothing(settings: Settings) -> None:
    app = create_app(settings)
    before = list(services(app).models)
    with served(app) as url:
        found = {"added": [], "changed": [], "removed": [], "unchanged": ["other", "tiny"], "default": "tiny"}
        assert reload(url) == (200, found)
        assert list(services(app).models) == before
        assert metrics(url)["cloze_reloads_total{outcome=unchanged}"] == 1


def test_a_reload_adds_changes_and_removes(folder: Path, settings: Settings) -> None:
    with served(create_app(settings)) as url:
        assert_is(embed(url, TEXTS), seed=0)
        write_bundle(folder / "tiny", seed=5)
        write_bundle(folder / "new", seed=6)
        shutil.rmtree(folder / "other")
        assert_is(embed(url, TEXTS), seed=0)  # not before it is asked for
        found = {"added": ["new"], "changed": ["tiny"], "removed": ["other"], "unchanged": [], "default": "tiny"}
        assert reload(url) == (200, found)
        assert_is(embed(url, TEXTS), seed=5)
        assert_is(embed(url, TEXTS, "/models/new/embed"), seed=6)
        assert httpx.post(f"{url}/models/other/embed", json={"inputs": "a"}).status_code == 404
        assert httpx.get(f"{url}/info").json()["models"] == ["new", "tiny"]
        found = metrics(url)
        assert found["cloze_reloads_total{outcome=swapped}"] == 1
        assert found["cloze_model_loaded{model=new}"] == found["cloze_model_loaded{model=tiny}"] == 1
        assert not [name for name in found if "model=other" in name]
        assert len([name for name in found if name.startswith("cloze_model_info") and "model=tiny" in name]) == 1


def test_a_link_is_flipped(tmp_path: Path, settings: Settings) -> None:
    for version in (1, 2):
        write_bundle(tmp_path / "versions" / str(version), seed=version)
    link = tmp_path / "links" / "tiny"
    link.parent.mkdir()
    link.symlink_to(tmp_path / "versions" / "1")
    with served(create_app(settings.model_copy(update={"bundle": link.parent}))) as url:
        assert_is(embed(url, TEXTS), seed=1)
        new = link.with_name(".next")
        new.symlink_to(tmp_path / "versions" / "2")
        os.replace(new, link)
        assert reload(url)[1]["changed"] == ["tiny"]
        assert_is(embed(url, TEXTS), seed=2)


def test_two_reloads_at_once_are_one_after_the_other(folder: Path, settings: Settings) -> None:
    with served(create_app(settings)) as url:
        write_bundle(folder / "tiny", seed=5)
        both = [Background(lambda: reload(url)) for _ in range(2)]
        assert sorted(each.result[1]["changed"] for each in both) == [[], ["tiny"]]
        assert_is(embed(url, TEXTS), seed=5)


def alter_graph(bundle: Path) -> None:
    with (bundle / "onnx" / "model.onnx").open("ab") as file:
        file.write(b"x")


def no_operator() -> onnx.ModelProto:
    model = graph()
    model.graph.node[-1].op_type = "Nothing"
    return model


BREAKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file is missing": (lambda bundle: (bundle / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    "the graph fails": (lambda bundle: write_bundle(bundle, not_finite()), "the graph fails on 2 texts of 32 tokens"),
    "the graph is none": (lambda bundle: write_bundle(bundle, no_operator()), "model.onnx cannot be loaded"),
    "the default is gone": (shutil.rmtree, "model is 'tiny', but"),
}


@pytest.mark.parametrize("fault", list(BREAKS))
def test_a_bundle_that_cannot_be_served_changes_nothing(
    folder: Path, settings: Settings, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even what could be: a bundle that is new and good waits with the others."""
    break_it, words = BREAKS[fault]
    app = create_app(settings)
    before = list(services(app).models)
    with served(app) as url:
        info = httpx.get(f"{url}/info").json()
        write_bundle(folder / "new", seed=6)
        break_it(folder / "tiny")
        with caplog.at_level(logging.ERROR):
            status, body = reload(url)
        assert (status, body["error_type"]) == (409, "ReloadFailed")
        assert body["error"].startswith("the reload failed, and nothing has changed: ")
        assert words in body["error"]
        assert words in caplog.text
        assert list(services(app).models) == before
        assert_is(embed(url, TEXTS), seed=0)
        assert httpx.get(f"{url}/info").json() == info
        assert httpx.get(f"{url}/health/ready").status_code == 200
        assert metrics(url)["cloze_reloads_total{outcome=failed}"] == 1
        shutil.rmtree(folder / "tiny", ignore_errors=True)
        write_bundle(folder / "tiny", seed=5)  # mended
        assert reload(url)[0] == 200
        assert_is(embed(url, TEXTS), seed=5)


@pytest.mark.parametrize("where", ["cloze.encoding.bundle.sha256", "cloze.service.inference.models.Path.iterdir"])
def test_a_folder_that_cannot_be_read_is_told(
    where: str, settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def denied(path: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with served(create_app(settings)) as url:
        with monkeypatch.context() as patch:
            patch.setattr(where, denied)
            status, body = reload(url)
        assert (status, body["error_type"]) == (409, "ReloadFailed")
        assert "cannot be read (Permission denied)" in body["error"]
        assert "the reload failed, nothing has changed: " in caplog.text
        assert "Traceback" not in caplog.text
        assert metrics(url)["cloze_reloads_total{outcome=failed}"] == 1
        assert_is(embed(url, TEXTS), seed=0)


def copy_in_place(bundle: Path) -> None:
    """The first half of it, for the contract comes last."""
    onnx.save(graph(seed=7), bundle / "onnx" / "model.onnx")


@pytest.mark.parametrize("exchange", [lambda bundle: write_bundle(bundle, seed=7), copy_in_place])
def test_a_bundle_exchanged_while_it_is_loaded(
    exchange: Callable[[Path], object], folder: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its template would be the one's, its graph the other's."""
    load = Model

    def exchanged(bundle: Bundle, *arguments: Any) -> Model:
        exchange(bundle.path)
        return load(bundle, *arguments)

    with served(create_app(settings)) as url:
        write_bundle(folder / "tiny", seed=5)
        with monkeypatch.context() as patch:
            patch.setattr("cloze.service.app.Model", exchanged)
            status, body = reload(url)
        assert (status, body["error_type"]) == (409, "ReloadFailed")
        assert "tiny changed while it was loaded" in body["error"]
        assert_is(embed(url, TEXTS), seed=0)
        write_bundle(folder / "tiny", seed=7)
        assert reload(url)[0] == 200
        assert_is(embed(url, TEXTS), seed=7)


def test_a_bundle_removed_while_it_is_loaded(
    folder: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load = Session.load

    def removed(bundle: Bundle, **options: Any) -> Session:
        session = load(bundle, **options)
        shutil.rmtree(bundle.path)
        return session

    with served(create_app(settings)) as url:
        write_bundle(folder / "tiny", seed=5)
        with monkeypatch.context() as patch:
            patch.setattr(Session, "load", removed)
            status, body = reload(url)
        assert (status, body["error_type"]) == (409, "ReloadFailed")
        assert "tiny/config.json cannot be read (No such file or directory)" in body["error"]
        assert "Traceback" not in caplog.text
        assert_is(embed(url, TEXTS), seed=0)


def test_what_is_served_does_not_need_its_folder(folder: Path, settings: Settings) -> None:
    with served(create_app(settings)) as url:
        info = httpx.get(f"{url}/info").json()
        (folder / "tiny" / "onnx" / "model.onnx").write_bytes(b"overwritten")
        assert_is(embed(url, TEXTS), seed=0)
        shutil.rmtree(folder)
        assert_is(embed(url, TEXTS), seed=0)
        assert httpx.get(f"{url}/info").json() == info
        assert [model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]] == ["other", "tiny"]
        assert reload(url)[0] == 409
        assert_is(embed(url, TEXTS), seed=0)


def test_a_request_that_has_begun_ends_on_the_model_that_it_began_with(folder: Path, settings: Settings) -> None:
    app = create_app(settings)
    former = default_model(app)
    with served(app) as url:
        gate = Gate(former.session)
        begun = Background(lambda: embed(url, TEXTS * 4))
        wait_until(lambda: gate.batches)
        write_bundle(folder / "tiny", seed=5)
        reloading = Background(lambda: reload(url))
        wait_until(lambda: gate.let(1) or default_model(app) is not former)
        later = Background(lambda: embed(url, TEXTS))
        gate.let()
        assert_is(begun.result[-3:], seed=0)
        np.testing.assert_allclose(begun.result, np.tile(begun.result[:3], (4, 1)), atol=1e-6)
        assert_is(later.result, seed=5)
        assert reloading.result[0] == 200


@pytest.mark.anyio
async def test_the_former_model_leaves_no_memory_behind(
    folder: Path, settings: Settings, request: pytest.FixtureRequest
) -> None:
    """At once: Python's own collections of garbage, which are rare, are off."""
    gc.disable()
    request.addfinalizer(gc.enable)
    app = create_app(settings)
    async with open_client(app) as http:
        await http.post("/embed", json={"inputs": TEXTS})
        await http.post("/models/other/embed", json={"inputs": TEXTS})
        former = [weakref.ref(each) for model in services(app).models for each in (model, model.session, model.bundle)]
        write_bundle(folder / "tiny", seed=5)
        shutil.rmtree(folder / "other")
        assert (await http.post("/admin/reload", headers=HEADERS)).status_code == 200
        await http.get("/metrics")
        await until(lambda: not any(each() for each in former))


@pytest.mark.anyio
async def test_a_failed_reload_leaves_no_memory_behind(
    folder: Path, settings: Settings, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was loaded before the bundle that cannot be served is freed, and before it nothing but graphs is loaded."""
    gc.disable()
    request.addfinalizer(gc.enable)
    made: list[weakref.ref[Model]] = []
    warm_up = Model.warm_up

    def noted(model: Model) -> None:
        made.append(weakref.ref(model))
        warm_up(model)

    app = create_app(settings)
    async with open_client(app) as http:
        monkeypatch.setattr(Model, "warm_up", noted)
        write_bundle(folder / "new", seed=6)
        write_bundle(folder / "tiny", not_finite())
        assert (await http.post("/admin/reload", headers=HEADERS)).status_code == 409
        assert len(made) == 2
        await until(lambda: not any(each() for each in made))
        alter_graph(folder / "tiny")  # is found before a graph is loaded
        assert (await http.post("/admin/reload", headers=HEADERS)).status_code == 409
        assert len(made) == 2


class Load:
    """Clients that send until `stop`. Each answer is of one model, never of an earlier one than a previous answer."""

    def __init__(self, url: str, allowed: dict[int, NDArray[np.float32]]) -> None:
        self.url = url
        self.allowed = {seed: np.tile(rows, (5, 1)) for seed, rows in allowed.items()}
        self.served = 0  # the seed that every request sent from now on meets, or a later one
        self.sent = 0
        self.answered: Counter[int] = Counter()
        self.stop = asyncio.Event()

    async def client(self) -> None:
        async with httpx.AsyncClient(timeout=PATIENCE) as http:
            while not self.stop.is_set():
                self.sent += 1
                least = self.served
                response = await http.post(f"{self.url}/embed", json={"inputs": TEXTS * 5})
                assert response.status_code == 200, response.text
                found = np.array(response.json(), dtype=np.float32)
                (seed,) = (seed for seed, rows in self.allowed.items() if np.allclose(found, rows, atol=1e-5))
                assert seed >= least
                self.answered[seed] += 1
                self.served = max(self.served, seed)


async def change(process: Process, folder: Path, load: Load, by_signal: bool) -> None:
    """A new model each time."""
    async with httpx.AsyncClient(timeout=PATIENCE) as http:
        for seed in (1, 2, 3, 4):
            await asyncio.to_thread(write_bundle, folder / "tiny", seed=seed)
            if by_signal:
                process.process.send_signal(signal.SIGHUP)
            else:
                response = await http.post(f"{process.url}/admin/reload", headers=HEADERS)
                assert response.json()["changed"] == ["tiny"], response.text
                load.served = seed
            await until(lambda seed=seed: load.answered[seed] > 10)


@pytest.mark.parametrize("by_signal", [False, True])
def test_reloads_under_load_lose_and_mix_nothing(serve: Serve, folder: Path, by_signal: bool) -> None:
    process = serve("--bundle", str(folder), "--model", "tiny", "--threads", "1", "--admin-keys", ADMIN)

    async def run() -> Load:
        load = Load(process.url, {seed: expected(seed) for seed in range(5)})
        clients = [asyncio.create_task(load.client()) for _ in range(8)]
        await until(lambda: load.answered[0] > 10)
        await change(process, folder, load, by_signal)
        load.stop.set()
        await asyncio.gather(*clients)
        return load

    load = asyncio.run(run())
    assert load.sent == load.answered.total()
    assert statuses(process.url) == {200: load.sent}  # none refused, none lost
    found = metrics(process.url)
    assert found["cloze_reloads_total{outcome=swapped}"] == 4
    assert found["cloze_texts_total{model=tiny}"] == 15 * load.sent
    assert process.end(signal.SIGTERM) == 0
    assert process.log.count("reloaded in") == 4
    assert "Traceback" not in process.log


def test_the_log_joins_a_text_that_failed_to_its_request(serve: Serve, folder: Path) -> None:
    """And not to the reload that brought the model."""
    options = ["--threads", "1", "--admin-keys", ADMIN, "--log-level", "debug"]
    process = serve("--bundle", str(folder), "--model", "tiny", *options)
    write_bundle(folder / "tiny", seed=5)
    with httpx.Client(base_url=process.url, timeout=PATIENCE) as http:
        assert http.post("/admin/reload", headers=HEADERS | {"x-request-id": "reload"}).json()["changed"] == ["tiny"]
        texts = {"inputs": ["a man", "poison"]}
        assert http.post("/embed", json=texts, headers={"x-request-id": "failed"}).status_code == 424
    assert process.end(signal.SIGTERM) == 0
    (failed,) = (line for line in process.log.splitlines() if "an item failed" in line)
    (halved,) = (line for line in process.log.splitlines() if "a batch of 2 failed and is halved" in line)
    assert failed.endswith(" request_id=failed")
    assert "request_id" not in halved


def test_a_signal_whose_reload_fails_changes_nothing(serve: Serve, folder: Path) -> None:
    process = serve("--bundle", str(folder), "--model", "tiny", "--threads", "1")
    alter_graph(folder / "tiny")
    process.process.send_signal(signal.SIGHUP)
    wait_until(lambda: metrics(process.url)["cloze_reloads_total{outcome=failed}"] == 1)
    assert_is(embed(process.url, TEXTS), seed=0)
    assert process.end(signal.SIGTERM) == 0
    assert "the reload failed, nothing has changed" in process.log
    assert "Traceback" not in process.log
