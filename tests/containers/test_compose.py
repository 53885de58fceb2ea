"""`docker compose up`, as a user runs it: the vectors are the library's, and SIGTERM loses no request."""

import http.client
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import yaml
from harness import LIMITS
from live import Background, answer, connect, head
from numpy.typing import NDArray
from patience import PATIENCE
from stack import ROOT, Stack, run

from cloze.encoding.bundle import OUTPUT, Bundle
from cloze.service.settings import Settings, variable

pytestmark = [pytest.mark.container, pytest.mark.long]

TEXTS = ["A man plays the guitar.", "", "Two dogs run.", 'It says "[MASK]" [SEP].', "guitar " * 2000, "naïve 字 ✓"]
CLIENTS = 12
HEADERS = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def stack(project: str, bundle: Path) -> Iterator[Stack]:
    """The tiny bundle, in small batches on one thread, so that requests wait."""
    settings = {"BUNDLES": str(bundle.parent), "BUNDLE": bundle.name}
    service = {"CLOZE_THREADS": "1", "CLOZE_MAX_BATCH_TOKENS": "64", "CLOZE_LOG_FORMAT": "text"}
    limits = {variable(name): str(value) for name, value in LIMITS.items()}
    made = Stack(project, settings | service | limits)
    yield made
    made.down()


@pytest.fixture(scope="module")
def address(stack: Stack) -> str:
    return stack.up()


def library(folder: Path, texts: Sequence[str]) -> NDArray[np.float32]:
    """The vectors without the service: the contract and ONNX Runtime, one text at a time, each of length 1."""
    bundle = Bundle.load(folder)
    session = ort.InferenceSession(bundle.graph(bundle.precisions[0]))
    vectors = [session.run([OUTPUT], bundle.text_encoder.batch([text])._asdict())[0][0] for text in texts]
    return np.stack([vector / np.linalg.norm(vector) for vector in vectors])


def post(client: http.client.HTTPConnection, texts: Sequence[str]) -> NDArray[np.float32]:
    client.request("POST", "/embed", json.dumps({"inputs": texts}), HEADERS)
    response = client.getresponse()
    body = response.read()  # IncompleteRead where it is not whole
    assert response.status == 200, body
    return np.array(json.loads(body), dtype=np.float32)


def assert_agree(found: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_vectors_are_the_librarys(address: str, bundle: Path) -> None:
    expected = library(bundle, TEXTS)
    client = http.client.HTTPConnection(address, timeout=PATIENCE)
    assert_agree(np.concatenate([post(client, [text]) for text in TEXTS]), expected)
    assert_agree(post(client, TEXTS), expected)
    client.close()


def test_the_service_is_healthy_and_version_known(address: str, stack: Stack) -> None:
    assert stack.state("Health.Status") == "healthy"
    client = http.client.HTTPConnection(address, timeout=PATIENCE)
    client.request("GET", "/info")
    info = json.load(client.getresponse())
    client.close()
    assert info["model_id"] == "tiny"
    assert info["version"] != "unknown"
    assert info["threads"] == 1  # CLOZE_THREADS arrived


INSIDE = """
import importlib.util, json, os
def writable(path):
    try:
        open(path + "/new", "w").close()
    except OSError as error:
        return error.strerror
    return True
status = dict(line.split(":\\t", 1) for line in open("/proc/1/status").read().splitlines())
print(json.dumps({
    "user": os.getuid(),
    "status": status,
    "writable": {path: writable(path) for path in ["/", "/app", "/models", "/opt/venv", "/var/tmp", "/tmp"]},
    "installed": list(filter(importlib.util.find_spec, ["torch", "transformers", "cloze.training", "onnxruntime"])),
}))
"""


def test_the_container_can_do_little(address: str, stack: Stack) -> None:
    found = json.loads(stack.python(INSIDE))
    assert found["user"] != 0
    assert int(found["status"]["Uid"].split()[0]) == found["user"]  # process 1's too
    assert int(found["status"]["CapBnd"], 16) == 0
    assert found["status"]["NoNewPrivs"] == "1"
    assert found["writable"].pop("/tmp") is True
    assert set(found["writable"].values()) == {"Read-only file system"}
    assert found["installed"] == ["onnxruntime"]


class Clients:
    """Threads that send request after request, each until one is not taken; half of them keep their connection."""

    def __init__(self, address: str, expected: NDArray[np.float32], texts: Sequence[str]) -> None:
        self.address, self.expected, self.texts = address, expected, texts
        self.counts: Counter[str] = Counter()
        self.wrong: list[BaseException] = []
        self.changed = threading.Condition()
        self.threads = [threading.Thread(target=self._send, args=(number % 2 == 0,)) for number in range(CLIENTS)]
        for thread in self.threads:
            thread.start()

    def wait_for(self, answered: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.counts["answered"] >= answered or self.wrong, PATIENCE)

    def join(self) -> None:
        for thread in self.threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()

    def _count(self, outcome: str) -> None:
        with self.changed:
            self.counts[outcome] += 1
            self.changed.notify_all()

    def _send(self, keep: bool) -> None:
        client = http.client.HTTPConnection(self.address, timeout=PATIENCE)
        try:
            while self._sent(client):
                if not keep:
                    client.close()
        except BaseException as error:  # an answer that is not whole or not right; the test tells it
            with self.changed:
                self.wrong.append(error)
                self.changed.notify_all()
        finally:
            client.close()

    def _sent(self, client: http.client.HTTPConnection) -> bool:
        self._count("sent")
        try:
            found = post(client, self.texts)
        except ConnectionError:
            self._count("refused")  # that the server had not taken it, its log must say
            return False
        assert_agree(found, self.expected)
        self._count("answered")
        return True


def test_sigterm_under_load_loses_no_request_that_was_taken(address: str, stack: Stack, bundle: Path) -> None:
    """One request is in flight for certain: the end of its body comes when the service drains."""
    texts = TEXTS[:4]
    expected = library(bundle, texts)
    before = stack.log().count(" POST /embed status=200 ")
    clients = Clients(address, expected, texts)
    clients.wait_for(answered=5 * CLIENTS)
    body = json.dumps({"inputs": texts}).encode()
    with connect(f"http://{address}") as slow:
        slow.sendall(head(f"content-length: {len(body)}", "/embed", "expect: 100-continue"))
        assert slow.recv(100).startswith(b"HTTP/1.1 100 ")  # the service waits for the body
        stop = Background(stack.stop)
        stack.wait_for(lambda: "draining requests=" in stack.log())
        slow.sendall(body)
        status, found = answer(slow)
    assert status == 200
    assert_agree(np.array(json.loads(found), dtype=np.float32), expected)
    assert stop.result is None
    clients.join()
    log = stack.log()
    print(dict(clients.counts), *re.findall(r"drain.*", log), sep="\n")
    assert clients.wrong == []
    assert stack.state("ExitCode") == "0", log
    stopping = re.search(r"draining requests=(\d+)", log)
    stopped = re.search(r"cloze.service.server drained requests=(\d+)", log)
    assert stopping
    assert stopped
    assert int(stopped[1]) >= int(stopping[1]) > 0
    # A request that the server took has a line in its log, and every line an answer that a client has.
    assert log.count(" POST /embed status=") == log.count(" POST /embed status=200 ")
    assert log.count(" POST /embed status=200 ") - before == clients.counts["answered"] + 1
    assert clients.counts["sent"] == clients.counts["answered"] + clients.counts["refused"]
    assert "Traceback" not in log


KILL = """
import os, pathlib, signal
for folder in pathlib.Path("/proc").glob("[0-9]*"):
    if (folder / "cmdline").read_bytes().split(b"\\0")[2:3] == [b"serve"]:
        os.kill(int(folder.name), signal.SIGKILL)
"""


def test_killed_under_load_it_is_started_again(stack: Stack, bundle: Path) -> None:
    """Requests in flight are lost, and their clients know; the restart policy brings the service back."""
    texts = TEXTS[:4]
    address, restarts = stack.up(), stack.restarts()
    clients = Clients(address, library(bundle, texts), texts)
    clients.wait_for(answered=5 * CLIENTS)
    with suppress(AssertionError):  # where the end of the container is faster than the command that caused it
        stack.python(KILL)  # from inside: what the engine itself kills it does not start again
    clients.join()
    stack.wait_for(lambda: stack.restarts() == restarts + 1 and stack.state("Health.Status") == "healthy")
    print(dict(clients.counts))
    assert all(isinstance(error, http.client.IncompleteRead) for error in clients.wrong)  # died while it wrote
    assert clients.counts["sent"] == clients.counts["answered"] + clients.counts["refused"] + len(clients.wrong)
    client = http.client.HTTPConnection(stack.address(), timeout=PATIENCE)
    assert_agree(post(client, texts), library(bundle, texts))
    client.close()


def test_without_any_setting_it_serves_the_shipped_model(project: str) -> None:
    stack = Stack(project)
    try:
        address = stack.up()
        client = http.client.HTTPConnection(address, timeout=PATIENCE)
        found = post(client, TEXTS)
        client.close()
        assert_agree(found, library(ROOT / "models" / "cloze-mini", TEXTS))
        stack.stop()
        assert stack.state("ExitCode") == "0", stack.log()
    finally:
        stack.down()


def config(*words: str, **settings: str) -> dict[str, dict[str, object]]:
    """The services of a composition, as `docker compose` reads them."""
    found = run("docker", "compose", *words, "config", "--format", "json", settings=settings)
    services: dict[str, dict[str, object]] = json.loads(found)["services"]
    return services


def test_every_setting_of_the_service_reaches_the_container(engine: None) -> None:
    own = {"bundle", "hostname", "port"}  # compose says these itself, through a mount and a published port
    names = [*(variable(name) for name in Settings.model_fields if name not in own), "FORWARDED_ALLOW_IPS"]
    settings = dict.fromkeys(names, "given")
    environment = config(**settings)["service"]["environment"]
    assert environment == settings | {"CLOZE_BUNDLE": "/models/cloze-mini"}


def test_the_engine_gives_a_drain_its_time() -> None:
    service = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]["service"]
    fields = Settings.model_fields
    drain = fields["stop_delay_seconds"].default + fields["drain_seconds"].default
    assert int(service["stop_grace_period"].removesuffix("s")) > drain


def test_the_gpu_file_asks_for_a_gpu_and_its_runtime(engine: None) -> None:
    service = config("--file", "docker-compose.yml", "--file", "docker/gpu.yml")["service"]
    assert service["build"]["args"] == {"RUNTIME": "gpu"}
    assert service["environment"]["CLOZE_PROVIDER"] == "cuda"
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"


def test_the_edge_takes_certificates_and_the_services_limit(engine: None) -> None:
    edge = config("--profile", "edge", CLOZE_PAYLOAD_LIMIT="1048576")["edge"]
    assert edge["environment"]["CLOZE_PAYLOAD_LIMIT"] == "1048576"
    assert edge["environment"]["EDGE_SCHEME"] == "http"
    assert edge["healthcheck"]["test"][-1] == "http://127.0.0.1:8000/health"
    edge = config("--profile", "edge", CERTIFICATES="./certificates")["edge"]
    assert edge["environment"]["EDGE_SCHEME"] == "https"
    assert edge["healthcheck"]["test"][-1] == "https://127.0.0.1:8000/health"
    assert [mount["source"] for mount in edge["volumes"]] == [str(ROOT / "docker" / "edge"), str(ROOT / "certificates")]
    assert all(mount["read_only"] for mount in edge["volumes"])


def test_every_profile_in_one_composition(engine: None) -> None:
    """Images from outside are pinned to a version, and no container may do more than it needs."""
    services = config("--profile", "*", FORWARDED_ALLOW_IPS="*")
    assert set(services) == {"service", "training", "edge", "prometheus", "grafana"}
    assert services["service"]["environment"]["FORWARDED_ALLOW_IPS"] == "*"
    for service in services.values():
        assert re.search(r":v?[0-9]+[.][0-9]+[.][0-9]+", service.get("image", ":0.0.0"))
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
    published = [port["host_ip"] for service in services.values() for port in service.get("ports", [])]
    assert published == ["127.0.0.1"] * 4
