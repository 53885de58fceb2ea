"""The layers of BERT and RoBERTa written out for export; the last one computes only the row that is read.

The last layer needs only keys and values of the other tokens. Three forms give the same vectors:

- `rows`, for the CPU: all tokens of a batch are the rows of one matrix (n·L, d), and attention is ONNX's own operator,
  which takes half the time of `com.microsoft.MultiHeadAttention` there. Two biases are removed: that of the keys adds
  the same number to all scores of a query, which the softmax ignores, and that of the values passes through weights
  that sum to 1, so it is added to the next bias;
- `exact`, the basis of int8: the same except for attention, which rounds on purpose and gives the same bits with every
  vector extension of the CPU, as `training.export.quantise` needs it (docs/int8.md);
- `fusible`, for GPUs: (n, L, d) everywhere, and attention in the parts that ONNX Runtime fuses.
"""

from collections.abc import Sequence
from typing import Any, Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from training.model.encoder import SentenceEncoder

__all__ = [
    "BITS",
    "BLOCKED",
    "WRITABLE",
    "Form",
    "WrittenOut",
    "coarse",
    "divided_attention",
    "one_row",
    "writable",
]

BITS: Final = {"query": 8, "key": 8, "score": 8, "weight": 9, "value": 8}  # behind the binary point, in attention
BLOCKED: Final = -10000.0  # added to a padding token's score: exp gives exactly 0, and fp16 can hold it

WRITABLE: Final = ("bert", "camembert", "roberta", "xlm-roberta")  # all but the first are RoBERTas

Form = Literal["rows", "exact", "fusible"]


def layers_of(backbone: PreTrainedModel) -> Sequence[Any]:
    """The layers of a BERT or a RoBERTa, which have no types."""
    layers: Sequence[Any] = backbone.get_submodule("encoder.layer")  # type: ignore[assignment]
    return layers


def writable(backbone: PreTrainedModel) -> bool:
    """Whether the backbone is a BERT or a RoBERTa."""
    return backbone.config.model_type in WRITABLE


def one_row(encoder: SentenceEncoder) -> tuple[str, ...]:
    """Parts of the names of the matrices that multiply one row per text, those of the last layer and of a head."""
    if not encoder.pooling.reads_one_token or not writable(encoder.backbone):
        return (".head.",)
    last = len(layers_of(encoder.backbone)) - 1
    return f".encoder.layer.{last}.", ".head."


class WrittenOut(nn.Module):
    """`SentenceEncoder.read` with the encoder's own pooling, in evaluation mode."""

    def __init__(self, encoder: SentenceEncoder, form: Form) -> None:
        super().__init__()
        self.encoder = encoder
        self.form = form
        for number, layer in enumerate(layers_of(encoder.backbone) if form != "fusible" else ()):
            dense, value = layer.attention.output.dense, layer.attention.self.value
            self.register_buffer(f"bias_{number}", (dense.bias + dense.weight @ value.bias).detach())  # (d)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Token ids and their mask (n, L) -> vectors (n, d)."""
        pooling = self.encoder.pooling
        n, length = input_ids.shape
        blocked = (1.0 - attention_mask.unsqueeze(1).unsqueeze(2).float()) * BLOCKED  # (n, 1, 1, L)
        states = self._embeddings(input_ids, attention_mask)  # (n, L, d)
        everywhere, layer = blocked, self._fusible_layer
        if self.form != "fusible":
            layer = self._rows_layer
            states = states.flatten(0, 1)  # (n·L, d)
        if self.form == "rows":
            everywhere = blocked.expand(n, 1, length, length)
        last = len(layers_of(self.encoder.backbone)) - 1
        for number in range(last):
            states = layer(number, states, states, everywhere)
        if not pooling.reads_one_token:
            states = layer(last, states, states, everywhere)
            return pooling.read(states.view(n, length, states.shape[-1]), attention_mask)
        read = pooling.read(states.view(n, length, states.shape[-1]), attention_mask)  # (n, d)
        if self.form == "fusible":
            return layer(last, read.unsqueeze(1), states, blocked).squeeze(1)
        return layer(last, read, states, blocked)

    def _embeddings(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        words = self.encoder.words(input_ids, attention_mask, self.encoder.pooling)
        embeddings = self.encoder.backbone.get_submodule("embeddings")
        states: Tensor = embeddings(**{"input_ids" if words.dim() == 2 else "inputs_embeds": words})
        return states

    def _fusible_layer(self, number: int, queries: Tensor, states: Tensor, blocked: Tensor) -> Tensor:
        """The output (n, Q, d) of one layer for `queries`, which attend to `states` (n, L, d)."""
        layer = layers_of(self.encoder.backbone)[number]
        attention = layer.attention.self

        def heads(projection: nn.Linear, rows: Tensor) -> Tensor:  # (n, heads, Q or L, d / heads)
            projected: Tensor = projection(rows)
            return projected.view(*rows.shape[:-1], -1, attention.attention_head_size).transpose(1, 2)

        query, key, value = (
            heads(attention.query, queries),
            heads(attention.key, states),
            heads(attention.value, states),
        )
        context, _ = divided_attention(attention, query, key, value, blocked)
        attended = layer.attention.output(context.reshape(*queries.shape[:-1], -1), queries)
        result: Tensor = layer.feed_forward_chunk(attended)
        return result

    def _rows_layer(self, number: int, queries: Tensor, states: Tensor, blocked: Tensor) -> Tensor:
        """The same for queries (n·Q, d) and states (n·L, d)."""
        layer = layers_of(self.encoder.backbone)[number]
        attention, output = layer.attention.self, layer.attention.output
        n, length = blocked.shape[0], blocked.shape[-1]
        width, heads = queries.shape[-1], int(attention.num_attention_heads)
        query, key, value = attention.query(queries), states @ attention.key.weight.T, states @ attention.value.weight.T
        if self.form == "rows":
            parts = (query.view(n, -1, width), key.view(n, length, width), value.view(n, length, width))
            context, *_ = torch.onnx.ops.attention(*parts, blocked, q_num_heads=heads, kv_num_heads=heads)
        else:
            context = exact_attention(query, key, value, blocked, heads)
        bias = self.get_buffer(f"bias_{number}")
        dense = F.linear(context.view(queries.shape), output.dense.weight, bias)
        result: Tensor = layer.feed_forward_chunk(output.LayerNorm(dense + queries))
        return result


def exact_attention(query: Tensor, key: Tensor, value: Tensor, blocked: Tensor, heads: int) -> Tensor:
    """softmax(query keyᵀ / √d + blocked) value for each head, (n·Q, d) from queries (n·Q, d) and others (n·L, d).

    The factors of both products have so few bits that fp32 holds the sums exactly, in any order: for the scores while
    |query · key| is below 2^(24 - 16), for the context while the weighted sums are below 2^(24 - 17). The last bit of
    exp differs between CPUs, but for so few arguments it is the same after rounding. `FusedMatMul` reads the keys
    without a transposition and applies the scale.
    """
    n, length, width = blocked.shape[0], blocked.shape[-1], key.shape[-1]
    size = width // heads
    query, key, value = (
        coarse(rows, BITS[name]).view(n, -1, heads, size).transpose(1, 2)
        for name, rows in (("query", query), ("key", key), ("value", value))
    )
    scores = torch.onnx.ops.symbolic(
        "com.microsoft::FusedMatMul",
        (query, key),
        {"transB": 1, "alpha": size**-0.5},
        dtype=query.dtype,
        shape=(n, heads, query.shape[2], length),
        version=1,
    )
    scores = scores + (blocked + summand(BITS["score"]))  # rounds; the largest score subtracts it again
    weights = coarse(torch.exp(scores - scores.amax(-1, keepdim=True)), BITS["weight"])
    context = (weights @ value) / weights.sum(-1, keepdim=True)
    return context.transpose(1, 2).reshape(-1, width)


def coarse(numbers: Tensor, bits: int) -> Tensor:
    """Numbers below 2^(22 - bits), rounded to multiples of 2^-bits."""
    return (numbers + summand(bits)) - summand(bits)


def summand(bits: int) -> float:
    """Added in fp32, this leaves only `bits` behind the binary point."""
    return 1.5 * 2.0 ** (23 - bits)


def divided_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """Attention in the form that the fusion recognises: scores (n, heads, L, L) divided by a constant."""
    scores = query @ key.transpose(2, 3) / query.shape[-1] ** 0.5 + attention_mask
    return (torch.softmax(scores, dim=-1) @ value).transpose(1, 2), None
