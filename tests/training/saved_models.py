"""Tiny random models that sentence-transformers saves, and the vectors that it gives."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, set_seed

PROMPTS = {"query": "find: ", "passage": "it says: "}
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 66,
    "initializer_range": 0.2,
}


def model_of(folder: Path, tokenizer: Path, name: str = "bert", pooling: Any = "mean", *behind: nn.Module) -> Path:
    """A tiny random model of sentence-transformers, saved in `folder`."""
    return saved(folder, tokenizer, name, {}, pooling, behind)


def saved(
    folder: Path, tokenizer: Path, name: str, keys: dict[str, Any], pooling: Any, behind: Any, **settings: Any
) -> Path:
    set_seed(0)
    words = AutoTokenizer.from_pretrained(tokenizer)
    special = {
        "pad_token_id": words.pad_token_id,
        "bos_token_id": words.cls_token_id,
        "eos_token_id": words.sep_token_id,
    }
    config = AutoConfig.for_model(name, vocab_size=len(words), **SMALL | special | keys)
    AutoModel.from_config(config).save_pretrained(folder / "transformers")
    words.save_pretrained(folder / "transformers")
    transformer = Transformer(str(folder / "transformers"), max_seq_length=48)
    modules = [transformer, Pooling(32, pooling_mode=pooling), *behind, Normalize()]
    model = SentenceTransformer(modules=modules, device="cpu", prompts=PROMPTS | settings)
    model.save(str(folder / "model"), create_model_card=False)
    shutil.rmtree(folder / "transformers")
    return folder / "model"


def own_vectors(folder: Path, texts: list[str], **options: Any) -> NDArray[np.float32]:
    """What sentence-transformers gives, with special tokens in texts as text."""
    model = SentenceTransformer(str(folder), device="cpu")
    model[0].processing_kwargs = {"text": {"split_special_tokens": True}}
    vectors: NDArray[np.float32] = model.encode(texts, show_progress_bar=False, **options)
    return vectors


def unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def edit(path: Path, **keys: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
