"""`cloze evaluate` on a real service: the bundle's own figures, and what happens when it is busy half way."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import numpy as np
import pytest
from harness import Process
from tiny_bundle import write_bundle

from cloze.command import run
from cloze.encoding.errors import OptionError
from cloze.training import evaluate
from cloze.training.evaluation.measures import units as unit
from cloze.training.evaluation.options import EvaluateOptions
from cloze.training.evaluation.server import ATTEMPTS
from cloze.training.evaluation.subjects import subjects

TEXTS = ["a man plays the guitar", "two dogs run", "the man run", "a sentence of the man", "dogs means two"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    templates = {"query": '"[X]" means [MASK].', "document": 'the sentence "[X]" means [MASK].'}
    return write_bundle(tmp_path_factory.mktemp("bundle") / "tiny", templates=templates)


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
def collection(tmp_path: Path) -> str:
    """Each text as a query for the next one."""
    folder = tmp_path / "collection"
    folder.mkdir()
    for name, ids in (("corpus", "d"), ("queries", "q")):
        lines = [json.dumps({"_id": f"{ids}{number}", "text": text}) for number, text in enumerate(TEXTS)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    grades = [f"q{number}\td{(number + 1) % len(TEXTS)}\t1" for number in range(len(TEXTS))]
    (folder / "qrels.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *grades]) + "\n")
    return str(folder)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Two files of scored pairs; the five texts of each are one request."""
    found = []
    for number, (name, more) in enumerate({"a": "", "b": "two "}.items()):  # no text is in both files
        rows = [
            f"{more}{left},{more}{right},{(3 * i + 5 * j + number) % 7}"
            for i, left in enumerate(TEXTS)
            for j, right in enumerate(TEXTS)
            if i < j  # the cosine of a text with itself is 1 but for the last bit, which ranks would show
        ]
        path = tmp_path / f"{name}.csv"
        path.write_text("\n".join(["sentence1,sentence2,score", *rows]) + "\n")
        found.append(str(path))
    return found


def figures(path: str, files: list[str], folder: Path, *words: str) -> dict[str, float]:
    out = folder / "figures.json"
    out.unlink(missing_ok=True)
    evaluate.main([path, "--pairs", *files, "--cache", str(folder / "cache"), "--json", str(out), *words])
    (found,) = json.loads(out.read_text())["scores"].values()
    return dict(found)


def test_a_service_has_the_figures_of_its_bundle(bundle: Path, service: str, files: list[str], tmp_path: Path) -> None:
    expected = figures(str(bundle), files, tmp_path)
    assert list(expected) == [f"pairs {name} {metric}" for name in "ab" for metric in ("spearman", "pearson")]
    assert figures(service, files, tmp_path) == pytest.approx(expected, abs=1e-3)


def test_a_service_searches_with_the_bundles_templates(
    bundle: Path, service: str, files: list[str], collection: str, tmp_path: Path
) -> None:
    (local,), (remote,) = (subjects(path, EvaluateOptions.parse([path], "p")) for path in (str(bundle), service))
    for kind in ("embed", "embed_queries", "documents"):
        np.testing.assert_allclose(unit(getattr(local, kind)(TEXTS)), unit(getattr(remote, kind)(TEXTS)), atol=1e-5)
    assert not np.allclose(local.embed(TEXTS), local.embed_queries(TEXTS), atol=1e-3)
    assert not np.allclose(local.embed(TEXTS), local.documents(TEXTS), atol=1e-3)
    expected = figures(str(bundle), files[:1], tmp_path, "--retrieval", collection)
    assert "collection nDCG@10" in expected
    assert figures(service, files[:1], tmp_path, "--retrieval", collection) == pytest.approx(expected, abs=1e-3)


def test_a_key_that_cannot_be_read_is_named(service: str, tmp_path: Path) -> None:
    several = tmp_path / "keys"
    several.write_text("first secret-1\n", encoding="utf-8")
    with pytest.raises(
        OptionError, match=r"--key-file .*keys must contain one API key of ASCII characters, and nothing else"
    ):
        next(subjects(service, EvaluateOptions.parse([service, "--key-file", str(several)], "p")))
    with pytest.raises(OptionError, match=r"--key-file .*none cannot be read .* give a file that holds the API key"):
        next(subjects(service, EvaluateOptions.parse([service, "--key-file", str(tmp_path / "none")], "p")))


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
    *waits, line = capsys.readouterr().err.splitlines()
    again = f"{gateway.url}/embed answered 503: full; again in 0 s"
    assert waits == [again] * (ATTEMPTS - 1)
    assert "answered 503: full, 8 times; finished sets are kept: run the same command again" in line
    assert gateway.embedded == 1 + ATTEMPTS
    gateway.busy = range(0)
    found = figures(gateway.url, files, tmp_path)
    assert gateway.embedded == 2 + ATTEMPTS  # only the second file was left
    assert found == pytest.approx(figures(str(bundle), files, tmp_path), abs=1e-3)
