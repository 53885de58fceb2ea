"""docker/systemd under a real systemd: no process before the first request, one that answers it, and none when idle."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Self

import httpx
import pytest
from harness import free_port
from patience import PATIENCE, wait_until
from tiny_bundle import write_bundle

pytestmark = pytest.mark.systemd

ROOT = Path(__file__).parents[1]
UNITS = ROOT / "docker" / "systemd"
SYSTEMD = Path("/usr/lib/systemd/systemd")
PROXY = SYSTEMD.with_name("systemd-socket-proxyd")
# systemd starts only where it seems to have booted the machine, so that it gets a /run/systemd of its own.
RUN = "/run/systemd"
START = f"mkdir -p {RUN} && mount -t tmpfs none {RUN} && mkdir {RUN}/system && exec {SYSTEMD} --user"
# A user's systemd cannot take these from a service; the system's does.
UNCONFINED = "DynamicUser=no\nNoNewPrivileges=no\nProtectSystem=no\nProtectHome=no\nPrivateTmp=no\n"


class Machine:
    """The units, for a bundle, under a systemd of their own."""

    def __init__(self, folder: Path, bundle: Path) -> None:
        self.port, inner = free_port(), free_port()
        units, runtime = folder / "config" / "systemd" / "user", folder / "run"
        runtime.mkdir(mode=0o700)
        self.environment = os.environ | {"XDG_RUNTIME_DIR": str(runtime), "XDG_CONFIG_HOME": str(folder / "config")}
        shutil.copytree(UNITS, units)
        other = {"8080": str(self.port), "8079": str(inner), "10min": "1s"}
        other["/opt/cloze/bin/cloze"] = f"{sys.executable} -m cloze"
        for unit in list(units.iterdir()):
            text = unit.read_text()
            for mine, yours in other.items():
                text = text.replace(mine, yours)
            unit.write_text(text)
        where = f"WorkingDirectory={ROOT}\nEnvironment=CLOZE_BUNDLE={bundle} CLOZE_THREADS=1\n"
        for name in ("cloze", "cloze-proxy"):
            (units / f"{name}.service.d").mkdir()
            (units / f"{name}.service.d" / "test.conf").write_text(f"[Service]\n{where}{UNCONFINED}")
        self.log = (folder / "log").open("w+")
        command = ["unshare", "--mount", "sh", "-c", START]
        self.process = subprocess.Popen(command, env=self.environment, stdout=self.log, stderr=self.log)
        wait_until(lambda: (runtime / "systemd" / "private").exists() or self.process.poll() is not None)

    def __enter__(self) -> Self:
        assert self.process.poll() is None, self.said()
        self.control("start", "cloze.socket")
        return self

    def __exit__(self, *_: object) -> None:
        self.control("exit")
        self.process.wait(PATIENCE)
        self.log.close()

    def said(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def control(self, *words: str) -> str:
        done = subprocess.run(
            ["systemctl", "--user", *words], capture_output=True, text=True, env=self.environment, timeout=PATIENCE
        )
        return done.stdout.strip()

    def state(self, unit: str) -> str:
        return self.control("show", "--value", "--property", "ActiveState", unit)

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=PATIENCE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the test's files are; skipped where no systemd can be started."""
    if not PROXY.exists() or not shutil.which("curl"):
        pytest.skip("Debian's packages `systemd` and `curl` are missing")
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("Starting systemd needs a mount namespace, and so root")
    return tmp_path


def test_it_starts_with_a_request_and_ends_when_idle(folder: Path) -> None:
    with Machine(folder, write_bundle(folder / "tiny")) as machine:
        for _ in range(2):  # it starts again
            assert machine.state("cloze.service") == machine.state("cloze-proxy.service") == "inactive", machine.said()
            with machine.client() as client:  # whose connection stays open
                response = client.post("/embed", json={"inputs": "A man."})  # waits for the service
                assert response.status_code == 200, machine.said()
                assert machine.state("cloze.service") == "active"
            wait_until(lambda: machine.state("cloze.service") == "inactive", machine.said)
            assert machine.control("show", "--value", "--property", "Result", "cloze.service") == "success"
        assert machine.state("cloze.socket") == "active"


def test_a_service_that_dies_is_started_by_the_next_request(folder: Path) -> None:
    with Machine(folder, write_bundle(folder / "tiny")) as machine, machine.client() as client:
        assert client.get("/health").status_code == 200, machine.said()
        machine.control("kill", "--signal=KILL", "cloze.service")
        wait_until(lambda: machine.state("cloze-proxy.service") in ("inactive", "failed"), machine.said)
        with machine.client() as another:
            assert another.get("/health").status_code == 200, machine.said()


def test_a_service_that_cannot_start_ends_the_wait(folder: Path) -> None:
    with Machine(folder, folder / "no-bundle") as machine:
        with machine.client() as client, pytest.raises(httpx.HTTPError):
            client.get("/health")
        assert machine.state("cloze.service") == "failed", machine.said()


def test_systemd_finds_no_fault_in_the_units(tmp_path: Path) -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("There is no systemd-analyze; Debian's package `systemd` has it")
    for unit in UNITS.iterdir():
        text = unit.read_text()
        (tmp_path / unit.name).write_text(text.replace("/opt/cloze/bin/cloze", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", *map(str, sorted(tmp_path.iterdir()))],
        capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
