"""`training.evaluate` on a real service: the bundle's own figures, and what happens when it is busy half way."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import pytest
from harness import Process
from tiny_bundle import write_bundle

from encoding.command import run
from training.evaluate import __main__ as evaluate
from training.evaluate.server_client import ATTEMPTS

TEXTS = ["a man plays the guitar", "two dogs run", "the man run", "a sentence of the man", "dogs means two"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("bundle") / "tiny")


@pytest.fixture(scope="module")
def service(bundle: Path) -> Iterator[str]:
    process = Process("--bundle", str(bundle), "--provider", "cpu", "--threads", "1")
    yield process.url
    process.close()


class Gateway(ThreadingHTTPServer):
    """Passes requests on to a service, and answers 503 instead of the embeddings whose numbers are in `busy`."""

    def __init__(self, service: str) -> None:
        super().__init__(("127.0.0.1", 0), Passing)
        self.service = service
        self.embedded, self.busy = 0, range(0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Passing(BaseHTTPRequestHandler):
    server: Gateway

    def do_GET(self) -> None:
        self._answer(httpx.get(self.server.service + self.path))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.embedded += 1
        if self.server.embedded in self.server.busy:
            self._answer(httpx.Response(503, headers={"retry-after": "0"}, json={"error": "full"}))
        else:
            headers = {"content-type": self.headers["content-type"]}
            self._answer(httpx.post(self.server.service + self.path, content=body, headers=headers))

    def _answer(self, response: httpx.Response) -> None:
        self.send_response(response.status_code)
        for name in ("retry-after", "content-type"):
            if name in response.headers:
                self.send_header(name, response.headers[name])
        self.send_header("content-length", str(len(response.content)))
        self.end_headers()
        self.wfile.write(response.content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: stderr is the command's."""


@pytest.fixture
def gateway(service: str) -> Iterator[Gateway]:
    server = Gateway(service)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Two files of scored pairs; the five texts of each are one request."""
    found = []
    for number, name in enumerate("ab"):
        rows = [
            f"{left},{right},{(3 * i + 5 * j + number) % 7}"
            for i, left in enumerate(TEXTS)
            for j, right in enumerate(TEXTS)
        ]
        path = tmp_path / f"{name}.csv"
        path.write_text("\n".join(["sentence1,sentence2,score", *rows]) + "\n")
        found.append(str(path))
    return found


def figures(path: str, files: list[str], folder: Path) -> dict[str, float]:
    out = folder / "figures.json"
    out.unlink(missing_ok=True)
    evaluate.main([path, "--pairs", *files, "--cache", str(folder / "cache"), "--json", str(out)])
    (found,) = json.loads(out.read_text())["scores"].values()
    return dict(found)


def test_a_service_has_the_figures_of_its_bundle(bundle: Path, service: str, files: list[str], tmp_path: Path) -> None:
    expected = figures(str(bundle), files, tmp_path)
    assert list(expected) == ["a spearman", "a pearson", "b spearman", "b pearson"]
    assert figures(service, files, tmp_path) == pytest.approx(expected, abs=1e-3)


def test_a_service_that_is_busy_for_a_moment_is_asked_again(
    bundle: Path, gateway: Gateway, files: list[str], tmp_path: Path
) -> None:
    gateway.busy = range(2, 5)
    expected = figures(str(bundle), files, tmp_path)
    assert figures(gateway.url, files, tmp_path) == pytest.approx(expected, abs=1e-3)
    assert gateway.embedded == 5


def test_a_service_that_stays_busy_is_a_stop_that_can_be_continued(
    bundle: Path, gateway: Gateway, files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.busy = range(2, 100)
    assert run(lambda: figures(gateway.url, files, tmp_path)) == 2  # type: ignore[arg-type, return-value]
    (line,) = capsys.readouterr().err.splitlines()
    assert "answered 503: full, 8 times; finished sets are kept: run the same command again" in line
    assert gateway.embedded == 1 + ATTEMPTS
    gateway.busy = range(0)
    found = figures(gateway.url, files, tmp_path)
    assert gateway.embedded == 2 + ATTEMPTS  # only the second file was left
    assert found == pytest.approx(figures(str(bundle), files, tmp_path), abs=1e-3)
