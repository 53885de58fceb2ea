"""The composed service, driven through `docker compose`."""

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from patience import PATIENCE, wait_until

ROOT = Path(__file__).parents[2]
FILES = ("--file", "docker-compose.yml", "--file", str(Path(__file__).with_name("patient.yml")))


def run(*command: str, settings: dict[str, str] | None = None) -> str:
    """Stdout of a command that must succeed; of the caller's environment it sees no setting of the service."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CLOZE_")}
    environ = kept | (settings or {})
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE, env=environ)
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@dataclass(frozen=True)
class Stack:
    """docker-compose.yml under a project name of its own, on a port of 127.0.0.1 that the engine chooses."""

    project: str
    settings: dict[str, str] = field(default_factory=dict)

    def compose(self, *words: str) -> str:
        settings = {"PUBLISH": "127.0.0.1:", "PATIENCE": f"{PATIENCE:g}", **self.settings}
        return run("docker", "compose", "--project-name", self.project, *FILES, *words, settings=settings)

    def up(self) -> str:
        """Start the service, wait until it is healthy, and tell its address."""
        self.compose("up", "--detach", "--no-build", "--wait")
        return self.address()

    def address(self) -> str:
        """Where it is published; another place after each start."""
        return self.compose("port", "service", "8080").strip()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, otherwise=self.log)

    def down(self) -> None:
        self.compose("down", "--volumes", "--timeout", "5")

    def stop(self) -> None:
        """SIGTERM; SIGKILL only after the grace period."""
        self.compose("stop", "service")

    def python(self, code: str) -> str:
        """What a line of Python prints inside the container."""
        return self.compose("exec", "--no-TTY", "service", "python", "-c", code).strip()

    def state(self, field: str) -> str:
        """One field of the container's state, as the engine tells it."""
        return self._inspect(f"State.{field}")

    def restarts(self) -> int:
        """How often the restart policy has started it."""
        return int(self._inspect("RestartCount"))

    def _inspect(self, field: str) -> str:
        container = self.compose("ps", "--all", "--quiet", "service").strip()
        return run("docker", "inspect", "--format", f"{{{{.{field}}}}}", container).strip()

    def log(self) -> str:
        return self.compose("logs", "--no-color", "--no-log-prefix", "service")
