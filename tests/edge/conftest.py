"""A real nginx in front of a real service. Without nginx these tests are skipped and listed."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from logging_service import OPTIONS, Service
from nginx_server import NGINX, Edge, Nginx
from tiny_bundle import write_bundle


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "edge" in getattr(item, "fixturenames", ()):
            item.add_marker("nginx")


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Its answers can be large, with 512 dimensions. No request for /smuggled may reach it in any test."""
    bundle = write_bundle(tmp_path_factory.mktemp("bundles") / "tiny", dimension=512)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORWARDED_ALLOW_IPS", "127.0.0.1")
        running = Service("--bundle", str(bundle), *OPTIONS)
    yield running
    smuggled = [line for line in running.requests() if "smuggled" in line["message"]]
    running.close()
    assert smuggled == []


@pytest.fixture(scope="session")
def edge() -> Iterator[Edge]:
    """Start nginx in front of an address. Tests that give the same settings share one."""
    if NGINX is None:
        pytest.skip("There is no nginx on the path; Debian's package `nginx` has it")
    running: dict[tuple[object, ...], Nginx] = {}

    def start(upstream: str, certificates: Path | None = None, **settings: object) -> Nginx:
        key = (upstream, certificates, *sorted(settings.items()))
        if key not in running:
            running[key] = Nginx(upstream, certificates, **settings)
        return running[key]

    yield start
    for nginx in running.values():
        nginx.close()
