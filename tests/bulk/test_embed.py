"""Embed against POST /embed, in every type of number, and what becomes of rows that cannot be embedded."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from harness import open_client
from tiny_bundle import DIMENSION, MAX_TOKENS, TEMPLATE, sequence, vector, write_bundle

from cloze.encoding.bundle import Bundle
from cloze.encoding.errors import OptionError
from cloze.service.app import create_app
from cloze.service.bulk import Embed
from cloze.service.bulk.embed import ADDED, FORMATS, _distinct, check_columns
from cloze.service.bulk.output import Output
from cloze.service.errors import SessionError
from cloze.service.inference.session import Session
from cloze.service.settings import Settings

pytestmark = pytest.mark.anyio

DOCUMENT = 'A man of "[X]" means [MASK].'
TEXTS = ["a man", "", "the man plays the guitar", "a [MASK] b", "a man", "two dogs run " * 40, "ümlaut", " a man "]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


def table(texts: list[Any], kind: pa.DataType | None = None) -> pa.Table:
    return pa.table({"text": pa.array(texts, kind or pa.string()), "place": list(range(len(texts)))})


def test_a_vector_is_that_of_the_graph(bundle: Path) -> None:
    found = Embed(bundle, normalize=False, threads=1).embed(["a man", "the man plays the guitar"])
    for row, text in zip(found.vectors, ["a man", "the man plays the guitar"], strict=True):
        np.testing.assert_allclose(row, vector(sequence(text, TEMPLATE)), rtol=1e-5, atol=1e-6)
    assert found.tokens.tolist() == [len(sequence("a man")), len(sequence("the man plays the guitar"))]


@pytest.mark.parametrize(
    ("dtype", "asked", "options"),
    [
        ("float32", {}, {}),
        ("float32", {"normalize": False}, {"normalize": False}),
        ("float32", {"dimensions": 5}, {"dimensions": 5}),
        ("float16", {"encoding_format": "float16"}, {}),
        ("int8", {"encoding_format": "int8"}, {}),
        ("binary", {"encoding_format": "ubinary", "dimensions": 11}, {"dimensions": 11}),
    ],
)
async def test_vectors_are_those_of_the_service(bundle: Path, dtype: Any, asked: Any, options: Any) -> None:
    texts = list(dict.fromkeys(TEXTS))  # in one batch on both sides: another batch changes the last digits in fp32
    found = Embed(bundle, dtype=dtype, threads=2, **options)(table(texts))
    async with open_client(create_app(Settings(bundle=bundle, provider="cpu", threads=1))) as http:
        headers = {"accept": "application/octet-stream"}
        response: httpx.Response = await http.post("/embed", json={"inputs": texts, **asked}, headers=headers)
    rows, width = map(int, response.headers["x-embedding-shape"].split(","))
    kind = response.headers["x-embedding-type"]
    served = np.frombuffer(response.content, kind).reshape(rows, width)
    column = found.column("embedding").combine_chunks()
    assert column.type == pa.list_(FORMATS[dtype][1], width)
    np.testing.assert_array_equal(np.asarray(column.flatten()).astype(kind).reshape(rows, width), served)


async def test_means_of_chunks_are_those_of_the_service(bundle: Path) -> None:
    found = Embed(bundle, threads=2, chunk_tokens=5).embed(TEXTS)
    async with open_client(create_app(Settings(bundle=bundle, provider="cpu", threads=1))) as http:
        response = await http.post("/embed", json={"inputs": TEXTS, "chunk": {"tokens": 5, "mean": True}})
    np.testing.assert_allclose(found.vectors, response.json(), atol=1e-6)
    whole = Embed(bundle, threads=2).embed(TEXTS)
    assert not np.allclose(found.vectors[5], whole.vectors[5], atol=1e-3)  # the long text, which is not truncated
    assert whole.truncated.tolist() == [place == 5 for place in range(len(TEXTS))]
    assert not found.truncated.any()


def test_a_chunk_that_fails_costs_its_text_alone(bundle: Path) -> None:
    found = Embed(bundle, threads=2, chunk_tokens=5).embed(["dogs " * 20 + "poison", "a man " * 9])
    assert list(found.errors) == [0]
    assert not found.vectors[0].any()
    assert found.vectors[1].any()


@pytest.mark.parametrize("tokens", [0, 23])
def test_chunks_that_do_not_fit(bundle: Path, tokens: int) -> None:
    with pytest.raises(OptionError, match=f"chunk_tokens is {tokens}; write 1 to 22, which fit into the template"):
        Embed(bundle, chunk_tokens=tokens)


def test_the_metadata_tells_the_space(bundle: Path, tmp_path: Path) -> None:
    found = Embed(bundle, threads=1)(table(["a man"]).replace_schema_metadata({"kept": "yes"}))
    space = Bundle.load(bundle).spec.space.encode()
    assert found.schema.metadata == {b"kept": b"yes", b"embedding_space": space}
    Output.at(str(tmp_path), 8).write(0, 0, found, [])
    (file,) = tmp_path.rglob("*.parquet")
    assert pq.read_schema(file).metadata[b"embedding_space"] == space


def test_a_named_template_is_used_by_name(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "tiny", templates={"document": DOCUMENT})
    (row,) = Embed(bundle, prompt_name="document", normalize=False, threads=1).embed(["a man"]).vectors
    np.testing.assert_allclose(row, vector(sequence("a man", DOCUMENT)), rtol=1e-5, atol=1e-6)
    with pytest.raises(OptionError, match="prompt_name is 'query'; the named templates of tiny are: document"):
        Embed(bundle, prompt_name="query")


def test_the_columns_beside_the_vectors(bundle: Path) -> None:
    found = Embed(bundle, threads=1)(table(TEXTS))
    assert found.column_names == ["text", "place", *ADDED]
    assert found.column("text").to_pylist() == TEXTS
    assert found.column("tokens").to_pylist()[5] == MAX_TOKENS
    assert found.column("truncated").to_pylist() == [place == 5 for place in range(len(TEXTS))]
    assert found.column("error").null_count == len(TEXTS)


@pytest.mark.parametrize("truncate", [True, False])
def test_a_row_without_a_vector_has_the_reason(bundle: Path, truncate: bool) -> None:
    texts = [b"a man", b"poison", None, b"a \xff man", b"a " * 600_000, b"poison", b"dogs " * 40]
    found = Embed(bundle, truncate=truncate, threads=2).embed(texts)
    assert found.errors.pop(1) == found.errors.pop(5)
    reasons = {
        2: "the text is null",
        3: "not UTF-8: byte 0xff at 2",
        4: "has 1200000 characters; at most 1000000 are allowed",
    }
    if not truncate:
        reasons[6] = "has 40 tokens; at most 22 fit beside the template's 10: shorten it or allow truncation"
    assert found.errors == reasons
    assert not found.vectors[[1, 2, 3, 4, 5]].any()
    assert found.vectors[0].any()
    assert bool(found.vectors[6].any()) == truncate


def test_one_text_that_fails_costs_the_others_nothing(bundle: Path) -> None:
    texts = ["a man", "poison", *(f"man {number}" for number in range(50)), "a poison", ""]
    embed = Embed(bundle, threads=2)
    found = embed.embed(texts)
    assert sorted(found.errors) == [1, 52]
    assert all("not finite" in reason for reason in found.errors.values())
    alone = embed.embed([text for text in texts if "poison" not in text])
    np.testing.assert_allclose(np.delete(found.vectors, [1, 52], axis=0), alone.vectors, atol=1e-6)


def test_a_graph_that_fails_on_everything_ends_the_job(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the texts are at fault, and their rows would never be computed again."""
    embed = Embed(bundle, threads=1)

    def broken(self: Session, batch: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Session, "_forward", broken)
    with pytest.raises(SessionError, match=r"fails on every text \(out of memory\); .* start the same job again"):
        embed.embed(["a man", "two dogs"])


def test_rows_with_errors_have_no_embedding(bundle: Path) -> None:
    found = Embed(bundle, threads=1)(table(["a man", "poison", None]))
    assert found.column("embedding").is_null().to_pylist() == [False, True, True]
    assert found.column("error").is_null().to_pylist() == [True, False, False]


@pytest.mark.parametrize("texts", [[], [None], ["poison"], [""]])
def test_tables_without_vectors(bundle: Path, texts: list[str | None]) -> None:
    found = Embed(bundle, threads=1)(table(texts))
    assert len(found) == len(texts)
    assert found.column("embedding").type == pa.list_(pa.float32(), DIMENSION)


def test_texts_may_be_a_dictionary_or_large(bundle: Path) -> None:
    embed = Embed(bundle, threads=1)
    plain = embed(table(TEXTS)).column("embedding")
    for kind in (pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())):
        assert embed(table(TEXTS, kind)).column("embedding") == plain


def test_equal_texts_are_embedded_once(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, sizes = Session.run, list[int]()

    def counted(self: Session, batch: Any) -> Any:
        sizes.append(len(batch.input_ids))
        return run(self, batch)

    embed = Embed(bundle, threads=1)
    monkeypatch.setattr(Session, "run", counted)
    assert len(embed.embed(["a man"] * 100).vectors) == 100
    assert sizes == [1]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"words": ["a"]}, "there is no column 'text'; the columns are words"),
        ({"text": [1]}, "the column 'text' is of type int64, not text"),
        ({"text": [["a"]]}, "not text; choose another column"),
        ({"text": ["a"], "embedding": [1]}, "the column 'embedding' exists already"),
    ],
)
def test_tables_that_cannot_be_embedded(bundle: Path, columns: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Embed(bundle, threads=1)(pa.table(columns))
    with pytest.raises(OptionError, match=message):
        check_columns(pa.table(columns).schema, "text")


@pytest.mark.parametrize("dimensions", [0, 17, -1])
def test_dimensions_that_are_not_there(bundle: Path, dimensions: int) -> None:
    with pytest.raises(OptionError, match=f"dimensions is {dimensions}; tiny has 16"):
        Embed(bundle, dimensions=dimensions)


def test_one_text_is_a_list_of_one(bundle: Path) -> None:
    embed = Embed(bundle, threads=1)
    assert np.array_equal(embed.embed("a man").vectors, embed.embed(["a man"]).vectors)


def test_distinct_texts_keep_their_order() -> None:
    assert _distinct(["b", b"a", "b", None, "a"]) == ({"b": [0, 2], "a": [1, 4]}, {3: "the text is null"})


def test_the_bundle_is_checked(bundle: Path) -> None:
    assert Embed(str(bundle), threads=1).bundle.spec == Bundle.load(bundle).spec
