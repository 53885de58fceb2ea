"""A real server: sockets, clients that leave, how it stops, and how it refuses to start."""

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from harness import (
    LIMITS,
    PATIENCE,
    ROOT,
    MakeBundle,
    Process,
    Serve,
    default_model,
    distinct,
    free_port,
    has_cuda,
    healthy,
    until,
    wait_until,
)
from live import (
    BODY,
    Gate,
    ServeHeld,
    answer,
    ask_for_megabytes,
    connect,
    embed,
    hanging,
    head,
    metrics,
    request,
    served,
    small_connection,
    statuses,
)
from tiny_bundle import DIMENSION, TEMPLATE, write_bundle

from cloze.encoding.errors import OptionError
from cloze.service import server as serving
from cloze.service.app import create_app
from cloze.service.inference.health import HUNG
from cloze.service.server import FORCED, bind
from cloze.service.settings import Settings


@pytest.fixture(scope="module")
def server(serve: Serve, bundle: Path) -> Process:
    return serve("--bundle", str(bundle), "--threads", "1", "--payload-limit", "10000")


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_the_first_lines_of_the_log_have_a_command_that_works(serve: Serve, bundle: Path) -> None:
    for options, key in ((), ""), (("--api-keys", "0123456789abcdef", "--no-ui"), "0123456789abcdef"):
        process = serve("--bundle", str(bundle), "--threads", "1", *options)
        wait_until(lambda process=process: "try: " in process.log)
        (command,) = re.findall(r"try: (curl .*)", process.log)
        found = subprocess.run(shlex.split(command.replace("KEY", key)), capture_output=True, text=True, check=True)
        (vector,) = json.loads(found.stdout)
        assert len(vector) == DIMENSION
        assert ("playground at /" in process.log) == (key == "")
        assert key not in process.log or not key


def test_a_body_in_slow_pieces(server: Process) -> None:
    with connect(server.url) as stream:
        stream.sendall(head(f"content-length: {len(BODY)}"))
        for byte in BODY:
            stream.sendall(bytes([byte]))
        assert answer(stream)[0] == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_far_over_the_limit_is_refused_before_it_has_all_come(server: Process, chunked: bool) -> None:
    with connect(server.url) as stream:
        if chunked:
            stream.sendall(head("transfer-encoding: chunked") + b"c350\r\n" + b"x" * 50_000 + b"\r\n")
        else:
            stream.sendall(head("content-length: 1000000000"))
        status, body = answer(stream)
        assert (status, json.loads(body)["error_type"]) == (413, "PayloadTooLarge")


def test_who_sends_a_body_over_the_limit_reads_the_answer(server: Process) -> None:
    """Not a reset connection: the body is read to its end and dropped."""
    for _ in range(20):
        with connect(server.url) as stream:
            stream.sendall(head("content-length: 39000"))
            for _ in range(39):
                stream.sendall(b"x" * 1000)
            status, body = answer(stream)
            assert (status, json.loads(body)["error_type"]) == (413, "PayloadTooLarge")


@pytest.mark.parametrize(("trusted", "client"), [(None, "127.0.0.1"), ("127.0.0.1", "192.0.2.7")])
def test_who_a_client_says_it_is_counts_where_its_proxy_is_named(
    trusted: str | None, client: str, serve: Serve, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FORWARDED_ALLOW_IPS", raising=False)
    if trusted:
        monkeypatch.setenv("FORWARDED_ALLOW_IPS", trusted)
    server = serve("--bundle", str(bundle), "--threads", "1")
    httpx.post(f"{server.url}/embed", json={"inputs": "a"}, headers={"x-forwarded-for": "192.0.2.7"})
    assert server.end(signal.SIGTERM) == 0
    assert f" client={client} " in server.log


def test_what_is_no_http(server: Process) -> None:
    with connect(server.url) as stream:
        stream.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
        assert stream.recv(100).startswith(b"HTTP/1.1 400")
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_client_that_leaves_in_the_middle_of_its_body(server: Process) -> None:
    with connect(server.url) as stream:
        stream.sendall(head("content-length: 9000", "/embed?key=secret", "x-request-id: who-left") + b'{"inp')
    wait_until(lambda: "who-left" in server.log)
    (line,) = [line for line in server.log.splitlines() if "who-left" in line]
    assert re.search(r" INFO \S+ POST /embed status=499 ms=\S+ client=127\.0\.0\.1 request_id=who-left$", line)
    assert httpx.post(f"{server.url}/embed", content=BODY, headers={"content-type": "application/json"}).is_success


def test_a_client_that_leaves_costs_nothing(bundle: Path) -> None:
    app = create_app(Settings(bundle=bundle, threads=1, **LIMITS))
    model = default_model(app)
    with served(app) as url, Gate(default_model(app).session) as gate:
        with connect(url) as first:
            first.sendall(request({"inputs": "a man"}))
            wait_until(lambda: gate.batches == [1])
            leavers = [connect(url) for _ in range(5)]
            for number, stream in enumerate(leavers):
                stream.sendall(request({"inputs": distinct(35)[7 * number :][:7]}))
            wait_until(lambda: model.batcher.waiting_items == 35)
            for stream in leavers:
                stream.close()
            wait_until(lambda: model.batcher.waiting_items == 0)
            gate.let()
            assert answer(first)[0] == 200
        embed(url, ["a"])
        assert gate.batches == [1, 1]
        assert metrics(url)["cloze_failures_total{reason=Dropped}"] == 5
        assert statuses(url) == {200: 2, 499: 5}


async def load(url: str, texts: list[str], until_stopped: asyncio.Event, answered: list[int]) -> str:
    """Send requests one after another until one is not taken; the way it was not taken."""
    async with httpx.AsyncClient(timeout=PATIENCE) as http:
        while True:
            try:
                response = await http.post(f"{url}/embed", json={"inputs": texts})
            except httpx.TransportError as error:
                return type(error).__name__
            assert response.status_code == 200, response.text
            assert len(response.json()) == 8
            answered.append(1)
            if len(answered) == 40:
                until_stopped.set()


def test_sigterm_under_load_answers_every_request_it_took(serve_held: ServeHeld, bundle: Path) -> None:
    """One request is held until the server drains; the others use its second thread."""
    options = ["--provider", "cpu", "--threads", "2", "--max-batch-tokens", "64"]
    process = serve_held("--bundle", str(bundle), *options)

    async def run() -> tuple[list[int], list[str]]:
        answered: list[int] = []
        busy = asyncio.Event()
        held = asyncio.create_task(asyncio.to_thread(embed, process.url, ["two dogs"]))
        await asyncio.to_thread(process.wait_for_batch)
        texts = [distinct(96)[8 * number :][:8] for number in range(12)]
        clients: list[Awaitable[str]] = [asyncio.create_task(load(process.url, of, busy, answered)) for of in texts]
        await busy.wait()
        process.process.send_signal(signal.SIGTERM)
        await until(lambda: "draining requests=" in process.log)
        process.open()
        answered.append(len(await held))
        return answered, list(await asyncio.gather(*clients))

    answered, ends = asyncio.run(run())
    assert process.wait() == 0, process.log
    assert set(ends) <= {"ConnectError", "RemoteProtocolError", "ReadError", "WriteError"}
    draining = re.search(r"draining requests=(\d+)", process.log)
    drained = re.search(r"drained requests=(\d+) given_up=0 answered_in_all=(\d+)", process.log)
    assert draining
    assert drained
    assert int(draining[1]) > 0
    assert int(drained[1]) >= int(draining[1])
    assert int(drained[2]) == len(answered)  # what the server says it answered is what the clients have
    assert "Traceback" not in process.log


def test_a_drain_that_lasts_too_long_tells_the_clients(serve_held: ServeHeld, bundle: Path) -> None:
    options = ["--provider", "cpu", "--threads", "1", "--max-batch-tokens", "32", "--drain-seconds", "1"]
    process = serve_held("--bundle", str(bundle), *options)
    with connect(process.url) as stream:
        stream.sendall(request({"inputs": ["two dogs", *distinct(1000)]}))
        process.wait_for_batch()
        process.process.send_signal(signal.SIGTERM)
        status, body = answer(stream)
        process.open()
    assert (status, json.loads(body)["error_type"]) == (503, "Unhealthy")
    assert process.wait() == 0
    assert "given_up=1" in process.log
    assert "Traceback" not in process.log


def test_a_drain_that_cuts_an_answer_short_says_so(serve: Serve, make_bundle: MakeBundle) -> None:
    """Its client does not read on."""
    wide = make_bundle(dimension=512)
    process = serve("--bundle", str(wide), "--threads", "1", "--drain-seconds", "1")
    with ask_for_megabytes(process.url) as stream:
        assert stream.recv(2000).startswith(b"HTTP/1.1 200")
        assert process.end(signal.SIGTERM) == 0
    assert re.search(r" POST /embed status=200 .* error_type=Unhealthy ", process.log)
    assert "drained requests=0 given_up=1 answered_in_all=0" in process.log
    assert "Traceback" not in process.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_ends_with_status_0(serve: Serve, bundle: Path, number: int) -> None:
    process = serve("--bundle", str(bundle), "--provider", "cpu")
    with connect(process.url):  # an idle connection does not hold it
        assert process.end(number) == 0
    assert "Traceback" not in process.log
    served = r"model tiny .* provider=cpu precision=fp32 .* dimension=16 .* parallel_batches=\d+ threads_per_batch=\d+ "
    assert re.search(served, process.log)


def test_a_delay_before_the_end_in_which_requests_are_answered(serve: Serve, bundle: Path) -> None:
    """For a load balancer that has not yet heard; a second signal cuts it short."""
    process = serve("--bundle", str(bundle), "--threads", "1", "--stop-delay-seconds", "600")
    process.process.send_signal(signal.SIGTERM)
    wait_until(lambda: httpx.get(f"{process.url}/health/ready").status_code == 503)
    assert httpx.get(f"{process.url}/health/live").status_code == 200
    assert embed(process.url, ["a man"]).shape == (1, DIMENSION)
    assert metrics(process.url)["cloze_ready"] == 0
    assert process.end(signal.SIGTERM) == 0
    assert "no longer ready; stopping in 600 s" in process.log
    assert re.search(r"drained requests=\d+ given_up=0", process.log)


def test_a_delay_ends_by_itself(serve: Serve, bundle: Path) -> None:
    process = serve("--bundle", str(bundle), "--threads", "1", "--stop-delay-seconds", "0.2")
    assert process.end(signal.SIGTERM) == 0
    assert "stopping in 0.2 s" in process.log


def test_sigterm_while_a_batch_hangs(serve_held: ServeHeld, bundle: Path) -> None:
    """The client gets an answer, and the process still ends, with a status that says why."""
    process = serve_held("--bundle", str(bundle), "--threads", "1", "--drain-seconds", "1")
    with connect(process.url) as stream:
        stream.sendall(request({"inputs": "two dogs"}))
        process.wait_for_batch()
        process.pass_time()
        wait_until(lambda: httpx.get(f"{process.url}/health/ready").status_code == 503)
        process.process.send_signal(signal.SIGTERM)
        status, body = answer(stream)
    assert (status, json.loads(body)["error_type"]) == (503, "Unhealthy")
    assert process.wait() == HUNG, process.log
    assert "a batch still hangs" in process.log


@pytest.mark.parametrize("option", [[], ["--check"]])
def test_a_warm_up_that_hangs_ends_the_process(make_bundle: MakeBundle, option: list[str]) -> None:
    bundle = make_bundle(model=hanging(), template='two dogs "[X]" means [MASK].')
    found = run("--bundle", str(bundle), "--threads", "1", "--stall-seconds", "0.35", *option)
    assert (found.returncode, found.stdout) == (HUNG, "")
    assert found.stderr.endswith("warming up has hung for 1 s: the process ends with status 70\n")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Port 8080, the default, may be another service's."""
    command = [sys.executable, "-m", "cloze.service", *arguments]
    return subprocess.run(
        command, env=os.environ | {"CLOZE_PORT": "0"}, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE
    )


def test_help_lists_every_setting() -> None:
    found = run("--help")
    assert found.returncode == 0
    words = found.stdout.replace("\n", " ")
    for name in Settings.model_fields:
        assert f"--{name.replace('_', '-')}" in words


def test_a_second_interrupt_ends_at_once_even_while_a_batch_hangs(serve_held: ServeHeld, bundle: Path) -> None:
    process = serve_held("--bundle", str(bundle), "--threads", "1")
    with connect(process.url) as stream:
        stream.sendall(request({"inputs": "two dogs"}))
        process.wait_for_batch()
        process.process.send_signal(signal.SIGINT)
        wait_until(lambda: "draining requests=" in process.log)
        assert process.end(signal.SIGINT) == FORCED
    assert "ended by force" in process.log
    assert "Traceback" not in process.log


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, bundle: Path) -> Callable[[str], str]:
    """A path for each word in capitals."""
    folder = tmp_path_factory.mktemp("places")
    write_bundle(folder / "two" / "a")
    write_bundle(folder / "two" / "b")
    (folder / "empty").mkdir()
    shutil.copytree(bundle, folder / "altered")
    with (folder / "altered" / "onnx" / "model.onnx").open("ab") as file:
        file.write(b"x")
    return lambda word: str(bundle) if word == "BUNDLE" else word.replace("TMP", str(folder))


no_cuda = pytest.mark.skipif(has_cuda(), reason="CUDA is here")

BAD_STARTS = [
    (["--port", "x"], "--port (CLOZE_PORT) is 'x'"),
    (["--bundle", "absent"], "absent is not a folder"),
    (["--bundle", "TMP/empty"], "is not a bundle and contains none"),
    (["--bundle", "TMP/altered"], "model.onnx is not the file that was exported"),
    (["--bundle", "TMP/two"], "has several models and no default; set model to one of a, b"),
    (["--bundle", "TMP/two", "--model", "c"], "model is 'c', but"),
    (["TMP/two", "--bundle=BUNDLE"], "and --bundle both name what to serve; give only one of them"),
    (["--bundle", "BUNDLE", "--precision", "int8"], "has no int8 graph"),
    (["--bundle", "BUNDLE", "--hostname", "256.256.256.256"], "cannot listen on host '256.256.256.256'"),
    (["--bundle", "BUNDLE", "--api-keys", "@TMP/absent"], "absent cannot be read (No such file or directory)"),
    (["--bundle", "BUNDLE", "--admin-keys", "short"], "has 5 characters; at least 16 are needed"),
    pytest.param(["--bundle", "BUNDLE", "--provider", "cuda"], "CUDA", marks=no_cuda),
]


@pytest.mark.parametrize(("arguments", "words"), BAD_STARTS)
def test_a_start_that_cannot_be_is_one_line_and_status_2(
    place: Callable[[str], str], check_here: Callable[..., tuple[int, str, str]], arguments: list[str], words: str
) -> None:
    status, printed, errors = check_here(*map(place, arguments))
    assert (status, printed) == (2, "")
    assert errors.startswith("error: ")
    assert words in errors
    assert len(errors.splitlines()) == 1


def test_a_process_ends_so_without_a_check_too(place: Callable[[str], str]) -> None:
    found = run("--bundle", place("TMP/altered"))
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith("error: ")
    assert "model.onnx is not the file that was exported" in found.stderr
    assert len(found.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("256.256.256.256", "cannot listen on host '256.256.256.256'"),
        ("a" * 300, "not a host name; choose another"),
    ],
)
def test_a_host_that_cannot_be_had_is_told(host: str, words: str) -> None:
    with pytest.raises(OptionError, match=re.escape(words)):
        bind(host, 0)


def test_a_check_says_what_would_be_served_and_opens_no_port(place: Callable[[str], str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        found = run("--bundle", place("TMP/two"), "--model", "b", "--provider", "cpu", "--port", port, "--check")
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.splitlines() == [
        f"a: {TEMPLATE!r}, pooling mask, dimension 16, fp32 on cpu",
        f"b (default): {TEMPLATE!r}, pooling mask, dimension 16, fp32 on cpu",
        "ok",
    ]


def test_a_port_that_is_taken_is_one_line_and_status_2(bundle: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = run("--bundle", str(bundle), "--port", str(taken.getsockname()[1]))
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith("error: cannot listen on host '127.0.0.1'")
    assert len(found.stderr.splitlines()) == 1


def test_a_port_that_is_taken_while_the_models_are_loaded_is_one_line_too(bundle: Path) -> None:
    with bind("127.0.0.1", 0) as first, bind("127.0.0.1", first.getsockname()[1]) as second:
        settings = Settings(bundle=bundle, provider="cpu")
        app = create_app(settings)
        first.listen()
        with pytest.raises(OptionError, match=r"cannot listen on host '127.0.0.1', port \d+: Address already in use"):
            serving.serve(app, settings, second)


@pytest.mark.skipif(sys.platform == "win32", reason="a POSIX shell closes descriptors")
@pytest.mark.parametrize("closed", [">&- 2>&-", "<&-", "<&- >&- 2>&-"])
def test_closed_descriptors_do_not_abort_it(bundle: Path, closed: str) -> None:
    port = free_port()
    words = shlex.join([sys.executable, "-m", "cloze.service", "--bundle", str(bundle), "--port", str(port)])
    with subprocess.Popen(["sh", "-c", f"exec {words} {closed}"], cwd=ROOT) as process:
        wait_until(lambda: process.poll() is not None or healthy(f"http://127.0.0.1:{port}"))
        assert embed(f"http://127.0.0.1:{port}", ["a man"]).shape == (1, DIMENSION)
        process.terminate()
        assert process.wait(PATIENCE) == 0


def test_a_log_that_nobody_reads_stops_no_request(bundle: Path) -> None:
    """A pipe holds some 350 lines of requests."""
    port = free_port()
    url, words = f"http://127.0.0.1:{port}", ["-m", "cloze.service", "--bundle", str(bundle), "--port", str(port)]
    with subprocess.Popen([sys.executable, *words], cwd=ROOT, stderr=subprocess.PIPE) as process:
        wait_until(lambda: process.poll() is not None or healthy(url))
        with httpx.Client(timeout=PATIENCE) as client:
            for _ in range(1000):
                assert client.post(f"{url}/embed", json={"inputs": "a man"}).status_code == 200
            assert client.get(f"{url}/health/live").status_code == 200
            assert "cloze_log_records_dropped_total 0.0" in client.get(f"{url}/metrics").text
        process.terminate()
        assert process.wait(PATIENCE) == 0


OFFERS = {
    "h2c": ["connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQAoAAAAAIAAAAA"],
    "tls": ["upgrade: TLS/1.2", "connection: Upgrade"],
    "websocket": ["connection: keep-alive, upgrade", "upgrade: websocket"],
}


@pytest.mark.parametrize("offer", OFFERS)
def test_an_offer_to_upgrade_is_ignored(server: Process, offer: str) -> None:
    """As clients of Java and curl --http2 make it; the body is read, and the connection kept."""
    content = request({"inputs": "a man"}, "/embed", *OFFERS[offer])
    with connect(server.url) as stream:
        for pieces in (1, 2, 7):
            size = -(-len(content) // pieces)
            for start in range(0, len(content), size):
                stream.sendall(content[start : start + size])
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            status, body = answer(stream)
            assert (status, len(json.loads(body)[0])) == (200, DIMENSION)
        stream.sendall(request({"inputs": "a man"}))
        assert answer(stream)[0] == 200


def test_an_offer_beside_close_closes(server: Process) -> None:
    with connect(server.url) as stream:
        stream.sendall(request({"inputs": "a man"}, "/embed", "connection: close, upgrade", "upgrade: h2c"))
        assert answer(stream)[0] == 200
        assert stream.recv(1) == b""


def test_connect_is_no_offer(server: Process) -> None:
    with connect(server.url) as stream:
        stream.sendall(b"CONNECT host:443 HTTP/1.1\r\nhost: host:443\r\n\r\n")
        assert stream.recv(100).startswith(b"HTTP/1.1 4")


def test_at_its_deadline_a_client_that_does_not_read_is_cut_off(serve: Serve, make_bundle: MakeBundle) -> None:
    """Its answer is freed, the request counts as failed, and the end waits for nobody."""
    process = serve("--bundle", str(make_bundle(dimension=512)), "--request-seconds", "2")
    with ask_for_megabytes(process.url):
        wait_until(lambda: metrics(process.url).get("cloze_failures_total{reason=Timeout}") == 1)
        found = metrics(process.url)
        assert found["cloze_requests_in_flight"] == 1  # the one that asks
        assert statuses(process.url)[504] == 1
        assert process.end(signal.SIGTERM) == 0
    assert re.search(r"POST /embed status=504 .*error_type=Timeout", process.log)
    assert "drained requests=0 given_up=0" in process.log
    assert "without completing response" not in process.log
    assert "Traceback" not in process.log


def test_a_page_that_nobody_reads_has_a_deadline_too(serve: Serve, bundle: Path) -> None:
    process = serve("--bundle", str(bundle), "--request-seconds", "2")
    with small_connection(process.url) as stream:
        stream.sendall(b"GET /docs/swagger-ui-bundle.js HTTP/1.1\r\nhost: x\r\n\r\n" * 8)
        wait_until(lambda: metrics(process.url).get("cloze_failures_total{reason=Timeout}") == 1)
        assert process.end(signal.SIGTERM) == 0
    assert "drained requests=0 given_up=0" in process.log
    assert "Traceback" not in process.log


def test_errors_that_nobody_reads_have_a_deadline_too(serve: Serve, bundle: Path) -> None:
    process = serve("--bundle", str(bundle), "--body-seconds", "2")
    lines = ("x-request-id: " + "i" * 128, "x-long: " + "a" * 6000)  # so that few requests come in one read
    refused = head("content-length: 0", "/embed", "x-priority: high", *lines)
    with small_connection(process.url) as stream:
        stream.settimeout(1)
        with suppress(TimeoutError, ConnectionError):  # the service waits for the client, and then cuts it off
            while True:
                stream.sendall(refused)
        wait_until(lambda: metrics(process.url)["cloze_requests_in_flight"] == 1)  # the one that asks
        assert process.end(signal.SIGTERM) == 0
    assert "given_up=0" in process.log
    assert "Traceback" not in process.log


LINE = b"x-long: " + b"a" * 200_000
CHUNKED = head("transfer-encoding: chunked") + b"3\r\n{} \r\n0\r\n"


@pytest.mark.parametrize(
    "begin",
    [b"POST /embed HTTP/1.1\r\n" + LINE, b"POST /" + LINE[-200_000:], CHUNKED + LINE],
    ids=["header", "path", "trailer"],
)
def test_a_head_has_a_limit(server: Process, begin: bytes) -> None:
    """Also one whose line never ends; what follows is not read."""
    with connect(server.url) as stream:
        for start in range(0, len(begin), 10_000):
            with suppress(BrokenPipeError, ConnectionResetError):
                stream.sendall(begin[start : start + 10_000])
        found = stream.recv(1000)
    assert found.startswith(b"HTTP/1.1 431 ")
    assert b"HeadersTooLarge" in found


@pytest.mark.parametrize(("header", "path"), [(70_000, 1), (1, 70_000)])
def test_a_head_that_comes_at_once_has_the_same_limit(server: Process, header: int, path: int) -> None:
    with connect(server.url) as stream:
        stream.sendall(b"GET /%s HTTP/1.1\r\nhost: here\r\nx-long: %s\r\n\r\n" % (b"a" * path, b"a" * header))
        found = stream.recv(1000)
    assert found.startswith(b"HTTP/1.1 431 ")
    assert b"400" not in found


def test_headers_and_small_chunks_below_the_limit_are_read(server: Process) -> None:
    """A body in parts of one byte has more framing than a head may have."""
    with connect(server.url) as stream:
        for _ in range(3):
            stream.sendall(head("transfer-encoding: chunked", "/embed", *(f"x-{n}: {'a' * 4000}" for n in range(15))))
            content = json.dumps({"inputs": "a" * 9_900}).encode()
            stream.sendall(b"".join(b"1\r\n%c\r\n" % byte for byte in content) + b"0\r\n\r\n")
            assert answer(stream)[0] == 200


def test_a_short_answer_comes_as_one_packet(server: Process) -> None:
    with connect(server.url) as stream:
        for _ in range(50):
            stream.sendall(request({"inputs": "a man"}))
            received_head, _, body = stream.recv(65_536).partition(b"\r\n\r\n")
            assert f"content-length: {len(body)}\r\n".encode() in received_head + b"\r\n"
