"""A stand-in for the Hugging Face hub, as far as an upload needs it: repositories, LFS objects and commits."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["OWNER", "TOKEN", "Hub", "hub_server"]

TOKEN = "hf_write"
OWNER = "rain"


class Hub(ThreadingHTTPServer):
    """`files` has the content of every committed file by repository and path."""

    def __init__(self, lfs_bytes: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lfs_bytes = lfs_bytes  # larger files are LFS objects
        self.files: dict[str, dict[str, bytes]] = {}
        self.objects: dict[str, bytes] = {}
        self.private: dict[str, bool] = {}
        self.messages: list[str] = []
        self.cards: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        path = self.path.partition("?")[0]
        if self.headers.get("authorization") != f"Bearer {TOKEN}":
            self.answer(401, {"error": "Invalid username or password."})
        elif path == "/api/repos/create":
            self.create(json.loads(body))
        elif path == "/api/validate-yaml":
            self.server.cards.append(json.loads(body)["content"])
            self.answer(200, {"errors": [], "warnings": []})
        elif path.endswith(".git/info/lfs/objects/batch"):
            self.lfs_batch(json.loads(body))
        elif path == "/lfs/verify":
            self.answer(200, {})
        elif "/preupload/" in path:
            self.preupload(json.loads(body))
        elif "/commit/" in path:
            self.commit(path.split("/api/models/")[1].partition("/commit/")[0], body)
        else:
            self.answer(404, {"error": f"no {path}"})

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["content-length"]))
        digest = hashlib.sha256(content).hexdigest()
        assert self.path == f"/lfs/{digest}"
        self.server.objects[digest] = content
        self.answer(200, {})

    def do_GET(self) -> None:
        self.answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})

    def create(self, request: dict[str, Any]) -> None:
        name = f"{request['organization']}/{request['name']}"
        if request["organization"] != OWNER:
            self.answer(403, {"error": f"You don't have the rights to create a model under {request['organization']}"})
            return
        status = 409 if name in self.server.files else 200
        self.server.files.setdefault(name, {})
        self.server.private.setdefault(name, request.get("visibility") == "private")
        self.answer(status, {"url": f"{self.server.url}/{name}", "name": name})

    def preupload(self, request: dict[str, Any]) -> None:
        modes = {
            file["path"]: "lfs" if file["size"] > self.server.lfs_bytes else "regular" for file in request["files"]
        }
        self.answer(
            200,
            {"files": [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]},
        )

    def lfs_batch(self, request: dict[str, Any]) -> None:
        objects = []
        for wanted in request["objects"]:
            actions = {
                "upload": {"href": f"{self.server.url}/lfs/{wanted['oid']}", "header": {}},
                "verify": {"href": f"{self.server.url}/lfs/verify", "header": {}},
            }
            objects.append(wanted | {"actions": actions})
        self.answer(200, {"transfer": "basic", "objects": objects})

    def commit(self, name: str, body: bytes) -> None:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                self.server.messages.append(value["summary"])
            elif line["key"] == "file":
                self.server.files[name][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.server.files[name][value["path"]] = self.server.objects[value["oid"]]
        self.answer(200, {"commitUrl": f"{self.server.url}/{name}/commit/{'0' * 40}", "commitOid": "0" * 40})

    def answer(self, status: int, content: object, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        for key, value in (
            {"content-type": "application/json", "content-length": str(len(body))} | (headers or {})
        ).items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def hub_server(lfs_bytes: int) -> Iterator[Hub]:
    with Hub(lfs_bytes) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
