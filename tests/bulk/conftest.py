"""A tiny bundle, whose vectors are known in numpy."""

from pathlib import Path

import pytest
from tiny_bundle import write_bundle


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("bundles") / "tiny")
