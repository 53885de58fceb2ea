"""Make a bundle of a sentence-transformers model's own ONNX graph, and compare it with that graph, pooled in numpy."""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from math import erf, sqrt
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import ModelProto
from safetensors import SafetensorError
from safetensors.numpy import load_file
from tokenizers import Tokenizer, normalizers

from cloze.adoption.checks import check_tokens, check_vectors
from cloze.adoption.graph import (
    EPSILONS,
    STATES,
    TOKEN_TYPES,
    Weights,
    activation_of,
    repository_graph,
    with_pooling,
)
from cloze.adoption.modules import (
    NEEDS_TORCH,
    ST_CONFIG_FILE,
    AdoptionError,
    Module,
    check_behind,
    check_pooling,
    json_of,
    limit_of,
    modules_of,
    pooling_of,
    settings_of,
    templates_of,
)
from cloze.encoding.bundle import (
    GRAPHS,
    INPUTS,
    OUTPUT,
    EmbeddingConfig,
    Provenance,
    learnt_parts,
    seal,
    sha256,
    staging,
)
from cloze.encoding.canaries import CANARY_TEXTS, Canaries
from cloze.encoding.errors import first_line
from cloze.encoding.template import PoolingMode
from cloze.encoding.text import TextEncoder

MOST_TOKENS: Final = 2**20  # a higher limit means that the model does not state one
WEIGHTS: Final = {"Dense": ("linear.weight",), "LayerNorm": ("norm.weight", "norm.bias")}  # required by a module
ROLES: Final = ("cls_token", "sep_token", "pad_token", "mask_token")

Floats = NDArray[np.float32]

ACTIVATED: Final[dict[str, Callable[[Floats], NDArray[Any]]]] = {
    "Identity": lambda x: x,
    "Tanh": np.tanh,
    "ReLU": lambda x: np.maximum(x, 0),
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "GELU": lambda x: 0.5 * x * (1 + np.array([erf(value / sqrt(2)) for value in x])),
}


def write(source: str, folder: Path, out: Path, max_tokens: int | None = None) -> None:
    """Write a bundle of the model `source`, whose files are in `folder`, to `out`. Raises ClozeError if it cannot."""
    _, pooling, *modules = modules_of(folder, source)
    if not (folder / "config.json").is_file():
        raise AdoptionError(f"{source!r} has no config.json; get the model again")
    behind = [(module, _weights(folder, module, source)) for module in modules]
    config = _embedding_config(folder, pooling, modules, source, max_tokens)
    if behind and behind[-1][0].kind == "Normalize":  # a bundle's graph does not normalise
        behind.pop()
    graph = repository_graph(folder, source)
    if lost := learnt_parts(out):
        _show(lost)
    with staging(out) as staged:
        _copy_tokenizer(folder, staged, source)
        shutil.copyfile(folder / "config.json", staged / "config.json")
        text_encoder = config.text_encoder(staged)
        own = _tokenizer(staged, config.max_tokens)
        check_tokens(text_encoder, config, CANARY_TEXTS, lambda texts: [own.encode(text).ids for text in texts], source)
        _show("fp32: adding the pooling to the model's own graph")
        sequences = [tokens.ids for tokens in text_encoder.encode(CANARY_TEXTS)]
        try:
            expected = _own_vectors(graph, sequences, config.pooling, behind)
        except Exception as error:  # ONNX Runtime's errors have no common base class
            raise AdoptionError(
                f"{source!r} has a graph that fails on inputs of up to {max(map(len, sequences))} tokens "
                f"({first_line(error)}); give a lower --max-tokens than {config.max_tokens}, or get the model again"
            ) from error
        path = staged / GRAPHS["fp32"]
        path.parent.mkdir()
        onnx.save(with_pooling(graph, config.pooling, behind, expected.shape[1]), path)
        vectors, difference = _compared(path, text_encoder, sequences, expected, source)
        Canaries.write(staged, {"fp32": vectors})
        provenance = _provenance(source, difference)
        (staged / "README.md").write_text(_card(out.absolute().name, config, provenance), encoding="utf-8")
        files = [
            *sorted(folder.glob(f"{GRAPHS['fp32']}*")),
            *(_file(folder, module) for module, weights in behind if weights),
        ]
        digest = hashlib.sha256("".join(map(sha256, files)).encode()).hexdigest()
        spec = seal(staged, config, expected.shape[1], digest, provenance)
    size = sum((out / name).stat().st_size for name in spec.files)
    _show(f"{out}: {size / 1e6:.1f} MB, fp32, vector space {spec.space}")


def _embedding_config(
    folder: Path, pooling: Module, behind: Sequence[Module], source: str, max_tokens: int | None
) -> EmbeddingConfig:
    described = pooling.config or {}
    mode = check_pooling(pooling_of(described), described.get("include_prompt", True), source)
    inputs = [(module.config or {}).get("module_input_name", "sentence_embedding") for module in behind]
    settings = json_of(folder / ST_CONFIG_FILE) or {}
    check_behind(inputs, settings.get("truncate_dim"), source)
    template, templates = templates_of(settings.get("prompts") or {}, settings.get("default_prompt_name"), source)
    limit, positions = limit_of(folder)
    if max_tokens is None and limit > MOST_TOKENS:
        raise AdoptionError(f"{source!r} does not say how many tokens it reads; give --max-tokens")
    if max_tokens is not None and max_tokens > positions:
        raise AdoptionError(f"max_tokens is {max_tokens}; {source!r} has positions for {positions}: lower it")
    return EmbeddingConfig(
        template=template,
        templates=templates,
        pooling=mode,
        max_tokens=max_tokens or limit,
        final_period=False,
        denoising=False,
    )


def _copy_tokenizer(folder: Path, staged: Path, source: str) -> None:
    """Copy the tokenizer; special tokens that only special_tokens_map.json names are added to its configuration."""
    if not (folder / "tokenizer.json").is_file():
        raise AdoptionError(
            f"{source!r} has no fast tokenizer (tokenizer.json), which Cloze requires; save one there with "
            "transformers, or choose another model"
        )
    shutil.copyfile(folder / "tokenizer.json", staged / "tokenizer.json")
    if settings_of(folder).get("do_lower_case"):  # before its own normalizer, as sentence-transformers does
        try:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises plain Exception
            raise AdoptionError(f"{source!r} has no readable tokenizer.json ({error}); get the model again") from error
        own = [tokenizer.normalizer] if tokenizer.normalizer else []
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
        tokenizer.save(str(staged / "tokenizer.json"))
    named = json_of(folder / "special_tokens_map.json") or {}
    config = {role: named[role] for role in ROLES if role in named} | (json_of(folder / "tokenizer_config.json") or {})
    (staged / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False) + "\n", encoding="utf-8")


def _weights(folder: Path, module: Module, source: str) -> Weights:
    """The weights of a module after the pooling. Raises AdoptionError if only torch can read or apply them."""
    if module.kind == "Normalize":
        return {}
    path = _file(folder, module)
    if not path.is_file():
        raise AdoptionError(
            f"{source!r} has no {module.path}/{path.name}, which Cloze needs to read the module without torch; "
            f"{NEEDS_TORCH}"
        )
    name = activation_of(module.config or {})
    if module.kind == "Dense" and name not in ACTIVATED:
        raise AdoptionError(
            f"{source!r} has the activation function {name} in {module.path}; without torch, Cloze supports "
            f"only {', '.join(ACTIVATED)}; {NEEDS_TORCH}"
        )
    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise AdoptionError(f"{source!r}: {path} cannot be read ({first_line(error)}); get the model again") from error
    if missing := [key for key in WEIGHTS[module.kind] if key not in weights]:
        raise AdoptionError(f"{source!r}: {path} has no {missing[0]}; get the model again")
    return {key: value.astype(np.float32) for key, value in weights.items()}


def _file(folder: Path, module: Module) -> Path:
    return folder / module.path / "model.safetensors"


def _tokenizer(staged: Path, max_tokens: int) -> Tokenizer:
    """The model's own tokenizer, with its post-processor."""
    tokenizer = Tokenizer.from_file(str(staged / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_tokens)
    tokenizer.encode_special_tokens = True  # "[MASK]" in a text is text
    return tokenizer


def _own_vectors(
    graph: ModelProto, sequences: Sequence[Sequence[int]], mode: PoolingMode, behind: Sequence[tuple[Module, Weights]]
) -> Floats:
    """The vectors (n, d) of sequences: a repository's own graph runs each one alone, and numpy does the rest."""
    session = _session(graph.SerializeToString())
    types = any(value.name == TOKEN_TYPES for value in session.get_inputs())
    output = next(value.name for value in session.get_outputs() if value.name in STATES)
    vectors = []
    for ids in sequences:
        batch = np.array([ids], dtype=np.int64)
        feeds = {INPUTS[0]: batch, INPUTS[1]: np.ones_like(batch)} | (
            {TOKEN_TYPES: np.zeros_like(batch)} if types else {}
        )
        [[states]] = session.run([output], feeds)  # (L, d)
        vector = _pooled(states.astype(np.float32), mode)
        for module, weights in behind:
            vector = _applied(module, weights, vector)
        vectors.append(vector)
    return np.stack(vectors)


def _pooled(states: Floats, mode: PoolingMode) -> Floats:
    """States (L, d) of one text without padding -> its vector (d)."""
    positions = np.arange(1, len(states) + 1, dtype=np.float32)[:, None]
    poolings: dict[str, Callable[[], NDArray[Any]]] = {
        "cls": lambda: states[0],
        "lasttoken": lambda: states[-1],
        "max": lambda: states.max(0),
        "mean": lambda: states.mean(0),
        "mean_sqrt_len_tokens": lambda: states.sum(0) / np.sqrt(len(states)),
        "weightedmean": lambda: (states * positions).sum(0) / positions.sum(),
    }
    return poolings[mode]().astype(np.float32)


def _applied(module: Module, weights: Weights, vector: Floats) -> Floats:
    """Apply a module after the pooling to a vector (d)."""
    config = module.config or {}
    output: NDArray[Any]
    if module.kind == "Normalize":
        output = vector / np.maximum(np.linalg.norm(vector), EPSILONS["Normalize"])
    elif module.kind == "LayerNorm":
        normed = (vector - vector.mean()) / np.sqrt(vector.var() + EPSILONS["LayerNorm"])
        output = normed * weights["norm.weight"] + weights["norm.bias"]
    else:
        output = ACTIVATED[activation_of(config)](weights["linear.weight"] @ vector + weights.get("linear.bias", 0))
        if config.get("use_residual"):
            output = output + (weights["residual.weight"] @ vector if "residual.weight" in weights else vector)
    return output.astype(np.float32)


def _compared(
    path: Path, text_encoder: TextEncoder, sequences: Sequence[Sequence[int]], expected: Floats, source: str
) -> tuple[Floats, float]:
    """Return the vectors of a bundle's graph, and their largest difference from `expected`, both normalised.

    Each text runs alone, and in a batch with longer ones. Raises AdoptionError.
    """
    session = _session(str(path))

    def run(rows: Sequence[Sequence[int]]) -> Floats:
        vectors: Floats = session.run([OUTPUT], dict(zip(INPUTS, text_encoder.pad(rows), strict=True)))[0]
        return vectors

    alone, batched = np.concatenate([run([ids]) for ids in sequences]), run(sequences)
    difference, batched_difference = (
        float(np.abs(_units(vectors) - _units(expected)).max()) for vectors in (alone, batched)
    )
    largest = max(difference, batched_difference)
    _show(f"fp32: differs from the model's own graph by {largest:.1e} of a vector's length")
    check_vectors(difference, batched_difference, "its own graph", source)
    return alone, largest


def _session(graph: bytes | str) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def _units(vectors: Floats) -> Floats:
    units: Floats = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return units


def _provenance(source: str, difference: float) -> Provenance:
    name = Path(os.path.abspath(source)).name if Path(source).is_dir() else source
    recipe = {"method": "sentence-transformers", "encoder": name, "command": "adopt"}
    graphs = {"fp32": "the model's own, with its pooling"}
    parity = {"fp32": difference}
    return Provenance(
        parent=name, recipe=recipe, data=[], commit=None, seeds=[], scores={}, parity=parity, graphs=graphs
    )


def _card(name: str, config: EmbeddingConfig, provenance: Provenance) -> str:
    return (
        f"# {name}\n\nSentence vectors of {provenance.parent}: its own ONNX graph, to which Cloze added the pooling "
        f"{config.pooling}. Cosine similarity compares them. Its licence is that of {provenance.parent}.\n\n"
        f"The vectors differ by at most {provenance.parity['fp32']:.1e} of their length from those of that graph with "
        "pooling in numpy.\n"
    )


def _show(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
