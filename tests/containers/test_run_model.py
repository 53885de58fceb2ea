"""`docker run cloze-service MODEL`: the image, which has no torch, makes a bundle of a model and serves it."""

import http.client
import json
from pathlib import Path

import numpy as np
import pytest
from patience import PATIENCE, wait_until
from repository_graph import write_repository_graph
from saved_models import model_of, own_vectors
from stack import run

pytestmark = [pytest.mark.container, pytest.mark.long]

TEXTS = ["A man plays the guitar.", "Two dogs run.", 'It says "[MASK]".']
STRICT = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")


def test_a_model_of_sentence_transformers_is_served(project: str, tiny_bert: Path, tmp_path: Path) -> None:
    model, name = model_of(tmp_path, tiny_bert), f"{project}-model"
    write_repository_graph(model)
    for path in (tmp_path, *tmp_path.rglob("*")):  # the container's user may not enter pytest's folders
        path.chmod(0o755)
    mounted = ("--volume", f"{model}:/model:ro", "--env", "XDG_CACHE_HOME=/tmp", "--publish", "127.0.0.1::8080")
    try:
        run("docker", "run", "--detach", "--name", name, *STRICT, *mounted, f"{project}-service", "/model")
        health = ("docker", "inspect", "--format", "{{.State.Health.Status}}", name)
        wait_until(lambda: run(*health).strip() == "healthy", otherwise=lambda: run("docker", "logs", name))
        client = http.client.HTTPConnection(run("docker", "port", name, "8080").strip(), timeout=PATIENCE)
        client.request("POST", "/embed", json.dumps({"inputs": TEXTS}), {"content-type": "application/json"})
        vectors = json.load(client.getresponse())
        client.close()
    finally:
        run("docker", "rm", "--force", name)
    np.testing.assert_allclose(np.array(vectors), own_vectors(model, TEXTS), atol=1e-5)
