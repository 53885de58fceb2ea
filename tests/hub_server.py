"""A stand-in for the Hugging Face hub: repositories that huggingface_hub's own client downloads."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

TOKEN = "hf_read"


class Hub(ThreadingHTTPServer):
    """`folders` has the folder of each repository's revision; a commit is the digest of its path.

    A `private` repository is hidden from who has no TOKEN, and a `gated` one refused. `asked` has every path.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folders: dict[str, dict[str, Path]] = {}
        self.private: set[str] = set()
        self.gated: set[str] = set()
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


def commit_of(folder: Path) -> str:
    return hashlib.sha1(str(folder).encode()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = urlsplit(self.path).path.removeprefix("/api/models").strip("/")
        self.server.asked.append(path)
        owner, name, kind, revision, *rest = [*map(unquote, path.split("/")), "", ""]
        revisions = self.server.folders.get(f"{owner}/{name}", {})
        allowed = self.headers.get("authorization") == f"Bearer {TOKEN}"
        if not revisions or (f"{owner}/{name}" in self.server.private and not allowed):
            self.refuse(401 if not allowed else 404, "RepoNotFound")
        elif f"{owner}/{name}" in self.server.gated and not allowed:
            self.refuse(401, "GatedRepo")
        elif (folder := revisions.get(revision) or self.at_commit(revisions, revision)) is None:
            self.refuse(404, "RevisionNotFound")
        elif kind == "revision":
            self.answer(json.dumps({"id": f"{owner}/{name}", "sha": commit_of(folder), "siblings": []}).encode())
        elif kind == "tree":
            files = sorted(each for each in folder.rglob("*") if each.is_file())
            rows = [
                {"type": "file", "path": each.relative_to(folder).as_posix(), "size": each.stat().st_size}
                | {"oid": hashlib.sha1(each.read_bytes()).hexdigest()}
                for each in files
            ]
            self.answer(json.dumps(rows).encode())
        elif (file := folder.joinpath(*[part for part in rest if part])).is_file():  # resolve
            content = file.read_bytes()
            etag = hashlib.sha1(content).hexdigest()
            self.answer(content, {"X-Repo-Commit": commit_of(folder), "ETag": f'"{etag}"'})
        else:
            self.refuse(404, "EntryNotFound")

    do_HEAD = do_GET

    def at_commit(self, revisions: dict[str, Path], commit: str) -> Path | None:
        return next((folder for folder in revisions.values() if commit_of(folder) == commit), None)

    def refuse(self, status: int, code: str) -> None:
        self.answer(b"{}", {"X-Error-Code": code, "X-Error-Message": code}, status)

    def answer(self, content: bytes, headers: dict[str, str] | None = None, status: int = 200) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def hub_server() -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
