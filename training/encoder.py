"""The sentence encoder: a transformers backbone and the place its vector is read.

All that is served is here, and nothing that is not: training's heads, teachers and second templates belong to the
objectives. A head that is kept and a continuous template are served, so they are here.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import numpy as np
import torch
import transformers
from huggingface_hub.utils import logging as hub_logging
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from encoding.bundle import EmbeddingConfig, upgrade
from encoding.template import PoolingMode, Template
from encoding.text import SpecialTokens, TextEncoder
from training.continuous import ContinuousTemplate
from training.errors import EncoderError
from training.heads import Head
from training.pooling import Pooling, token_batches
from training.source import looks_local

__all__ = ["SentenceEncoder", "fastest_device", "loading", "quiet", "saved_config"]

CONFIG_FILE = "embedding_config.json"
FORMER_CONFIG_FILE = "reading.json"  # what runs of Cloze 0.1 hold
_CPU_TOKENS = 2048  # a batch's activations stay in the caches: 1.5 times as fast as 8192
_GPU_TOKENS = 65536


class SentenceEncoder(nn.Module):
    """Backbone, prompt and what else is served. `forward` maps a padded batch to one vector a text, not normalised.

    `head` comes last; `continuous` stands in for the words of the encoder's own template. Most encoders have neither.
    """

    def __init__(self, backbone: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: EmbeddingConfig) -> None:
        super().__init__()
        self.head: Head | None = None
        self.continuous: ContinuousTemplate | None = None
        if getattr(backbone, "pooler", None) is not None:
            backbone.pooler = None  # next-sentence head: never read
        self.backbone = backbone
        self.tokenizer = tokenizer
        self.reconfigure(config)

    @classmethod
    def load(cls, source: str, **changes: object) -> Self:
        """Load a folder that `save` wrote, or any hub or local encoder.

        `changes` are fields of EmbeddingConfig; a model without a configuration of its own needs `template` and
        `pooling`.
        `max_tokens` defaults to what the position table holds. In evaluation mode. Raises EncoderError.
        """
        saved = saved_config(Path(source))
        fields: dict[str, object] = {"final_period": False, "denoising": False}
        with loading(source, "an encoder"):
            if saved:
                fields |= upgrade(json.loads(saved.read_text(encoding="utf-8")))
            tokenizer = AutoTokenizer.from_pretrained(source)
            backbone, found = AutoModel.from_pretrained(source, dtype=torch.float32, output_loading_info=True)
        fields |= {key: value for key, value in changes.items() if value is not None}
        missing = sorted(key for key in found["missing_keys"] if not key.startswith("pooler."))
        if missing:
            raise EncoderError(
                f"{source!r} lacks the weights {', '.join(missing[:3])} ({len(missing)} in all); get it again"
            )
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise EncoderError(f"{source!r} has no fast tokenizer (tokenizer.json); Cloze serves only those")
        if len(tokenizer) <= len(tokenizer.all_special_ids):  # what transformers makes up where the files are missing
            raise EncoderError(f"{source!r} has a tokenizer without words; copy the parent's tokenizer.json into it")
        limit = int(backbone.config.max_position_embeddings) - _first_position(backbone)
        fields.setdefault("max_tokens", limit)
        try:
            config = EmbeddingConfig.model_validate(fields)
        except ValidationError as error:
            first = error.errors()[0]
            if first["type"] == "missing":
                raise EncoderError(f"{source!r} does not say how it is read; give --template and --pooling") from error
            raise EncoderError(f"{source!r}: {first['loc'][0]} is {first['input']!r}: {first['msg']}") from error
        if config.max_tokens > limit:
            raise EncoderError(f"max_tokens is {config.max_tokens}; {source!r} has positions for {limit}: lower it")
        encoder = cls(backbone, tokenizer, config)
        encoder.head = Head.load(Path(source), backbone.config)
        encoder.continuous = ContinuousTemplate.load(
            Path(source), encoder.prompt.text_encoder, backbone.get_input_embeddings()
        )
        return encoder.eval()

    def save(self, folder: Path) -> None:
        """Write all that `load` reads: backbone, tokenizer, embedding configuration, head, template vectors."""
        with quiet():
            self.backbone.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        text = json.dumps(self.config.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"
        (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
        for part in (self.head, self.continuous):
            if part is not None:
                part.save(folder)

    @property
    def dimension(self) -> int:
        return int(self.backbone.config.hidden_size)

    @property
    def vocabulary(self) -> int:
        """How many ids are words with an embedding: tokenizer and table may each hold more than the other."""
        return min(len(self.tokenizer), self.backbone.get_input_embeddings().num_embeddings)

    @property
    def device(self) -> torch.device:
        return self.backbone.device

    def reconfigure(self, config: EmbeddingConfig) -> None:
        """Read the vector in another way from now on."""
        self.config = config
        self.prompt = self.make_prompt(config.template, config.max_tokens, config.denoising)

    def make_prompt(
        self, template: str, max_tokens: int, denoising: bool = False, pooling: PoolingMode | None = None
    ) -> Pooling:
        """Another way to read the same backbone: a second view's template, training's shorter limit."""
        pooling = pooling or self.config.pooling
        tokenizer = self.tokenizer
        special = SpecialTokens(
            cls=tokenizer.cls_token_id,
            sep=tokenizer.sep_token_id,
            pad=tokenizer.pad_token_id,
            mask=tokenizer.mask_token_id,
        )
        text_encoder = TextEncoder(
            tokenizer.backend_tokenizer,
            special,
            Template.parse(template, pooling),
            max_tokens,
            self.config.final_period,
        )
        return Pooling(text_encoder, pooling, denoising)

    def words(self, input_ids: Tensor, attention_mask: Tensor, prompt: Pooling) -> Tensor:
        """What `hidden` takes: the ids as they are, or embeddings where `prompt` has the continuous template."""
        if self.continuous is None or prompt.text_encoder.template != self.continuous.template:
            return input_ids
        return self.continuous(self.backbone.get_input_embeddings()(input_ids), attention_mask.sum(1))

    def hidden(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """The backbone's last layer, (n, L, d), of token ids (n, L) or word embeddings (n, L, d)."""
        words = {"input_ids" if input_ids.dim() == 2 else "inputs_embeds": input_ids}
        return self.backbone(**words, attention_mask=attention_mask, position_ids=position_ids).last_hidden_state

    def forward(self, input_ids: Tensor, attention_mask: Tensor, prompt: Pooling | None = None) -> Tensor:
        """Token ids (n, L) -> vectors (n, d) in fp32, read by `prompt` (by default the encoder's own)."""
        prompt = prompt or self.prompt
        vectors = self.read(input_ids, attention_mask, prompt)
        bias = self.template_bias(prompt.lengths(attention_mask), prompt) if prompt.denoising else None
        return self.finish(vectors, bias)

    def read(self, input_ids: Tensor, attention_mask: Tensor, prompt: Pooling) -> Tensor:
        """Token ids (n, L) -> vectors (n, d) in fp32 as they stand in the last layer: not denoised, before the head."""
        words = self.words(input_ids, attention_mask, prompt)
        return prompt.read(self.hidden(words, attention_mask), attention_mask).float()

    def finish(self, vectors: Tensor, bias: Tensor | None = None) -> Tensor:
        """What `read` gave, less the bias (n, d) where one is given, through the kept head where there is one."""
        if self.head is not None:
            return self.head(vectors, bias).float()
        return vectors if bias is None else vectors - bias

    def template_bias(self, lengths: Tensor, prompt: Pooling | None = None) -> Tensor:
        """Vectors (n, d) that the template alone gives, its suffix standing where a text of `lengths` (n) puts it.

        PromptBERT section 4.3: the template without [X], the position ids of what follows [X] raised by the text's
        length. One row a distinct length is computed, with gradient; texts of one length share it, dropout included.
        """
        prompt = prompt or self.prompt
        text_encoder = prompt.text_encoder
        distinct, rows = torch.unique(lengths, return_inverse=True)  # (m,), (n,)
        prefix, suffix = len(text_encoder.prefix_ids), len(text_encoder.suffix_ids)
        ids = torch.tensor([text_encoder.prefix_ids + text_encoder.suffix_ids], device=lengths.device)
        ids = ids.expand(len(distinct), -1)  # (m, template)
        places = torch.arange(prefix + suffix, device=lengths.device) + _first_position(self.backbone)  # (template,)
        follows = torch.arange(prefix + suffix, device=lengths.device) >= prefix
        positions = places + follows * distinct.unsqueeze(1)  # (m, template)
        attention = torch.ones_like(ids)
        words = self.words(ids, attention, prompt)
        return prompt.read(self.hidden(words, attention, positions), attention).float()[rows]

    @torch.no_grad()
    def embed(self, texts: Sequence[str], batch_tokens: int | None = None) -> NDArray[np.float32]:
        """Texts -> vectors (n, d) float32 in the texts' order, in evaluation mode, by the encoder's own prompt."""
        batch_tokens = batch_tokens or (_CPU_TOKENS if self.device.type == "cpu" else _GPU_TOKENS)
        was_training = self.training
        self.eval()
        vectors = np.empty((len(texts), self.dimension), dtype=np.float32)
        sequences = [tokens.ids for tokens in self.prompt.text_encoder.encode(texts)]
        for rows in token_batches([len(ids) for ids in sequences], batch_tokens):
            batch = self.prompt.text_encoder.pad([sequences[row] for row in rows])
            input_ids, attention_mask = (torch.from_numpy(array).to(self.device) for array in batch)
            vectors[rows] = self(input_ids, attention_mask).float().cpu().numpy()
        self.train(was_training)
        return vectors


def saved_config(folder: Path) -> Path | None:
    """Return the file of a saved model's embedding configuration; None where the folder has none."""
    files = (folder / name for name in (CONFIG_FILE, FORMER_CONFIG_FILE))
    return next((file for file in files if file.is_file()), None)


def fastest_device() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def quiet() -> Iterator[None]:
    """transformers without its progress bars, load report and retries; what matters of these is checked here."""
    levels = [(logging, logging.get_verbosity()) for logging in (transformers.logging, hub_logging)]
    for logging, _ in levels:
        logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        for logging, level in levels:
            logging.set_verbosity(level)
        transformers.logging.enable_progress_bar()


@contextmanager
def loading(source: str, what: str) -> Iterator[None]:
    """`quiet`; where `source` cannot be loaded as `what`, an EncoderError says why."""
    advice = (
        "give a folder with config.json, model.safetensors and tokenizer.json, or a model name that is in the local "
        "hub cache"
    )
    if looks_local(source) and not Path(source).is_dir():
        raise EncoderError(f"{source!r} cannot be loaded as {what}: it is no folder; {advice}")
    try:
        with quiet():
            yield
    except Exception as error:  # transformers, safetensors, tokenizers and pickle have no error in common
        raise EncoderError(f"{source!r} cannot be loaded as {what}: {_first_line(error)}; {advice}") from error


def _first_position(backbone: PreTrainedModel) -> int:
    """BERT counts positions from 0, RoBERTa and its kin from padding_idx + 1."""
    padding = getattr(backbone.embeddings.position_embeddings, "padding_idx", None)
    return 0 if padding is None else padding + 1


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
