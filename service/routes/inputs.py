"""Texts and token ids as a body brings them, each checked in one pass, so that a refusal is one line.

A body may hold millions of items and is checked on the event loop: so no union is tried branch by branch, which notes
an error for each item, and a list ends at its first error.
"""

from itertools import chain
from typing import Annotated, Any

from pydantic import FailFast, Field, PlainValidator
from pydantic_core import PydanticCustomError

__all__ = ["Ids", "Inputs", "TextList", "Texts"]


def _inputs(value: Any) -> Any:
    """Say what is wrong with `inputs` in one line; the type alone would name every branch of the union."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError(
            "inputs", "should be a text or a list of texts (or of token ids), not {kind}", {"kind": _kind(value)}
        )
    if _are_texts(value) or _are_ids(value) or _are_lists_of_ids(value):
        return value
    wanted = _shape_of(value[0])
    index = next(place for place, item in enumerate(value) if _shape_of(item) != wanted or wanted == "other")
    raise PydanticCustomError(
        "inputs",
        "item {index} should be {wanted}, not {kind}",
        {"index": index, "wanted": WANTED[wanted], "kind": _kind(value[index])},
    )


WANTED = {"text": "a text", "id": "a token id, as the first is", "ids": "a list of token ids", "other": "a text"}


def _shape_of(item: Any) -> str:
    if isinstance(item, str):
        return "text"
    if _are_ids([item]):
        return "id"
    return "ids" if isinstance(item, list) and _are_ids(item) else "other"


def _are_texts(items: list[Any]) -> bool:
    return set(map(type, items)) <= {str}


def _are_ids(items: list[Any]) -> bool:
    return set(map(type, items)) <= {int} and min(items, default=0) >= 0  # the vocabulary is another's matter


def _are_lists_of_ids(items: list[Any]) -> bool:
    return set(map(type, items)) <= {list} and _are_ids(list(chain.from_iterable(items)))


def _kind(value: Any) -> str:
    names = {
        str: "a text",
        bool: "a truth value",
        int: "a number",
        float: "a number",
        dict: "an object",
        type(None): "null",
        list: "a list",
    }
    return names.get(type(value), "that")


def _texts(value: Any) -> Any:
    if isinstance(value, str) or (isinstance(value, list) and _are_texts(value)):
        return value
    raise PydanticCustomError("texts", "should be a text or a list of texts")


def _ids(value: Any) -> Any:
    if isinstance(value, list) and (_are_ids(value) or _are_lists_of_ids(value)):
        return value
    raise PydanticCustomError("ids", "should be a list of token ids, or a list of such lists")


TokenId = Annotated[int, Field(ge=0)]
AnyInputs = str | list[str] | list[int] | list[list[int]]
OneOrMany = str | list[str]
AnyIds = list[TokenId] | list[list[TokenId]]
Inputs = Annotated[AnyInputs, PlainValidator(_inputs, json_schema_input_type=AnyInputs)]
Texts = Annotated[OneOrMany, PlainValidator(_texts, json_schema_input_type=OneOrMany)]
Ids = Annotated[AnyIds, PlainValidator(_ids, json_schema_input_type=AnyIds)]
TextList = Annotated[list[str], FailFast()]
