"""A service behind nginx that logs every request that reaches it."""

import json
import re
from itertools import count
from typing import Any

import httpx
from harness import Process, wait_until

ADMIN_KEY = "the-key-of-an-operator"
OPTIONS = ("--threads", "1", "--log-format", "json", "--log-level", "debug", "--admin-keys", ADMIN_KEY)


class Service(Process):
    _numbers = count()

    def requests(self) -> list[dict[str, Any]]:
        """The lines of all that reached it until now, without this question's own."""
        identity = f"question-{next(self._numbers)}"
        httpx.get(f"{self.url}/health", headers={"x-request-id": identity})
        wait_until(lambda: f'"{identity}"' in self.log)
        lines = [json.loads(line) for line in self.log.splitlines() if line.startswith("{")]
        found = [line for line in lines if re.match(r"[A-Z]+ /", line["message"])]
        return [line for line in found if not line["request_id"].startswith("question-")]

    def of(self, identity: str) -> list[dict[str, Any]]:
        return [line for line in self.requests() if line["request_id"] == identity]
