"""The native routes over HTTP: text-embeddings-inference's wire format and more, and an answer to everything else."""

import asyncio
import gzip
import json
from base64 import b64decode
from typing import Any

import httpx
import numpy as np
import pytest
from harness import Hold, MakeApp, MakeClient, default_model, open_client, services, until
from numpy.typing import NDArray
from tiny_bundle import DIMENSION, MAX_TOKENS, OTHER, TEMPLATE, sequence, vector, vocabulary

from cloze.encoding.errors import BundleError
from cloze.service.http.errors import ErrorBody
from cloze.service.settings import Settings

pytestmark = pytest.mark.anyio

JSON = {"content-type": "application/json"}
TEXTS = ["a man plays the guitar", "", "dogs", "two dogs run"]
ROOM = MAX_TOKENS - len(sequence(""))


def refused(response: httpx.Response, status: int, error_type: str, *words: str) -> None:
    """The answer is this error, in the envelope, and says these words."""
    body = ErrorBody.model_validate_json(response.content, extra="forbid")
    assert (response.status_code, body.error_type) == (status, error_type), response.text
    assert all(word in body.error for word in words), body.error
    assert "Traceback" not in body.error


def raw(*texts: str) -> NDArray[np.float32]:
    """What the default model gives, computed by hand."""
    return np.stack([vector(sequence(text)) for text in texts])


def units(rows: NDArray[Any]) -> NDArray[np.float64]:
    return rows / np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)


def near(found: Any, expected: NDArray[Any]) -> None:
    np.testing.assert_allclose(np.array(found), expected, atol=1e-6, rtol=0, strict=False)


async def post(http: httpx.AsyncClient, path: str, **body: Any) -> Any:
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


# /embed


async def test_one_text_gives_a_list_of_one(both: httpx.AsyncClient) -> None:
    response = await both.post("/embed", json={"inputs": "a man"})
    assert response.headers["content-type"] == "application/json"
    near(response.json(), units(raw("a man")))


async def test_many_texts_keep_their_order(client: MakeClient) -> None:
    async with client(max_batch_tokens=64) as http:
        near(await post(http, "/embed", inputs=TEXTS * 30), units(raw(*TEXTS * 30)))


async def test_dimensions_are_cut_and_then_normalised(both: httpx.AsyncClient) -> None:
    near(await post(both, "/embed", inputs=TEXTS, normalize=False), raw(*TEXTS))
    near(await post(both, "/embed", inputs=TEXTS, dimensions=4), units(raw(*TEXTS)[:, :4]))
    near(await post(both, "/embed", inputs=TEXTS, dimensions=4, normalize=False), raw(*TEXTS)[:, :4])
    near(await post(both, "/embed", inputs=TEXTS, dimensions=DIMENSION), units(raw(*TEXTS)))


@pytest.mark.parametrize("dimensions", [None, 5])
async def test_every_format_is_made_of_the_float_rows(both: httpx.AsyncClient, dimensions: int | None) -> None:
    found = {
        name: await post(both, "/embed", inputs=TEXTS, dimensions=dimensions, encoding_format=name)
        for name in ("float", "base64", "float16", "int8", "binary", "ubinary")
    }
    rows = np.array(found["float"], dtype=np.float32)
    near(rows, units(raw(*TEXTS)[:, :dimensions]))
    assert np.array_equal([np.frombuffer(b64decode(row), "<f4") for row in found["base64"]], rows)
    assert np.array_equal([np.frombuffer(b64decode(row), "<f2") for row in found["float16"]], rows.astype(np.float16))
    scaled = rows.astype(np.float64) * 127 / np.abs(rows).max(axis=1, keepdims=True).astype(np.float64)
    assert np.array_equal(found["int8"], np.rint(scaled))
    bits = ["".join("1" if value > 0 else "0" for value in row).ljust(DIMENSION, "0") for row in rows]
    octets = [[int(row[start : start + 8], 2) for start in range(0, len(rows[0]), 8)] for row in bits]
    assert found["ubinary"] == octets
    assert found["binary"] == [[octet - 128 for octet in row] for row in octets]


@pytest.mark.parametrize(
    ("format", "dtype", "width"),
    [
        (None, "float32", DIMENSION),
        ("float", "float32", DIMENSION),
        ("base64", "float32", DIMENSION),
        ("float16", "float16", DIMENSION),
        ("int8", "int8", DIMENSION),
        ("binary", "int8", -(-DIMENSION // 8)),
        ("ubinary", "uint8", -(-DIMENSION // 8)),
    ],
)
async def test_bytes_hold_the_same_numbers(both: httpx.AsyncClient, format: str | None, dtype: str, width: int) -> None:
    texts = TEXTS * 30  # written in several slices
    body = {"inputs": texts, "encoding_format": format}
    response = await both.post("/embed", json=body, headers={"accept": "application/octet-stream"})
    assert response.headers["content-type"] == "application/octet-stream"
    assert response.headers["x-embedding-type"] == dtype
    assert response.headers["x-embedding-shape"] == f"{len(texts)},{width}"
    assert response.headers["x-compute-tokens"]
    found = np.frombuffer(response.content, np.dtype(dtype).newbyteorder("<")).reshape(len(texts), width)
    rows = await post(both, "/embed", inputs=texts, encoding_format=format)
    if isinstance(rows[0], str):
        rows = [np.frombuffer(b64decode(row), found.dtype) for row in rows]
    assert np.array_equal(found, np.array(rows, dtype=found.dtype))


async def test_what_the_accept_header_asks_for(both: httpx.AsyncClient) -> None:
    for accept, expected in [
        ("Application/Octet-Stream; q=0.5, */*;q=0.1", "application/octet-stream"),
        ("application/json;q=0.5, application/octet-stream", "application/octet-stream"),
        ("application/json, application/octet-stream", "application/json"),
        ("application/octet-stream;q=0", "application/json"),
        ("*/*", "application/json"),
        ("application/*", "application/json"),
        ("application/octet-stream;q=0.1, */*", "application/json"),
        ("application/octet-stream;q=0.5, application/*;q=0.4, */*", "application/octet-stream"),
        ("text/html", "application/json"),
        ("", "application/json"),
        (",;q=,q=1;application/octet-stream", "application/json"),
    ]:
        response = await both.post("/embed", json={"inputs": "a"}, headers={"accept": accept})
        assert (response.status_code, response.headers["content-type"]) == (200, expected), accept


async def test_an_error_is_json_whatever_is_accepted(both: httpx.AsyncClient) -> None:
    headers = {"accept": "application/octet-stream"}
    refused(await both.post("/embed", json={"inputs": []}, headers=headers), 400, "Empty", "empty list")
    body = {"inputs": {"source_sentence": "a", "sentences": ["a"]}}
    assert (await both.post("/", json=body, headers=headers)).json() == pytest.approx([1.0])
    assert len((await both.post("/", json={"inputs": "a"}, headers=headers)).content) == 4 * DIMENSION


async def test_nulls_are_the_defaults_and_other_fields_are_ignored(both: httpx.AsyncClient) -> None:
    """huggingface_hub and Chroma leave nulls out or write them, TEI's own clients write all."""
    expected = await post(both, "/embed", inputs=["a man"])
    for fields in (
        {"truncate": None, "truncation_direction": "Right", "prompt_name": None, "normalize": True},
        {"dimensions": None, "encoding_format": None, "model": None},
        {"encoding_format": "float", "model": ""},
        {"options": {"wait_for_model": True, "use_cache": False}, "user": "someone", "parameters": {}},
    ):
        assert await post(both, "/embed", inputs=["a man"], **fields) == expected, fields


async def test_truncation_direction(both: httpx.AsyncClient) -> None:
    text = "man " + "a " * 100 + "dogs"
    for direction in ("left", "Left", "right", "Right"):
        kept = "a " * (ROOM - 1) + "dogs" if direction.lower() == "left" else "man " + "a " * (ROOM - 1)
        near(await post(both, "/embed", inputs=text, truncation_direction=direction), units(raw(kept)))


async def test_truncate_is_the_setting_unless_the_request_says(client: MakeClient) -> None:
    body = {"inputs": ["a", "a " * 100]}
    async with client() as http:
        assert (await http.post("/embed", json=body)).status_code == 200
        refused(await http.post("/embed", json={**body, "truncate": False}), 422, "Validation", "text 1 has 100 tokens")
    async with client(auto_truncate=False) as http:
        refused(await http.post("/embed", json=body), 422, "Validation", "text 1 has 100 tokens")
        assert (await http.post("/embed", json={**body, "truncate": True})).status_code == 200


async def test_an_empty_text_has_the_vector_of_the_empty_template(both: httpx.AsyncClient) -> None:
    near(await post(both, "/embed", inputs=["", "  \n"]), units(raw("", "")))


async def test_special_tokens_in_a_text_stay_text(both: httpx.AsyncClient) -> None:
    """`[MASK]` is a bracket, the pieces m ##a ##s ##k, and a bracket."""
    near(await post(both, "/embed", inputs="[MASK]"), units(raw("[ m ##a ##s ##k ]")))


# Token ids


async def test_own_token_ids_have_the_texts_vector(both: httpx.AsyncClient) -> None:
    shown = await post(both, "/tokenize", inputs=TEXTS, add_special_tokens=False)
    ids = [[token["id"] for token in tokens] for tokens in shown]
    assert await post(both, "/embed", inputs=ids) == await post(both, "/embed", inputs=TEXTS)
    assert await post(both, "/embed", inputs=ids[0]) == await post(both, "/embed", inputs=TEXTS[0])
    long = [vocabulary()["a"]] * 100
    near(await post(both, "/embed", inputs=long), units(raw("a " * ROOM)))
    refused(await both.post("/embed", json={"inputs": [[5], long], "truncate": False}), 422, "Validation", "text 1 has")


async def test_ids_that_are_no_texts_are_refused(both: httpx.AsyncClient) -> None:
    for inputs, words in [
        ([[5], [5, vocabulary()["[MASK]"]]], "text 1, place 1: id 4 is the special token [MASK]; leave it out"),
        ([5, 99_999], f"text 0, place 1: id 99999 is outside the vocabulary of {len(vocabulary())} tokens"),
        ([[5], [2**31]], "text 1, place 0: id 2147483648 is outside the vocabulary"),
        ([2**64 - 1], "id 18446744073709551615 is outside the vocabulary"),
    ]:
        refused(await both.post("/embed", json={"inputs": inputs}), 422, "Tokenizer", words)


async def test_ids_are_refused_where_nobody_vouches_for_them(client: MakeClient) -> None:
    async with client() as http:
        for inputs in ([5, 6], [[5], [6]], [[]], [2**31]):
            words = ("check_embedding_ctx_length=False", "--token-ids")
            refused(await http.post("/embed", json={"inputs": inputs}), 422, "Validation", *words)


# /similarity and POST /


async def test_similarity_has_three_shapes(both: httpx.AsyncClient) -> None:
    rows = units(raw(*TEXTS))
    one = {"source_sentence": TEXTS[0], "sentences": TEXTS}
    near(await post(both, "/similarity", inputs=one, parameters=None), rows @ rows[0])
    pairs = {"pairs": [[TEXTS[0], TEXTS[1]], [TEXTS[2], TEXTS[2]], [TEXTS[3], TEXTS[0]]]}
    near(await post(both, "/similarity", inputs=pairs), (rows[[0, 2, 3]] * rows[[1, 2, 0]]).sum(axis=1))
    lists = {"source_sentences": TEXTS[:3], "sentences": TEXTS[1:3]}
    near(await post(both, "/similarity", inputs=lists), rows[:3] @ rows[1:3].T)
    assert (await post(both, "/similarity", inputs=one))[0] == pytest.approx(1, abs=1e-12)


async def test_similarity_takes_options(both: httpx.AsyncClient) -> None:
    inputs = {"source_sentence": "a", "sentences": ["man " + "a " * 100]}
    options = {"truncate": True, "truncation_direction": "left", "prompt_name": None}
    expected = units(raw("a", "a " * ROOM))
    near(await post(both, "/similarity", inputs=inputs, parameters=options), expected[1:] @ expected[0])
    strict = {"inputs": inputs, "parameters": {"truncate": False}}
    refused(await both.post("/similarity", json=strict), 422, "Validation", "inputs.sentences[0] has 101 tokens")


async def test_a_matrix_has_a_limit(both: httpx.AsyncClient) -> None:
    inputs = {"source_sentences": ["a"] * 4096, "sentences": ["a"] * 1025}
    refused(await both.post("/similarity", json={"inputs": inputs}), 422, "Validation", "4198400 cosines; at most")


@pytest.mark.parametrize("prefix", ["", "/models/other"])
async def test_root_is_embed_or_similarity_by_shape(both: httpx.AsyncClient, prefix: str) -> None:
    bodies = {
        "/embed": ["a", ["a", "dogs"], [5, 6], [[5], [6]]],
        "/similarity": [
            {"source_sentence": "a man", "sentences": ["a man", "dogs"]},
            {"pairs": [["a", "dogs"]]},
            {"source_sentences": ["a"], "sentences": ["dogs"]},
        ],
    }
    for path, shapes in bodies.items():
        for inputs in shapes:
            found = [await both.post(each, json={"inputs": inputs}) for each in (prefix or "/", prefix + path)]
            assert [each.status_code for each in found] == [200, 200]
            assert found[0].content == found[1].content


# /search


async def test_search_ranks_by_cosine(both: httpx.AsyncClient) -> None:
    query, texts = "a man plays", ["dogs", "a man plays", "the guitar", "", "two dogs run"]
    rows = units(raw(query, *texts))
    scores = rows[1:] @ rows[0]
    found = await post(both, "/search", query=query, texts=texts)
    assert [each["index"] for each in found] == sorted(range(5), key=lambda place: -scores[place])
    near([each["score"] for each in found], np.sort(scores)[::-1])
    assert set(found[0]) == {"index", "score"}
    assert found[0]["index"] == 1
    assert await post(both, "/search", query=query, texts=texts, top_k=2) == found[:2]
    assert await post(both, "/search", query=query, texts=texts, top_k=99) == found
    shown = await post(both, "/search", query=query, texts=texts, return_text=True, top_k=None)
    assert shown == [{**each, "text": texts[each["index"]]} for each in found]


async def test_of_equal_texts_the_first_comes_first(both: httpx.AsyncClient) -> None:
    found = await post(both, "/search", query="dogs", texts=["a", "dogs", "a", "dogs", "a"])
    assert [each["index"] for each in found] == [1, 3, 0, 2, 4]


# /tokenize and /decode


async def test_tokenize_shows_what_the_model_sees(both: httpx.AsyncClient) -> None:
    [tokens] = await post(both, "/tokenize", inputs=" A man,")
    of_text = [token for token in tokens if not token["template"]]
    assert [(token["text"], token["start"], token["stop"]) for token in of_text] == [
        ("a", 1, 2), ("man", 3, 6), (",", 6, 7)
    ]  # fmt: skip
    assert [token["id"] for token in tokens] == sequence("a man ,")
    assert [token["text"] for token in tokens if token["special"]] == ["[CLS]", "[MASK]", "[SEP]"]
    assert all(token["start"] is token["stop"] is None for token in tokens if token["template"])
    assert not any(token["cut"] for token in tokens)
    assert await post(both, "/tokenize", inputs=" A man,", add_special_tokens=False) == [of_text]
    empty, mask = await post(both, "/tokenize", inputs=["", "[MASK]"], add_special_tokens=False)
    assert empty == []
    assert [token["text"] for token in mask] == ["[", "m", "##a", "##s", "##k", "]"]
    where = {"start": 2, "stop": 3, "template": False, "cut": False}
    assert mask[2] == {"id": vocabulary()["##a"], "text": "##a", "special": False, **where}


async def test_tokenize_shows_what_is_cut(both: httpx.AsyncClient) -> None:
    text = "man " + "a " * ROOM + "dogs"
    for direction, expected in (("left", ["man", "a"]), ("right", ["a", "dogs"])):
        [tokens] = await post(both, "/tokenize", inputs=text, truncation_direction=direction)
        cut = [token["text"] for token in tokens if token["cut"]]
        assert cut == expected
        assert len(tokens) - len(cut) == MAX_TOKENS
        assert len(tokens) == len(sequence(text))


async def test_decode_reads_ids(both: httpx.AsyncClient) -> None:
    ids = sequence("a man plays")
    plain = TEMPLATE.replace("[X]", "a man plays").replace(" [MASK].", "").lower()
    assert await post(both, "/decode", ids=ids[1:-3]) == [plain.replace('"', ' " ').replace("  ", " ").strip()]
    skipped, shown = [
        (await post(both, "/decode", ids=[ids, [], ids[:2]], skip_special_tokens=skip)) for skip in (True, False)
    ]
    assert [len(skipped), skipped[1:]] == [3, ["", "this"]]
    assert shown[1:] == ["", "[CLS] this"]
    assert all(word in shown[0] and word not in skipped[0] for word in ("[CLS]", "[MASK]", "[SEP]"))
    for wrong in (88_888, 2**31, 2**63):
        outside = await both.post("/decode", json={"ids": [5, wrong]})
        refused(outside, 422, "Tokenizer", f"ids, place 1: id {wrong} is outside the vocabulary")
        outside = await both.post("/decode", json={"ids": [[5], [], [5, wrong]]})
        refused(outside, 422, "Tokenizer", f"ids[2], place 1: id {wrong} is outside the vocabulary")


async def test_a_list_too_long_is_refused_whatever_is_in_it(
    client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its items are looked at: millions of wrong ones would hold the event loop for seconds."""
    monkeypatch.setattr("cloze.service.http.request.MAX_TEXT_CHARACTERS", 5)
    async with client(max_client_batch_size=2) as http:
        for path, body, words in [
            ("/embed", {"inputs": [[]] * 3}, "3 texts"),  # too many lists of token ids too
            ("/decode", {"ids": [1] * 6}, "6 token ids"),
            ("/similarity", {"inputs": {"pairs": [[1]] * 3}}, "3 texts"),
            ("/search", {"query": "a", "texts": [1.5] * 3}, "3 texts"),
            ("/embed", {"inputs": "a", "unknown": [{}] * 3}, "3 texts"),
        ]:
            refused(await http.post(path, json=body), 422, "Validation", words, "at most", "split it")


async def test_tokenize_and_decode_have_limits(client: MakeClient) -> None:
    async with client(max_client_batch_size=2) as http:
        refused(await http.post("/tokenize", json={"inputs": ["a"] * 3}), 422, "Validation", "3 texts", "at most 2")
        refused(await http.post("/decode", json={"ids": [[5]] * 3}), 422, "Validation", "3 texts", "at most 2")
        long = {"inputs": ["a" * 2**17, "b" * 2**17 + "c"], "add_special_tokens": False}
        refused(await http.post("/tokenize", json=long), 422, "Validation", "262145 characters", "at most 262144")
        for ids in ([5] * (2**18 + 1), [[5] * 2**17, [5] * (2**17 + 1)]):
            refused(await http.post("/decode", json={"ids": ids}), 422, "Validation", "262145 token ids", "262144")


async def test_tokenize_counts_the_template_of_empty_texts(client: MakeClient) -> None:
    """Its tokens are written for each text."""
    template = len(sequence(""))
    count = 2**18 // template + 1
    async with client(max_client_batch_size=count) as http:
        found = await http.post("/tokenize", json={"inputs": [""] * count})
        refused(
            found, 422, "Validation", f"the texts and their templates have {count * template} characters and tokens"
        )
        found = await http.post("/tokenize", json={"inputs": [""] * count, "add_special_tokens": False})
        assert found.json() == [[]] * count


# Several models


async def test_a_model_is_chosen_by_the_path_or_the_body(both: httpx.AsyncClient) -> None:
    expected = np.stack([vector(sequence(text, "[X]"), OTHER["dimension"], OTHER["seed"]) for text in TEXTS])
    rows = units(expected)
    for path, body in (("/models/other", {}), ("", {"model": "other"}), ("/models/other", {"model": "other"})):
        near(await post(both, f"{path}/embed", inputs=TEXTS, **body), rows)
        near(await post(both, path or "/", inputs=TEXTS, normalize=False, **body), expected)
        lists = {"source_sentences": TEXTS, "sentences": TEXTS}
        near(await post(both, f"{path}/similarity", inputs=lists, **body), rows @ rows.T)
        found = await post(both, f"{path}/search", query=TEXTS[3], texts=TEXTS, top_k=1, **body)
        assert found == [{"index": 3, "score": pytest.approx(1)}]
        [tokens] = await post(both, f"{path}/tokenize", inputs="a man", **body)
        assert [token["text"] for token in tokens] == ["[CLS]", "a", "man", "[SEP]"]
        assert await post(both, f"{path}/decode", ids=[5], **body) == ["this"]
    inputs = {"source_sentence": "a", "sentences": ["dogs"]}
    by_option = await post(both, "/similarity", inputs=inputs, parameters={"model": "other"})
    assert by_option == await post(both, "/similarity", inputs=inputs, model="other")
    refused(await both.post("/models/other/embed", json={"inputs": "a", "dimensions": 9}), 422, "Validation", "has 8")


EVERY = {
    "/embed": {"inputs": "a"},
    "/": {"inputs": "a"},
    "/similarity": {"inputs": {"source_sentence": "a", "sentences": ["a"]}},
    "/search": {"query": "a", "texts": ["a"]},
    "/explain": {"inputs": ["a", "a"]},
    "/predict": {"inputs": "a"},
    "/tokenize": {"inputs": "a"},
    "/decode": {"ids": [5]},
}


async def test_an_unknown_model_is_told_with_those_served(both: httpx.AsyncClient, subtests: pytest.Subtests) -> None:
    words = ("'neither'", "other, tiny")
    for path, body in EVERY.items():
        with subtests.test(path):
            refused(await both.post(path, json={**body, "model": "neither"}), 404, "ModelNotFound", *words)
            refused(await both.post(f"/models/neither{path.rstrip('/')}", json=body), 404, "ModelNotFound", *words)


async def test_two_models_at_once_are_refused(both: httpx.AsyncClient, subtests: pytest.Subtests) -> None:
    for path, body in EVERY.items():
        with subtests.test(path):
            response = await both.post(f"/models/other{path.rstrip('/')}", json={**body, "model": "tiny"})
            refused(response, 422, "Validation", "two models are named, 'other' and 'tiny'")
    body = {**EVERY["/similarity"], "model": "tiny", "parameters": {"model": "other"}}
    refused(await both.post("/similarity", json=body), 422, "Validation", "two models are named, 'tiny' and 'other'")


# What is refused


SENTENCES = {"source_sentence": "a", "sentences": ["a"]}
WRONG = [
    ("/embed", {}, "inputs: Field required"),
    ("/embed", [], "body: should be a JSON object"),
    ("/embed", {"inputs": None}, "inputs: should be a text or a list of texts (or of token ids)"),
    ("/embed", {"inputs": [1, "a"]}, "inputs[1]: Input should be a valid integer"),
    ("/embed", {"inputs": ["a", 1]}, "inputs[1]: Input should be a valid string"),
    ("/embed", {"inputs": [[1], 1]}, "inputs[1]: Input should be a valid list"),
    ("/embed", {"inputs": [-1]}, "inputs[0]: Input should be greater than or equal to 0"),
    ("/embed", {"inputs": [1.0]}, "inputs[0]: Input should be a valid string"),
    ("/embed", {"inputs": [[[[[[{}]]]]]]}, "inputs[0][0]: Input should be a valid integer"),
    ("/embed", {"inputs": "a", "normalize": "yes"}, "normalize: Input should be a valid bool"),
    ("/embed", {"inputs": "a", "truncation_direction": "up"}, "'left', 'Left', 'right'"),
    ("/embed", {"inputs": "a", "dimensions": 0}, "greater than or equal to 1"),
    ("/embed", {"inputs": "a", "dimensions": 17}, "dimensions is 17; the model has 16"),
    ("/embed", {"inputs": "a", "prompt_name": "query"}, "the named templates of model tiny are: none"),
    ("/similarity", {"inputs": "a"}, "inputs: should be a JSON object"),
    ("/similarity", {"inputs": {"sentences": ["a"]}}, "inputs.source_sentence: Field required"),
    ("/similarity", {"inputs": {"source_sentences": ["a"]}}, "inputs.sentences: Field required"),
    ("/similarity", {"inputs": {"pairs": [["a", "b"], ["a"]]}}, "inputs.pairs[1]: List should"),
    ("/similarity", {"inputs": {"pairs": [["a", 1]]}}, "inputs.pairs[0][1]: Input"),
    ("/similarity", {"inputs": SENTENCES, "parameters": {"truncate": 3}}, "parameters.truncate: Input should be"),
    ("/", {"inputs": 5}, "inputs: should be a text"),
    ("/", {"inputs": {"pairs": ["a"]}}, "inputs.pairs[0]: Input should be a valid list"),
    ("/search", {"query": "a", "texts": "a"}, "texts: Input should be a valid list"),
    ("/search", {"query": "a", "texts": ["a"], "top_k": 0}, "top_k: Input should be greater"),
    ("/explain", {"inputs": ["a"]}, "inputs: List should have at least 2 items"),
    ("/predict", {"inputs": 5}, "inputs: should be a text, or a list of texts in lists of one"),
    ("/predict", {"inputs": [["a"], "a"]}, "inputs[1]: Input should be a valid list"),
    ("/predict", {"inputs": [["a", "a"]]}, "inputs[0]: List should have at most 1 item"),
    ("/predict", {"inputs": "a", "head": []}, "head"),
    ("/tokenize", {"inputs": [5]}, "inputs: should be a text or a list of texts"),
    ("/decode", {"ids": ["a"]}, "ids: should be a list of token ids, or a list of such lists"),
    ("/decode", {"ids": [5, [5]]}, "ids[1]: Input should be a valid integer"),
]


async def test_a_wrong_value_is_named(both: httpx.AsyncClient, subtests: pytest.Subtests) -> None:
    for path, body, words in WRONG:
        with subtests.test(path, body=body):
            refused(await both.post(path, json=body), 422, "Validation", words)


async def test_an_empty_list_is_named(both: httpx.AsyncClient, subtests: pytest.Subtests) -> None:
    for path, body, words in [
        ("/embed", {"inputs": []}, "the input is an empty list; send at least one text"),
        ("/similarity", {"inputs": {"pairs": []}}, "a list in inputs is empty"),
        ("/similarity", {"inputs": {"source_sentences": [], "sentences": ["a"]}}, "a list in inputs is empty"),
        ("/search", {"query": "a", "texts": []}, "texts is an empty list"),
        ("/tokenize", {"inputs": []}, "inputs is an empty list"),
        ("/decode", {"ids": []}, "ids is an empty list"),
    ]:
        with subtests.test(path, body=body):
            refused(await both.post(path, json=body), 400, "Empty", words)


async def test_what_is_no_json_is_malformed(both: httpx.AsyncClient, subtests: pytest.Subtests) -> None:
    for content in (
        b"",
        b"{'inputs': 'a'}",
        b'{"inputs": "\xff\xfe"}',
        b'{"inputs": "\xed\xa0\x80"}',
        b'{"inputs": "\\ud800"}',
        b'{"inputs": "a", "x": NaN}',
        b'{"inputs": "a", "x": ' + b"9" * 400 + b"}",
        b'{"inputs": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        '{"inputs": "a"}'.encode("utf-16"),
    ):
        with subtests.test(content=content[:40]):
            refused(await both.post("/embed", content=content, headers=JSON), 400, "Malformed", "not JSON in UTF-8")


async def test_the_content_type_is_json(both: httpx.AsyncClient) -> None:
    for bad in ({}, {"content-type": "text/plain"}, {"content-type": "garbage;;"}):
        response = await both.post("/embed", content=b'{"inputs": "a"}', headers=bad)
        refused(response, 415, "UnsupportedMediaType", "send")
    for good in ("application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"):
        response = await both.post("/embed", content=b'{"inputs": "a"}', headers={"content-type": good})
        assert response.status_code == 200


@pytest.mark.parametrize("route", ["/embed", "/tokenize", "/v1/embeddings"])
async def test_a_compressed_body_is_refused_by_its_name(both: httpx.AsyncClient, route: str) -> None:
    body = gzip.compress(b'{"inputs": "a", "input": "a"}')
    response = await both.post(route, content=body, headers={**JSON, "content-encoding": "gzip"})
    assert response.status_code == 415
    assert "content-encoding is gzip; send the body without compression" in response.text
    plain = await both.post("/embed", content=b'{"inputs": "a"}', headers={**JSON, "content-encoding": "identity"})
    assert plain.status_code == 200


async def test_a_body_over_the_limit_is_refused(client: MakeClient) -> None:
    async with client(payload_limit=100) as http:
        body = json.dumps({"inputs": "a" * 100}).encode()
        refused(
            await http.post("/embed", content=body, headers=JSON), 413, "PayloadTooLarge", f"{len(body)} bytes", "100"
        )

        async def chunks() -> Any:
            for start in range(0, len(body), 10):
                yield body[start : start + 10]

        refused(await http.post("/embed", content=chunks(), headers=JSON), 413, "PayloadTooLarge", "more than 100")


async def test_a_megabyte_of_text_is_cut_or_refused(both: httpx.AsyncClient) -> None:
    text = "a man plays the guitar " * 43_000
    assert (await both.post("/embed", json={"inputs": text})).status_code == 200
    response = await both.post("/embed", json={"inputs": text, "truncate": False})
    refused(response, 422, "Validation", "text 0 has 215000 tokens")
    assert len(response.content) < 500
    assert (await both.post("/embed", json={"inputs": "x" * 1_000_000})).status_code == 200
    longer = await both.post("/embed", json={"inputs": ["x", "x" * 1_000_001]})
    refused(longer, 422, "Validation", "text 1 has 1000001 characters; at most 1000000 are allowed")


async def test_ten_thousand_texts_are_answered_in_order(both: httpx.AsyncClient) -> None:
    texts = [f"dogs {' '.join(str(number))}" for number in range(10_000)]
    near(await post(both, "/embed", inputs=texts, encoding_format="float"), units(raw(*texts)))


async def test_of_many_wrong_items_the_first_is_named(both: httpx.AsyncClient) -> None:
    """An error for each of a million items would hold the event loop for a minute."""
    for path, body, field in [
        ("/search", {"query": "a", "texts": [1] * 9}, "texts[0]"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": [1] * 9}}, "inputs.sentences[0]"),
        ("/similarity", {"inputs": {"source_sentences": ["a", 1], "sentences": ["a"]}}, "inputs.source_sentences[1]"),
        ("/similarity", {"inputs": {"pairs": [["a"]] * 9}}, "inputs.pairs[0]"),
        ("/embed", {"inputs": [*["a"] * 9, 1, 1]}, "inputs[9]:"),
        ("/embed", {"inputs": [[1], [1, "a"], ["a"]]}, "inputs[1][1]:"),
    ]:
        response = await both.post(path, json=body)
        refused(response, 422, "Validation", field)
        assert "; " not in response.json()["error"]


async def test_more_texts_than_the_limit_are_refused(both: httpx.AsyncClient, settings: Settings) -> None:
    texts = ["a"] * (settings.max_client_batch_size + 1)
    words = (f"{len(texts)} texts", f"at most {settings.max_client_batch_size}")
    refused(await both.post("/embed", json={"inputs": texts}), 422, "Validation", *words)
    pair = {"inputs": {"source_sentence": "a", "sentences": texts[1:]}}
    refused(await both.post("/similarity", json=pair), 422, "Validation", *words)
    refused(await both.post("/search", json={"query": "a", "texts": texts[1:]}), 422, "Validation", *words)


async def test_unknown_paths_and_methods_answer_in_the_envelope(both: httpx.AsyncClient) -> None:
    refused(await both.get("/nothing"), 404, "NotFound", "GET /nothing", "/docs")
    assert len((await both.get("/" + "x" * 9000)).content) < 400
    response = await both.get("/embed")
    refused(response, 405, "MethodNotAllowed", "GET /embed")
    assert response.headers["allow"] == "POST"


# Under load, and under fault


async def test_a_text_that_breaks_the_model_hurts_no_neighbour(make_app: MakeApp, hold: Hold) -> None:
    """Eight texts of four requests in one batch: it is halved three times, until the text that fails is alone."""
    app = make_app()
    async with open_client(app) as http:
        with hold():
            first = asyncio.create_task(http.post("/embed", json={"inputs": "a"}))
            await until(lambda: services(app).executors.busy_for)
            texts = [["a man", "man"], ["the", "poison"], ["a dogs", "dogs"], ["a two", "two"]]
            rest = [asyncio.create_task(http.post("/embed", json={"inputs": each})) for each in texts]
            await until(lambda: default_model(app).batcher.waiting_items == 8)
        assert (await first).status_code == 200
        found = await asyncio.gather(*rest)
        refused(found[1], 424, "Backend", "text 1: ", "not finite")
        for place in (0, 2, 3):
            near(found[place].json(), units(raw(*texts[place])))
        metrics = (await http.get("/metrics")).text
        assert 'cloze_inference_failures_total{model="tiny"} 4.0' in metrics  # batches of 8, 4, 2 and 1
        assert (await http.get("/health")).status_code == 200


async def test_nan_is_never_answered(both: httpx.AsyncClient) -> None:
    for encoding_format in ("float", "int8"):
        body = {"inputs": ["a", "poison"], "encoding_format": encoding_format}
        refused(await both.post("/embed", json=body), 424, "Backend", "text 1: the model gave a vector that is not")
    pair = {"inputs": {"pairs": [["a", "poison"]]}}
    refused(await both.post("/similarity", json=pair), 424, "Backend", "not finite")
    refused(await both.post("/search", json={"query": "a", "texts": ["poison"]}), 424, "Backend", "not finite")


async def test_a_text_that_cannot_be_embedded_is_named_as_it_was_sent(both: httpx.AsyncClient) -> None:
    async def message(path: str, body: dict[str, Any], bad: str, **options: Any) -> str:
        sent = json.loads(json.dumps(body).replace("BAD", bad)) | options
        error = (await both.post(path, json=sent)).json()["error"]
        return str(error["message"] if isinstance(error, dict) else error)

    strict = {"parameters": {"truncate": False}, "truncate": False}
    for path, body, field in [
        ("/search", {"query": "BAD", "texts": ["a", "man"]}, "query"),
        ("/search", {"query": "a", "texts": ["a", "BAD", "man"]}, "texts[1]"),
        ("/similarity", {"inputs": {"source_sentence": "BAD", "sentences": ["a"]}}, "inputs.source_sentence"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["BAD", "a"]}}, "inputs.sentences[0]"),
        ("/", {"inputs": {"pairs": [["a", "man"], ["BAD", "a"]]}}, "inputs.pairs[1][0]"),
        ("/similarity", {"inputs": {"pairs": [["a", "BAD"], ["a", "a"]]}}, "inputs.pairs[0][1]"),
        ("/similarity", {"inputs": {"source_sentences": ["BAD"], "sentences": ["a"]}}, "inputs.source_sentences[0]"),
        ("/similarity", {"inputs": {"source_sentences": ["a"] * 2, "sentences": ["a", "BAD"]}}, "inputs.sentences[1]"),
        ("/embed", {"inputs": ["a", "BAD"]}, "text 1"),
        ("/v1/embeddings", {"input": ["a", "BAD"]}, "text 1"),
    ]:
        assert (await message(path, body, "poison")).startswith(f"{field}: the model gave a vector that is not finite")
        assert (await message(path, body, "a " * 99, **strict)).startswith(f"{field} has 99 tokens; at most")
        assert (await message(path, body, "a" * 1_000_001)).startswith(f"{field} has 1000001 characters; at most")


async def test_what_is_beyond_the_limit_is_refused_whole(make_app: MakeApp, hold: Hold) -> None:
    app = make_app(max_tokens_in_flight=100)
    async with open_client(app) as http:
        with hold():
            first = asyncio.create_task(http.post("/embed", json={"inputs": ["a"] * 8}))  # 88 tokens
            await until(lambda: services(app).executors.busy_for)
            full = await http.post("/embed", json={"inputs": ["a", "dogs"]})
            refused(full, 429, "Overloaded", "88 tokens are in flight and the request adds 22", "send it again in")
            assert int(full.headers["retry-after"]) >= 1
        assert (await first).status_code == 200
        assert (await http.post("/embed", json={"inputs": ["a"] * 99})).status_code == 200  # alone it may be larger


async def test_too_many_requests_at_once_are_refused_and_the_status_still_answers(
    make_app: MakeApp, hold: Hold
) -> None:
    app = make_app(max_concurrent_requests=4)  # three, for one client
    async with open_client(app) as http:
        with hold():
            work = [asyncio.create_task(http.post("/embed", json={"inputs": "a"})) for _ in range(3)]
            await until(lambda: services(app).traffic.in_flight == 3)
            full = await http.post("/embed", json={"inputs": "a"})
            refused(full, 429, "Overloaded", "3 requests are in flight")
            assert int(full.headers["retry-after"]) >= 1
            for path in ("/health", "/health/live", "/metrics", "/info", "/v1/models"):
                assert (await http.get(path)).status_code == 200
        assert [each.status_code for each in await asyncio.gather(*work)] == [200] * 3


@pytest.mark.parametrize("kind", [ZeroDivisionError, BundleError])
async def test_a_bug_answers_500_and_tells_only_the_log(
    kind: type[Exception], both: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also an error that a user could put right, where no request can be the reason for it."""

    def broken(*args: object, **options: object) -> None:
        raise kind("secret detail")

    monkeypatch.setattr("cloze.service.http.embed.to_json", broken)
    response = await both.post("/embed", json={"inputs": "a"})
    refused(response, 500, "Internal", "see its log")
    assert "secret" not in response.text
    assert "secret detail" in caplog.text
    assert (await both.get("/health")).status_code == 200
