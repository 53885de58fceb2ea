"""What a body may cost before its texts are embedded: its values are counted first, and nothing else of it is kept."""

import gc
import json
import tracemalloc
from typing import Annotated, Any

import orjson
import pytest
from fastapi import Body, FastAPI, Response
from harness import MakeApp, MakeClient, open_client
from hypothesis import given
from hypothesis import strategies as some
from test_native import JSON, refused
from tiny_bundle import vector

from cloze.service.http.embed import embed_texts
from cloze.service.http.request import Context, JSONRoute, _values
from cloze.service.http.schemas import EmbedRequest

WORDS = some.text(alphabet='a,[]{}:"\\é\n', max_size=8)
ANY = some.recursive(
    some.none() | some.booleans() | some.integers(-(10**9), 10**9) | WORDS,
    lambda inner: some.lists(inner, max_size=4) | some.dictionaries(WORDS, inner, max_size=4),
    max_leaves=20,
)


def marks(value: Any) -> int:
    """The commas and brackets that JSON writes around values: a list of n has n - 1 and one, an empty one has one."""
    items = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if items is None else 1 + max(0, len(items) - 1) + sum(map(marks, items))


@given(ANY)
def test_values_are_counted_outside_strings(value: Any) -> None:
    assert _values(orjson.dumps(value), 1000, b"[{,") == marks(value)


@given(some.lists(WORDS, min_size=60, max_size=90))
def test_more_strings_than_are_read_are_too_many(texts: list[str]) -> None:
    assert _values(orjson.dumps([*texts, *["a"] * 50]), 50, b"[{,") > 50


BODIES = {
    "numbers": '{"inputs":[[' + ",".join(["7"] * 400_000) + "]]}",
    "numbers behind a text": '{"inputs":["a",' + ",".join(["7"] * 400_000) + "]}",
    "lists in an unknown field": '{"inputs":"a","other":[' + ",".join(["[]"] * 400_000) + "]}",
    "strings in an unknown field": '{"inputs":"a","other":[' + ",".join(['"a"'] * 400_000) + "]}",
    "objects": '{"inputs":"a","other":[' + ",".join(['{"a":1}'] * 200_000) + "]}",
}


@pytest.mark.anyio
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
async def test_values_that_no_request_needs_are_refused_before_they_are_read(client: MakeClient, body: str) -> None:
    async with client(token_ids=False) as http:
        refused(await http.post("/embed", content=body, headers=JSON), 422, "Validation", "more than 66536 values")


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["lists in an unknown field", "objects"])
async def test_a_service_that_takes_token_ids_refuses_lists_and_objects_too(client: MakeClient, kind: str) -> None:
    async with client(token_ids=True) as http:
        found = await http.post("/embed", content=BODIES[kind], headers=JSON)
        refused(found, 422, "Validation", "more than 66536 values")


@pytest.mark.anyio
@pytest.mark.parametrize("texts", [["a, b [c] {d} " * 9] * 16_384, ['"\\' * 99] * 16_384])
async def test_as_many_texts_as_are_allowed_are_read_whatever_is_in_them(client: MakeClient, texts: list[str]) -> None:
    async with client(token_ids=False) as http:
        response = await http.post("/embed", json={"inputs": texts, "dimensions": 1})
    assert response.status_code == 200
    assert len(response.json()) == len(texts)


@pytest.mark.anyio
async def test_pairs_and_token_ids_that_are_allowed_are_read(client: MakeClient) -> None:
    async with client(token_ids=False) as http:
        pairs = {"pairs": [["a", "b"]] * 8192}
        assert (await http.post("/similarity", json={"inputs": pairs})).status_code == 200
        assert (await http.post("/decode", json={"ids": [[5] * 1000] * 250})).status_code == 200
    async with client(token_ids=True) as http:
        response = await http.post("/embed", json={"inputs": [[5] * 16] * 16_384, "truncate": True, "dimensions": 1})
        assert response.status_code == 200


@pytest.mark.anyio
async def test_nothing_is_kept_of_a_field_that_is_not_known(make_app: MakeApp) -> None:
    """While a request waits, it holds its texts and no more."""
    app, held = make_app(), list[int]()

    async def look(body: Annotated[EmbedRequest, Body()], context: Context) -> Response:
        gc.collect()  # of what earlier tests have left, and the client
        held.append(tracemalloc.get_traced_memory()[0])
        return await embed_texts(body, context)

    route = JSONRoute("/embed", look, methods=["POST"])
    async with open_client(_with(app, route)) as http:
        tracemalloc.start()
        try:
            for other in ("", "x" * 8_000_000, [["y" * 100] * 8] * 2000):
                response = await http.post("/embed", json={"inputs": "a man", "other": other})
                assert response.status_code == 200
                assert len(response.json()[0]) == len(vector([1]))
        finally:
            tracemalloc.stop()
    sent = len(json.dumps({"inputs": "a man", "other": "x" * 8_000_000}))
    assert held[1] - held[0] < sent + 2_000_000  # the client's own copy
    assert held[2] - held[0] < 10_000_000


def _with(app: FastAPI, route: JSONRoute) -> FastAPI:
    """The application, whose middleware calls this route."""
    (middleware,) = (each for each in app.user_middleware if "routes" in each.kwargs)
    middleware.kwargs["routes"] = middleware.kwargs["routes"] | {route.path: route}
    return app
