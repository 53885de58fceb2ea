"""Bundles made in code, without torch: a small vocabulary, a graph of a few operators, and the same in numpy."""

import json
import string
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from cloze.encoding.bundle import (
    GRAPHS,
    INPUTS,
    OUTPUT,
    SPEC_FILE,
    EmbeddingConfig,
    Precision,
    Provenance,
    seal,
    staging,
)
from cloze.encoding.calibration import CALIBRATION_FILE, Calibration, Curve
from cloze.encoding.canaries import CANARY_TEXTS, Canaries
from cloze.encoding.heads import HEAD_FOLDER, ClassifierHead
from cloze.encoding.template import PoolingMode

TEMPLATE = 'This sentence of "[X]" means [MASK].'
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["this", "sentence", "of", "means", "a", "man", "plays", "the", "guitar", "two", "dogs", "run", "poison"]
DIMENSION = 16
MAX_TOKENS = 32
CURVE = Curve(
    method="platt", cosines=(-1, 0, 0.5, 1), values=(0, 0.1, 0.4, 1), error_before=0.3, error=0.02,
    thresholds={"F1": 0.45},
)  # fmt: skip
OTHER: dict[str, Any] = {"template": "[X]", "pooling": "cls", "max_tokens": 20, "dimension": 8, "seed": 1}


@cache
def vocabulary() -> dict[str, int]:
    pieces = [*string.ascii_lowercase, *string.digits, *(f"##{piece}" for piece in string.ascii_lowercase)]
    tokens = [*SPECIAL, *WORDS, *(piece for piece in pieces if piece not in WORDS), *'".,!?[]<>']
    return {token: index for index, token in enumerate(tokens)}


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.WordPiece(vocabulary(), unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens(SPECIAL)
    return made


def sequence(text: str, template: str = TEMPLATE) -> list[int]:
    """The ids that the model sees, by hand: for a text of the vocabulary's words, with blanks between."""
    words = template.lower().replace("[x]", text).replace("[mask]", "[MASK]").replace('"', ' " ').replace(".", " .")
    return [vocabulary()[word] for word in ["[CLS]", *words.split(), "[SEP]"]]


@cache
def weights(dimension: int = DIMENSION, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """A row for each token, NaN for "poison", a weight for each place, and a matrix."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(len(vocabulary()), dimension)).astype(np.float32)
    rows[vocabulary()["poison"]] = np.nan
    matrix = rng.normal(size=(dimension, dimension)).astype(np.float32)
    return {"rows": rows, "places": np.linspace(1, 2, MAX_TOKENS, dtype=np.float32), "matrix": matrix}


def vector(ids: list[int], dimension: int = DIMENSION, seed: int = 0) -> NDArray[np.float32]:
    """What the graph gives for one sequence: tanh(the mean of the tokens' rows, each times its place's weight, M)."""
    made = weights(dimension, seed)
    rows = made["rows"][ids] * made["places"][: len(ids), None]
    return np.tanh(rows.mean(axis=0) @ made["matrix"])  # type: ignore[no-any-return]


def graph(dimension: int = DIMENSION, output: str = OUTPUT, seed: int = 0) -> onnx.ModelProto:
    """`vector` for a batch."""
    made = weights(dimension, seed)
    constants = {
        "rows": made["rows"],
        "places": made["places"][None, :, None],
        "matrix": made["matrix"],
        "last": np.array([-1]),
        "one": np.array([1]),
        "zero": np.array([0]),
        "step": np.array([1]),
        "axis": np.array([1]),
    }
    nodes = [
        helper.make_node("Gather", ["rows", INPUTS[0]], ["embedded"]),  # (texts, length, dimension)
        helper.make_node("Shape", [INPUTS[0]], ["length"], start=1, end=2),
        helper.make_node("Slice", ["places", "zero", "length", "axis", "step"], ["near"]),
        helper.make_node("Cast", [INPUTS[1]], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["mask", "last"], ["column"]),
        helper.make_node("Mul", ["embedded", "column"], ["masked"]),
        helper.make_node("Mul", ["masked", "near"], ["placed"]),
        helper.make_node("ReduceSum", ["placed", "one"], ["sum"], keepdims=0),
        helper.make_node("ReduceSum", ["column", "one"], ["count"], keepdims=0),
        helper.make_node("Div", ["sum", "count"], ["mean"]),
        helper.make_node("MatMul", ["mean", "matrix"], ["mixed"]),
        helper.make_node("Tanh", ["mixed"], ["vectors"]),
    ]
    nodes.append(helper.make_node("Identity", ["vectors"], [output]))
    body = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "length"]) for name in INPUTS],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, ["batch", dimension])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return helper.make_model(body, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def not_finite() -> onnx.ModelProto:
    """Every batch fails, for [CLS] is NaN."""
    model = graph()
    (rows,) = (each for each in model.graph.initializer if each.name == "rows")
    values = numpy_helper.to_array(rows).copy()
    values[vocabulary()["[CLS]"]] = np.nan
    rows.CopyFrom(numpy_helper.from_array(values, "rows"))
    return model


def head(dimension: int = DIMENSION, *, several: bool = False) -> ClassifierHead:
    """Three labels by random weights."""
    rng = np.random.default_rng(7)
    return ClassifierHead(
        labels=("music", "animals", "none"),
        several=several,
        weights=tuple(map(tuple, (5 * rng.normal(size=(3, dimension))).round(3).tolist())),
        biases=(0.25, 0, -0.5),
        threshold=0.625,
        texts=300,
        source="topics.csv",
        figures={"accuracy": 0.75},
    )


def write_bundle(
    out: Path,
    model: onnx.ModelProto | None = None,
    precisions: tuple[Precision, ...] = ("fp32",),
    *,
    template: str = TEMPLATE,
    pooling: PoolingMode = "mask",
    max_tokens: int = MAX_TOKENS,
    dimension: int = DIMENSION,
    seed: int = 0,
    final_period: bool = False,
    templates: dict[str, str] | None = None,
    heads: dict[str, ClassifierHead] | None = None,
) -> Path:
    """Seal a bundle at `out`; every precision holds the same graph, that of `dimension` and `seed` if none is given.

    Without `heads`, it has the head `topic`.
    """
    with staging(out) as folder:
        (folder / "onnx").mkdir()
        graph_is_own = model is None
        model = model or graph(dimension=dimension, seed=seed)
        for precision in precisions:
            onnx.save(model, folder / GRAPHS[precision])
        tokenizer().save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(
            '{"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "mask_token": "[MASK]"}'
        )
        (folder / "config.json").write_text("{}")
        (folder / "README.md").write_text("# tiny\n")
        (folder / HEAD_FOLDER).mkdir()
        for name, each in ({"topic": head(dimension)} if heads is None else heads).items():
            (folder / HEAD_FOLDER / f"{name}.json").write_text(each.model_dump_json())
        config = EmbeddingConfig(
            template=template,
            templates=templates or {},
            pooling=pooling,
            max_tokens=max_tokens,
            final_period=final_period,
            denoising=False,
        )
        provenance = Provenance(parent="none", recipe={}, data=[], commit=None, seeds=[0], scores={}, parity={})
        if graph_is_own:
            sequences = config.text_encoder(folder).encode(CANARY_TEXTS)
            vectors = np.stack([vector(tokens.ids, dimension, seed) for tokens in sequences])
            Canaries.write(folder, dict.fromkeys(precisions, vectors))
        weights = sha256(model.SerializeToString()).hexdigest()
        seal(folder, config, dimension, weights, provenance)
    return out


def calibrate(bundle: Path, precision: str = "fp32") -> Path:
    """Add CURVE to a bundle, for one precision."""
    made = Calibration(
        meaning="probability", lowest=0, highest=1, pairs=300, source="pairs.csv", curves={precision: CURVE}
    )
    file = bundle / CALIBRATION_FILE
    file.write_text(made.model_dump_json())
    spec = json.loads((bundle / SPEC_FILE).read_text())
    spec["files"][CALIBRATION_FILE] = sha256(file.read_bytes()).hexdigest()
    (bundle / SPEC_FILE).write_text(json.dumps(spec))
    return bundle
