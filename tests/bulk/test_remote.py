"""--server: a running service is the encoder of a job; its vectors, its refusals, and what it is asked."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from live import metrics, served
from pydantic import SecretStr
from tiny_bundle import write_bundle

from cloze.command import run
from cloze.encoding.bundle import Bundle
from cloze.encoding.errors import OptionError
from cloze.service.app import create_app
from cloze.service.bulk import remote
from cloze.service.bulk.__main__ import main
from cloze.service.bulk.embed import Embed
from cloze.service.bulk.remote import Remote, RemoteError
from cloze.service.settings import Settings

KEY = "a-key-of-a-test-0123456789"
TEXTS = [
    "a man",
    "",
    "the man plays",
    "a [MASK] b",
    "two dogs run " * 40,
    None,
    "ümlaut",
    *(f"a {n}" for n in range(99)),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "tiny", templates={"document": 'A man of "[X]" means [MASK].'})


@pytest.fixture
def url(folder: Path) -> Iterator[str]:
    with served(create_app(Settings(bundle=folder, provider="cpu", threads=1, api_keys=SecretStr(KEY)))) as address:
        yield address


@contextmanager
def scripted(
    folder: Path, answers: list[tuple[int, dict[str, str], bytes]], health: int = 200, **facts: Any
) -> Iterator[tuple[str, list[Any]]]:
    """The address of a server that gives these answers in turn, the last one again and again, and what it was sent."""
    asked: list[Any] = []
    spec = Bundle.load(folder).spec
    info = {"model_sha": spec.files["onnx/model.onnx"], "embedding_space": spec.space, "max_client_batch_size": 50}
    info |= {"max_input_length": spec.max_tokens, "template": {"text": spec.template}} | facts

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer(*((200, {}, json.dumps(info).encode()) if self.path.endswith("/info") else (health, {}, b"")))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append((self.path, dict(self.headers), body))
            self.answer(*answers[min(len(asked), len(answers)) - 1])

        def answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
            self.send_response(status)
            for name, value in {**headers, "content-length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", asked
        finally:
            server.shutdown()


@pytest.mark.parametrize(
    "options",
    [{}, {"prompt_name": "document"}, {"chunk_tokens": 10}, {"truncate": False}, {"dtype": "int8", "dimensions": 5}],
)
def test_the_tables_are_those_of_the_graph_here(folder: Path, url: str, options: dict[str, Any]) -> None:
    table = pa.table({"text": TEXTS})
    here, there = (
        Embed(folder, threads=1, **options, **more)(table) for more in ({}, {"server": url, "key": SecretStr(KEY)})
    )
    assert there.schema.equals(here.schema, check_metadata=True)
    assert there.drop_columns("embedding").equals(here.drop_columns("embedding"))
    for one, other in zip(here.column("embedding").to_pylist(), there.column("embedding").to_pylist(), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_allclose(one, other, atol=1e-6)


def test_requests_are_of_the_class_bulk_and_of_one_space(folder: Path, url: str) -> None:
    Embed(folder, server=url, key=SecretStr(KEY)).embed(["a man", "two dogs"])
    counted = metrics(url)
    assert counted["cloze_request_seconds_count{priority=bulk,route=/embed}"] == 1
    with scripted(folder, [(200, {"x-embedding-shape": "1,16"}, bytes(64))]) as (address, asked):
        Remote(address + "/models/tiny/", SecretStr(""), Bundle.load(folder)).embed(["a"])
    ((path, headers, body),) = asked
    assert path == "/models/tiny/embed"
    assert (headers["x-priority"], headers["if-match"]) == ("bulk", Bundle.load(folder).spec.space)
    assert "authorization" not in headers
    assert body == {"inputs": ["a"], "truncate": True, "prompt_name": None, "normalize": False}


def test_a_busy_server_is_asked_again_after_the_time_that_it_gives(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("urllib3.util.retry.time.sleep", pauses.append)
    busy = [(429, {"retry-after": "7"}, b""), (503, {"retry-after": "3"}, b"")] * 10
    with scripted(folder, [*busy, (200, {"x-embedding-shape": "1,16"}, bytes(64))]) as (address, asked):
        assert Embed(folder, server=address).embed(["a"]).errors == {}
    assert len(asked) == 21
    assert pauses == [7, 3] * 10


def test_no_request_has_more_texts_than_the_server_takes(folder: Path) -> None:
    with scripted(folder, [(424, {}, b"")], max_client_batch_size=3) as (address, asked):
        Embed(folder, server=address).embed([f"a {number}" for number in range(7)])
    assert max(len(body["inputs"]) for _, _, body in asked) == 3


def test_only_the_refused_text_has_no_vector(folder: Path, url: str) -> None:
    found = Embed(folder, server=url, key=SecretStr(KEY), normalize=False).embed(["a man", "the poison", "two dogs"])
    assert list(found.errors) == [1]
    assert "not finite" in found.errors[1]
    assert np.abs(found.vectors[[0, 2]]).min(axis=1).all()


@pytest.mark.parametrize(
    ("status", "content", "message"),
    [
        (
            401,
            b'{"error": "no API key was sent"}',
            "answered 401: no API key was sent; correct this; complete parts are kept",
        ),
        (412, b'{"error": "another space"}', "answered 412: another space; correct this; complete parts are kept"),
        (200, b"[[1.0]]", "answered 200: OK; correct this; complete parts are kept"),
    ],
)
def test_a_fatal_response_is_reported(folder: Path, status: int, content: bytes, message: str) -> None:
    with scripted(folder, [(status, {}, content)]) as (address, _), pytest.raises(RemoteError, match=message):
        Embed(folder, server=address).embed(["a"])


def test_a_model_that_fails_on_everything_ends_the_job(folder: Path) -> None:
    """Rows that were recorded as failed would not be tried again."""
    with (
        scripted(folder, [(424, {}, b'{"error": "the GPU is lost"}')], health=503) as (address, asked),
        pytest.raises(RemoteError, match="answered 424: the GPU is lost"),
    ):
        Embed(folder, server=address).embed(["a", "b"])
    assert [len(body["inputs"]) for _, _, body in asked] == [2, 1]


def test_an_unreachable_server_ends_the_job(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "LOST_ATTEMPTS", 0)
    with scripted(folder, []) as (address, _):
        embed = Embed(folder, server=address)
    with pytest.raises(RemoteError, match=r"cannot be reached .*start the same command again when it answers"):
        embed.embed(["a"])


@pytest.mark.parametrize("facts", [{"model_sha": "0" * 64}, {"embedding_space": "0" * 16}, {"max_input_length": 20}])
def test_another_graph_space_or_limit_is_refused(folder: Path, facts: dict[str, Any]) -> None:
    with (
        scripted(folder, [], **facts) as (address, _),
        pytest.raises(OptionError, match="does not serve the model and graph of"),
    ):
        Embed(folder, server=address)


def test_another_model_is_refused_before_the_work(
    folder: Path, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key, texts = tmp_path / "key", tmp_path / "texts.txt"
    key.write_text(KEY)
    texts.write_text("a man\n")
    other = write_bundle(tmp_path / "other", seed=3)
    both = write_bundle(
        tmp_path / "both", None, ("fp32", "int8"), templates={"document": 'A man of "[X]" means [MASK].'}
    )
    words = [str(texts), str(tmp_path / "out"), "--server", url, "--key-file", str(key), "--bundle"]
    for arguments, message in (
        ([*words, str(other)], "does not serve the model and graph of"),
        ([*words, str(folder), "--precision", "int8"], "tiny has no int8 graph, only fp32"),
        ([*words, str(both), "--precision", "int8"], f"precision is int8, but {url} runs fp32; omit --precision"),
        ([*words[:2], "--key-file", str(key)], "--key-file is used only with --server"),
        ([*words[:4], "--bundle", str(folder)], "/info answered 401: no API key was sent; send the header"),
        ([*words[:3], "http://127.0.0.1:1", "--bundle", str(folder)], "cannot be reached"),
        (
            [*words[:3], "127.0.0.1:8080", "--bundle", str(folder)],
            "'127.0.0.1:8080', which is not a URL; write http://",
        ),
        ([*words[:5], str(tmp_path / "none"), "--bundle", str(folder)], "give a file that holds the API key"),
    ):
        assert run(partial(main, arguments)) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert message in err
    assert not (tmp_path / "out" / "job.json").exists()


def test_the_precision_is_that_of_the_server(folder: Path, url: str) -> None:
    assert Remote(url, SecretStr(KEY), Bundle.load(folder)).precision == "fp32"
    with pytest.raises(OptionError, match=r"answered 404: .*; give the address and the key of a service of Cloze"):
        Remote(url + "/nothing", SecretStr(KEY), Bundle.load(folder))


def test_an_alias_of_another_template_is_named(folder: Path) -> None:
    """Its own vectors are those of the named template, which the record of the job would not say."""
    settings = Settings(bundle=folder, provider="cpu", threads=1, alias="store=tiny:document")
    with served(create_app(settings)) as address:
        alias = f"{address}/models/store"
        with pytest.raises(OptionError, match="is an alias that stands for another template of the model; name the"):
            Embed(folder, server=alias)
        named = [Embed(folder, server=each, prompt_name="document").embed(TEXTS).vectors for each in (alias, address)]
    np.testing.assert_array_equal(*named)


def test_a_graph_that_changes_during_the_job_ends_it(tmp_path: Path) -> None:
    both = write_bundle(tmp_path / "both", None, ("fp32", "int8"))
    embed, spec = None, Bundle.load(both).spec
    with scripted(both, [(200, {"x-embedding-shape": f"1,{spec.dimension}"}, bytes(4 * spec.dimension))]) as (url, _):
        embed = Embed(both, server=url)
        assert embed(pa.table({"text": ["a man"]})).num_rows == 1
        embed._remote.precision = "int8"  # as if it had run this graph at the start
        with pytest.raises(RemoteError, match="now runs fp32, but ran int8 before; complete parts are kept"):
            embed(pa.table({"text": ["a man"]}))


def test_a_server_that_is_lost_between_two_parts_ends_the_job_with_the_next_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = Bundle.load(folder).spec
    answer = (200, {"x-embedding-shape": f"1,{spec.dimension}"}, bytes(4 * spec.dimension))
    with scripted(folder, [answer]) as (url, _):
        embed = Embed(folder, server=url)
        monkeypatch.setattr(embed._remote, "url", "http://127.0.0.1:1")
        embed._remote._pool.connection_pool_kw["retries"] = 1
        with pytest.raises(RemoteError, match=r"cannot be reached .*start the same command again when it answers"):
            embed(pa.table({"text": ["a man"]}))
