"""Masked words: the head that gives a score to every word, its files, and the words that an encoder predicts at [MASK].

The head is read from the checkpoints of BERT, RoBERTa and DistilBERT and written with their own names. A tied head has
no output matrix of its own; it uses the encoder's static word embeddings.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM, PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from cloze.encoding.bundle import SPEC_FILE
from cloze.training.encoder_source import encoder_folder, saved_config
from cloze.training.errors import EncoderError
from cloze.training.model.encoder import SentenceEncoder, loading
from cloze.training.model.pretrained import fastest_device, quiet, word_embeddings

ROWS: Final = 128  # texts whose scores over the vocabulary are held in memory at once


class _Parts(NamedTuple):
    """The names of the head's three modules in transformers, and the configuration key of its activation."""

    dense: str
    norm: str
    decoder: str
    activation: str | None  # None: always GELU


_TRANSFORM = "cls.predictions.transform"
_BERT = _Parts(f"{_TRANSFORM}.dense", f"{_TRANSFORM}.LayerNorm", "cls.predictions.decoder", "hidden_act")
_ROBERTA = _Parts("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", None)
_DISTILBERT = _Parts("vocab_transform", "vocab_layer_norm", "vocab_projector", "activation")
_PARTS: Final = {
    "bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "distilbert": _DISTILBERT,
}


class MaskedHead(nn.Module):
    """Linear(d, d), activation, layer norm; then a score per word: output matrix (vocabulary, d) and a bias."""

    def __init__(self, config: PretrainedConfig, tied: bool = True) -> None:
        super().__init__()
        parts = _parts(config)  # so that an unknown architecture fails before training, not after it
        width, vocabulary = config.hidden_size, config.vocab_size
        self.dense = nn.Linear(width, width)
        self.activation = ACT2FN[getattr(config, parts.activation) if parts.activation else "gelu"]
        self.norm = nn.LayerNorm(width, eps=getattr(config, "layer_norm_eps", 1e-12))
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        self.weight = None if tied else nn.Parameter(torch.empty(vocabulary, width))
        spread = getattr(config, "initializer_range", 0.02)
        nn.init.normal_(self.dense.weight, std=spread)
        nn.init.zeros_(self.dense.bias)
        if self.weight is not None:
            nn.init.normal_(self.weight, std=spread)

    @classmethod
    def load(cls, source: str) -> Self:
        """The head of the checkpoint `source`. Raises EncoderError if it has none."""
        return cls.of(load_masked_lm(source))

    @classmethod
    def begun(cls, source: str, config: PretrainedConfig) -> Self:
        """The head of the checkpoint `source`, which has `config`, or a new one if it has none."""
        try:
            return cls.load(source)
        except EncoderError:
            return cls(config)

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        """The head of a transformers model, as a copy."""
        dense, norm, decoder = _modules(model)
        tied = decoder.weight.data_ptr() == word_embeddings(model).weight.data_ptr()
        head = cls(model.config, tied)
        head.dense.load_state_dict(dense.state_dict())
        head.norm.load_state_dict(norm.state_dict())
        with torch.no_grad():
            head.bias.copy_(decoder.bias)
            if head.weight is not None:
                head.weight.copy_(decoder.weight)
        return head

    def transform(self, hidden: Tensor) -> Tensor:
        """Hidden states (..., d) -> (..., d), the input of the output matrix."""
        transformed: Tensor = self.norm(self.activation(self.dense(hidden)))
        return transformed

    def forward(self, hidden: Tensor, embeddings: Tensor) -> Tensor:
        """Hidden states (..., d), word embeddings (vocabulary, d) -> scores (..., vocabulary)."""
        return F.linear(self.transform(hidden), embeddings if self.weight is None else self.weight, self.bias)


def load_masked_lm(source: str) -> PreTrainedModel:
    """transformers' masked language model in `source`, in fp32. Raises EncoderError if its head is missing."""
    source = encoder_folder(source)
    remedy = f"give it one: cloze pretrain --encoder {source} --corpus TEXT"
    if Path(source, SPEC_FILE).is_file():
        raise EncoderError(f"{source!r} is a bundle, which has no masked-word head; {remedy}")
    with loading(source, "a masked language model"):
        model: PreTrainedModel
        model, loading_info = AutoModelForMaskedLM.from_pretrained(
            source, trust_remote_code=False, dtype=torch.float32, output_loading_info=True
        )
    if missing := sorted(loading_info["missing_keys"]):
        raise EncoderError(
            f"{source!r} has no masked-word head (it lacks {missing[0]} and {len(missing) - 1} more); {remedy}"
        )
    return model


def save_masked_lm(backbone: PreTrainedModel, head: MaskedHead, folder: Path) -> None:
    """Write backbone and head as one checkpoint that transformers' AutoModelForMaskedLM reads."""
    config = type(backbone.config).from_dict(backbone.config.to_dict() | {"tie_word_embeddings": head.weight is None})
    model = AutoModelForMaskedLM.from_config(config)
    model.base_model.load_state_dict(backbone.state_dict())
    dense, norm, decoder = _modules(model)
    dense.load_state_dict(head.dense.state_dict())
    norm.load_state_dict(head.norm.state_dict())
    with torch.no_grad():
        decoder.bias.copy_(head.bias)
        if head.weight is not None:
            decoder.weight.copy_(head.weight)
    with quiet():
        model.save_pretrained(folder)


def _modules(model: PreTrainedModel) -> tuple[nn.Module, nn.Module, nn.Linear]:
    parts = _parts(model.config)
    decoder = model.get_submodule(parts.decoder)
    assert isinstance(decoder, nn.Linear), "transformers scores words with a Linear. This is a bug."
    return model.get_submodule(parts.dense), model.get_submodule(parts.norm), decoder


def _parts(config: PretrainedConfig) -> _Parts:
    if config.model_type not in _PARTS:
        raise EncoderError(
            f"the masked-word head of a {config.model_type!r} model is not supported; use one of {', '.join(_PARTS)}"
        )
    return _PARTS[config.model_type]


class MaskedWords:
    """An encoder with mask pooling and its masked-word head. `embed` is PromptBERT's equation 3.

    If the encoder denoises, the input of the head is h - h^. The paper's Tables 7 and 9 do not say how; this is the
    most plausible reading.
    """

    def __init__(self, encoder: SentenceEncoder, head: MaskedHead) -> None:
        encoder.head = None  # a kept head makes sentence vectors; words are predicted from its input
        self.encoder = encoder.eval()
        self.head = head.to(encoder.device)
        self.static = encoder.word_embeddings.weight.detach()  # (vocabulary, d)

    @classmethod
    def load(cls, source: str, **changes: object) -> Self:
        """Load a run, a folder or a hub name; `changes` override its embedding configuration. Raises ClozeError."""
        source = encoder_folder(source)
        bundle = (Path(source) / SPEC_FILE).is_file()  # a bundle has a template, but no masked-word head
        if changes.get("template") is None and saved_config(Path(source)) is None and not bundle:
            raise EncoderError(f"{source!r} has no template of its own; give one: --template '[X] means [MASK].'")
        head = MaskedHead.load(source)
        return cls(SentenceEncoder.load(source, **changes | {"pooling": "mask"}).to(fastest_device()), head)

    @torch.no_grad()
    def top(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Vectors at [MASK] (n, d) -> probabilities and ids (n, k) of the likeliest tokens, likeliest first."""
        if not 1 <= k <= len(self.static):
            raise EncoderError(f"--top-k is {k}; write 1 to {len(self.static)}, the size of the vocabulary")
        probabilities, ids = self.head(hidden, self.static).softmax(-1).topk(k)
        return probabilities, ids

    def words(self, texts: Sequence[str], k: int) -> list[list[tuple[str, float]]]:
        """For each text its k likeliest tokens and their probabilities."""
        decode = self.encoder.tokenizer.decode
        return [
            [(str(decode([token])).strip(), probability) for probability, token in zip(*row, strict=True)]
            for row in zip(*(part.tolist() for part in self.top(self._hidden(texts), k)), strict=True)
        ]

    def embed(self, texts: Sequence[str], k: int) -> NDArray[np.float32]:
        """Equation 3: the sum of the static embeddings of a text's k likeliest tokens, weighted by probability: (n, d).

        The weights are not divided by their sum, which would only change a vector's length.
        """
        vectors = []
        for hidden in self._hidden(texts).split(ROWS):
            probabilities, ids = self.top(hidden, k)
            vectors.append(torch.einsum("nk,nkd->nd", probabilities, self.static[ids]))
        return torch.cat(vectors).cpu().numpy()

    def _hidden(self, texts: Sequence[str]) -> Tensor:
        return torch.from_numpy(self.encoder.embed(texts)).to(self.encoder.device)
