"""Maps with known answers, and the command."""

import random
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.linalg import orthogonal_procrustes
from scipy.stats import ortho_group
from tiny_bundle import OTHER, WORDS, write_bundle

from cloze.encoding.bridge import Bridge
from cloze.encoding.bundle import Bundle
from cloze.encoding.errors import ClozeError
from cloze.training import bridge
from cloze.training.evaluation.measures import units


def unit_vectors(rows: int, width: int, seed: int) -> NDArray[np.float64]:
    return units(np.random.default_rng(seed).normal(size=(rows, width)))


def test_a_rotation_is_found_exactly() -> None:
    new = unit_vectors(50, 6, 0)
    rotation = ortho_group.rvs(6, random_state=np.random.default_rng(1))
    found = bridge.orthogonal(new, new @ rotation)
    np.testing.assert_allclose(found.matrix, rotation, atol=1e-12)
    assert not found.offset.any()


def test_the_orthogonal_map_is_that_of_scipy() -> None:
    new, old = unit_vectors(50, 6, 0), unit_vectors(50, 6, 1)
    np.testing.assert_allclose(bridge.orthogonal(new, old).matrix, orthogonal_procrustes(new, old)[0], atol=1e-12)


@pytest.mark.parametrize(("wide", "narrow"), [(8, 5), (5, 8)])
def test_between_two_widths_the_smaller_side_is_orthonormal(wide: int, narrow: int) -> None:
    new, old = unit_vectors(60, wide, 0), unit_vectors(60, narrow, 1)
    matrix = bridge.orthogonal(new, old).matrix
    assert matrix.shape == (wide, narrow)
    gram = matrix.T @ matrix if wide > narrow else matrix @ matrix.T
    np.testing.assert_allclose(gram, np.eye(min(wide, narrow)), atol=1e-12)
    other = bridge.orthogonal(unit_vectors(60, wide, 2), unit_vectors(60, narrow, 3)).matrix
    assert (new @ matrix * old).sum() > (new @ other * old).sum()  # it has the largest sum of dot products


def test_an_affine_map_is_found() -> None:
    new = unit_vectors(4000, 4, 0)
    matrix, offset = np.random.default_rng(1).normal(size=(4, 3)), np.array([1.0, -2.0, 0.5])
    found = bridge.affine(new, new @ matrix + offset)
    np.testing.assert_allclose(found.matrix, matrix, atol=1e-3)
    np.testing.assert_allclose(found.offset, offset, atol=1e-3)


def test_what_is_kept_is_that_of_a_naive_loop() -> None:
    mapped, old, documents = unit_vectors(20, 4, 0), unit_vectors(20, 4, 1), unit_vectors(40, 4, 2)
    expected = []
    for one, other in zip(mapped, old, strict=True):
        best = [{*sorted(range(40), key=lambda row: -query @ documents[row])[:7]} for query in (one, other)]
        expected.append(len(best[0] & best[1]) / 7)
    assert list(bridge.recalls(mapped, old, documents, depth=7)) == expected
    assert list(bridge.recalls(old, old, documents, depth=7)) == [1.0] * 20


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = random.Random(0)
    words = [word for word in WORDS if word != "poison"]
    path = tmp_path_factory.mktemp("texts") / "texts.txt"
    rows = dict.fromkeys(" ".join(draw.choices(words, k=draw.randint(3, 12))) for _ in range(800))
    path.write_text("\n".join(rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`old`, `near`, the same graph in a template that is a little longer, and `far`, of another width and graph."""
    folder = tmp_path_factory.mktemp("bundles")
    write_bundle(folder / "old")
    write_bundle(folder / "near", template='This sentence of "[X]" means [MASK]!')
    write_bundle(folder / "far", **OTHER)
    return folder


def test_the_command_writes_a_bridge(
    bundles: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bridge"
    words = [str(bundles / "old"), str(bundles / "near"), str(out), "--texts", str(texts), "--least-recall", "0.5"]
    bridge.main(words)
    found = Bridge.load(out)
    assert found.about.old == Bundle.load(bundles / "old").spec.space
    assert found.about.new == Bundle.load(bundles / "near").spec.space
    assert 0.5 <= found.about.least <= found.about.recall <= found.about.most <= 1
    assert f"recall@10 {found.about.recall:.3f}" in capsys.readouterr().out
    again = tmp_path / "again"
    bridge.main([*words[:2], str(again), *words[3:]])
    assert again.read_bytes() == out.read_bytes()


def test_between_two_widths_the_command_refuses_what_keeps_too_little_unless_forced(
    bundles: Path, texts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "bridge"
    words = [str(bundles / "old"), str(bundles / "far"), str(out), "--texts", str(texts), "--least-recall", "1"]
    with pytest.raises(ClozeError, match=r"keeps too little of the old results: recall@10 0\.\d+ .* with --force"):
        bridge.main(words)
    assert not out.exists()
    bridge.main([*words, "--force"])
    assert Bridge.load(out).matrix.shape == (8, 16)


def test_what_cannot_be_fitted_is_one_line(bundles: Path, texts: Path, tmp_path: Path) -> None:
    old, near, out = str(bundles / "old"), str(bundles / "near"), str(tmp_path / "bridge")
    unknown = tmp_path / "unknown.txt"
    unknown.write_text("".join(f"{chr(0x1780 + row % 30)}{chr(0x1780 + row // 30)} " * 3 + "\n" for row in range(600)))
    few = tmp_path / "few.txt"
    few.write_text("a man\nthe dogs\n", encoding="utf-8")
    for words, message in [
        ((old, old, out, "--texts", str(texts)), "have the same vector space; their vectors need no bridge"),
        ((old, near, out, "--texts", str(few)), "2 distinct texts; a bridge needs 500 or more"),
        ((old, near, out, "--texts", str(unknown)), "old model gives 480 different texts only 1 different vectors"),
        ((old, str(tmp_path), out, "--texts", str(texts)), "so it is not a finished bundle"),
        ((old, near, str(tmp_path), "--texts", str(texts)), "is a folder; name a file"),
        ((old, near, out, "--texts", str(tmp_path / "none.txt")), "does not exist"),
        ((old, near, str(few), "--texts", str(tmp_path / "*.txt")), "would overwrite one of the files that are read"),
    ]:
        with pytest.raises(ClozeError, match=message):
            bridge.main(words)
    assert not Path(out).exists()
