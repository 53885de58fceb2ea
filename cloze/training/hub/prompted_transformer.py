"""A module for sentence-transformers 6: puts a template around each text and pools one vector.

Cloze writes this file into a model's folder. `SentenceTransformer(folder, trust_remote_code=True)` runs it, and does
not need Cloze. The settings are in `embedding_config.json`.

A sequence is built from ids, `[CLS] prefix + text + suffix [SEP]`. So a long text is cut but the template never is, and
"[MASK]" in a text is text. A prompt that contains [X] is a template. Any other prompt goes before [X] in the template.
"""

import inspect
import re
from collections.abc import Sequence
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sentence_transformers.base.modules import InputModule
from tokenizers import Regex, Tokenizer, pre_tokenizers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import MODEL_MAPPING, AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.activations import ACT2FN

TEXT, MASK = "[X]", "[MASK]"
HEAD_FILE, WEIGHTS_FILE = "head.safetensors", "token_weights.safetensors"


class PromptedTransformer(InputModule):
    config_file_name = "embedding_config.json"
    token_weights: Tensor | None
    tokenizer: PreTrainedTokenizerBase

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: dict[str, Any],
        head: nn.Sequential,
        token_weights: Tensor | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model, self.tokenizer, self.config, self.head = model, tokenizer, config, head
        self.register_buffer("token_weights", token_weights)  # (vocabulary, 1), for mean pooling
        self.words = _without_special_tokens(tokenizer)

    # Texts to ids

    def preprocess(self, inputs: Sequence[Any], prompt: str | None = None, **kwargs: Any) -> dict[str, Tensor]:
        """Return `input_ids` and `attention_mask`, (n, L), and the index of the token to read in each row, (n)."""
        template, prompt = self.config["template"], prompt or ""
        if self.config.get("denoising") and TEXT in prompt and prompt != template:
            raise ValueError(
                "this model subtracts the vector of its own template, so a prompt cannot be another template; omit it"
            )
        template = prompt if TEXT in prompt else template.replace(TEXT, prompt + TEXT)
        prefix, suffix = self._around(template)
        room = self.max_seq_length - len(prefix) - len(suffix)
        if room < 1:
            raise ValueError(
                f"template {template!r} leaves no room for a text in {self.max_seq_length} tokens; raise max_seq_length"
            )
        blank = " " if template.partition(TEXT)[0].lstrip()[-1:].isspace() else ""
        encodings = self.words.encode_batch([self._prepare(text, blank) for text in inputs], add_special_tokens=False)
        rows = [torch.tensor(prefix + encoding.ids[:room] + suffix) for encoding in encodings]
        places = torch.tensor([self._place(prefix, suffix, len(row)) for row in rows])
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        ids = pad_sequence(rows, batch_first=True, padding_value=self.tokenizer.pad_token_id)
        return {"input_ids": ids, "attention_mask": mask, "place": places}

    def _prepare(self, text: str, blank: str) -> str:
        text = text.strip()
        if self.config["final_period"] and text and text[-1] not in ".?\"'":
            text += "."
        return blank + text if text else ""

    def _around(self, template: str) -> tuple[list[int], list[int]]:
        """Return the ids from [CLS] to the text, and from the text to [SEP]."""
        before, after = (self._template_ids(part) for part in template.strip().split(TEXT))
        return [self.tokenizer.cls_token_id, *before], [*after, self.tokenizer.sep_token_id]

    def _template_ids(self, part: str) -> list[int]:
        words = [self.words.encode(piece.rstrip(), add_special_tokens=False).ids for piece in part.split(MASK)]
        return words[0] if len(words) == 1 else [*words[0], self.tokenizer.mask_token_id, *words[1]]

    def _place(self, prefix: list[int], suffix: list[int], length: int) -> int:
        """Return the index of the template's [MASK] in a sequence, or of its last token, or of [CLS]."""
        if self.config["pooling"] != "mask":
            return length - 1 if self.config["pooling"] == "lasttoken" else 0
        mask = self.tokenizer.mask_token_id
        return length - len(suffix) + suffix.index(mask) if mask in suffix else prefix.index(mask)

    # Ids to vectors

    def forward(self, features: dict[str, Tensor], **kwargs: Any) -> dict[str, Tensor]:
        ids, mask = features["input_ids"], features["attention_mask"]
        vectors = self._read(ids, mask, features["place"])
        if not self.config["denoising"]:
            return features | {"sentence_embedding": self.head(vectors)}
        bias = self._template_bias(mask.sum(1))
        tanh = not len(self.head) or isinstance(self.head[-1], nn.Tanh)  # applied to the difference
        denoised = self.head(vectors - bias) if tanh else self.head(vectors) - self.head(bias)
        return features | {"sentence_embedding": denoised}

    def _read(self, ids: Tensor, mask: Tensor, places: Tensor, positions: Tensor | None = None) -> Tensor:
        output = self.model(input_ids=ids, attention_mask=mask, position_ids=positions)
        hidden: Tensor = output.last_hidden_state  # (n, L, d)
        pooling, weights = self.config["pooling"], mask.to(hidden.dtype).unsqueeze(-1)
        if pooling in ("mask", "cls", "lasttoken"):
            return hidden[torch.arange(len(hidden), device=hidden.device), places]
        if pooling == "max":
            return hidden.masked_fill(weights == 0, -torch.inf).amax(1)
        if pooling == "weightedmean":
            weights = weights * weights.cumsum(1)
        if self.token_weights is not None:
            weights = weights * self.token_weights[ids].to(hidden.dtype)
        divisor = weights.sum(1)
        return (hidden * weights).sum(1) / (divisor.sqrt() if pooling == "mean_sqrt_len_tokens" else divisor)

    def _template_bias(self, lengths: Tensor) -> Tensor:
        """Return the template's own vectors, with its suffix at the positions that it has in sequences of `lengths`."""
        prefix, suffix = self._around(self.config["template"])
        alone = torch.tensor(prefix + suffix, device=lengths.device)
        different, rows = lengths.unique(return_inverse=True)
        behind = torch.arange(len(alone), device=lengths.device) >= len(prefix)
        padding: Any = self.model.get_submodule("embeddings.position_embeddings").padding_idx
        first = 0 if padding is None else padding + 1  # RoBERTa's positions follow the padding's
        positions = first + torch.arange(len(alone), device=lengths.device)
        positions = positions + behind * (different - len(alone)).unsqueeze(1)  # (different, template)
        ids = alone.expand(len(different), -1)
        places = torch.full_like(different, self._place(prefix, suffix, len(alone)))
        return self._read(ids, torch.ones_like(ids), places, positions)[rows]

    # What sentence-transformers asks for

    @property
    def max_seq_length(self) -> int:
        return int(self.config["max_tokens"])

    @max_seq_length.setter
    def max_seq_length(self, tokens: int) -> None:
        self.config["max_tokens"] = tokens

    def get_embedding_dimension(self) -> int:
        return int(self.model.config.hidden_size)

    def get_config_dict(self) -> dict[str, Any]:
        return self.config

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        self.model.save_pretrained(output_path)
        self.tokenizer.save_pretrained(output_path)
        self.save_config(output_path)
        if len(self.head):
            kind = "tanh" if isinstance(self.head[-1], nn.Tanh) else "transform"
            save_file(self.head.state_dict(), f"{output_path}/{HEAD_FILE}", metadata={"kind": kind})
        if self.token_weights is not None:
            save_file({"table": self.token_weights}, f"{output_path}/{WEIGHTS_FILE}")

    @classmethod
    def load(
        cls,
        model_name_or_path: str,
        subfolder: str = "",
        token: bool | str | None = None,
        cache_folder: str | None = None,
        revision: str | None = None,
        local_files_only: bool = False,
        init_defaults: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> "PromptedTransformer":
        hub_options: dict[str, Any] = {
            "subfolder": subfolder,
            "token": token,
            "revision": revision,
            "local_files_only": local_files_only,
        }
        config = cls.load_config(model_name_or_path, cache_folder=cache_folder, **hub_options)
        head = cls.load_file_path(model_name_or_path, HEAD_FILE, cache_folder=cache_folder, **hub_options)
        table = cls.load_file_path(model_name_or_path, WEIGHTS_FILE, cache_folder=cache_folder, **hub_options)
        token_weights = load_file(table)["table"] if table else None
        hub_options["cache_dir"] = cache_folder
        architecture: Any = MODEL_MAPPING[type(AutoConfig.from_pretrained(model_name_or_path, **hub_options))]
        has_pooler = "add_pooling_layer" in inspect.signature(architecture).parameters  # neither read nor saved
        options = {"add_pooling_layer": False} if has_pooler else {}
        model = AutoModel.from_pretrained(
            model_name_or_path, **hub_options, **options | (kwargs.get("model_kwargs") or {})
        )
        options = kwargs.get("processor_kwargs") or {}
        tokenizer = AutoTokenizer.from_pretrained(model_name_or_path, **hub_options, **options)
        layers = _head(head, model.config) if head else nn.Sequential()
        return cls(model, tokenizer, config, layers, token_weights)


def _head(path: str, config: Any) -> nn.Sequential:
    """Read the layers after the pooling: Linear and tanh, or Linear, activation and layer norm."""
    with safe_open(path, "pt") as file:
        kind = file.metadata()["kind"]
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    linear = nn.Linear(config.hidden_size, config.hidden_size)
    norm = nn.LayerNorm(config.hidden_size, eps=getattr(config, "layer_norm_eps", 1e-12))  # DistilBERT has no key
    activation = ACT2FN[getattr(config, "hidden_act", "gelu")]
    head = nn.Sequential(linear, nn.Tanh()) if kind == "tanh" else nn.Sequential(linear, activation, norm)
    head.load_state_dict(weights)
    return head


def _without_special_tokens(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """Copy the tokenizer so that it finds no special token in a text.

    The search of a unigram vocabulary can still find one: there, the first character of its name is split off.
    """
    words = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    words.no_truncation()
    words.no_padding()
    words.encode_special_tokens = True
    special = (tokenizer.cls_token, tokenizer.sep_token, tokenizer.pad_token, tokenizer.mask_token)
    names = [name for name in special if name in words.encode(name or "", add_special_tokens=False).tokens]
    if names:
        pattern = "|".join(f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in names)
        split, former = pre_tokenizers.Split(Regex(pattern), "isolated"), words.pre_tokenizer
        words.pre_tokenizer = pre_tokenizers.Sequence([split, former]) if former else split
    return words
