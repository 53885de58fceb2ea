"""kubectl builds every overlay as a user does. Without kubectl these tests are skipped and listed."""

import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import yaml
from manifests import Build, Document


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "build" in getattr(item, "fixturenames", ()):
            item.add_marker("kubectl")


@pytest.fixture(scope="session")
def build() -> Build:
    """The documents that `kubectl apply -k FOLDER` sends. Each folder is built once."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("There is no kubectl on the path; Debian 13's package `kubernetes-client` has it")

    @cache
    def built(folder: Path) -> list[Document]:
        done = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert not done.stderr  # warnings of fields that will be removed
        return list(yaml.safe_load_all(done.stdout))

    return built
