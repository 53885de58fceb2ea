"""Helpers to load a pretrained model: silence transformers, choose a device, find the word embeddings."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
import transformers
from huggingface_hub.utils import logging as hub_logging
from torch import nn
from transformers import PreTrainedModel

from cloze import machine

BERTS: Final = ("bert", "camembert", "roberta", "xlm-roberta")  # all but the first are RoBERTas


def fastest_device() -> torch.device:
    """The GPU if there is one, otherwise the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def has_bf16() -> bool:
    """Whether the fastest device multiplies in bf16. Other devices emulate it, which takes longer than fp32."""
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return machine.has_bf16()


def word_embeddings(model: PreTrainedModel) -> nn.Embedding:
    """The static embeddings of the vocabulary, (vocabulary, d)."""
    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, nn.Embedding), "transformers looks words up in an Embedding. This is a bug."
    return embeddings


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress bars, load reports and retries of transformers. Cloze itself checks what matters."""
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
