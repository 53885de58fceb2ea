"""A Prometheus in a process of its own."""

import re
import subprocess
from pathlib import Path
from typing import Any

import httpx
from patience import PATIENCE, wait_until

FOLDER = Path(__file__).parents[2] / "docker" / "monitoring"


class Prometheus:
    """Runs `folder`/prometheus.yml on a port that it chooses."""

    def __init__(self, binary: str, folder: Path) -> None:
        self._log = folder / "log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [
                    binary,
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    "--web.listen-address=127.0.0.1:0",
                ],
                stderr=log,
                stdout=log,
            )
        wait_until(lambda: self._process.poll() is not None or self._address())
        assert self._process.poll() is None, self._log.read_text()
        self.http = httpx.Client(base_url=f"http://{self._address()}", timeout=PATIENCE)
        wait_until(lambda: self.http.get("/-/ready").status_code == 200)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an instant vector, or a scalar as one; an expression that cannot be evaluated is an error."""
        answer = self.http.get("/api/v1/query", params={"query": expression}).json()
        assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
        assert not answer.get("warnings"), f"{expression}: {answer['warnings']}"
        data = answer["data"]
        return data["result"] if data["resultType"] == "vector" else [{"metric": {}, "value": data["result"]}]

    def wait_for(self, expression: str) -> list[dict[str, Any]]:
        """The same, once there is an answer: after a scrape that took too long there is none for a moment."""
        wait_until(lambda: self.query(expression), lambda: f"{expression} has no answer")
        return self.query(expression)

    def names(self) -> set[str]:
        """Every series that was scraped or made by a rule."""
        return set(self.http.get("/api/v1/label/__name__/values").json()["data"])

    def rules(self, kind: str) -> list[dict[str, Any]]:
        """`record` or `alert`."""
        groups = self.http.get("/api/v1/rules", params={"type": kind}).json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def close(self) -> None:
        self.http.close()
        self._process.terminate()
        self._process.wait(PATIENCE)

    def _address(self) -> str | None:
        found = re.search(r'"Listening on" address=(\S+)', self._log.read_text())
        return found and found[1]


def send_traffic(url: str) -> None:
    """Every kind of answer, and short and long texts for both models."""
    words = [chr(ord("a") + index) for index in range(26)]
    with httpx.Client(base_url=url, timeout=PATIENCE) as http:
        for first in words:
            texts = [f"{first} {second}" * length for length, second in enumerate(words[:8], start=1)]
            for model in ("one", "two"):
                assert http.post(f"/models/{model}/embed", json={"inputs": texts}).status_code == 200
        assert http.post("/embed", json={"inputs": "a " * 100}).status_code == 200  # cut
        assert http.post("/v1/embeddings", json={"input": ["a"], "model": "one"}).status_code == 200
        similarity = {"inputs": {"source_sentence": "a", "sentences": ["b"]}}
        assert http.post("/similarity", json=similarity).status_code == 200
        assert http.post("/embed", json={"inputs": []}).status_code == 400
        for model in ("one", "two"):
            assert http.post(f"/models/{model}/embed", json={"inputs": "poison"}).status_code == 424
