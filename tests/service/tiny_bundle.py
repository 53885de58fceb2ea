"""A bundle made in code, without torch: a small vocabulary and a graph of a few operators."""

import string
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from encoding.bundle import GRAPHS, INPUTS, OUTPUT, Precision, Provenance, Reading, seal, staging

TEMPLATE = 'This sentence of "[X]" means [MASK].'
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["this", "sentence", "of", "means", "a", "man", "plays", "the", "guitar", "two", "dogs", "run", "poison"]
DIMENSION = 16
MAX_TOKENS = 32


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


def graph(work: int = 0, dimension: int = DIMENSION, output: str = OUTPUT) -> onnx.ModelProto:
    """The mean of the tokens' rows, each weighted by its place, through tanh; "poison" is NaN.

    `work` adds that many products with a matrix of 512 × 512, so that a batch takes a while.
    """
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(len(vocabulary()), dimension)).astype(np.float32)
    rows[vocabulary()["poison"]] = np.nan
    weights = {
        "rows": rows,
        "places": np.linspace(1, 2, MAX_TOKENS, dtype=np.float32)[None, :, None],
        "matrix": rng.normal(size=(dimension, dimension)).astype(np.float32),
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
    if work:
        weights["heavy"] = np.full((512, 512), 1e-3, dtype=np.float32)
        weights["nothing"] = np.zeros((512, dimension), dtype=np.float32)
        weights["wide"] = np.ones((dimension, 512), dtype=np.float32)
        names = ["busy0", *(f"busy{step + 1}" for step in range(work))]
        nodes.append(helper.make_node("MatMul", ["vectors", "wide"], [names[0]]))
        nodes += [helper.make_node("MatMul", [a, "heavy"], [b]) for a, b in pairwise(names)]
        nodes.append(helper.make_node("MatMul", [names[-1], "nothing"], ["zeros"]))
        nodes.append(helper.make_node("Add", ["vectors", "zeros"], [output]))
    else:
        nodes.append(helper.make_node("Identity", ["vectors"], [output]))
    made = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "length"]) for name in INPUTS],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, ["batch", dimension])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def write_bundle(
    out: Path, model: onnx.ModelProto | None = None, precisions: tuple[Precision, ...] = ("fp32",)
) -> Path:
    """Seal a bundle at `out`; every precision holds the same graph."""
    with staging(out) as folder:
        (folder / "onnx").mkdir()
        for precision in precisions:
            onnx.save(model or graph(), folder / GRAPHS[precision])
        tokenizer().save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(
            '{"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "mask_token": "[MASK]"}'
        )
        (folder / "config.json").write_text("{}")
        (folder / "README.md").write_text("# tiny\n")
        reading = Reading(
            template=TEMPLATE, read_out="mask", max_tokens=MAX_TOKENS, final_period=False, denoising=False
        )
        provenance = Provenance(parent="none", recipe={}, data=[], commit=None, seeds=[0], scores={}, parity={})
        seal(folder, reading, DIMENSION, provenance)
    return out
