"""The layers of BERT and RoBERTa written out for export. The last layer computes only the row that pooling reads.

Of the other tokens the last layer needs only keys and values. Three forms give the same vectors:

- `rows`, for the CPU: all tokens of a batch are the rows of one matrix (n·L, d), and attention is ONNX's own operator,
  which takes half the time of `com.microsoft.MultiHeadAttention` there. Two biases are removed. The bias of the keys
  adds the same number to all scores of a query, which the softmax ignores. The bias of the values is multiplied by
  weights that sum to 1, so it is added to the next bias;
- `exact`, the basis of int8: the same except for attention, which rounds deliberately and gives the same bits with
  every vector extension of the CPU, as `cloze.training.export.quantise` requires (docs/int8.md). For a short text the
  operators cost as much as the tokens, so there are few of them: rows are (n·L, 1, d), the shape of an instance norm,
  and queries, keys and values of the same rows are one product;
- `fusible`, for GPUs: (n, L, d) everywhere, and attention in the operators that ONNX Runtime fuses.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.pooling import ONE_TOKEN, pool
from cloze.training.model.pretrained import BERTS

# fractional bits: in attention, and of the states before their mean, whose sums are then exact below 2^12
BITS: Final = {"factor": 8, "score": 8, "weight": 9, "state": 12}
BLOCKED: Final = -10000.0  # added to a padding token's score: exp gives exactly 0, and fp16 can hold it

Form = Literal["rows", "exact", "fusible"]


def layers_of(backbone: PreTrainedModel) -> Sequence[Any]:
    """The layers of a BERT or a RoBERTa, which transformers does not type."""
    layers: Sequence[Any] = backbone.get_submodule("encoder.layer")  # type: ignore[assignment]
    return layers


def writable(backbone: PreTrainedModel) -> bool:
    """Whether the backbone is a BERT or a RoBERTa."""
    return backbone.config.model_type in BERTS


def one_row(encoder: SentenceEncoder) -> tuple[str, ...]:
    """Name parts of the matrices that multiply one row per text: those of the last layer and of a head."""
    if encoder.config.pooling not in ONE_TOKEN or not writable(encoder.backbone):
        return (".head.",)
    last = len(layers_of(encoder.backbone)) - 1
    return f".encoder.layer.{last}.", ".head."


class WrittenOut(nn.Module):
    """`SentenceEncoder.pooled` in the encoder's own template, in evaluation mode."""

    def __init__(self, encoder: SentenceEncoder, form: Form) -> None:
        super().__init__()
        self.encoder = encoder
        self.form = form
        for number, layer in enumerate(layers_of(encoder.backbone) if form != "fusible" else ()):
            dense, attention = layer.attention.output.dense, layer.attention.self
            self.register_buffer(f"bias_{number}", (dense.bias + dense.weight @ attention.value.bias).detach())  # (d)
            if form == "exact":
                key_value = [attention.key.weight, attention.value.weight]
                bias = torch.cat([attention.query.bias, torch.zeros(2 * len(attention.query.bias))])
                self.register_buffer(f"others_{number}", torch.cat(key_value).detach())  # (2d, d)
                self.register_buffer(
                    f"all_{number}", torch.cat([attention.query.weight, *key_value]).detach()
                )  # (3d, d)
                self.register_buffer(f"all_bias_{number}", bias.detach())  # (3d)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Token ids and their mask (n, L) -> vectors (n, d)."""
        mode, mask_index = self.encoder.config.pooling, self.encoder.text_encoder.mask_index
        n, length = input_ids.shape
        blocked = (1.0 - attention_mask.unsqueeze(1).unsqueeze(2).float()) * BLOCKED  # (n, 1, 1, L)
        states = self._embeddings(input_ids, attention_mask)  # (n, L, d)
        everywhere, layer = blocked, self._fusible_layer
        if self.form != "fusible":
            layer = self._rows_layer
            states = states.flatten(0, 1) if self.form == "rows" else states.view(n * length, 1, -1)
        if self.form == "rows":
            everywhere = blocked.expand(n, 1, length, length)
        last = len(layers_of(self.encoder.backbone)) - 1
        for number in range(last):
            states = layer(number, states, states, everywhere)
        if mode not in ONE_TOKEN:
            states = layer(last, states, states, everywhere)
            weights = self.encoder.weights_of(input_ids)
            rounded = partial(coarse, bits=BITS["state"]) if self.form == "exact" else None
            return pool(states.view(n, length, states.shape[-1]), attention_mask, mode, None, weights, rounded)
        pooled = pool(states.view(n, length, states.shape[-1]), attention_mask, mode, mask_index)  # (n, d)
        if self.form == "fusible":
            return layer(last, pooled.unsqueeze(1), states, blocked).squeeze(1)
        return layer(last, pooled, states, blocked)

    def _embeddings(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        words = self.encoder.words(input_ids, attention_mask, self.encoder.text_encoder)
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
        """Like `_fusible_layer`, for queries (n·Q, d) and states (n·L, d); in the form `exact`, states (n·L, 1, d)."""
        layer = layers_of(self.encoder.backbone)[number]
        attention, output = layer.attention.self, layer.attention.output
        n, length = blocked.shape[0], blocked.shape[-1]
        width, heads = queries.shape[-1], int(attention.num_attention_heads)
        if self.form == "rows":
            query, key = attention.query(queries), states @ attention.key.weight.T
            value = states @ attention.value.weight.T
            parts = (query.view(n, -1, width), key.view(n, length, width), value.view(n, length, width))
            context, *_ = torch.onnx.ops.attention(*parts, blocked, q_num_heads=heads, kv_num_heads=heads)
        else:
            context = exact_attention(*self._factors(number, queries, states, n), blocked)
        bias = self.get_buffer(f"bias_{number}")
        dense = F.linear(context.reshape(queries.shape), output.dense.weight, bias)
        result: Tensor = layer.feed_forward_chunk(output.LayerNorm(dense + queries))
        return result

    def _factors(self, number: int, queries: Tensor, states: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (1, n, heads, Q, d / heads), keys and values (1, n, heads, L, d / heads) for the form `exact`."""
        attention = layers_of(self.encoder.backbone)[number].attention.self

        def heads(rows: Tensor) -> Tensor:  # (n·L, 1, k·d) -> (k, n, heads, L, d / heads)
            shape = (n, -1, rows.shape[-1] // queries.shape[-1], *attention_shape)
            return coarse(rows, BITS["factor"]).view(shape).permute(2, 0, 3, 1, 4)

        attention_shape = (int(attention.num_attention_heads), int(attention.attention_head_size))
        if queries is states:
            together = states @ self.get_buffer(f"all_{number}").T + self.get_buffer(f"all_bias_{number}")
            query, key, value = heads(together).split(1)
        else:
            query = heads(attention.query(queries))
            key, value = heads(states @ self.get_buffer(f"others_{number}").T).split(1)
        return query, key, value


def exact_attention(query: Tensor, key: Tensor, value: Tensor, blocked: Tensor) -> Tensor:
    """softmax(query keyᵀ / √(d / heads) + blocked) value for each head, (n·Q, d).

    `query` (1, n, heads, Q, d / heads), `key` and `value` (1, n, heads, L, d / heads) are rounded by `coarse`.

    The factors of both products have so few bits that fp32 holds the sums exactly, in any order: for the scores if
    |query · key| is below 2^(24 - 16), for the context if the weighted sums are below 2^(24 - 17). The last bit of exp
    differs between CPUs, but there are so few arguments that the rounded results agree. `FusedMatMul` reads the keys
    without a transposition and applies the scale.
    """
    *batch, rows, size = query.shape
    scores = torch.onnx.ops.symbolic(
        "com.microsoft::FusedMatMul",
        (query, key),
        {"transB": 1, "alpha": size**-0.5},
        dtype=query.dtype,
        shape=(*batch, rows, key.shape[-2]),
        version=1,
    )
    scores = scores + (blocked + summand(BITS["score"]))  # rounds; the largest score subtracts it again
    weights = coarse(torch.exp(scores - scores.amax(-1, keepdim=True)), BITS["weight"])
    context = (weights @ value) / weights.sum(-1, keepdim=True)
    return context.transpose(2, 3)


def coarse(numbers: Tensor, bits: int) -> Tensor:
    """Numbers below 2^(22 - bits), rounded to multiples of 2^-bits."""
    return (numbers + summand(bits)) - summand(bits)


def summand(bits: int) -> float:
    """A number whose addition in fp32 leaves only `bits` fractional bits."""
    return 1.5 * 2.0 ** (23 - bits)


def divided_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """Attention in the form that the fusion recognises: scores (n, heads, L, L) divided by a constant."""
    scores = query @ key.transpose(2, 3) / query.shape[-1] ** 0.5 + attention_mask
    return (torch.softmax(scores, dim=-1) @ value).transpose(1, 2), None
