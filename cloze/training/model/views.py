"""A view: the token ids of a batch of texts. It is encoded in parts of similar length to reduce padding.

A row's vector depends neither on other rows nor on padding, so vectors and gradients are the same as for one batch.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from cloze.encoding.text import TextEncoder

View = dict[str, Tensor]  # input_ids and attention_mask, both (n, L), and tensors that a method adds, one row per text

Pass = Callable[[str, View], Tensor]
"""A view's name and the view -> (n, ...). Row i depends only on row i of the view."""

PARTS: Final = 4  # most parts of one batch: more would save little padding, and small products run slower
CPU_TOKENS: Final = 1024  # fewest tokens of one part, padding included; with 512, steps in bf16 took a sixth longer
CUDA_TOKENS: Final = 32_768  # the same on a GPU; an estimate: with fewer, a GPU waits for its next kernel
TOKENWISE: Final = ("input_ids", "attention_mask")  # (n, L); others are (n, ...), unless the caller names them


def view(text_encoder: TextEncoder, texts: Sequence[str]) -> View:
    """Texts in the template of `text_encoder`, padded to the longest."""
    input_ids, attention_mask = map(torch.from_numpy, text_encoder.batch(texts))
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def encode_trimmed(
    encode: Callable[[View], Tensor], view: View, size: int | None = None, tokenwise: Sequence[str] = ()
) -> Tensor:
    """The rows of `encode(view)`, (n, ...), in the view's order, encoded `size` rows at a time."""
    places, vectors = zip(*((rows, encode(part)) for rows, part in trimmed(view, size, tokenwise)), strict=True)
    return torch.cat(vectors)[torch.cat(places).argsort()]


def trimmed(view: View, size: int | None = None, tokenwise: Sequence[str] = ()) -> Iterator[tuple[Tensor, View]]:
    """Yield `size` rows at a time, shortest first: their indices, and these rows of the view without common padding.

    By default there are up to PARTS parts, each of at least CPU_TOKENS or CUDA_TOKENS. `tokenwise` names the tensors
    that a method adds with one column per token, (n, L).
    """
    lengths, size, cut = view["attention_mask"].sum(1), size or _size(view), (*TOKENWISE, *tokenwise)
    if size >= len(lengths):
        yield torch.arange(len(lengths), device=lengths.device), view
        return
    for rows in lengths.argsort(stable=True).split(size):
        longest = int(lengths[rows[-1]])
        yield rows, {key: tensor[rows, :longest] if key in cut else tensor[rows] for key, tensor in view.items()}


def _size(view: View) -> int:
    ids = view["input_ids"]
    parts = max(1, min(PARTS, ids.numel() // (CUDA_TOKENS if ids.is_cuda else CPU_TOKENS)))
    return -(-len(ids) // parts)
