"""A static bundle: the vector of a text is the mean of its tokens' vectors.

Every token of the vocabulary is encoded alone in the bundle's template, and its vector is weighted by a / (a + p),
where p is the token's share of the corpus (Arora et al., "A simple but tough-to-beat baseline for sentence embeddings",
ICLR 2017, equation 3). Then the vectors are fitted: Adam maximises the cosine between a sentence's mean and the
encoder's vector. The new bundle's graph is a Gather and a mean. Its vectors are 16-bit integers with one scale. Their
sums are exact in float32, so that a text has the same vector in every batch and on every machine.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper
from torch.nn.functional import cosine_similarity, embedding_bag

from cloze.encoding.bundle import (
    GRAPHS,
    INPUTS,
    OUTPUT,
    Bundle,
    EmbeddingConfig,
    Provenance,
    Source,
    learnt_parts,
    seal,
    staging,
)
from cloze.encoding.canaries import CANARY_TEXTS, Canaries
from cloze.encoding.errors import OptionError
from cloze.encoding.text import TOKENIZER_FILES, TextEncoder
from cloze.training.bar import bar, console
from cloze.training.data.corpus import read_corpus
from cloze.training.errors import CorpusError
from cloze.training.evaluation.measures import units
from cloze.training.export.card import front_matter, parent_metadata
from cloze.training.model.graph_encoder import GraphEncoder

A: Final = 1e-3  # the a of the weights a / (a + p)
BATCH: Final = 512  # sentences per step
EPOCHS: Final = 3
LEARNING_RATE: Final = 3e-3  # 1e-3 and 1e-2 gave 0.5 and 0.8 points less on STS-B dev
GRAPH_TOKENS: Final = 512  # tokens per batch of the encoder: larger batches do not fit the caches
SLICE: Final = 4096  # texts between two updates of the progress bar
HELD_OUT: Final = 2000  # sentences that are only measured, at most a tenth of all
NEAREST: Final = 10
EXACT: Final = 2**24  # float32 represents every integer up to it


Item = TypeVar("Item")
Floats = NDArray[np.float32]


class Rows(NamedTuple):
    """The vector of each token: `codes` (v, d) int16 times `scale`."""

    codes: NDArray[np.int16]
    scale: np.float32


def distil(path: Path, out: Path, files: Sequence[str], columns: Sequence[str] = ()) -> None:
    """Write the bundle `out`, distilled from the bundle `path` and fitted to texts of `files`. Raises ClozeError."""
    bundle = Bundle.load(path)
    if out.resolve() == bundle.path.resolve():
        raise OptionError(f"{out} is the encoder's own folder, which would be overwritten; name another folder")
    corpus = read_corpus(files, columns)
    texts = list(dict.fromkeys(row[0] for row in corpus.rows))
    if len(texts) < NEAREST * NEAREST:
        raise CorpusError(
            f"--corpus has {len(texts)} different sentences; at least {NEAREST * NEAREST} are needed, and 50,000 are a "
            "good start"
        )
    config = EmbeddingConfig(
        template="[X]",
        pooling="mean",
        max_tokens=bundle.spec.max_tokens,
        final_period=False,
        denoising=False,
    )
    if lost := learnt_parts(out):
        console.print(lost)
    with staging(out) as folder:
        encoder = GraphEncoder.of(bundle, bundle.precisions[0])
        text_encoder = config.text_encoder(bundle.path)
        sequences = [tokens.ids for tokens in text_encoder.encode(texts)]
        order = np.random.default_rng(0).permutation(len(texts))
        held_out, fitted = np.split(order, [min(HELD_OUT, len(texts) // 10)])
        started = vocabulary_vectors(encoder) * _weights(sequences, len(text_encoder.id_range))[:, None]
        targets = _units(np.concatenate([encoder.embed(part, GRAPH_TOKENS) for part in _parts(texts, "corpus")]))
        vectors = fit(started, [sequences[row] for row in fitted], targets[fitted])
        rows = quantised(vectors, config.max_tokens)
        static_encoder, parity = _write_graph(folder, rows, vectors, text_encoder)
        measurement = measured(_units(static_encoder.embed([texts[row] for row in held_out])), targets[held_out])
        if len(held_out) < NEAREST * NEAREST:  # among so few sentences the nearest ones mean nothing
            measurement = measurement._replace(recall=None)
        _write_rest(folder, out.name, bundle, config, rows, measurement, corpus.sources, parity)
    console.print(f"{out}: {measurement}, on {len(held_out):,} held-out sentences")


def vocabulary_vectors(encoder: GraphEncoder) -> Floats:
    """The unit vector of each token alone in the template, (v, d)."""
    own = encoder.text_encoder
    sequences = [[*own.prefix_ids, token, *own.suffix_ids] for token in own.id_range]
    return _units(np.concatenate([encoder.embed_ids(part, GRAPH_TOKENS) for part in _parts(sequences, "vocabulary")]))


def fit(vectors: Floats, sequences: Sequence[Sequence[int]], targets: Floats) -> Floats:
    """Fit vectors (v, d) whose means over `sequences` have the highest cosine with `targets` (n, d)."""
    rows = torch.from_numpy(vectors.copy()).requires_grad_()
    expected, lists = torch.from_numpy(targets), [torch.tensor(ids) for ids in sequences]
    rng = torch.Generator().manual_seed(0)
    optimiser = torch.optim.Adam([rows], LEARNING_RATE)
    steps = [chosen for _ in range(EPOCHS) for chosen in torch.randperm(len(lists), generator=rng).split(BATCH)]
    decay = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.0, len(steps))
    for chosen in bar(steps, desc="fitting", unit=" steps"):
        batch = [lists[row] for row in chosen.tolist()]
        starts = torch.tensor([0, *map(len, batch[:-1])]).cumsum(0)
        means = embedding_bag(torch.cat(batch), rows, starts, mode="mean")
        optimiser.zero_grad()
        (1 - cosine_similarity(means, expected[chosen])).mean().backward()
        optimiser.step()
        decay.step()
    return rows.detach().numpy()


def quantised(vectors: Floats, max_tokens: int) -> Rows:
    """Vectors as integers, as large as possible while the sum of `max_tokens` of them is exact in float32."""
    largest = min(EXACT // max_tokens, np.iinfo(np.int16).max)
    scale = np.float32(np.abs(vectors).max() / largest)
    return Rows(np.rint(vectors / scale).clip(-largest, largest).astype(np.int16), scale)


def graph(rows: Rows) -> ModelProto:
    """The mean of the tokens' vectors: the masked sum of their codes, divided by their number, times the scale."""
    constants: dict[str, NDArray[Any]] = {
        "codes": rows.codes,
        "scale": np.array(rows.scale, dtype=np.float32),
        "one": np.array([1]),
    }
    nodes = [
        helper.make_node("Cast", [INPUTS[1]], ["mask"], to=TensorProto.FLOAT),  # (texts, length)
        helper.make_node("Unsqueeze", ["mask", "one"], ["row"]),  # (texts, 1, length)
        helper.make_node("Gather", ["codes", INPUTS[0]], ["found"]),  # (texts, length, d)
        helper.make_node("Cast", ["found"], ["values"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["row", "values"], ["sums"]),  # (texts, 1, d)
        helper.make_node("Squeeze", ["sums", "one"], ["sum"]),
        helper.make_node("ReduceSum", ["mask", "one"], ["count"], keepdims=1),  # (texts, 1)
        helper.make_node("Div", ["sum", "count"], ["mean"]),
        helper.make_node("Mul", ["mean", "scale"], [OUTPUT]),
    ]
    body = helper.make_graph(
        nodes,
        "static",
        [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "length"]) for name in INPUTS],
        [helper.make_tensor_value_info(OUTPUT, TensorProto.FLOAT, ["batch", rows.codes.shape[1]])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return helper.make_model(body, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def _weights(sequences: Sequence[Sequence[int]], vocabulary: int) -> Floats:
    """a / (a + p) of each token, (v)."""
    counts = np.bincount(np.concatenate(sequences), minlength=vocabulary)
    return (A / (A + counts / counts.sum())).astype(np.float32)  # type: ignore[no-any-return]


def _parts(items: Sequence[Item], name: str) -> Iterator[Sequence[Item]]:
    for start in bar(range(0, len(items), SLICE), desc=name, unit=" parts"):
        yield items[start : start + SLICE]


def _units(vectors: Floats) -> Floats:
    return units(vectors).astype(np.float32)


def _write_graph(folder: Path, rows: Rows, vectors: Floats, text_encoder: TextEncoder) -> tuple[GraphEncoder, float]:
    """Write the graph. Return it and the largest difference of a component from the means of the fitted vectors."""
    path = folder / GRAPHS["fp32"]
    path.parent.mkdir()
    onnx.save(graph(rows), path)
    encoder = GraphEncoder(path, text_encoder)
    embedded = encoder.embed(CANARY_TEXTS)
    expected = np.stack([vectors[tokens.ids].mean(0) for tokens in text_encoder.encode(CANARY_TEXTS)])
    Canaries.write(folder, {"fp32": embedded})
    return encoder, float(np.abs(embedded - expected).max() / np.linalg.norm(expected, axis=1).max())


class Measured(NamedTuple):
    cosine: float
    recall: float | None

    def __str__(self) -> str:
        recall = (
            "" if self.recall is None else f", recall@{NEAREST} {100 * self.recall:.1f} % among the encoder's vectors"
        )
        return f"cosine to the encoder {self.cosine:.3f} on average{recall}"


def measured(vectors: Floats, targets: Floats) -> Measured:
    """Mean cosine with the encoder's vectors, and the share of each text's nearest ones that are the same; (n, d)."""
    nearest = []
    for queries in (vectors, targets):
        cosines = queries @ targets.T
        np.fill_diagonal(cosines, -np.inf)  # the text itself
        nearest.append(np.argpartition(-cosines, NEAREST - 1, axis=1)[:, :NEAREST])
    same = [len(np.intersect1d(*pair)) for pair in zip(*nearest, strict=True)]
    return Measured(float((vectors * targets).sum(1).mean()), float(np.mean(same)) / NEAREST)


def _write_rest(
    folder: Path,
    name: str,
    bundle: Bundle,
    config: EmbeddingConfig,
    rows: Rows,
    measurement: Measured,
    sources: list[Source],
    parity: float,
) -> None:
    """Write tokenizer, configuration, card and contract."""
    for file in TOKENIZER_FILES:
        shutil.copyfile(bundle.path / file, folder / file)
    vocabulary, dimension = rows.codes.shape
    sizes = {"model_type": "static", "vocab_size": vocabulary, "hidden_size": dimension}
    (folder / "config.json").write_text(json.dumps(sizes, indent=2) + "\n", encoding="utf-8")
    provenance = Provenance(
        parent=bundle.name,
        recipe={"method": "distil-static", "encoder": bundle.name, "space": bundle.spec.space},
        data=sources,
        commit=None,
        seeds=[0],
        scores={},
        parity={"fp32": parity},
        graphs={"fp32": "mean of tokens' vectors, whole numbers of 16 bits"},
    )
    about = {key: parent_metadata(bundle.path, key) for key in ("license", "language")} | {"library_name": "cloze"}
    text = ", ".join(f"{source.name} ({source.sentences:,} sentences)" for source in sources)
    card = (
        f"{front_matter(provenance, about)}\n\n# {name}\n\n"
        f"Sentence vectors that are means of vectors of tokens, fitted by Cloze to {bundle.name} on {text}: "
        f"{measurement}. Cosine similarity compares them with each other. They are NOT of the vector space of "
        f"{bundle.name}.\n\n## Figures\n"
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
    weights = hashlib.sha256(rows.codes.tobytes() + rows.scale.tobytes()).hexdigest()
    seal(folder, config, dimension, weights, provenance)
