"""Bodies of the native routes: text-embeddings-inference's wire format, and more. Unknown fields are ignored."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from cloze.encoding.calibration import Meaning
from cloze.encoding.text import Direction
from cloze.service.http.request import AnyIds, Inputs, Text, TextList, TextOrTexts, one_of
from cloze.service.inference.vectors import Format

ModelName = Annotated[str | None, Field(description="Name of the model; null: the default model")]
Rows = list[list[float]] | list[list[int]] | list[str]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class _Sided(_Body):
    """The model, and the side from which a text that is too long is truncated."""

    model: ModelName = None
    truncation_direction: Literal["left", "Left", "right", "Right"] = Field(
        "right", description="Side from which a text that is too long is truncated"
    )
    prompt_name: str | None = Field(
        None, description="Name of one of the model's templates, as listed by /info; null: the model's default template"
    )

    @property
    def direction(self) -> Direction:
        return "left" if self.truncation_direction in ("left", "Left") else "right"


class EncodingOptions(_Sided):
    """How texts are encoded."""

    truncate: bool | None = Field(
        None,
        description="Truncate a text that is too long (true) or reject it (false); null: `auto_truncate` of /info "
        "applies",
    )


class Chunking(_Body):
    """How long texts are split into chunks: between words and, where possible, between sentences."""

    tokens: int | None = Field(None, ge=1, description="Maximum number of tokens in a chunk; null: as many as fit")
    overlap: int = Field(
        0,
        ge=0,
        description="Maximum number of tokens that a chunk repeats from the end of the previous one, at most half of "
        "`tokens`",
    )
    mean: bool = Field(
        False,
        description="Return one vector per text: the mean of its chunks' unit vectors, weighted by their number of "
        "characters",
    )


class ChunkRow(BaseModel):
    """One chunk: where it starts and stops in the text, in characters, and its vector."""

    start: int
    stop: int
    embedding: list[float] | list[int] | str


ChunkRows = list[list[ChunkRow]]


class EmbedRequest(EncodingOptions):
    """One or more texts to embed. Each gets one vector, or one for each of its chunks."""

    inputs: Inputs = Field(description="A text or a list of texts; or token ids, if the service accepts them")
    normalize: bool = Field(True, description="Scale each vector to length 1")
    dimensions: int | None = Field(None, ge=1, description="Keep only this many leading dimensions, before normalising")
    encoding_format: Format | None = Field(
        None,
        description="null or float: JSON numbers; base64: little-endian float32; float16: base64 of little-endian "
        "float16; int8: integers, each row scaled so that its largest magnitude is 127; uint8: the same plus 128; "
        "binary, ubinary: sign bits, eight per byte",
    )

    chunk: Chunking | None = Field(None, description="Cut long texts into chunks instead of truncating them")

    model_config = ConfigDict(json_schema_extra={"example": {"inputs": ["A man plays a guitar."]}})


class Sentences(_Body):
    """One text, and the texts to compare it with."""

    source_sentence: str
    sentences: TextList


class Pairs(_Body):
    """Pairs of texts to compare."""

    pairs: Annotated[list[Annotated[TextList, Field(min_length=2, max_length=2)]], Field(fail_fast=True)]


class Lists(_Body):
    """Two lists of texts: every text of the first is compared with every text of the second."""

    source_sentences: TextList
    sentences: TextList


def _comparison(value: Any) -> str:
    keys = value if isinstance(value, dict) else ()
    return "Pairs" if "pairs" in keys else "Lists" if "source_sentences" in keys else "Sentences"


Calibrated = Annotated[
    bool, Field(description="Return calibrated values instead of cosines; `calibration` in /info says what they mean")
]


class SimilarityRequest(_Body):
    """Texts to compare by cosine: one with others, in pairs, or every text of one list with every text of another."""

    inputs: Annotated[
        Annotated[Sentences, Tag("Sentences")] | Annotated[Pairs, Tag("Pairs")] | Annotated[Lists, Tag("Lists")],
        Discriminator(_comparison),
    ]
    parameters: EncodingOptions | None = None
    model: ModelName = None
    calibrated: Calibrated = False

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"inputs": {"source_sentence": "A man plays a guitar.", "sentences": ["Someone makes music."]}}
        }
    )


def _shape(value: Any) -> str:
    inputs = value.get("inputs") if isinstance(value, dict) else None
    return "SimilarityRequest" if isinstance(inputs, dict) else "EmbedRequest"


AnyRequest = Annotated[
    Annotated[EmbedRequest, Tag("EmbedRequest")] | Annotated[SimilarityRequest, Tag("SimilarityRequest")],
    Discriminator(_shape),
]


class SearchRequest(EncodingOptions):
    """Texts to rank by their cosine with a query.

    The query is embedded with the model's template `query`, or the one that `prompt_name` names, and the texts with its
    template `document`. A model without these templates uses its default template.
    """

    query: str
    texts: TextList
    top_k: int | None = Field(None, ge=1, description="Number of texts to return; null: all")
    return_text: bool = Field(False, description="Also return each text, not only its index")
    calibrated: Calibrated = False
    threshold: float | None = Field(None, description="Return only texts whose score is at least this")

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"query": "Who makes music?", "texts": ["A man plays a guitar.", "Shares fell."], "top_k": 1}
        }
    )


class Found(BaseModel):
    """One result of a search: its index in `texts`, its score, and the text if `return_text` is set.

    The score is the cosine with the query, or the calibrated value if `calibrated` is set.
    """

    index: int
    score: float
    text: str | None = None


class ExplainRequest(EncodingOptions):
    """Two texts whose cosine is explained word by word."""

    inputs: Annotated[TextList, Field(min_length=2, max_length=2, description="The two texts")]

    model_config = ConfigDict(
        json_schema_extra={"example": {"inputs": ["A man plays a guitar.", "Someone makes music."]}}
    )


class ExplainedWord(BaseModel):
    """One word, where it starts and stops in the text, in characters, and how the cosine changes if it is removed.

    A change below 0 means that the word makes the texts more similar. null: the word is the only one of its text.
    """

    word: str
    start: int
    stop: int
    change: float | None


class Explanation(BaseModel):
    """The cosine of the two texts, and the words of each."""

    cosine: float
    texts: list[list[ExplainedWord]]


Batch = Annotated[
    list[Annotated[TextList, Field(min_length=1, max_length=1)]], Field(fail_fast=True), Tag("list[list]")
]
Single = Annotated[TextList, Field(max_length=1), Tag("list[str]")]


class PredictRequest(EncodingOptions):
    """One text, or several as [["one"], ["another"]], to classify with one or more heads.

    In text-embeddings-inference a list of two texts is a pair, and heads do not accept pairs.
    """

    inputs: Annotated[Text | Single | Batch, one_of('a text, or a list of texts in lists of one: [["a"], ["b"]]')]
    prompt_name: str | None = Field(
        None, description="Rejected: a head is trained on vectors of the model's default template"
    )
    head: str | Annotated[TextList, Field(min_length=1)] | None = Field(
        None, description="Name of a head, as listed by /info, or a list of names; null: the model's only head"
    )
    raw_scores: bool = Field(False, description="Return scores instead of probabilities")
    abstain: bool = Field(
        False,
        description="Omit what does not reach the head's threshold. With one label per text: return no labels for a "
        "text whose best label does not reach it; with several: omit each label that does not",
    )

    model_config = ConfigDict(json_schema_extra={"example": {"inputs": [["Where is the station?"], ["Call me."]]}})


class Prediction(BaseModel):
    """A label and its probability, or its score if `raw_scores` is set."""

    label: str
    score: float


OfText = list[Prediction]
OfTexts = list[OfText]
Predictions = OfText | OfTexts | dict[str, OfText | OfTexts]


class TokenizeRequest(_Sided):
    """Texts to show as the tokens that the model sees."""

    inputs: TextOrTexts
    add_special_tokens: bool = Field(True, description="Include [CLS], [SEP] and the tokens of the template")

    model_config = ConfigDict(json_schema_extra={"example": {"inputs": "A man plays a guitar."}})


class TokenInfo(BaseModel):
    """One token. `start` and `stop` are in characters of the text; null: the token is not part of the text."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None
    template: bool = Field(description="Whether the token belongs to the template rather than to the text")
    cut: bool = Field(description="Whether the token is truncated because the text is too long")


class DecodeRequest(_Body):
    """Token ids of the model's own vocabulary to decode to text."""

    ids: AnyIds
    skip_special_tokens: bool = True
    model: ModelName = None

    model_config = ConfigDict(json_schema_extra={"example": {"ids": [1037, 2158, 3248, 1037, 2858, 1012]}})


class TemplateInfo(BaseModel):
    """How a text becomes a sequence of tokens, and how its vector is pooled."""

    text: str
    pooling: str
    template_tokens: int = Field(description="tokens of the template, [CLS] and [SEP] included")
    text_tokens: int = Field(description="maximum number of tokens of a text, beside those of the template")
    final_period: bool
    denoising: bool


class CalibrationInfo(BaseModel):
    """What /similarity and /search return if `calibrated` is set."""

    meaning: Meaning = Field(
        description="score: on the scale of the judged pairs; probability: that two texts have the same meaning"
    )
    lowest: float = Field(description="lowest value of the scale")
    highest: float
    source: str = Field(description="name of the file of judged pairs")
    pairs: int
    error: float = Field(description="expected calibration error on held-out pairs, as a fraction of the scale")
    thresholds: dict[str, float] = Field(description="thresholds of the values, by criterion, such as F1")


class HeadInfo(BaseModel):
    """One of the model's classifier heads, which /predict uses."""

    labels: list[str]
    several: bool = Field(description="whether a text may have several of the labels, or none of them")
    threshold: float | None = Field(
        description="probability below which the head abstains if a request sets `abstain`; null: no threshold "
        "reaches the accuracy that was requested"
    )
    texts: int = Field(description="number of texts that it was trained on")
    source: str = Field(description="name of the file of labelled texts")
    figures: dict[str, float] = Field(description="scores on held-out texts")


class Info(BaseModel):
    """The model and the limits of the service: the keys of text-embeddings-inference, and further ones."""

    model_config = ConfigDict(protected_namespaces=())

    model_id: str
    model_sha: str | None = Field(description="SHA-256 of the graph's file")
    bridge_sha: str | None = Field(None, description="SHA-256 of the bridge's file; null: the model has no bridge")
    model_dtype: str
    served_model_name: str
    model_type: dict[str, dict[str, str]]
    max_concurrent_requests: int
    max_input_length: int = Field(description="maximum number of tokens of a sequence, template included")
    max_batch_tokens: int
    max_batch_requests: int | None = None
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    sha: str | None = None
    docker_label: str | None = None
    dimension: int
    provider: str
    threads: int = Field(description="CPU threads that run graphs")
    threads_per_batch: int
    token_ids: bool = Field(description="whether token ids are accepted in place of texts")
    vocabulary_size: int
    max_tokens_in_flight: int
    max_bytes_in_flight: int = Field(description="limit on the bytes of all requests in flight, bodies and responses")
    max_text_characters: int = Field(description="limit on the characters, or token ids, of one text")
    max_body_bytes: int = Field(description="limit on the bytes of a request's body")
    max_similarities: int = Field(description="limit on the cosines of two lists in one request of /similarity")
    max_explained_words: int = Field(description="limit on the words of the two texts of /explain, together")
    max_predictions: int = Field(description="limit on texts × labels of the heads in one request of /predict")
    max_tokenize_characters: int = Field(
        description="limit on the characters, and tokens of templates, in one request of /tokenize"
    )
    max_decode_ids: int = Field(description="limit on the token ids in one request of /decode")
    template: TemplateInfo
    templates: dict[str, str] = Field(description="named templates, which a request chooses by `prompt_name`")
    calibration: CalibrationInfo | None = Field(description="null: the model has no calibration")
    heads: dict[str, HeadInfo] = Field(description="classifier heads of /predict, by name")
    embedding_space: str = Field(
        description="digest of everything that determines a vector; also the header x-embedding-space"
    )
    models: list[str] = Field(description="all served models; each has its own /models/NAME/info")
    default_model: str
    aliases: dict[str, str] = Field(description="other names of the models")
