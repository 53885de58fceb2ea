"""The OpenAPI document holds: whatever is sent, the answer is one that it describes, and never a failure of ours.

schemathesis makes the requests from the document: its examples, each limit it states from both sides, and random ones,
right and wrong; the same ones each time.
"""

import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from harness import PATIENCE, Process, Serve

KEY = "the-key-of-a-test"
CONFIG = f"""
request-timeout = {PATIENCE}
suppress-health-check = ["too_slow"]

[auth.openapi.HTTPBearer]
bearer = "{KEY}"

[generation]
deterministic = true
database = "none"

[phases.stateful]
enabled = false

[parameters]
"path.model" = {{ dictionary = "served", probability = 0.8 }}

[dictionaries.served]
values = ["tiny"]

[checks.positive_data_acceptance] # what the document allows, this model may still not have
expected-statuses = [200, 400, 404, 422]

[checks.allow_header_conformance] # Starlette names the methods of a path's first route only
enabled = false

[checks.unsupported_method] # where there are keys, one is asked for before the method is looked at
enabled = false
"""


@pytest.mark.parametrize(
    ("phases", "examples"), [("examples,coverage,fuzzing", 5), pytest.param("fuzzing", 50, marks=pytest.mark.long)]
)
def test_every_answer_is_one_that_the_document_describes(
    phases: str, examples: int, serve: Serve, bundle: Path, tmp_path: Path
) -> None:
    keys = ("--api-keys", KEY, "--admin-keys", KEY)
    server = serve("--bundle", str(bundle), "--threads", "1", "--token-ids", *keys)
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--no-color"]
    command += ["--phases", phases, "--max-examples", str(examples)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert httpx.get(f"{server.url}/health/ready").status_code == 200


@pytest.fixture(scope="module")
def locked(serve: Serve, bundle: Path) -> Process:
    return serve("--bundle", str(bundle), "--threads", "1", "--api-keys", KEY)


def test_an_answer_without_a_key_is_described_too(locked: Process) -> None:
    refused = []
    for path, methods in httpx.get(f"{locked.url}/openapi.json").json()["paths"].items():
        for method, described in methods.items():
            status = httpx.request(method, locked.url + path.replace("{model}", "tiny"), json={}).status_code
            assert str(status) in described["responses"], f"{method} {path} answers {status}"
            refused += [path] * (status == 401)
    assert {"/embed", "/v1/embeddings", "/v1/models", "/info", "/admin/reload"} <= {*refused}
    assert not {"/health", "/health/ready", "/health/live", "/health/startup", "/metrics"} & {*refused}
