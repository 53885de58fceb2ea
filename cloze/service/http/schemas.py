"""Bodies of the native routes: text-embeddings-inference's wire format, and more. Unknown fields are ignored."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from cloze.encoding.calibration import Meaning
from cloze.encoding.text import Direction
from cloze.service.http.request import AnyIds, Inputs, Text, TextList, TextOrTexts, one_of
from cloze.service.inference.vectors import Format

ModelName = Annotated[str | None, Field(description="Name of the model; null: the default")]
Rows = list[list[float]] | list[list[int]] | list[str]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class _Sided(_Body):
    """The model, and the side from which a text that is too long is truncated."""

    model: ModelName = None
    truncation_direction: Literal["left", "Left", "right", "Right"] = Field("right", description="The truncated side")
    prompt_name: str | None = Field(
        None, description="Name of one of the model's templates, as /info lists them; null: its own template"
    )

    @property
    def direction(self) -> Direction:
        return "left" if self.truncation_direction in ("left", "Left") else "right"


class EncodingOptions(_Sided):
    """How texts are encoded."""

    truncate: bool | None = Field(None, description="Truncate or refuse a text that is too long; null: as /info says")


class Chunking(_Body):
    """How a long text is cut into chunks, at the ends of words and, where it can be, of sentences."""

    tokens: int | None = Field(None, ge=1, description="Tokens of a chunk at most; null: as many as fit")
    overlap: int = Field(
        0, ge=0, description="Tokens that a chunk shares with the one before, at most half of `tokens`"
    )
    mean: bool = Field(
        False, description="One vector for each text: the mean of its chunks' unit vectors, weighted by characters"
    )


class ChunkRow(BaseModel):
    """One chunk: its place in the text, in characters, and its vector."""

    start: int
    stop: int
    embedding: list[float] | list[int] | str


ChunkRows = list[list[ChunkRow]]


class EmbedRequest(EncodingOptions):
    """One text or several, each to a vector, or to one for each of its chunks."""

    inputs: Inputs = Field(description="A text or a list of texts; token ids only where the service allows them")
    normalize: bool = Field(True, description="Give each vector length 1")
    dimensions: int | None = Field(None, ge=1, description="Keep only the first dimensions, before normalising")
    encoding_format: Format | None = Field(
        None,
        description="null or float: JSON numbers; base64: little-endian float32; float16: base64 of little-endian "
        "float16; int8: integers, each row scaled to 127; binary, ubinary: signs, eight to a byte",
    )

    chunk: Chunking | None = Field(None, description="Cut long texts into chunks instead of truncating them")

    model_config = ConfigDict(json_schema_extra={"example": {"inputs": ["A man plays a guitar."]}})


class Sentences(_Body):
    """One text, and the texts it is compared with."""

    source_sentence: str
    sentences: TextList


class Pairs(_Body):
    """Pairs of texts."""

    pairs: Annotated[list[Annotated[TextList, Field(min_length=2, max_length=2)]], Field(fail_fast=True)]


class Lists(_Body):
    """Every text of the first list with every text of the second."""

    source_sentences: TextList
    sentences: TextList


def _comparison(value: Any) -> str:
    keys = value if isinstance(value, dict) else ()
    return "Pairs" if "pairs" in keys else "Lists" if "source_sentences" in keys else "Sentences"


Calibrated = Annotated[
    bool, Field(description="Answer what each cosine means by the model's calibration, as /info describes it")
]


class SimilarityRequest(_Body):
    """Cosines of one text with others, of pairs, or of every text of one list with every text of another."""

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

    The query is put into the model's template `query`, or the one of `prompt_name`, and the texts into its template
    `document`, where it has them.
    """

    query: str
    texts: TextList
    top_k: int | None = Field(None, ge=1, description="How many texts to return; null: all")
    return_text: bool = Field(False, description="Return each text with its index")
    calibrated: Calibrated = False
    threshold: float | None = Field(None, description="Return only texts with this score or a higher one")

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"query": "Who makes music?", "texts": ["A man plays a guitar.", "Shares fell."], "top_k": 1}
        }
    )


class Found(BaseModel):
    """One text of a search: its index in `texts`, its score, and the text where it was asked for.

    The score is the cosine with the query, or what that means, where `calibrated` was asked for.
    """

    index: int
    score: float
    text: str | None = None


class ExplainRequest(EncodingOptions):
    """Two texts whose cosine is to be explained by their words."""

    inputs: Annotated[TextList, Field(min_length=2, max_length=2, description="The two texts")]

    model_config = ConfigDict(
        json_schema_extra={"example": {"inputs": ["A man plays a guitar.", "Someone makes music."]}}
    )


class ExplainedWord(BaseModel):
    """One word, its place in the text, in characters, and the cosine without the word minus the cosine.

    Below 0 the word makes the texts more similar. null for a text's only word: nothing would be left to compare.
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
    """One text, or several as [["one"], ["another"]], to answer with the labels of a head.

    A list of two texts is a pair for text-embeddings-inference, and no head takes pairs.
    """

    inputs: Annotated[Text | Single | Batch, one_of('a text, or a list of texts in lists of one: [["a"], ["b"]]')]
    prompt_name: str | None = Field(
        None, description="Refused: a head is learnt from vectors of the model's own template"
    )
    head: str | Annotated[TextList, Field(min_length=1)] | None = Field(
        None, description="Name of a head, as /info lists them, or of several; null: the model's only one"
    )
    raw_scores: bool = Field(False, description="Answer scores instead of probabilities")
    abstain: bool = Field(
        False,
        description="Leave out what does not reach the head's threshold: of one label a text whose best does not, of "
        "several each that does not",
    )

    model_config = ConfigDict(json_schema_extra={"example": {"inputs": [["Where is the station?"], ["Call me."]]}})


class Prediction(BaseModel):
    """A label and its probability, or its score where `raw_scores` was asked for."""

    label: str
    score: float


OfText = list[Prediction]
OfTexts = list[OfText]
Predictions = OfText | OfTexts | dict[str, OfText | OfTexts]


class TokenizeRequest(_Sided):
    """Texts to show as the model sees them."""

    inputs: TextOrTexts
    add_special_tokens: bool = Field(True, description="Include the tokens of the template, [CLS] and [SEP]")

    model_config = ConfigDict(json_schema_extra={"example": {"inputs": "A man plays a guitar."}})


class TokenInfo(BaseModel):
    """One token. Offsets are characters of the text; tokens that are not part of the text have none."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None
    template: bool = Field(description="Whether it belongs to the template, not to the text")
    cut: bool = Field(description="Whether it is truncated, because the text is too long")


class DecodeRequest(_Body):
    """Token ids of the model's own vocabulary to write as text."""

    ids: AnyIds
    skip_special_tokens: bool = True
    model: ModelName = None

    model_config = ConfigDict(json_schema_extra={"example": {"ids": [1037, 2158, 3248, 1037, 2858, 1012]}})


class TemplateInfo(BaseModel):
    """How a text becomes a sequence of tokens, and how its vector is pooled."""

    text: str
    pooling: str
    template_tokens: int = Field(description="tokens of the template, [CLS] and [SEP] included")
    text_tokens: int = Field(description="tokens of a text that fit beside them")
    final_period: bool
    denoising: bool


class CalibrationInfo(BaseModel):
    """What the answers of /similarity and /search are where `calibrated` is asked for."""

    meaning: Meaning = Field(description="score: as people give it; probability: of the same meaning")
    lowest: float = Field(description="of the scale")
    highest: float
    source: str = Field(description="the file of judged pairs")
    pairs: int
    error: float = Field(description="expected calibration error on held-out pairs, as a share of the scale")
    thresholds: dict[str, float] = Field(description="values, by what they are best for")


class HeadInfo(BaseModel):
    """What /predict answers with one of the model's heads."""

    labels: list[str]
    several: bool = Field(description="whether a text may have several of the labels, or none")
    threshold: float | None = Field(description="probability below which it abstains, where a request lets it")
    texts: int = Field(description="that it was learnt from")
    source: str = Field(description="the file of labelled texts")
    figures: dict[str, float] = Field(description="of texts that it was not fitted to")


class Info(BaseModel):
    """The model and the limits, under text-embeddings-inference's keys and further ones."""

    model_config = ConfigDict(protected_namespaces=())

    model_id: str
    model_sha: str | None = Field(description="sha256 of the graph's file")
    bridge_sha: str | None = Field(None, description="sha256 of the bridge's file; null: the model has none")
    model_dtype: str
    served_model_name: str
    model_type: dict[str, dict[str, str]]
    max_concurrent_requests: int
    max_input_length: int = Field(description="tokens of a sequence, template included")
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
    threads: int = Field(description="that run graphs on the CPU")
    threads_per_batch: int
    token_ids: bool = Field(description="whether token ids are taken for a text")
    vocabulary_size: int
    max_tokens_in_flight: int
    max_bytes_in_flight: int = Field(description="bytes of the requests in flight, of bodies and of answers")
    max_text_characters: int = Field(description="characters, or token ids, of one text")
    max_body_bytes: int = Field(description="bytes of one request's body")
    max_similarities: int = Field(description="cosines of two lists, in one request of /similarity")
    max_explained_words: int = Field(description="words of the two texts of /explain")
    max_predictions: int = Field(description="texts of one request of /predict × labels of its heads")
    max_tokenize_characters: int = Field(description="characters, and tokens of templates, in one /tokenize")
    max_decode_ids: int = Field(description="token ids of one request of /decode")
    template: TemplateInfo
    templates: dict[str, str] = Field(description="further templates, which a request names by `prompt_name`")
    calibration: CalibrationInfo | None = Field(description="null: the model has none")
    heads: dict[str, HeadInfo] = Field(description="the classifiers that /predict answers with")
    embedding_space: str = Field(description="digest of all that decides a vector; also the header x-embedding-space")
    models: list[str] = Field(description="every model that is served; each has its own /models/NAME/info")
    default_model: str
    aliases: dict[str, str] = Field(description="other names of the models")
