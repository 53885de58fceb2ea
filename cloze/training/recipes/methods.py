"""The keys of each training method, in addition to those of all methods. A method's own module describes it.

They are separate from the methods, so that a recipe can be read, checked and described without torch.
"""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from cloze.encoding.bundle import SEARCH_NAMES
from cloze.encoding.template import PoolingMode
from cloze.training.recipes.recipe import Positive, Recipe, check_template

Weight = Annotated[float, Field(ge=0)]
EditKind = Literal["replace", "insert", "delete"]
Guessing = Literal["best", "sampled"]
TWO_TEMPLATES: Final = ("different", "denoised")  # modes of PromptBERT
Distribution = Literal["fixed", "uniform", "beta", "truncnormal", "choice"]

FORMS: Final[dict[Distribution, str]] = {
    "fixed": "one rate below 1, such as [0.1]",
    "uniform": "the lowest and the highest rate, below 1, such as [0.0, 0.2]",
    "beta": "its two parameters, above 0, such as [2.0, 18.0]",
    "truncnormal": "mean, standard deviation, lowest and highest rate, such as [0.1, 0.05, 0.0, 0.2]",
    "choice": "the rates to choose from, below 1, such as [0.05, 0.1, 0.15]",
}


class BatchRecipe(Recipe):
    """The keys of every method whose loss compares the vectors of a batch."""

    dimensions: tuple[Positive, ...] = Field(
        (),
        description="Matryoshka: average the loss over vectors truncated to each of these sizes; empty: full vectors "
        "only",
    )
    mini_batch_size: Positive | None = Field(
        None, description="GradCache: encode this many rows at a time, twice, to save memory; unset: all at once"
    )

    @property
    def chunk_rows(self) -> int | None:
        return self.mini_batch_size

    @model_validator(mode="after")
    def _distinct_dimensions(self) -> Self:
        if len(set(self.dimensions)) < len(self.dimensions):
            raise ValueError(f"dimensions has one size twice: {', '.join(map(str, self.dimensions))}; write each once")
        return self


class ContrastiveRecipe(BatchRecipe):
    """The keys of every contrastive method."""

    temperature: Annotated[float, Field(gt=0)] = Field(0.05, description="divides the cosines in the loss")
    no_duplicates: bool = Field(
        False, description="never put the same text into a batch twice, because it would be a negative of itself"
    )

    @property
    def distinct_texts(self) -> bool:
        return self.no_duplicates

    @model_validator(mode="after")
    def _one_order(self) -> Self:
        orders = {"group_by_length": self.group_by_length, "weights": self.weights}
        second_order = next((name for name, value in orders.items() if value), None)
        if self.no_duplicates and second_order:
            raise ValueError(f"no_duplicates and {second_order} order the corpus in two ways; choose one")
        return self


class PairsRecipe(ContrastiveRecipe):
    """The keys of the methods that learn from pairs and hard negatives as well as from single sentences."""

    readable_columns: ClassVar[Sequence[int]] = range(1, 11)

    negative_weight: float = Field(
        0.0, description="added to the logits of a row's own hard negatives; the logarithm of their weight in the loss"
    )
    kept_head: Literal["tanh", "transform"] | None = Field(
        None,
        description="head that is trained and served: tanh, or transform, which is initialised from the encoder's "
        "masked-word head; unset: a tanh head that is used in training only",
    )
    guide: str | None = Field(
        None,
        description="model that finds false negatives in a batch, which are excluded from the loss: a run, a bundle, "
        "an encoder's folder or a hub name; unset: none",
    )
    guide_margin: Annotated[float, Field(ge=0, le=2)] = Field(
        0.0,
        description="ignore negatives whose cosine, as scored by the guide, is above the positive's minus this margin",
    )

    @model_validator(mode="after")
    def _guided(self) -> Self:
        if self.guide_margin and self.guide is None:
            raise ValueError(
                f"guide_margin is {self.guide_margin}, but there is no guide; write one, or guide_margin = 0.0"
            )
        return self

    @model_validator(mode="after")
    def _weighed(self) -> Self:
        if self.negative_weight and len(self.columns) < 3:
            raise ValueError(
                f"negative_weight is {self.negative_weight}, but columns names {len(self.columns)}; hard negatives are "
                "in the third and later columns: name three or more, or write negative_weight = 0.0"
            )
        return self


class PromptBERTRecipe(PairsRecipe):
    """The keys of `method = "promptbert"`."""

    method: Literal["promptbert"]
    pooling: Literal["mask"] = Field("mask", description="pooling of the vector: PromptBERT reads it at [MASK]")
    mode: Literal["same", "different", "denoised", "supervised"] = Field(
        "denoised",
        description="how the two views are made: same, different or denoised, from one column; supervised, from two "
        "or more",
    )
    second_template: str | None = Field(
        None, description="template of the second view, in the modes different and denoised"
    )

    @model_validator(mode="after")
    def _templates(self) -> Self:
        if self.mode not in TWO_TEMPLATES:
            if self.second_template is not None:
                raise ValueError(
                    f"mode {self.mode!r} has one template; remove second_template or write mode = 'different'"
                )
            return self
        if self.second_template in (None, self.template):
            raise ValueError(
                f"mode {self.mode!r} needs two templates; write a second_template that differs from template"
            )
        check_template(str(self.second_template), "mask", "second_template: ")
        return self

    @model_validator(mode="after")
    def _supervision(self) -> Self:
        columns = len(self.columns) or 1
        if self.mode == "supervised":
            if columns == 1:
                raise ValueError("mode 'supervised' needs pairs; name two columns, and one for each hard negative")
        elif columns > 1:
            raise ValueError(
                f"mode {self.mode!r} has views of one text, but columns names {columns}; name one, or write "
                "mode = 'supervised'"
            )
        elif self.kept_head is not None:
            raise ValueError(
                f"mode {self.mode!r} does not serve a head; remove kept_head, or write mode = 'supervised'"
            )
        return self


class DropoutRecipe(PairsRecipe):
    """The keys that SimCSE and S-SimCSE share."""

    query_template: str | None = Field(
        None,
        description="template for the first column's texts, kept as the template `query`; unset: with several "
        "columns, the encoder's own `query` if it has one; else template",
    )
    document_template: str | None = Field(
        None,
        description="template for the other columns' texts, kept as the template `document`; unset: the encoder's "
        "own `document` if it has one; else template",
    )
    mlm_weight: Annotated[float, Field(ge=0)] = Field(
        0.0, description="weight of an additional masked language modelling loss; 0: none"
    )
    masked_share: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.15, description="fraction of the tokens that are masked for that loss"
    )

    @property
    def templates(self) -> dict[str, str]:
        """The named templates that the encoder keeps."""
        templates = zip(SEARCH_NAMES, (self.query_template, self.document_template), strict=True)
        return {name: template for name, template in templates if template is not None}

    @model_validator(mode="after")
    def _templates(self) -> Self:
        if self.templates and len(self.columns) < 2:
            raise ValueError(
                f"{next(iter(self.templates))}_template is set, but columns names {len(self.columns)}; queries and "
                "documents are two columns of the corpus: name both, or remove the template"
            )
        for name, template in self.templates.items():
            check_template(template, self.pooling, f"{name}_template: ")
        return self


class SimCSERecipe(DropoutRecipe):
    """The keys of `method = "simcse"`."""

    method: Literal["simcse"]


class SSimCSERecipe(DropoutRecipe):
    """The keys of `method = "ssimcse"`."""

    method: Literal["ssimcse"]
    scope: Literal["pass", "op", "sentence", "sentence-op"] = Field(
        "op",
        description="what has its own dropout rate: pass, each view of a batch; op, each dropout operation of a view; "
        "sentence, each sentence; sentence-op, each operation of each sentence",
    )
    distribution: Distribution = Field(
        "uniform", description="distribution of the rates: fixed, uniform, beta, truncnormal or choice"
    )
    rates: tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...] = Field(
        (0.0, 0.2), description="parameters of the distribution; uniform: the lowest and the highest rate"
    )
    attention_dropout: bool = Field(
        False,
        description="also draw the rates for attention probabilities; otherwise these keep the encoder's own rate",
    )

    @model_validator(mode="after")
    def _rates(self) -> Self:
        if not well_formed(self.distribution, self.rates):
            raise ValueError(
                f"rates is {list(self.rates)}; distribution {self.distribution!r} takes {FORMS[self.distribution]}"
            )
        return self


class DiffCSERecipe(ContrastiveRecipe):
    """The keys of `method = "diffcse"`."""

    method: Literal["diffcse"]
    generator: str | None = Field(
        None,
        description="masked language model that edits sentences: a folder or a hub name, with the encoder's "
        "vocabulary; unset: the encoder's own checkpoint, which then needs a masked-word head; not needed to delete "
        "only, or for task mlm",
    )
    edits: tuple[EditKind, ...] = Field(
        ("replace",),
        min_length=1,
        description="replace, insert, delete: the edit of a view is drawn from these at each step",
    )
    masked_share: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.3, description="fraction of the tokens to mask for the generator, to insert or to delete"
    )
    guessing: Guessing = Field(
        "best",
        description="words of the generator: best, the likeliest one at every position; sampled, one drawn at each "
        "masked position",
    )
    contrast: bool = Field(
        True, description="also train with the contrastive loss; otherwise with the task's loss alone"
    )
    task: Literal["detection", "mlm", "correction", "positive", "negative"] = Field(
        "detection",
        description="what the discriminator does: detection, find the edits; mlm, predict masked words; correction, "
        "restore the original words of the edited sentence. mlm and correction start from the encoder's masked-word "
        "head. positive, negative: no discriminator, and the edited sentence is a second positive, or a hard "
        "negative",
    )
    edited: Literal["same", "next", "both"] = Field(
        "same",
        description="sentence that is edited or masked for the discriminator: same, the sentence itself; next, the "
        "next one in the corpus; both, the sentence itself for one view and the next one for the other",
    )
    detection_weight: Annotated[float, Field(ge=0)] = Field(
        0.005, description="weight of the task's loss; 0: no discriminator, which is SimCSE with this projector"
    )
    projector: Literal["batchnorm", "tanh"] = Field(
        "batchnorm",
        description="layers between vectors and losses: batchnorm, two layers with BatchNorm; tanh, SimCSE's single "
        "layer with tanh",
    )
    condition: Literal["projected", "cls"] = Field(
        "projected",
        description="input of the discriminator: projected, the projector's output; cls, the encoder's raw vector",
    )

    @property
    def next_sentences(self) -> bool:
        return self.edited != "same"

    @property
    def compares_edited(self) -> bool:
        """Whether the contrastive loss compares the edited sentence; then there is no discriminator."""
        return self.task in ("positive", "negative")

    @model_validator(mode="after")
    def _variant(self) -> Self:
        if self.mini_batch_size and self.projector == "batchnorm":
            raise ValueError(
                f"mini_batch_size is {self.mini_batch_size}, but method 'diffcse' has BatchNorm, which sees all rows "
                "at once; remove mini_batch_size, or write projector = 'tanh'"
            )
        if self.compares_edited and (not self.contrast or self.edited != "same"):
            raise ValueError(
                f"task is {self.task!r}, which compares the edited sentence with its own; write contrast = true and "
                "edited = 'same'"
            )
        if self.task in ("mlm", "correction") and self.edits != ("replace",):
            raise ValueError(
                f"task is {self.task!r}, but edits names {', '.join(self.edits)}; only replaced words can be guessed: "
                "write edits = ['replace']"
            )
        if not self.detection_weight and (not self.contrast or self.task != "detection" or self.edited != "same"):
            raise ValueError(
                "detection_weight is 0, which leaves only the contrastive loss: raise it, or write contrast = true, "
                "task = 'detection' and edited = 'same'"
            )
        if not self.contrast and self.dimensions:
            raise ValueError("dimensions average the contrastive loss, but contrast is false; remove dimensions")
        return self


class OptiPromptRecipe(ContrastiveRecipe):
    """The keys of `method = "optiprompt"`."""

    method: Literal["optiprompt"]
    pooling: Literal["mask"] = Field("mask", description="pooling of the vector: OptiPrompt reads it at [MASK]")

    @model_validator(mode="after")
    def _frozen(self) -> Self:
        if self.lora_rank:
            raise ValueError(
                f"lora_rank is {self.lora_rank}, and method 'optiprompt' keeps the encoder frozen; write lora_rank = 0"
            )
        if self.frozen_layers is not None:
            raise ValueError(
                f"frozen_layers is {self.frozen_layers}, and method 'optiprompt' keeps all layers frozen; remove it"
            )
        return self


class SGRecipe(ContrastiveRecipe):
    """The keys of `method = "sg"`."""

    readable_columns: ClassVar[Sequence[int]] = (1, 2)

    method: Literal["sg"]
    variant: Literal["base", "opt1", "opt2", "opt3"] = Field(
        "opt3", description="the paper's loss: base (SG), opt1, opt2 or opt3 (SG-OPT)"
    )
    positives: Literal["layers", "translation"] = Field(
        "layers",
        description="positive of a sentence's vector: layers, those of the frozen copy; translation, the vector of "
        "the second column",
    )
    guide_pooling: Literal["max", "mean"] = Field("max", description="pooling of each layer of the frozen copy")
    first_layer: Annotated[int, Field(ge=0)] = Field(
        0, description="lowest layer of the frozen copy that is used; 0: the embeddings"
    )
    head_width: Annotated[int, Field(ge=0)] = Field(
        4096, description="width of both layers of the head, which is used in training only; 0: no head"
    )
    drift_weight: Annotated[float, Field(ge=0)] = Field(
        0.1, description="weight of the squared distance between the parameters and those of the frozen copy"
    )

    @model_validator(mode="after")
    def _guides(self) -> Self:
        if self.lora_rank:
            raise ValueError(
                f"lora_rank is {self.lora_rank}, and method 'sg' compares every weight with the frozen copy's; write "
                "lora_rank = 0"
            )
        if self.positives == "translation" and len(self.columns) != 2:
            raise ValueError(
                f"positives = 'translation' reads two columns, a sentence and its translation, but columns names "
                f"{len(self.columns)}; name both"
            )
        return self


class ScoredRecipe(BatchRecipe):
    """The keys of `method = "scored"`."""

    readable_columns: ClassVar[Sequence[int]] = (3,)

    method: Literal["scored"]
    scale: Annotated[float, Field(gt=0)] = Field(20.0, description="multiplies the similarities in the loss")

    @property
    def scored(self) -> bool:
        return True


class DistillRecipe(Recipe):
    """The keys of `method = "distill"`."""

    method: Literal["distill"]
    teacher: str | None = Field(
        None,
        description="encoder whose vectors to match: a run, a bundle, a folder or a hub name; unset, without "
        "teacher_vectors: the encoder itself, as it is served",
    )
    teacher_vectors: tuple[str, ...] = Field(
        (),
        description="folders that cloze bulk wrote for the texts of the corpus, one per teacher; cannot be "
        "combined with teacher",
    )
    teacher_weights: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        (), description="weight of each teacher of teacher_vectors in the combined cosine; unset: equal weights"
    )
    teacher_template: str | None = Field(None, description="template for the teacher; unset: its own, or `[X]`")
    teacher_pooling: PoolingMode | None = Field(None, description="pooling of the teacher; unset: its own, or mean")
    temperature: Annotated[float, Field(gt=0)] = Field(0.05, description="divides the cosines in the KL divergence")

    @model_validator(mode="after")
    def _weights(self) -> Self:
        if self.teacher and self.teacher_vectors:
            raise ValueError(
                f"teacher is {self.teacher!r}, but teacher_vectors would be learnt in its place; write only one of the "
                "two"
            )
        if self.teacher_weights and len(self.teacher_weights) != len(self.teacher_vectors):
            raise ValueError(
                f"teacher_weights has {len(self.teacher_weights)} numbers, but teacher_vectors has "
                f"{len(self.teacher_vectors)} folders; write one number for each folder"
            )
        if self.teacher_vectors and (self.teacher_template or self.teacher_pooling):
            raise ValueError(
                "teacher_template and teacher_pooling are for a teacher that embeds texts, but teacher_vectors is set; "
                "remove them"
            )
        if self.teacher_template and self.teacher_pooling:
            check_template(self.teacher_template, self.teacher_pooling, "teacher_template: ")
        return self


class MLMRecipe(Recipe):
    """The keys of `method = "mlm"`."""

    method: Literal["mlm"]
    from_scratch: bool = Field(
        False, description="initialise all weights at random; encoder provides only the configuration and the tokenizer"
    )
    layers: Positive | None = Field(
        None, description="keep only this many first layers of the encoder, for a smaller model; unset: all"
    )
    head: Literal["fresh", "kept"] = Field(
        "fresh", description="masked-word head: fresh, a newly initialised one; kept, the encoder's own"
    )
    tied: bool = Field(True, description="tie the output weights of a fresh head to the encoder's word embeddings")
    masked_share: Annotated[float, Field(gt=0, lt=1)] = Field(0.15, description="fraction of the tokens to predict")
    accumulation_steps: Positive = Field(
        1,
        description="gradient accumulation: process each batch in this many parts, with less memory and in more "
        "time; the loss is the mean of the parts' losses, however many words each masks",
    )

    @property
    def parts(self) -> int:
        return self.accumulation_steps

    @model_validator(mode="after")
    def _consistent_keys(self) -> Self:
        if self.from_scratch and self.head == "kept":
            raise ValueError("from_scratch initialises all weights, but head = 'kept' keeps old ones; choose one")
        if self.from_scratch and self.lora_rank:
            raise ValueError(
                f"lora_rank is {self.lora_rank}, which keeps weights, but from_scratch initialises all; choose one"
            )
        if self.from_scratch and self.frozen_layers is not None:
            raise ValueError(
                f"frozen_layers is {self.frozen_layers}, which keeps weights, but from_scratch initialises all; choose "
                "one"
            )
        if self.batch_size % self.accumulation_steps:
            raise ValueError(
                f"batch_size is {self.batch_size} and accumulation_steps is {self.accumulation_steps}; write a "
                "batch_size that is a multiple of accumulation_steps"
            )
        if self.head == "kept" and not self.tied:
            raise ValueError(
                "tied = false needs head = 'fresh', because a kept head keeps its own tying; write head = 'fresh', or "
                "remove tied"
            )
        return self


class RankingRecipe(Recipe):
    """The keys of `method = "ranking"`."""

    readable_columns: ClassVar[Sequence[int]] = (2, 3)

    method: Literal["ranking"]
    documents: tuple[str, ...] = Field(
        (),
        description="files of further documents to rank with those of the corpus, from a column of the same name",
    )
    judges: tuple[str, ...] = Field(
        (),
        description="encoders whose mean cosine the judge uses: runs, bundles, folders or hub names; unset: the "
        "encoder as it is before training",
    )
    candidates: Annotated[int, Field(ge=0)] = Field(
        1, description="extra documents per query in a batch, drawn from the 30 that the judge ranks highest; 0: none"
    )
    lexical_weight: Weight = Field(
        0.3,
        description="weight of BM25 in the judge's score, in units of the standard deviation of the query's cosines; "
        "0: no BM25",
    )
    judged_weight: Weight = Field(
        0.4,
        description="multiplied by the grade of a judged document and added to the judge's score, which is on the "
        "scale of a cosine",
    )
    temperature: Annotated[float, Field(gt=0)] = Field(0.03, description="divides the scores in the loss")

    @property
    def scored(self) -> bool:
        return len(self.columns) == 3


RECIPES: Final[dict[str, type[Recipe]]] = {
    "diffcse": DiffCSERecipe,
    "distill": DistillRecipe,
    "mlm": MLMRecipe,
    "optiprompt": OptiPromptRecipe,
    "promptbert": PromptBERTRecipe,
    "ranking": RankingRecipe,
    "scored": ScoredRecipe,
    "sg": SGRecipe,
    "simcse": SimCSERecipe,
    "ssimcse": SSimCSERecipe,
}
"""The keys of each method, by its name in recipes."""


def well_formed(distribution: Distribution, numbers: Sequence[float]) -> bool:
    """Whether the numbers, none below 0, fit the description in FORMS."""
    match distribution, numbers:
        case "fixed", (rate,):
            return rate < 1
        case "uniform", (low, high):
            return low <= high < 1
        case "beta", (a, b):
            return min(a, b) > 0
        case "truncnormal", (mean, spread, low, high):
            return low <= mean <= high < 1 and low < high and spread > 0
        case "choice", (_, *_):
            return max(numbers) < 1
    return False
