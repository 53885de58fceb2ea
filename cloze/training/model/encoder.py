"""The sentence encoder: a transformers backbone and its embedding configuration.

It holds all that is served and nothing else. Heads, teachers and second templates that only training uses belong to the
methods. A kept head and a continuous template are served, so they are part of the encoder.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import SAFE_WEIGHTS_NAME

from cloze.adoption.hub import explain_hub_error, looks_local
from cloze.encoding.bundle import SPEC_FILE, Bundle, EmbeddingConfig, Precision, upgrade
from cloze.encoding.errors import first_line
from cloze.encoding.template import PoolingMode, Template
from cloze.encoding.text import SpecialTokens, TextEncoder, token_batches
from cloze.training.bar import bar
from cloze.training.encoder_source import CONFIG_FILE, encoder_folder, named_templates, saved_config
from cloze.training.errors import EncoderError
from cloze.training.model.continuous_template import CONTINUOUS_FILE, ContinuousTemplate
from cloze.training.model.graph_weights import ORIGIN, graph_weights
from cloze.training.model.heads import HEAD_FILE, AdoptedHead, ProjectionHead
from cloze.training.model.pooling import pool
from cloze.training.model.pretrained import quiet, word_embeddings
from cloze.training.model.token_weights import WEIGHTS_FILE, TokenWeights

SHORT: Final = 1e-3  # share of the longest vector's length: the direction of a shorter vector is noise
LEAST_COSINES: Final = {"fp32": 0.9999, "int8": 0.98}  # between the graph's vectors and those of the read weights
_CPU_TOKENS = 2048  # the activations of a batch stay in the caches: 1.5 times as fast as 8192
_GPU_TOKENS = 65536


class SentenceEncoder(nn.Module):
    """Backbone, pooling and everything else that is served. `forward` gives one vector per text, not normalised.

    `head` is applied last. `continuous` replaces the words of the encoder's own template. `token_weights` weight the
    tokens in the pooling `mean`. Most encoders have none of these three.
    """

    def __init__(self, backbone: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: EmbeddingConfig) -> None:
        super().__init__()
        self.head: ProjectionHead | AdoptedHead | None = None
        self.continuous: ContinuousTemplate | None = None
        self.token_weights: TokenWeights | None = None
        if getattr(backbone, "pooler", None) is not None:
            backbone.register_module("pooler", None)  # the next-sentence head, which is never read
        self.backbone = backbone
        self.tokenizer = tokenizer
        self.reconfigure(config)

    @classmethod
    def load(cls, source: str, **changes: object) -> Self:
        """Load a run, a bundle, `cloze-mini`, any local encoder or hub name, in evaluation mode.

        `changes` are fields of EmbeddingConfig; an encoder without a saved configuration needs `template` and
        `pooling`. `max_tokens` defaults to the size of the position table. Raises ClozeError.
        """
        source = encoder_folder(source)
        if (Path(source) / SPEC_FILE).is_file() and not (Path(source) / SAFE_WEIGHTS_NAME).is_file():
            return cls._of_bundle(Bundle.load(Path(source)), changes)
        saved = saved_config(Path(source))
        fields: dict[str, object] = {"final_period": False, "denoising": False}
        if saved is None and not (Path(source) / SPEC_FILE).is_file():
            fields["templates"] = named_templates(source)
        elif saved is None:  # a bundle that has weights as well
            fields |= Bundle.load(Path(source)).spec.model_dump(
                include=set(EmbeddingConfig.model_fields) - {"max_tokens"}
            )
        with loading(source, "an encoder"):
            if saved:
                fields |= upgrade(json.loads(saved.read_text(encoding="utf-8")))
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
            backbone, loading_info = AutoModel.from_pretrained(
                source, trust_remote_code=False, dtype=torch.float32, output_loading_info=True
            )
        _check_complete(loading_info["missing_keys"], source)
        check_tokenizer(tokenizer, source)
        fields |= {key: value for key, value in changes.items() if value is not None}
        encoder = cls(backbone, tokenizer, _config(fields, backbone, source))
        encoder._load_parts(Path(source))
        return encoder.eval()

    @classmethod
    def _of_bundle(cls, bundle: Bundle, changes: Mapping[str, object]) -> Self:
        """Read the weights back from a graph. Raises EncoderError, also if the vectors of the canary texts differ.

        The bundle's `max_tokens` is the service's limit, not the encoder's.
        """
        source, spec = str(bundle.path), bundle.spec
        if spec.provenance.recipe.get("method") == "distil-static":
            raise EncoderError(
                f"{source} has a vector for each token but no encoder; give the encoder that it was made from"
            )
        with loading(source, "an encoder"):
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
            backbone = AutoModel.from_config(
                AutoConfig.from_pretrained(source, trust_remote_code=False), dtype=torch.float32
            )
        precision, weights, token_weights = graph_weights(bundle, backbone.config)
        with loading(source, "an encoder"):
            missing = backbone.load_state_dict(weights, strict=False).missing_keys
        _check_complete(missing, source, ORIGIN)
        check_tokenizer(tokenizer, source)
        fields = spec.model_dump(include=set(EmbeddingConfig.model_fields))
        encoder = cls(backbone, tokenizer, _config(fields, backbone, source)).eval()
        encoder.token_weights = None if token_weights is None else TokenWeights(token_weights)
        _check_canaries(encoder, bundle, precision)
        del fields["max_tokens"]
        fields |= {key: value for key, value in changes.items() if value is not None}
        encoder.reconfigure(_config(fields, backbone, source))
        if encoder.config.pooling != "mean":
            encoder.token_weights = None
        return encoder

    def _load_parts(self, folder: Path) -> None:
        """Load the head, the continuous template and the token weights if the folder has them."""
        with _reading(folder / HEAD_FILE):
            self.head = ProjectionHead.load(folder, self.backbone.config)
        with _reading(folder / CONTINUOUS_FILE):
            self.continuous = ContinuousTemplate.load(folder, self.text_encoder, self.word_embeddings)
        if self.config.pooling == "mean":
            with _reading(folder / WEIGHTS_FILE):
                self.token_weights = TokenWeights.load(folder, self.word_embeddings.num_embeddings)

    def save(self, folder: Path) -> None:
        """Write all that `load` reads: backbone, tokenizer, configuration, head, template vectors, token weights."""
        with quiet():
            self.backbone.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        text = json.dumps(self.config.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"
        (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
        assert not isinstance(self.head, AdoptedHead), "an adopted model is exported and not saved. This is a bug."
        for part in (self.head, self.continuous, self.token_weights):
            if part is not None:
                part.save(folder)

    @property
    def dimension(self) -> int:
        return int(getattr(self.head, "dimension", self.backbone.config.hidden_size))

    @property
    def vocabulary(self) -> int:
        """How many token ids have both a word and an embedding; tokenizer and embedding table may differ in size."""
        return min(len(self.tokenizer), self.word_embeddings.num_embeddings)

    @property
    def word_embeddings(self) -> nn.Embedding:
        return word_embeddings(self.backbone)

    @property
    def device(self) -> torch.device:
        return self.backbone.device

    def reconfigure(self, config: EmbeddingConfig) -> None:
        """Use another template, pooling, limit or denoising from now on."""
        self.config = config
        self.text_encoder = self.make_text_encoder(config.template, config.max_tokens)

    def within(self, template: str) -> "SentenceEncoder":
        """The same weights with another template."""
        config = self.config.model_copy(update={"template": template})
        encoder = SentenceEncoder(self.backbone, self.tokenizer, config)
        encoder.head, encoder.token_weights = self.head, self.token_weights
        return encoder.train(self.training)

    def named(self, name: str) -> "SentenceEncoder":
        """The same weights with the named template; the encoder itself if it has no template of this name."""
        template = self.config.templates.get(name)
        return self if template is None else self.within(template)

    def make_text_encoder(self, template: str, max_tokens: int, mode: PoolingMode | None = None) -> TextEncoder:
        """A text encoder with another template or, for training, a lower limit. Raises TemplateError.

        `mode` decides whether the template needs [MASK]; it defaults to the encoder's own pooling.
        """
        tokenizer = self.tokenizer
        special = SpecialTokens(
            cls=tokenizer.cls_token_id,
            sep=tokenizer.sep_token_id,
            pad=tokenizer.pad_token_id,
            mask=tokenizer.mask_token_id,
        )
        return TextEncoder(
            tokenizer.backend_tokenizer,
            special,
            Template.parse(template, mode or self.config.pooling),
            max_tokens,
            self.config.final_period,
        )

    def words(self, input_ids: Tensor, attention_mask: Tensor, text_encoder: TextEncoder) -> Tensor:
        """The input of `hidden`: token ids, or word embeddings if `text_encoder` has the continuous template."""
        if self.continuous is None or text_encoder.template != self.continuous.template:
            return input_ids
        words: Tensor = self.continuous(self.word_embeddings(input_ids), attention_mask.sum(1))
        return words

    def hidden(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """The backbone's last layer, (n, L, d), of token ids (n, L) or word embeddings (n, L, d)."""
        words = {"input_ids" if input_ids.dim() == 2 else "inputs_embeds": input_ids}
        output = self.backbone(**words, attention_mask=attention_mask, position_ids=position_ids)
        states: Tensor = output.last_hidden_state
        return states

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Token ids (n, L) in the encoder's own template -> the served vectors (n, d) in fp32."""
        vectors = self.pooled(input_ids, attention_mask, self.text_encoder)
        lengths = attention_mask.sum(1) - self.text_encoder.template_tokens
        return self.finish(vectors, self.template_bias(lengths, self.text_encoder) if self.config.denoising else None)

    def vectors(self, view: Mapping[str, Tensor], text_encoder: TextEncoder) -> Tensor:
        """A view in any template -> vectors (n, d) in fp32, with the kept head and without denoising."""
        return self.finish(self.pooled(view["input_ids"], view["attention_mask"], text_encoder))

    def pooled(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        text_encoder: TextEncoder,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Token ids (n, L) -> pooled vectors (n, d) in fp32, before denoising and before the head."""
        words = self.words(input_ids, attention_mask, text_encoder)
        states = self.hidden(words, attention_mask, position_ids)
        weights = self.weights_of(input_ids)
        return pool(states, attention_mask, self.config.pooling, text_encoder.mask_index, weights).float()

    def weights_of(self, input_ids: Tensor) -> Tensor | None:
        """How much each token counts, (n, L, 1); None if all count the same."""
        if self.token_weights is None or self.config.pooling != "mean":
            return None
        weights: Tensor = self.token_weights(input_ids)
        return weights

    def finish(self, vectors: Tensor, bias: Tensor | None = None) -> Tensor:
        """Subtract the bias (n, d), if given, from pooled vectors, and apply the kept head, if there is one."""
        if self.head is not None:
            vectors = self.head(vectors, bias)
            return vectors.float()
        return vectors if bias is None else vectors - bias

    def template_bias(self, lengths: Tensor, text_encoder: TextEncoder) -> Tensor:
        """Vectors (n, d) of the template alone, with its suffix at the positions that follow texts of `lengths` (n).

        PromptBERT section 4.3: the template without [X]; the position ids after [X] are shifted by the text's length.
        One row per distinct length is computed, with gradient; texts of the same length share it, dropout included.
        """
        distinct, rows = torch.unique(lengths, return_inverse=True)  # (m,), (n,)
        prefix, suffix = len(text_encoder.prefix_ids), len(text_encoder.suffix_ids)
        ids = torch.tensor([text_encoder.prefix_ids + text_encoder.suffix_ids], device=lengths.device)
        ids = ids.expand(len(distinct), -1)  # (m, template)
        places = torch.arange(prefix + suffix, device=lengths.device) + _first_position(self.backbone)  # (template,)
        follows = torch.arange(prefix + suffix, device=lengths.device) >= prefix
        positions = places + follows * distinct.unsqueeze(1)  # (m, template)
        return self.pooled(ids, torch.ones_like(ids), text_encoder, positions)[rows]

    @torch.no_grad()
    def embed(
        self, texts: Sequence[str], batch_tokens: int | None = None, dropout: bool = False
    ) -> NDArray[np.float32]:
        """Texts -> the served vectors (n, d), float32, in the texts' order.

        The model is in evaluation mode unless `dropout` is set.
        """
        batch_tokens = batch_tokens or (_CPU_TOKENS if self.device.type == "cpu" else _GPU_TOKENS)
        was_training = self.training
        self.train(dropout)
        vectors = np.empty((len(texts), self.dimension), dtype=np.float32)
        sequences = [tokens.ids for tokens in self.text_encoder.encode(texts)]
        lengths = [len(ids) for ids in sequences]
        with bar(total=sum(lengths), desc="embedding", unit=" tokens", unit_scale=True) as shown:
            for rows in token_batches(lengths, batch_tokens):
                batch = self.text_encoder.pad([sequences[row] for row in rows])
                input_ids, attention_mask = (torch.from_numpy(array).to(self.device) for array in batch)
                vectors[rows] = self(input_ids, attention_mask).float().cpu().numpy()
                shown.update(sum(lengths[row] for row in rows))
        self.train(was_training)
        return vectors


def weights_digest(module: nn.Module) -> str:
    """Sha256 of the names and the values of all weights, in hexadecimal."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def loading(source: str, description: str) -> Iterator[None]:
    """`quiet`, and any exception becomes an EncoderError that says why `source` cannot be loaded as `description`."""
    advice = (
        "give a folder with config.json, model.safetensors and tokenizer.json, or the name of a model on the "
        "hub, or cloze-mini, the model that comes with Cloze"
    )
    if looks_local(source) and not Path(source).is_dir():
        raise EncoderError(f"{source!r} cannot be loaded as {description}: it is not a folder; {advice}")
    try:
        with quiet():
            yield
    except Exception as error:  # transformers, safetensors, tokenizers and pickle have no error in common
        if not Path(source).is_dir() and (reason := explain_hub_error(error, source)):
            raise EncoderError(f"{reason}; or give cloze-mini, the model that comes with Cloze") from error
        if "trust_remote_code" in str(error):
            raise EncoderError(
                f"{source!r} needs custom code to be loaded, which Cloze does not run; give a model whose architecture "
                "transformers supports"
            ) from error
        raise EncoderError(f"{source!r} cannot be loaded as {description}: {first_line(error)}; {advice}") from error


def _check_complete(missing: Sequence[str], source: str, advice: str = "get it again") -> None:
    names = sorted(key for key in missing if not key.startswith("pooler."))
    if names:
        raise EncoderError(f"{source!r} lacks the weights {', '.join(names[:3])} ({len(names)} in all); {advice}")


def _check_canaries(encoder: SentenceEncoder, bundle: Bundle, precision: Precision) -> None:
    """Check that the weights give vectors close to those of the graph. Its int8 activations change them a little.

    Raises EncoderError.
    """
    if bundle.canaries is None:
        raise EncoderError(f"{bundle.path} has an older format without canary texts; {ORIGIN}")
    expected = np.array(bundle.canaries.vectors[precision], dtype=np.float32)
    vectors = encoder.embed(bundle.canaries.texts)
    if vectors.shape != expected.shape:
        raise EncoderError(
            f"{bundle.path}: its encoder has {vectors.shape[1]} dimensions, but its vectors have {expected.shape[1]}, "
            f"so its graph has further layers; {ORIGIN}"
        )
    norms = np.linalg.norm(expected, axis=1)
    rows = norms > SHORT * norms.max()  # the vector of an empty text is almost 0 after denoising
    lengths = np.linalg.norm(vectors, axis=1) * norms
    lowest = float(((vectors * expected).sum(1) / lengths)[rows].min())
    if not lowest >= LEAST_COSINES[precision]:
        raise EncoderError(
            f"{bundle.path}: the weights of its {precision} graph do not give the graph's vectors (a cosine of "
            f"{lowest:.4f}; at least {LEAST_COSINES[precision]} is expected); {ORIGIN}"
        )


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        raise EncoderError(f"{path} does not fit this encoder ({first_line(error)}); restore the folder") from error


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    """Check that the tokenizer is a fast one, with words and the special tokens of an encoder. Raises EncoderError."""
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise EncoderError(
            f"{source!r} has no fast tokenizer (tokenizer.json), which Cloze requires; save one there with "
            "transformers, or choose another model"
        )
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # transformers makes an empty one if the files are missing
        raise EncoderError(f"{source!r} has a tokenizer without words; copy the parent's tokenizer.json into it")
    for role in ("cls", "sep", "pad"):
        if getattr(tokenizer, f"{role}_token_id", None) is None and not (role == "cls" and _only_ends(tokenizer)):
            raise EncoderError(
                f"{source!r} has a tokenizer without {role}_token, but the sequences of a bundle are [CLS], text, "
                "[SEP]; choose another model"
            )


def _only_ends(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a sequence is the text and a last token, as in decoders with `lasttoken` pooling."""
    return tokenizer.sep_token_id is not None and tokenizer("")["input_ids"] == [tokenizer.sep_token_id]


def _config(fields: dict[str, object], backbone: PreTrainedModel, source: str) -> EmbeddingConfig:
    limit = positions(backbone, source)
    try:
        config = EmbeddingConfig.model_validate({"max_tokens": limit} | fields)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "missing":
            raise EncoderError(
                f"{source!r} has no embedding configuration of its own; give --template and --pooling"
            ) from error
        raise EncoderError(f"{source!r}: {first['loc'][0]} is {first['input']!r}: {first['msg']}") from error
    if config.max_tokens > limit:
        raise EncoderError(f"max_tokens is {config.max_tokens}; {source!r} has positions for {limit}: lower it")
    return config


def positions(backbone: PreTrainedModel, source: str) -> int:
    """How many tokens a sequence may have. Raises EncoderError if the model does not say so, for example T5."""
    if not hasattr(backbone.config, "max_position_embeddings"):
        raise EncoderError(
            f"{source!r} is a {type(backbone).__name__}, not an encoder that Cloze can train or serve; choose another "
            "model"
        )
    return int(backbone.config.max_position_embeddings) - _first_position(backbone)


def _first_position(backbone: PreTrainedModel) -> int:
    """The first position id: 0 for BERT and models without a position table, padding_idx + 1 for RoBERTas."""
    table = getattr(getattr(backbone, "embeddings", None), "position_embeddings", None)
    padding = getattr(table, "padding_idx", None)
    return 0 if padding is None else padding + 1
