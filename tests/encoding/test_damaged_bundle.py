"""A bundle with any one byte changed: it is refused in one line, or it gives the vectors that it gave."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from tiny_bundle import write_bundle

from cloze.encoding.bundle import Bundle
from cloze.encoding.errors import ClozeError

TEXTS = ["two dogs run", "", "a man [MASK]"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("damaged") / "tiny", templates={"query": "dogs: [X] [MASK]"})


def read(folder: Path) -> object:
    """All that is read of a bundle before its graph runs."""
    found = Bundle.load(folder)
    sequences = [each.ids for each in found.text_encoder.encode(TEXTS)]
    heads = {name: head.model_dump() for name, head in found.heads.items()}
    return sequences, heads, found.spec.space, found.canaries, found.spec.dimension


@given(name=some.integers(0, 100), place=some.integers(0, 2**31), change=some.integers(1, 255))
def test_any_byte(bundle: Path, tmp_path_factory: pytest.TempPathFactory, name: int, place: int, change: int) -> None:
    files = sorted(path.relative_to(bundle) for path in bundle.rglob("*") if path.is_file())
    copy = tmp_path_factory.mktemp("copy") / "tiny"
    shutil.copytree(bundle, copy)
    path = copy / files[name % len(files)]
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= change
    path.write_bytes(content)
    try:
        found = read(copy)
    except ClozeError as error:
        assert str(copy) in str(error)  # noqa: PT017 - whether it is refused depends on the byte
    else:
        np.testing.assert_equal(found, read(bundle))
    shutil.rmtree(copy.parent)
