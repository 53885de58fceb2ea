"""Distillation from vectors that cloze bulk wrote: the same loss as with the teacher in the loop, in its parts."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from numpy.typing import NDArray
from recipes import load_recipe
from scipy.linalg import orthogonal_procrustes
from test_objectives import build
from tiny_bundle import write_bundle

from cloze.service.bulk.embed import Embed
from cloze.service.bulk.output import Output
from cloze.training.data.teacher_vectors import TeacherVectors
from cloze.training.errors import CorpusError, RecipeError
from cloze.training.loop.prepare import prepare
from cloze.training.methods.distill import Distill
from cloze.training.model.encoder import SentenceEncoder

THINGS = ["dog", "man", "letter", "city", "rain", "guitar"]
TEXTS = [f"The {a} and the {b} run over the field." for a in THINGS for b in THINGS]


def written(
    folder: Path, texts: Sequence[str], vectors: NDArray[Any], space: str = "one", number: int = 0, **columns: Any
) -> str:
    """A part of a folder as cloze bulk writes it."""
    kind = pa.from_numpy_dtype(vectors.dtype)
    table = pa.table(
        {
            "text": list(texts),
            "embedding": pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel(), kind), vectors.shape[1]),
            "tokens": pa.array([1] * len(texts), pa.int32()),
            "truncated": [False] * len(texts),
            "error": pa.nulls(len(texts), pa.string()),
            **columns,
        },
    )
    output = Output.at(str(folder), rows_per_part=8192)
    output.filesystem.create_dir(output.root)
    output.write(0, number, table.replace_schema_metadata({"embedding_space": space}), [])
    return str(folder)


def random(width: int, seed: int = 0, rows: int = len(TEXTS)) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(rows, width)).astype(np.float32)


def units(vectors: NDArray[Any]) -> NDArray[Any]:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_products_are_the_weighted_mean_of_the_teachers_cosines(tmp_path: Path) -> None:
    """Whatever the order of their texts, and however long their vectors are."""
    one, other, order = random(24, 1), 7 * random(16, 2), np.random.default_rng(3).permutation(len(TEXTS))
    folders = [
        written(tmp_path / "one", TEXTS, one),
        written(tmp_path / "other", [TEXTS[place] for place in order], other[order], "other"),
    ]
    found = TeacherVectors.read(folders, [3, 1], "text").of(TEXTS)
    cosines = 0.75 * units(one) @ units(one).T + 0.25 * units(other) @ units(other).T
    np.testing.assert_allclose(found @ found.T, cosines, atol=2e-3)


def test_a_text_is_found_whatever_blanks_are_around_it(tmp_path: Path) -> None:
    """A corpus strips its texts, and cloze bulk embeds them as they are."""
    vectors = random(8)
    folder = written(tmp_path / "one", [f" {text}\u00a0" for text in TEXTS], vectors)
    np.testing.assert_allclose(TeacherVectors.read([folder], [1], "text").of(TEXTS), units(vectors), atol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_the_vectors_of_a_bundle_are_read_as_the_service_gives_them(dtype: Any, tmp_path: Path) -> None:
    """In several files, and of another column than the texts by which they are found."""
    embed = Embed(write_bundle(tmp_path / "bundle"), dtype=dtype, text_column="words", threads=1)
    output = Output.at(str(tmp_path / "vectors"), rows_per_part=20)
    output.filesystem.create_dir(output.root)
    words = [text.replace(".", "") for text in TEXTS]
    for number, first in enumerate(range(0, len(TEXTS), 20)):
        rows = slice(first, first + 20)
        output.write(0, number, embed(pa.table({"text": TEXTS[rows], "words": words[rows]})), [])
    expected = units(embed.embed(words).vectors.astype(np.float32))
    found = TeacherVectors.read([str(tmp_path / "vectors")], [1], "text").of(TEXTS[::-1])[::-1]
    np.testing.assert_allclose(found, expected, atol=1e-3)


def test_principal_axes_keep_what_a_singular_value_decomposition_keeps(tmp_path: Path) -> None:
    vectors = random(24) @ np.diag(np.logspace(0, -2, 24)).astype(np.float32)
    found = TeacherVectors.read([written(tmp_path / "one", TEXTS, vectors)], [1], "text")
    axes, kept = found.principal(8)
    _, values, right = np.linalg.svd(units(vectors).astype(np.float64), full_matrices=False)
    assert kept == pytest.approx((values[:8] ** 2).sum() / (values**2).sum(), abs=1e-4)
    np.testing.assert_allclose(axes @ axes.T, right[:8].T @ right[:8], atol=1e-2)  # the same space
    np.testing.assert_allclose(found.projected(axes).of(TEXTS), found.of(TEXTS) @ axes, atol=1e-3)


def vectors_of(encoder: SentenceEncoder) -> NDArray[np.float32]:
    return encoder.embed(TEXTS)


def test_the_loss_is_that_of_the_teacher_in_the_loop(tiny_bert: Path, tmp_path: Path) -> None:
    live = build("distill", tiny_bert)
    assert isinstance(live, Distill)
    folder = written(
        tmp_path / "vectors", TEXTS, vectors_of(SentenceEncoder.load(str(tiny_bert), template="[X]", pooling="mean"))
    )
    ready = build("distill", tiny_bert, teacher_vectors=[folder])
    rows = [(text,) for text in TEXTS[:8]]
    losses = []
    for objective in (live, ready):
        outputs = objective(**objective.views(rows))
        outputs["loss"].backward()
        losses.append([float(outputs[name].detach()) for name in ("loss", "cosine_distance", "divergence")])
    assert losses[1] == pytest.approx(losses[0], abs=1e-3)
    for (name, weight), other in zip(ready.named_parameters(), live.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, other.grad, atol=1e-2, rtol=1e-2, msg=name)


def test_the_loss_is_the_weighted_sum_of_its_parts(tiny_bert: Path, tmp_path: Path) -> None:
    folder = written(tmp_path / "vectors", TEXTS, random(32))
    objective = build("distill", tiny_bert, teacher_vectors=[folder])
    rows = [(text,) for text in TEXTS[:8]]
    outputs = {name: value.item() for name, value in objective(**objective.views(rows)).items()}
    parts = 5 * outputs["cosine_distance"] + outputs["divergence"]
    assert outputs["loss"] == pytest.approx(parts, rel=1e-5)


def test_teachers_of_another_width_are_turned_to_the_students_vectors(
    tiny_bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = random(40, 1), random(24, 2)
    folders = [written(tmp_path / "one", TEXTS, one), written(tmp_path / "other", TEXTS, other, "other")]
    objective = build("distill", tiny_bert, teacher_vectors=folders, teacher_weights=["2", "1"])
    found = objective.views([(text,) for text in TEXTS])["student"]["target"].numpy()
    side = np.hstack([np.sqrt(2 / 3) * units(one), np.sqrt(1 / 3) * units(other)]).astype(np.float64)
    _, values, right = np.linalg.svd(side, full_matrices=False)
    axes = right[:32].T
    own = units(vectors_of(objective.encoder).astype(np.float64))
    np.testing.assert_allclose(found @ found.T, side @ axes @ axes.T @ side.T, atol=5e-3)
    _, closest = orthogonal_procrustes(side @ axes, own)  # the turn itself is ill-conditioned: own vectors are similar
    assert (found * own).sum() == pytest.approx(closest, rel=1e-3)
    kept = (values[:32] ** 2).sum() / (values**2).sum()
    assert f"teacher vectors: 32 principal axes keep {kept:.1%} of their squared length" in capsys.readouterr().err


def test_a_narrower_teacher_fits_into_the_students_width(tiny_bert: Path, tmp_path: Path) -> None:
    narrow = random(8)
    folder = written(tmp_path / "narrow", TEXTS, narrow)
    objective = build("distill", tiny_bert, teacher_vectors=[folder])
    found = objective.views([(text,) for text in TEXTS])["student"]["target"].numpy()
    assert found.shape == (len(TEXTS), 32)
    np.testing.assert_allclose(found @ found.T, units(narrow) @ units(narrow).T, atol=5e-3)


def test_a_text_without_a_vector_is_named(tiny_bert: Path, tmp_path: Path) -> None:
    folder, texts = written(tmp_path / "vectors", TEXTS, random(48)), tmp_path / "texts.txt"
    texts.write_text("\n".join([*TEXTS, "A text of its own."]) + "\n", encoding="utf-8")
    words = {"encoder": tiny_bert, "corpus": texts, "teacher_vectors": folder, "max_tokens": 64}
    corpus, _, objective = prepare(load_recipe("distill", words | {"batch_size": 8, "held_out": 0}))
    message = r"1 of 37 texts do not have a vector from every teacher, such as 'A text of its own\.'; embed the"
    with pytest.raises(CorpusError, match=message):
        objective.begin(corpus, tmp_path)


def broken(folder: Path, kind: str) -> list[str]:
    match kind:
        case "empty":
            folder.mkdir()
            return [str(folder)]
        case "two models":
            written(folder, TEXTS[:4], random(8, rows=4))
            return [written(folder, TEXTS[4:8], random(8, rows=4), "two", 1)]
        case "binary":
            return [written(folder, TEXTS, np.zeros((len(TEXTS), 4), dtype=np.uint8))]
        case "torn":
            written(folder, TEXTS, random(8))
            next(folder.rglob("*.parquet")).write_bytes(b"PAR1")
            return [str(folder)]
    return [written(folder / "a", TEXTS[:4], random(8, rows=4)), written(folder / "b", TEXTS[4:8], random(8, rows=4))]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("empty", r"has no vectors/\*/\*\.parquet; give a folder that cloze bulk wrote"),
        ("two models", r"has vectors of several models \(one, two\); embed the texts again with one"),
        ("binary", r"has vectors of type .*uint8.*; embed the texts again with --dtype float32, float16 or int8"),
        ("torn", "cannot be read .*; embed the texts again"),
        ("apart", "have no text in common; embed the same file with each teacher"),
    ],
)
def test_folders_that_do_not_serve_are_refused(kind: str, message: str, tmp_path: Path) -> None:
    folders = broken(tmp_path / "vectors", kind)
    with pytest.raises(CorpusError, match=message):
        TeacherVectors.read(folders, [1] * len(folders), "text")


def test_the_sample_is_of_texts_that_all_teachers_embedded(tmp_path: Path) -> None:
    """About a thousand, or all if there are fewer, whichever teacher comes first."""
    many = [f"text {number}" for number in range(20_000)]
    large, small = written(tmp_path / "large", many, random(4, rows=20_000)), many[:300]
    few = written(tmp_path / "few", [*small, "", None], random(4, rows=302))  # type: ignore[list-item]
    for folders in ([large, few], [few, large]):
        assert sorted(TeacherVectors.read(folders, [1, 1], "text").sample) == sorted(small)
    assert 1024 < len(TeacherVectors.read([large], [1], "text").sample) < 1250


def test_a_disk_without_space_for_the_vectors_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write beyond the disk would end the process by a signal."""
    folder = written(tmp_path / "vectors", TEXTS, random(8))

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CorpusError, match=r"vectors, 0\.0 GB, cannot be stored in .*No space left.* set TMPDIR"):
        TeacherVectors.read([folder], [1], "text")


def test_a_column_that_is_not_there_is_named(tmp_path: Path) -> None:
    folder = written(tmp_path / "vectors", TEXTS, random(8))
    with pytest.raises(CorpusError, match="has no column 'body'; name one of text, embedding, tokens, truncated"):
        TeacherVectors.read([folder], [1], "body")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"teacher": ["t"]}, "teacher is 't', but teacher_vectors .*; write only one of the two"),
        ({"teacher_weights": ["1"]}, "teacher_weights has 1 numbers, but teacher_vectors has 2 folders"),
    ],
)
def test_keys_that_contradict_teacher_vectors_are_refused(keys: dict[str, list[str]], message: str) -> None:
    words = {"encoder": ["e"], "corpus": ["c.txt"], "teacher_vectors": ["a", "b"]}
    with pytest.raises(RecipeError, match=message):
        load_recipe("distill", words | keys)
