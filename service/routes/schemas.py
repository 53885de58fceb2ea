"""What the native routes take and give: text-embeddings-inference's wire format. Unknown fields are ignored."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from encoding.text import Direction

__all__ = ["AnyRequest", "EmbedRequest", "Info", "Options", "SimilarityRequest", "TemplateInfo"]


def _texts(value: Any) -> Any:
    """Say what is wrong with `inputs` in one line; the type alone would name every branch of the union."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("texts", "should be a text or a list of texts, not {kind}", {"kind": _kind(value)})
    for index, item in enumerate(value):
        if not isinstance(item, str):
            raise PydanticCustomError(
                "texts", "item {index} should be a text, not {kind}", {"index": index, "kind": _kind(item)}
            )
    return value


def _kind(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return "a number: token ids are not taken; send texts (LangChain: check_embedding_ctx_length=False)"
    if isinstance(value, list):
        return "a list: token ids are not taken; send texts (LangChain: check_embedding_ctx_length=False)"
    names = {bool: "a truth value", float: "a number", dict: "an object", type(None): "null"}
    return names.get(type(value), "that")


def _no_prompts(value: Any) -> None:
    if value is not None:
        raise PydanticCustomError(
            "prompt_name", "the bundle has no prompts; its template, see /info, is put around every text"
        )


def _direction(value: str) -> str:
    return value.lower()


Texts = Annotated[str | list[str], BeforeValidator(_texts)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class Options(_Body):
    """How texts are put into the template."""

    truncate: bool | None = Field(None, description="Cut a text that is too long, or refuse it; null: as /info says")
    truncation_direction: Annotated[
        Literal["left", "Left", "right", "Right"], AfterValidator(_direction), Field(description="The side that is cut")
    ] = "right"
    prompt_name: Annotated[None, BeforeValidator(_no_prompts)] = Field(None, description="Null: there are no prompts")

    @property
    def direction(self) -> Direction:
        return "left" if self.truncation_direction == "left" else "right"


class EmbedRequest(Options):
    """One text or many, each to a vector."""

    inputs: Texts = Field(description="A text, or a list of them; an empty text has a vector too")
    normalize: bool = Field(True, description="Give each vector length 1")
    dimensions: int | None = Field(None, ge=1, description="Keep only the first dimensions, before normalising")

    model_config = ConfigDict(json_schema_extra={"example": {"inputs": ["A man plays a guitar."]}})


class Sentences(_Body):
    """One text, and those it is compared with."""

    source_sentence: str
    sentences: list[str]


class SimilarityRequest(_Body):
    """The cosine of one text with each of others."""

    inputs: Sentences
    parameters: Options | None = None

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"inputs": {"source_sentence": "A man plays a guitar.", "sentences": ["Someone makes music."]}}
        }
    )


def _shape(value: Any) -> str:
    inputs = value.get("inputs") if isinstance(value, dict) else getattr(value, "inputs", None)
    return "similarity" if isinstance(inputs, dict | Sentences) else "embed"


AnyRequest = Annotated[
    Annotated[EmbedRequest, Tag("embed")] | Annotated[SimilarityRequest, Tag("similarity")], Discriminator(_shape)
]


class TemplateInfo(BaseModel):
    """How a text becomes a sequence of tokens, and where its vector is read."""

    text: str
    read_out: str
    template_tokens: int = Field(description="tokens of the template, [CLS] and [SEP] included")
    text_tokens: int = Field(description="tokens of a text that fit beside them")
    final_period: bool
    denoising: bool


class Info(BaseModel):
    """What is served, in text-embeddings-inference's keys and some of our own."""

    model_config = ConfigDict(protected_namespaces=())

    model_id: str
    model_sha: str | None = Field(description="sha256 of the graph's file")
    model_dtype: str
    served_model_name: str
    model_type: dict[str, dict[str, str]]
    max_concurrent_requests: int
    max_input_length: int = Field(description="tokens of a sequence, template included")
    max_batch_tokens: int
    max_batch_requests: int | None
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    sha: str | None
    docker_label: str | None
    dimension: int
    provider: str
    threads: int
    template: TemplateInfo
