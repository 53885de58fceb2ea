"""Reloads while requests are in flight, and reloads and starts that hang: no request is lost, and no hang is unseen."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from harness import PATIENCE, ROOT, Serve, services, until, wait_until
from live import Background, embed, metrics, served, statuses, unit
from numpy.typing import NDArray
from tiny_bundle import sequence, vector, write_bundle

from cloze.encoding.bundle import Bundle
from cloze.service.app import create_app
from cloze.service.http import embed as embed_route
from cloze.service.inference import session
from cloze.service.inference.health import HUNG
from cloze.service.inference.session import Session
from cloze.service.settings import Settings

ADMIN = "an-admin-key-of-a-test"
HEADERS = {"authorization": f"Bearer {ADMIN}"}
TEXTS = ["a man", "two dogs run", "the guitar"]
LONG = "a man plays the guitar, two dogs run. " * 4
VERSIONS = 4  # bundles that take turns

ROADS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("/embed", {"inputs": TEXTS}),
    "by path": ("/models/tiny/embed", {"inputs": TEXTS}),
    "either": ("/", {"inputs": TEXTS}),
    "chunks": ("/embed", {"inputs": [LONG, "a man"], "chunk": {"tokens": 6, "overlap": 2}}),
    "mean of chunks": ("/embed", {"inputs": [LONG], "chunk": {"tokens": 6, "mean": True}}),
    "search": ("/search", {"query": "a man", "texts": TEXTS}),
    "similarity": ("/similarity", {"inputs": {"source_sentences": TEXTS, "sentences": TEXTS[1:]}}),
    "labels": ("/predict", {"inputs": [[text] for text in TEXTS], "raw_scores": True}),
    "OpenAI": ("/v1/embeddings", {"input": TEXTS}),
    "Cohere": ("/v2/embed", {"texts": TEXTS, "input_type": "search_query"}),
    "token ids": ("/embed", {"inputs": [[9, 10], [11]]}),
}


def numbers(value: Any) -> list[float]:
    """Every number of a JSON value, in order."""
    if isinstance(value, dict):
        return [
            number
            for key, each in value.items()
            if key not in ("id", "label", "usage", "meta")
            for number in numbers(each)
        ]
    if isinstance(value, list):
        return [number for each in value for number in numbers(each)]
    return [float(value)] if isinstance(value, int | float) else []


def expected(seed: int) -> NDArray[np.float32]:
    return unit(np.stack([vector(sequence(text), seed=seed) for text in TEXTS]))


class Bundles:
    """Bundles of several seeds; a link names the one that is served after the next reload."""

    def __init__(self, folder: Path) -> None:
        self.served, self._versions = folder / "served", folder / "versions"
        self.served.mkdir(parents=True)
        for seed in range(VERSIONS):
            write_bundle(self._versions / str(seed), seed=seed)
        self.choose(0)

    def choose(self, seed: int) -> None:
        self.link(self._versions / str(seed))

    def link(self, bundle: Path) -> None:
        new = self.served / ".next"
        new.symlink_to(bundle)
        os.replace(new, self.served / "tiny")


@pytest.fixture
def bundles(tmp_path: Path) -> Bundles:
    return Bundles(tmp_path)


def reload(url: str) -> httpx.Response:
    return httpx.post(f"{url}/admin/reload", headers=HEADERS, timeout=PATIENCE)


@contextmanager
def running(bundles: Bundles) -> Iterator[tuple[str, Any]]:
    """The address of a service of the bundles, and its models."""
    app = create_app(Settings(bundle=bundles.served, provider="cpu", threads=1, admin_keys=ADMIN))
    with served(app) as url:
        yield url, services(app).models


def test_a_request_whose_text_is_being_cut_ends_on_its_model(bundles: Bundles, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has chosen its model, and has not embedded anything, while the model is replaced."""
    cutting, free, chunked = threading.Event(), threading.Event(), embed_route.chunked

    def held(*arguments: Any) -> Any:
        cutting.set()
        assert free.wait(PATIENCE)
        return chunked(*arguments)

    path, body = ROADS["chunks"]
    with running(bundles) as (url, models):
        before = httpx.post(url + path, json=body, timeout=PATIENCE).json()
        (former,) = models
        with monkeypatch.context() as patch:
            patch.setattr(embed_route, "chunked", held)
            begun = Background(lambda: httpx.post(url + path, json=body, timeout=PATIENCE))
            assert cutting.wait(PATIENCE)
            bundles.choose(1)
            assert reload(url).json()["changed"] == ["tiny"]
            np.testing.assert_allclose(embed(url, TEXTS), expected(1), atol=1e-5)
            free.set()
            assert begun.result.status_code == 200, begun.result.text
        np.testing.assert_allclose(numbers(begun.result.json()), numbers(before), atol=1e-5)
        wait_until(lambda: not former.batcher._tasks)  # it has stopped after its last lease


class Load:
    """Clients of every road. Each response is of a model that was served between its request and its arrival."""

    def __init__(self, url: str, known: dict[str, list[list[float]]]) -> None:
        self.url, self.known = url, known
        self.reloading = 0  # the number of the reload that is under way, or of the last one
        self.reloaded = 0  # the number of the last one that has ended
        self.answered: Counter[str] = Counter()
        self.stop = asyncio.Event()

    async def client(self, roads: Iterator[str]) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=PATIENCE) as http:
            while not self.stop.is_set():
                road = next(roads)
                path, body = ROADS[road]
                first = self.reloaded
                response = await http.post(path, json=body)
                assert response.status_code == 200, (road, response.text)
                possible = {number % VERSIONS for number in range(first, self.reloading + 1)}
                found = numbers(response.json())
                assert any(np.allclose(found, self.known[road][seed], atol=1e-5) for seed in possible), road
                self.answered[road] += 1

    async def reload(self, bundles: Bundles, reloads: int, requests: int) -> None:
        """Reload so often, each time after some more answers, and go on until there are so many answers."""
        async with httpx.AsyncClient(base_url=self.url, timeout=PATIENCE) as http:
            for number in range(1, reloads + 1):
                before = self.answered.total()
                self.reloading = number
                await asyncio.to_thread(bundles.choose, number % VERSIONS)
                response = await http.post("/admin/reload", headers=HEADERS)
                assert response.json()["changed"] == ["tiny"], response.text
                self.reloaded = number
                await until(lambda before=before: self.answered.total() > before)
        await until(lambda: self.answered.total() >= requests)
        self.stop.set()


@pytest.mark.parametrize(("reloads", "requests"), [(10, 500), pytest.param(100, 4_000, marks=pytest.mark.long)])
def test_reloads_under_load_lose_nothing_on_any_road(
    serve: Serve, bundles: Bundles, reloads: int, requests: int
) -> None:
    options = ["--threads", "2", "--admin-keys", ADMIN, "--token-ids"]
    process = serve("--bundle", str(bundles.served), *options)
    known: dict[str, list[list[float]]] = {road: [] for road in ROADS}
    for seed in range(VERSIONS):
        bundles.choose(seed)
        assert reload(process.url).status_code == 200
        np.testing.assert_allclose(embed(process.url, TEXTS), expected(seed), atol=1e-5)
        for road, (path, body) in ROADS.items():
            known[road].append(numbers(httpx.post(process.url + path, json=body, timeout=PATIENCE).json()))
    bundles.choose(0)
    assert reload(process.url).status_code == 200
    before = answers(process.url)

    async def run() -> Load:
        load, roads = Load(process.url, known), itertools.cycle(ROADS)
        async with asyncio.TaskGroup() as group:
            for _ in range(16):
                group.create_task(load.client(roads))
            group.create_task(load.reload(bundles, reloads, requests))
        return load

    load = asyncio.run(run())
    assert load.answered.total() >= requests
    assert set(load.answered) == set(ROADS)
    assert answers(process.url) - before == {200: load.answered.total()}  # none refused, none lost
    assert metrics(process.url)["cloze_background_errors_total{task=retire}"] == 0
    assert process.end(signal.SIGTERM) == 0
    assert "Traceback" not in process.log


def answers(url: str) -> Counter[int]:
    """How many answers of each status the server has counted, on all roads."""
    found = Counter[int]()
    for path in ("/", "/embed", "/predict", "/search", "/similarity", "/v1/embeddings", "/v2/embed"):
        found.update(statuses(url, path))
    return found


# What hangs, at a start or at a reload: PHASES says which function it is, and `block` takes its place


def at_load(block: Callable[..., Any], patch: pytest.MonkeyPatch) -> None:
    patch.setattr(session, "_open", block)


def at_race(block: Callable[..., Any], patch: pytest.MonkeyPatch) -> None:
    patch.setattr(session, "suitable", lambda bundle, provider: ("fp32", "fp32"))  # so that there is a race
    patch.setattr(Session, "_forward", block)


def at_canaries(block: Callable[..., Any], patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Session, "_forward", block)


def at_warm_up(block: Callable[..., Any], patch: pytest.MonkeyPatch) -> None:
    patch.setattr(session, "_check_canaries", lambda *_: patch.setattr(Session, "_forward", block))


PHASES = {"loading": at_load, "race": at_race, "canaries": at_canaries, "warm-up": at_warm_up}


@pytest.mark.parametrize("phase", PHASES)
def test_a_reload_that_hangs_changes_nothing_and_the_next_one_works(
    bundles: Bundles, phase: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reached, free = threading.Event(), threading.Event()
    with running(bundles) as (url, models):
        forward, read = Session._forward, Bundle.load

        def block(*arguments: Any) -> Any:
            if arguments[0] is not served_session:
                reached.set()
                assert free.wait(PATIENCE)
            return forward(*arguments)

        def read_and_limit(folder: Path) -> Bundle:
            bundle = read(folder)
            models._limit = 0.05  # seconds, of the step that hangs
            return bundle

        (served_session,) = (model.session for model in models)
        bundles.choose(1)
        with monkeypatch.context() as patch:
            patch.setattr(Bundle, "load", read_and_limit)
            PHASES[phase](block, patch)
            failed = reload(url)
            assert (failed.status_code, failed.json()["error_type"]) == (409, "ReloadFailed")
            assert "tiny was not loaded and warmed up within 0.05 s, which is" in failed.json()["error"]
            assert reached.wait(PATIENCE)
            np.testing.assert_allclose(embed(url, TEXTS), expected(0), atol=1e-5)
            assert httpx.get(f"{url}/health/ready").status_code == 200
            assert metrics(url)["cloze_reloads_total{outcome=failed}"] == 1
        models._limit = PATIENCE
        assert reload(url).json()["changed"] == ["tiny"]  # while the former one still hangs
        np.testing.assert_allclose(embed(url, TEXTS), expected(1), atol=1e-5)
        free.set()
    assert "the reload failed, nothing has changed" in caplog.text
    assert "Traceback" not in caplog.text


START = """
import sys, threading
import pytest
import test_reloads
from cloze.command import run
from cloze.service.__main__ import main
from cloze.service.inference import models

blocked, wait = threading.Event(), models.wait

def block(*arguments):
    print("blocked", file=sys.stderr, flush=True)
    blocked.set()
    threading.Event().wait()

def wait_from_then_on(futures, limit):
    blocked.wait()
    return wait(futures, limit)

models.wait = wait_from_then_on  # however long a busy machine needs to get so far
test_reloads.PHASES[{phase!r}](block, pytest.MonkeyPatch())
sys.exit(run(main))
"""


def starting(bundle: Path, phase: str, *options: str) -> subprocess.Popen[str]:
    """A service whose start hangs in a phase."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "service")))
    command = [
        sys.executable,
        "-c",
        START.format(phase=phase),
        "--bundle",
        str(bundle),
        "--port",
        "0",
        "--threads",
        "1",
    ]
    environ = os.environ | {"PYTHONPATH": path}
    return subprocess.Popen([*command, *options], env=environ, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("phase", PHASES)
def test_a_start_that_hangs_ends_the_process(bundle: Path, phase: str) -> None:
    with starting(bundle, phase, "--stall-seconds", "2") as process:
        _, log = process.communicate(timeout=PATIENCE)
    assert process.returncode == HUNG
    assert "Traceback" not in log
    assert "blocked\n" in log  # and not while it loaded what comes before
    hung = "model tiny: loading or warming up has hung for 6 s: the process ends with status 70\n"
    assert log.endswith(hung), log


def test_sigterm_ends_a_start_at_once(bundle: Path) -> None:
    with starting(bundle, "canaries") as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "blocked\n"
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=PATIENCE)
    assert (process.returncode, log) == (0, "")


STOPPED = """
import sys
from cloze.command import run
from cloze.service.__main__ import main
from cloze.service.inference.model import Model

warm_up = Model.warm_up

def for_ever(model):
    if "tiny" in loaded:  # a reload
        print("reloading", file=sys.stderr, flush=True)
        encoder = model.bundle.text_encoder
        while True:  # a real model is in ONNX Runtime nearly all of the time
            model.session.run(encoder.pad([encoder.longest]))
    loaded.add(model.name)
    warm_up(model)

loaded = set()
Model.warm_up = for_ever
sys.exit(run(main))
"""


def test_sigterm_during_a_reload_ends_the_service_with_status_0(bundles: Bundles) -> None:
    """The thread that loads the new model is in ONNX Runtime when the interpreter shuts down."""
    command = [sys.executable, "-c", STOPPED, "--bundle", str(bundles.served), "--port", "0", "--threads", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "try: curl" not in (line := process.stderr.readline()):
            assert line
        bundles.link(ROOT / "models" / "cloze-mini")
        process.send_signal(signal.SIGHUP)
        while line != "reloading\n":
            line = process.stderr.readline()
            assert line
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, log
