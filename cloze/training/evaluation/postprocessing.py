"""Vectors made from an encoder's states without training the encoder: whitening, flow, WK pooling, word averages."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cloze.encoding.text import TextEncoder
from cloze.training.data.masking import continuing_prefix
from cloze.training.model.encoder import SentenceEncoder

SMALLEST: Final = 1e-12  # least singular value, relative to the largest, of a direction that is kept

LEVELS: Final = 3
DEPTH: Final = 3
WIDTH: Final = 32
RATE: Final = 1e-3
EPOCHS: Final = 1
BATCH: Final = 64
SEED: Final = 0

WINDOW: Final = 2  # layers on each side
FEWEST_STATES: Final = 3  # with fewer, the last layer has no layers around it
START: Final = 3  # the first layer is the depth divided by this

FREQUENT: Final = 36
BEGINNINGS: Final = ("Ġ", "▁")  # mark a word's first token, if continuations are not marked


def whiten(vectors: NDArray[np.floating]) -> NDArray[np.float64]:
    """Whitening (arXiv:2103.15316): dimensions that are uncorrelated and vary equally.

    The result (n, d) has mean 0, and the identity as covariance in the directions in which the vectors differ.
    """
    centred = vectors.astype(np.float64) - vectors.mean(0, dtype=np.float64)
    directions, sizes, _ = np.linalg.svd(np.cov(centred.T))
    kept = sizes > SMALLEST * sizes[0]
    whitened: NDArray[np.float64] = centred @ directions[:, kept] / np.sqrt(sizes[kept])
    return whitened


def flow_vectors(vectors: NDArray[np.floating], epochs: int = EPOCHS) -> NDArray[np.float32]:
    """BERT-flow (arXiv:2011.05864): a small Glow that maps vectors to a standard Gaussian, trained on them alone.

    There are three levels of three steps. A step is a scale and shift per dimension, a linear mixing of all dimensions,
    and an additive coupling of width 32. After each level half of the dimensions are finished. Adam at 1e-3 makes one
    pass over the vectors, with gradients clipped at 1, as in the published code. The encoder is not trained. Unlike in
    Glow, the prior is the standard Gaussian on every level.

    Vectors (n, d) -> latent vectors (n, d) of a flow that was trained on them.
    """
    inputs = torch.from_numpy(vectors.astype(np.float32))
    flow = fit_flow(inputs, epochs)
    with torch.no_grad():
        latent: NDArray[np.float32] = flow(inputs)[0].numpy()
    return latent


def fit_flow(vectors: Tensor, epochs: int = EPOCHS) -> "Flow":
    """Fit a flow to vectors (n, d) by maximum likelihood. The same vectors give the same flow."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        flow = Flow(vectors)
        optimizer = torch.optim.Adam(flow.parameters(), lr=RATE)
        for _ in range(epochs):
            for rows in torch.randperm(len(vectors)).split(BATCH):
                loss = -flow.log_likelihood(vectors[rows]).mean() / vectors.shape[1]
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(flow.parameters(), 1.0)
                optimizer.step()
    return flow.eval()


class Flow(nn.Module):
    """Invertible: vectors (n, d) -> latent vectors (n, d) and the logarithm of the volume's change, a scalar."""

    def __init__(self, vectors: Tensor) -> None:
        """Initialise scales and shifts so that these vectors have mean 0 and variance 1 in every step."""
        super().__init__()
        self.steps = nn.ModuleList()
        for number in range(LEVELS * DEPTH):
            step = _Step(vectors)
            self.steps.append(step)
            with torch.no_grad():
                vectors = step(vectors)[0]
            if number % DEPTH == DEPTH - 1:
                vectors = vectors[:, : vectors.shape[1] // 2]

    def forward(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        finished, volume = [], torch.zeros(())
        for number, step in enumerate(self.steps):
            vectors, change = step(vectors)
            volume = volume + change
            if number % DEPTH == DEPTH - 1:
                half = vectors.shape[1] // 2
                finished.append(vectors[:, half:])
                vectors = vectors[:, :half]
        return torch.cat([*finished, vectors], 1), volume

    def log_likelihood(self, vectors: Tensor) -> Tensor:
        """Vectors (n, d) -> log-likelihoods (n), under the standard Gaussian."""
        latent, volume = self(vectors)
        log_likelihoods: Tensor = -0.5 * (latent.square() + float(np.log(2 * np.pi))).sum(1) + volume
        return log_likelihoods


class _Step(nn.Module):
    def __init__(self, vectors: Tensor) -> None:
        super().__init__()
        d = vectors.shape[1]
        deviation = vectors.std(0).clamp(min=1e-6)
        self.log_scale = nn.Parameter(-deviation.log())
        self.shift = nn.Parameter(-vectors.mean(0) / deviation)
        self.mixing = nn.Parameter(nn.init.orthogonal_(torch.empty(d, d)))
        widths = (d // 2, WIDTH, WIDTH)
        hidden = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
        last = nn.Linear(WIDTH, d - d // 2)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.coupling = nn.Sequential(*hidden, last)

    def forward(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        vectors = (vectors * self.log_scale.exp() + self.shift) @ self.mixing
        half = vectors.shape[1] // 2
        first, second = vectors[:, :half], vectors[:, half:]
        vectors = torch.cat([first, second + self.coupling(first)], 1)
        return vectors, self.log_scale.sum() + torch.linalg.slogdet(self.mixing)[1]


def wk_pooling(hidden_states: Sequence[Tensor], attention_mask: Tensor) -> Tensor:
    """WK pooling (SBERT-WK, arXiv:2002.06652): layers, then tokens, weighted by how they change over depth.

    A layer's weight for a token is the sum of its alignment with the layers around it and its novelty, which is the
    share that they do not explain. A token's weight is the variance of the cosines of its adjacent layers. As in the
    published code, the window of the first two layers has no layers before them, and [CLS] counts but the last token
    does not. That code uses layers 4 to 12 of 12; here they start at a third of the depth, so 2 to 6 of 6. The paper's
    QR decomposition gives the same weights as the Gram matrix that is used here.

    Hidden states (n, L, d) of layer 0 to the last -> vectors (n, d) in float64.
    """
    first = (len(hidden_states) - 1) // START
    states = torch.stack(list(hidden_states[first:]), 2).double()  # (n, L, k, d)
    gram = states @ states.mT  # (n, L, k, k)
    words = (_layer_weights(gram).unsqueeze(-1) * states).sum(2)  # (n, L, d)
    counted = torch.zeros_like(attention_mask, dtype=torch.float64)
    counted[:, :-1] = attention_mask[:, 1:].double()  # all tokens of a row except the last one
    weights = _token_weights(gram) * counted
    return (weights.unsqueeze(-1) * words).sum(1) / weights.sum(1, keepdim=True)


def _layer_weights(gram: Tensor) -> Tensor:
    """Products of a token's layers (..., k, k) -> their weights (..., k), which add up to 1."""
    layers = range(gram.shape[-1])
    alignment, novelty = zip(*(_alignment_and_novelty(gram, layer) for layer in layers), strict=True)
    shares = [torch.stack(scores, -1) for scores in (alignment, novelty)]
    weights = sum((share / share.sum(-1, keepdim=True) for share in shares), torch.zeros(()))
    return weights / weights.sum(-1, keepdim=True)


def _alignment_and_novelty(gram: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """For one layer x with its window W: 1 / (2 (|W| + 1) c) and |x - Px| / |x|, with Px in the span of W.

    c is the mean cosine of Px with the layers of W.
    """
    left = range(layer - WINDOW, layer) if layer >= WINDOW else ()
    window = [*left, *range(layer + 1, min(layer + WINDOW + 1, gram.shape[-1]))]
    inside, toward = gram[..., window, :][..., window], gram[..., window, layer]
    projected = (toward * torch.linalg.solve(inside, toward)).sum(-1).clamp(min=0)  # |Px|^2
    lengths = inside.diagonal(dim1=-2, dim2=-1).sqrt()
    cosine = (toward / lengths).mean(-1) / projected.sqrt()
    square = gram[..., layer, layer]
    novelty = ((square - projected).clamp(min=0) / square).sqrt()
    return 1 / (2 * (len(window) + 1) * cosine), novelty


def _token_weights(gram: Tensor) -> Tensor:
    """The variance of the cosines of adjacent layers, (..., k, k) -> (...)."""
    lengths = gram.diagonal(dim1=-2, dim2=-1).sqrt()
    cosines = gram.diagonal(1, -2, -1) / (lengths[..., 1:] * lengths[..., :-1])
    return cosines.var(-1, unbiased=False)


def static_means(
    encoder: SentenceEncoder, texts: Sequence[str], words: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """The mean (n, d) over all tokens of a text, special ones included.

    `words` (vocabulary, d) are the tokens' vectors, by default the static word embeddings.
    """
    if words is None:
        words = encoder.word_embeddings.weight.detach().float().cpu().numpy()
    text_encoder = encoder.make_text_encoder("[X]", encoder.config.max_tokens, "mean")
    return np.stack([words[tokens.ids].mean(0) for tokens in text_encoder.encode(texts)])


def static_averages(
    encoder: SentenceEncoder, texts: Sequence[str], frequent: int = FREQUENT
) -> dict[str, NDArray[np.float32]]:
    """Averages of static word embeddings without biased tokens (PromptBERT, arXiv:2201.04337, Table 3, appendix A.1).

    The kinds of tokens are removed one after the other, as in the table: the 36 most frequent, subwords, upper case (by
    writing the text in lower case), and tokens of punctuation alone. Special tokens never count. The most frequent
    tokens are counted in the distinct texts that are averaged; the paper's list of 36 is from its own texts. A text
    that has no token left gets a vector of zeros, whose cosines are 0; the paper's code uses [PAD] for it.

    Name -> averages (n, d), with more kinds of tokens removed in each. An uncased model has no row for case.
    """
    text_encoder = encoder.make_text_encoder("[X]", encoder.config.max_tokens, "mean")
    words = encoder.word_embeddings.weight.detach().float().cpu().numpy()
    pieces = [piece or "" for piece in encoder.tokenizer.convert_ids_to_tokens(list(range(len(encoder.tokenizer))))]
    removal = Removal(pieces, len(words), continuing_prefix(encoder.tokenizer))
    sequences = _inner_tokens(text_encoder, texts)
    removal.frequent(sequences, frequent)
    averages = {"static -freq": removal.averages(words, sequences)}
    removal.subwords()
    averages["static -freq -sub"] = removal.averages(words, sequences)
    if _inner_tokens(text_encoder, ["A"]) != _inner_tokens(text_encoder, ["a"]):
        sequences = _inner_tokens(text_encoder, [text.lower() for text in texts])
        averages["static -freq -sub -case"] = removal.averages(words, sequences)
    removal.punctuation()
    return averages | {f"{[*averages][-1]} -pun": removal.averages(words, sequences)}


class Removal:
    """The token ids that are removed. `pieces` are the vocabulary's tokens by id; `prefix` marks tokens in a word."""

    def __init__(self, pieces: Sequence[str], vocabulary: int, prefix: str | None) -> None:
        self.pieces, self.prefix = pieces, prefix
        self.removed = np.zeros(vocabulary, dtype=bool)
        self.inside = np.zeros(vocabulary, dtype=bool)  # removed except at the start of a text

    def frequent(self, sequences: Sequence[Sequence[int]], count: int) -> None:
        counts = np.bincount(np.concatenate(sequences).astype(int), minlength=len(self.removed))
        self.removed[np.argsort(-counts, kind="stable")[:count]] = True

    def subwords(self) -> None:
        """A text's first token is kept: it begins a word, though byte-level vocabularies write it like a subword."""
        for token, piece in enumerate(self.pieces[: len(self.removed)]):
            if self.prefix:
                self.removed[token] |= piece.startswith(self.prefix)
            else:
                self.inside[token] = not piece.startswith(BEGINNINGS)

    def punctuation(self) -> None:
        for token, piece in enumerate(self.pieces[: len(self.removed)]):
            self.removed[token] |= not any(character.isalnum() for character in piece)

    def averages(self, words: NDArray[np.float32], sequences: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Word embeddings (v, d) -> the mean over the remaining tokens of each sequence, (n, d)."""
        means = np.zeros((len(sequences), words.shape[1]), np.float32)
        for row, ids in enumerate(sequences):
            kept = [
                token for place, token in enumerate(ids) if not (self.removed[token] or (place and self.inside[token]))
            ]
            if kept:
                means[row] = words[kept].mean(0)
        return means


def _inner_tokens(text_encoder: TextEncoder, texts: Sequence[str]) -> list[list[int]]:
    """Ids without [CLS] and [SEP]."""
    return [tokens.ids[1:-1] for tokens in text_encoder.encode(texts)]
