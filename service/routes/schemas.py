"""What the native routes take and give: text-embeddings-inference's wire format and more. Other fields are ignored."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, FailFast, Field, Tag
from pydantic_core import PydanticCustomError

from encoding.text import Direction
from service.routes.inputs import Ids, Inputs, TextList, Texts
from service.vectors import Format

__all__ = [
    "AnyRequest",
    "DecodeRequest",
    "EmbedRequest",
    "Found",
    "Info",
    "Lists",
    "Options",
    "Pairs",
    "Rows",
    "SearchRequest",
    "Sentences",
    "SimilarityRequest",
    "TemplateInfo",
    "TokenInfo",
    "TokenizeRequest",
]


def _no_prompts(value: Any) -> None:
    if value is not None:
        raise PydanticCustomError(
            "prompt_name", "a bundle has no prompts; its template, see /info, is put around every text"
        )


ModelName = Annotated[str | None, Field(description="Which model, where several are served; null: the default")]
Rows = list[list[float]] | list[list[int]] | list[str]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class _Sided(_Body):
    """Which model, and which side of a text that is too long it loses."""

    model: ModelName = None
    truncation_direction: Literal["left", "Left", "right", "Right"] = Field("right", description="The side that is cut")
    prompt_name: Annotated[None, BeforeValidator(_no_prompts)] = Field(None, description="Null: there are no prompts")

    @property
    def direction(self) -> Direction:
        return "left" if self.truncation_direction in ("left", "Left") else "right"


class Options(_Sided):
    """How texts are put into the template."""

    truncate: bool | None = Field(None, description="Cut a text that is too long, or refuse it; null: as /info says")


class EmbedRequest(Options):
    """One text or many, each to a vector."""

    inputs: Inputs = Field(description="A text or a list of them; token ids only where the service allows them")
    normalize: bool = Field(True, description="Give each vector length 1")
    dimensions: int | None = Field(None, ge=1, description="Keep only the first dimensions, before normalising")
    encoding_format: Format | None = Field(
        None,
        description="null or float: JSON numbers; base64: little-endian float32; float16: base64 of little-endian "
        "float16; int8: integers, each row scaled to 127; binary, ubinary: signs, eight to a byte",
    )

    model_config = ConfigDict(json_schema_extra={"example": {"inputs": ["A man plays a guitar."]}})


class Sentences(_Body):
    """One text, and those it is compared with."""

    source_sentence: str
    sentences: TextList


class Pairs(_Body):
    """Two texts at a time."""

    pairs: Annotated[list[Annotated[TextList, Field(min_length=2, max_length=2)]], FailFast()]


class Lists(_Body):
    """Every text of the first list with every one of the second."""

    source_sentences: TextList
    sentences: TextList


def _comparison(value: Any) -> str:
    keys = value if isinstance(value, dict) else type(value).model_fields if isinstance(value, _Body) else ()
    return "Pairs" if "pairs" in keys else "Lists" if "source_sentences" in keys else "Sentences"


class SimilarityRequest(_Body):
    """Cosines: of one text with each of others, of pairs, or of two lists."""

    inputs: Annotated[
        Annotated[Sentences, Tag("Sentences")] | Annotated[Pairs, Tag("Pairs")] | Annotated[Lists, Tag("Lists")],
        Discriminator(_comparison),
    ]
    parameters: Options | None = None
    model: ModelName = None

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"inputs": {"source_sentence": "A man plays a guitar.", "sentences": ["Someone makes music."]}}
        }
    )


def _shape(value: Any) -> str:
    inputs = value.get("inputs") if isinstance(value, dict) else getattr(value, "inputs", None)
    return "SimilarityRequest" if isinstance(inputs, dict | Sentences | Pairs | Lists) else "EmbedRequest"


AnyRequest = Annotated[
    Annotated[EmbedRequest, Tag("EmbedRequest")] | Annotated[SimilarityRequest, Tag("SimilarityRequest")],
    Discriminator(_shape),
]


class SearchRequest(Options):
    """Texts, ranked by their cosine with a query."""

    query: str
    texts: TextList
    top_k: int | None = Field(None, ge=1, description="How many to give; null: all")
    return_text: bool = Field(False, description="Give each text beside its place")

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"query": "Who makes music?", "texts": ["A man plays a guitar.", "Shares fell."], "top_k": 1}
        }
    )


class Found(BaseModel):
    """One text of a search: its place among the texts, its cosine with the query, and itself if asked for."""

    index: int
    score: float
    text: str | None = None


class TokenizeRequest(_Sided):
    """Texts, to be shown as the model sees them."""

    inputs: Texts
    add_special_tokens: bool = Field(True, description="Show the template's tokens, [CLS] and [SEP] too")

    model_config = ConfigDict(json_schema_extra={"example": {"inputs": "A man plays a guitar."}})


class TokenInfo(BaseModel):
    """One token. Offsets are characters of the text; what is not of the text has none."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None
    template: bool = Field(description="of the template, not of the text")
    cut: bool = Field(description="left out, for the text is too long")


class DecodeRequest(_Body):
    """Token ids of the model's own vocabulary, to be read as text."""

    ids: Ids
    skip_special_tokens: bool = True
    model: ModelName = None

    model_config = ConfigDict(json_schema_extra={"example": {"ids": [1037, 2158, 3248, 1037, 2858, 1012]}})


class TemplateInfo(BaseModel):
    """How a text becomes a sequence of tokens, and where its vector is read."""

    text: str
    pooling: str
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
    threads: int = Field(description="that run graphs on the CPU")
    threads_per_batch: int
    token_ids: bool = Field(description="whether token ids are taken for a text")
    vocabulary_size: int
    max_tokens_in_flight: int
    max_text_characters: int = Field(description="characters, or token ids, of one text")
    max_body_bytes: int = Field(description="bytes of one request's body")
    max_similarities: int = Field(description="cosines of two lists, in one request of /similarity")
    max_tokenize_characters: int = Field(description="characters of one request of /tokenize")
    max_decode_ids: int = Field(description="token ids of one request of /decode")
    template: TemplateInfo
    models: list[str] = Field(description="every model that is served; each has its own /models/NAME/info")
    default_model: str
