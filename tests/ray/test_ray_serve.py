"""The application on Ray Serve: two nodes with one replica each, and the proxy of the first."""

import re
import select
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import live
import numpy as np
import pytest
import yaml
from harness import LIMITS, PATIENCE, ROOT, distinct, samples_of, wait_until
from numpy.typing import NDArray
from test_imports import ANSWER, without
from tiny_bundle import DIMENSION, write_bundle

from cloze.service.app import create_app
from cloze.service.settings import Settings, variable

if TYPE_CHECKING:  # importing Ray takes seconds, also for those who run other tests
    from benchmarks.ray_cluster import Nodes

pytestmark = [pytest.mark.long, pytest.mark.ray]

TEXTS = distinct(200)
SETTINGS = {"payload_limit": 10_000, "threads": 1, "provider": "cpu", **LIMITS}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("bundles") / "tiny")


@pytest.fixture(scope="module")
def nodes() -> Iterator["Nodes"]:
    pytest.importorskip("ray.serve", reason="Ray is not installed")
    from ray.serve._private import api, client

    from benchmarks import ray_cluster

    ray_cluster.HANGING = api.HTTP_PROXY_TIMEOUT = client.HTTP_PROXY_TIMEOUT = PATIENCE  # type: ignore[misc]
    nodes = ray_cluster.Nodes(2)
    yield nodes
    nodes.close()


@pytest.fixture(scope="module")
def served(nodes: "Nodes", bundle: Path) -> "Nodes":
    nodes.deploy(bundle, replicas=2, **SETTINGS)
    return nodes


@pytest.fixture(scope="module")
def plain(bundle: Path) -> Iterator[str]:
    """The plain service with the same settings."""
    with live.served(create_app(Settings(bundle=bundle, **SETTINGS))) as url:
        yield url


@pytest.fixture(scope="module")
def expected(plain: str) -> dict[str, NDArray[np.float32]]:
    """The plain service's vector of each text."""
    return dict(zip(TEXTS, live.embed(plain, TEXTS), strict=True))


@pytest.mark.parametrize(
    ("path", "body", "accept"),
    [
        ("/embed", {"inputs": TEXTS[:20]}, "application/json"),
        ("/embed", {"inputs": TEXTS[:20], "dimensions": 8}, "application/octet-stream"),
        ("/v1/embeddings", {"model": "tiny", "input": TEXTS[:20], "encoding_format": "base64"}, "application/json"),
        (
            "/similarity",
            {"inputs": {"source_sentence": "a man", "sentences": ["two dogs", "a man"]}},
            "application/json",
        ),
    ],
)
def test_answers_are_those_of_the_service_byte_for_byte(
    served: "Nodes", plain: str, path: str, body: object, accept: str
) -> None:
    headers = {"accept": accept, "x-request-id": "same"}  # OpenAI's answer repeats the id
    found, expected = (
        httpx.post(f"{url}{path}", json=body, headers=headers, timeout=PATIENCE) for url in (served.url, plain)
    )
    assert (found.status_code, found.content) == (200, expected.content)


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/embed", b"{"),
        ("/embed", b'{"inputs": []}'),
        ("/embed", b'{"inputs": "a man", "model": "other"}'),
        ("/embed", b'{"inputs": "a man", "dimensions": 1000}'),
        ("/embed", b'{"inputs": "poison"}'),
        ("/embed", b'{"inputs": "%s"}' % (b"a " * 10_000)),
        ("/v1/embeddings", b'{"model": "other", "input": "a man"}'),
        ("/absent", b"{}"),
        ("/admin/reload", b""),
    ],
)
def test_errors_keep_their_status_shape_and_id(served: "Nodes", plain: str, path: str, content: bytes) -> None:
    headers = {"content-type": "application/json", "x-request-id": "order-66"}
    found, expected = (
        httpx.post(f"{url}{path}", content=content, headers=headers, timeout=PATIENCE) for url in (served.url, plain)
    )
    assert found.status_code == expected.status_code >= 400
    assert found.json() == expected.json()
    assert found.headers.get_list("x-request-id") == ["order-66"]


def metrics_of(nodes: "Nodes") -> dict[str, float]:
    """The samples that the agents of all nodes export."""
    import ray

    ports = [node["MetricsExportPort"] for node in ray.nodes() if node["Alive"]]
    return {
        name: value
        for port in ports
        for name, value in samples_of(httpx.get(f"http://127.0.0.1:{port}/metrics").text).items()
        if name.startswith("ray_cloze_")
    }


def test_metrics_of_every_replica_carry_its_id(served: "Nodes") -> None:
    def answered() -> Counter[str]:
        found: Counter[str] = Counter()
        for name, value in metrics_of(served).items():
            if name.startswith("ray_cloze_requests_total{") and "route=/tokenize,status=200" in name:
                found[re.findall(r"replica=(\w+)", name)[0]] += int(value)
        return found

    for text in TEXTS:  # on a route of no other test, since the counts of earlier requests may come late
        assert httpx.post(f"{served.url}/tokenize", json={"inputs": text}, timeout=PATIENCE).status_code == 200
    wait_until(lambda: answered().total() == len(TEXTS))
    assert len(answered()) == 2


def test_a_replica_refuses_with_429_and_when_to_try_again(served: "Nodes", bundle: Path, tmp_path: Path) -> None:
    """Each of the two replicas takes at most two requests, and does not end them."""
    hanging = write_bundle(tmp_path / "tiny", model=live.hanging())
    served.deploy(hanging, replicas=2, **SETTINGS | {"max_concurrent_requests": 2, "drain_seconds": 1})
    try:
        with ExitStack() as stack:
            streams = [stack.enter_context(live.connect(served.url)) for _ in range(32)]
            for stream in streams:
                stream.sendall(live.request({"inputs": "two dogs"}))
            answered = partial(readable, streams)
            wait_until(lambda: len(answered()) >= 32 - 2 * 2)
            found = [stream.recv(4096).lower() for stream in answered()]
    finally:
        served.deploy(bundle, replicas=2, **SETTINGS)
    for answer in found:
        assert answer.startswith(b"http/1.1 429 ")
        assert re.search(rb"\r\nretry-after: [1-9]", answer)


def readable(streams: list[socket.socket]) -> list[socket.socket]:
    """Those on which an answer has arrived."""
    return select.select(streams, [], [], 0)[0]


def test_a_deployment_under_load_loses_nothing(
    served: "Nodes", bundle: Path, expected: dict[str, NDArray[np.float32]]
) -> None:
    from benchmarks.ray_cluster import load

    with load(served.url, expected, clients=8) as answers:
        served.deploy(bundle, replicas=2, **SETTINGS)
    assert (answers.lost, answers.retries) == ([], {})
    assert answers.seconds


def test_a_lost_node_loses_nothing(served: "Nodes", expected: dict[str, NDArray[np.float32]]) -> None:
    from benchmarks.ray_cluster import load

    with load(served.url, expected, clients=16) as answers:
        wait_until(lambda: len(answers.seconds) > 200)
        served.kill()
        seen = len(answers.seconds)
        wait_until(lambda: len(answers.seconds) > seen + 500)
        wait_until(lambda: served.replicas == 1)
        served.add()
        wait_until(lambda: served.replicas == 2)
    assert answers.lost == []
    assert set(answers.retries) <= {"503"}


def test_a_replica_that_hangs_is_replaced(served: "Nodes", tmp_path: Path) -> None:
    hanging = write_bundle(tmp_path / "tiny", model=live.hanging())
    served.deploy(hanging, replicas=1, **SETTINGS | {"stall_seconds": 5})  # it is loaded sooner
    found = httpx.post(f"{served.url}/embed", json={"inputs": "two dogs"}, timeout=PATIENCE)
    assert (found.status_code, found.json()["error_type"]) == (503, "Unhealthy")
    assert found.headers["retry-after"]
    assert httpx.post(f"{served.url}/embed", json={"inputs": "a man"}, timeout=PATIENCE).status_code == 200


def test_settings_that_would_reach_one_replica_are_refused(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray.serve", reason="Ray is not installed")
    from cloze.encoding.errors import OptionError
    from cloze.service.ray import Replicas, app

    monkeypatch.setenv("CLOZE_BUNDLE", str(bundle))
    monkeypatch.setenv("CLOZE_ADMIN_KEYS", "0123456789abcdef")
    with pytest.raises(OptionError, match="CLOZE_ADMIN_KEYS is set"):
        app(Replicas())


def test_the_config_file_is_valid() -> None:
    pytest.importorskip("ray.serve", reason="Ray is not installed")
    from ray.serve.schema import ServeDeploySchema

    from cloze.service.ray import Replicas

    config = ServeDeploySchema.model_validate(yaml.safe_load((ROOT / "docker/ray/serve.yaml").read_text()))
    (application,) = config.applications
    Replicas.model_validate(application.args)
    assert application.import_path == "cloze.service.ray:app"
    assert set(application.runtime_env["env_vars"]) <= {variable(name) for name in Settings.model_fields}


def test_usage_reports_are_off_and_the_service_needs_no_ray(bundle: Path) -> None:
    assert without({"ray"}, ANSWER, str(bundle)) == f"200 {DIMENSION}\n"
    pytest.importorskip("ray.serve", reason="Ray is not installed")
    from ray._common.usage.usage_lib import usage_stats_enabled

    import cloze.service.ray  # noqa: F401

    assert not usage_stats_enabled()
