"""The shipped configuration of nginx, run by a real nginx in front of a service, and raw connections to it."""

import json
import os
import pwd
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

import httpx
import yaml
from harness import PATIENCE, ROOT, free_port, wait_until

TEMPLATES = ROOT / "docker" / "edge"
# A busy machine must not reach a limit. A test of one sets it, and no other.
LIMITS = dict.fromkeys(("EDGE_HEADER_SECONDS", "EDGE_BODY_SECONDS", "EDGE_SEND_SECONDS"), int(PATIENCE))
NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}{os.pathsep}/usr/sbin")


def shipped() -> dict[str, str]:
    """The environment that docker-compose.yml gives the container where the operator sets nothing."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    environment: dict[str, str] = services["edge"]["environment"]
    return {
        name: re.sub(r"\$\{\w+:\+.*?\}", "", re.sub(r"\$\{\w+:-(.*?)\}", r"\1", value))
        for name, value in environment.items()
    }


class Nginx:
    """nginx with the shipped templates, as an ordinary user, in a folder of its own.

    `settings` replace LIMITS and the environment's values. Its certificates are those of `certificates`, if any.
    """

    def __init__(self, upstream: str, certificates: Path | None = None, **settings: object) -> None:
        assert NGINX is not None
        self.port = free_port()
        self.scheme = "https" if certificates else "http"
        self.url = f"{self.scheme}://127.0.0.1:{self.port}"
        self._folder = tempfile.TemporaryDirectory(prefix="cloze-edge-")  # pytest's own folders are closed to others
        self.folder = Path(self._folder.name)
        self._render(
            {
                "EDGE_LISTEN": f"127.0.0.1:{self.port}",
                "EDGE_UPSTREAM": upstream.removeprefix("http://"),
                "EDGE_SCHEME": self.scheme,
                "EDGE_CERTIFICATES": self.folder,
            }
            | LIMITS
            | settings
        )
        for file in certificates.iterdir() if certificates else ():
            shutil.copy(file, self.folder)
        self._user = self._ordinary_user()
        self._command = [NGINX, "-e", "stderr", "-p", str(self.folder), "-c", "nginx.conf"]
        tested = subprocess.run([*self._command, "-t"], stdout=self._output(), stderr=self._output(), **self._user)
        assert tested.returncode == 0, self.output
        self.process = subprocess.Popen(self._command, stdout=self._output(), stderr=self._output(), **self._user)
        wait_until(self._listens)

    def _render(self, settings: dict[str, object]) -> None:
        """As the image does: ${NAME} is replaced where the environment has NAME, and nothing else is."""
        environment = shipped() | settings
        for template in TEMPLATES.glob("*.template"):
            text = re.sub(r"\$\{(\w+)\}", lambda found: str(environment[found[1]]), template.read_text())
            (self.folder / template.name.removesuffix(".template")).write_text(text)

    def _ordinary_user(self) -> dict[str, Any]:
        if os.geteuid() != 0:
            return {}
        nobody = pwd.getpwnam("nobody")
        for path in (self.folder, *self.folder.iterdir()):
            os.chown(path, nobody.pw_uid, nobody.pw_gid)
        return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}

    def _output(self) -> int:
        """nginx opens /dev/stdout again, so the file must be its user's."""
        opened = os.open(self.folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        if self._user:
            os.fchown(opened, self._user["user"], self._user["group"])
        return opened

    def _listens(self) -> bool:
        assert self.process.poll() is None, self.output
        try:
            socket.create_connection(("127.0.0.1", self.port), PATIENCE).close()
        except ConnectionRefusedError:
            return False
        return True

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()

    def log(self) -> list[dict[str, Any]]:
        """The lines of its log; nginx's own errors have another form."""
        return [json.loads(line) for line in self.output.splitlines() if line.startswith("{")]

    def connect(self, source: str = "127.0.0.1", receive_buffer: int = 0) -> "Connection":
        return Connection(self.port, source, receive_buffer)

    def ask(self, *parts: bytes) -> list["Answer"]:
        """Every answer on one connection, which nginx must end."""
        with self.connect() as connection:
            connection.send(*parts)
            return answers(connection.rest())

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE)
        self._folder.cleanup()


Edge = Callable[..., Nginx]


class Answer(NamedTuple):
    status: int
    headers: httpx.Headers
    body: bytes


def answers(received: bytes) -> list[Answer]:
    """Split what came on a connection; each answer must be complete."""
    found = []
    while received:
        head, _, rest = received.partition(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        headers = httpx.Headers([tuple(line.split(b": ", 1)) for line in lines])
        length = int(headers["content-length"])
        assert len(rest) >= length
        found.append(Answer(int(first.split()[1]), headers, rest[:length]))
        received = rest[length:]
    return found


def refusal(answer: Answer, status: int, error_type: str) -> str:
    """The message of an answer in the shape of the service's errors, which nginx gave."""
    assert answer.status == status
    assert answer.headers["server"] == "nginx"  # without a version
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    found = json.loads(answer.body)
    assert found == {"error": found["error"], "error_type": error_type}
    return str(found["error"])


class Connection:
    """One connection, byte by byte."""

    def __init__(self, port: int, source: str, receive_buffer: int) -> None:
        self.socket = socket.socket()
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(PATIENCE)
        self.socket.bind((source, 0))
        self.socket.connect(("127.0.0.1", port))
        self.file = self.socket.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.file.close()
        self.socket.close()

    def send(self, *parts: bytes) -> None:
        """nginx may refuse a request, and end the connection, before all of it is sent."""
        try:
            for part in parts:
                self.socket.sendall(part)
        except (BrokenPipeError, ConnectionResetError):
            pass

    def answer(self) -> Answer:
        """The next answer of a connection that goes on."""
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            line = self.file.readline()
            assert line, head
            head += line
        length = re.search(rb"(?i)content-length: (\d+)", head)
        return answers(head + self.file.read(int(length[1]) if length else 0))[0]

    def interim(self) -> bytes:
        """100 Continue, which nginx sends when it begins to read the body."""
        line = self.file.readline()
        assert self.file.readline() == b"\r\n"
        return line

    def rest(self) -> bytes:
        """What comes until nginx ends the connection; it resets the connection of a client that was too slow."""
        received = b""
        try:
            while part := self.file.read1():
                received += part
        except ConnectionResetError:
            pass
        return received
