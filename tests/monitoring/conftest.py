"""A real Prometheus that scrapes a real service. Only where there is no binary are these tests skipped, and aloud."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from harness import Process, wait_until
from prometheus_server import FOLDER, Prometheus, send_traffic
from tiny_bundle import write_bundle


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if {"prometheus", "promtool"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("prometheus")


def binary(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"There is no {name} on the path; Debian's package `prometheus` has it")
    return found


@pytest.fixture(scope="session")
def promtool() -> str:
    return binary("promtool")


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models side by side."""
    folder = tmp_path_factory.mktemp("bundles")
    write_bundle(folder / "one")
    write_bundle(folder / "two")
    return folder


@pytest.fixture(scope="session")
def services(bundles: Path) -> Iterator[list[Process]]:
    """Two services with two models each; the second is there to be killed."""
    running = [Process("--bundle", str(bundles), "--model", "one", "--threads", "1") for _ in range(2)]
    yield running
    for process in running:
        process.close()


@pytest.fixture(scope="session")
def prometheus(services: list[Process], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """The shipped files, but for the addresses and the steps in time; traffic of every kind has been scraped."""
    folder = tmp_path_factory.mktemp("prometheus")
    for name in ("prometheus.yml", "rules.yml", "alerts.yml"):
        changed = (FOLDER / name).read_text().replace("15s", "2s").replace("[1h:5m]", "[1h:1s]")
        (folder / name).write_text(changed)
    configuration = yaml.safe_load((folder / "prometheus.yml").read_text())
    (job,) = configuration["scrape_configs"]
    assert job.pop("dns_sd_configs")[0]["names"] == ["service"]
    job["static_configs"] = [{"targets": [process.url.removeprefix("http://") for process in services]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    server = Prometheus(binary("prometheus"), folder)
    try:
        wait_until(lambda: len(server.query('up{job="cloze"} == 1')) == len(services))
        send_traffic(services[0].url)
        server.wait_for("status:cloze_requests:rate5m{status='424'} > 0")
        server.wait_for("model:cloze_space_mean_cosine:avg1h{model='two'}")
        os.kill(services[0].process.pid, signal.SIGHUP)
        server.wait_for("increase(cloze_reloads_total[1m]) > 0")
        # Groups of rules take turns within a second, each seeing what the one before has recorded.
        recorded = [rule["name"] for rule in server.rules("record")]
        wait_until(lambda: all(server.query(name) for name in recorded))
        yield server
    finally:
        server.close()
