"""Run an embedding library behind a pipe: each input line is a JSON list of texts, each output line the result.

    PYTHON benchmarks/encode.py BACKEND MODEL TEXTS

BACKEND is torch, onnx, onnx-int8, openvino or openvino-int8, all of sentence-transformers, fastembed or llama-cpp.
MODEL is the folder of an encoder, in which fastembed and onnx need model.onnx and llama-cpp needs model.gguf. TEXTS is
a folder with train.jsonl, whose column `text` calibrates openvino-int8. The first output line has the versions of the
libraries, each other one the seconds of a call and the vectors. This file imports nothing from Cloze, so that it can
run in another environment.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("sentence-transformers", "fastembed", "llama-cpp-python", "onnxruntime", "openvino", "optimum", "torch")

Encode = Callable[[list[str]], Any]  # texts to vectors, (n, d), as an array or as rows


def sentence_transformers(folder: Path, backend: str, texts: str) -> Encode:
    """`folder` is a copy, to which quantised graphs are added."""
    import sentence_transformers

    runtime, _, int8 = backend.partition("-")

    def encoder_of(name: str | None) -> Any:
        options: dict[str, Any] = {"model_kwargs": {"file_name": name}} if name else {}
        return sentence_transformers.SentenceTransformer(str(folder), device="cpu", backend=runtime, **options)  # type: ignore[arg-type]

    encoder = encoder_of("model.onnx" if runtime == "onnx" else None)
    if int8 and runtime == "onnx":
        vnni = "avx512_vnni" in Path("/proc/cpuinfo").read_text(encoding="ascii")
        target = "avx512_vnni" if vnni else "avx2"
        sentence_transformers.export_dynamic_quantized_onnx_model(encoder, target, str(folder), file_suffix="int8")
        encoder = encoder_of("onnx/model_int8.onnx")
    elif int8:
        sentence_transformers.export_static_quantized_openvino_model(
            encoder, None, str(folder), texts, "default", "train", "text", file_suffix="int8"
        )
        encoder = encoder_of("openvino_model_int8.xml")
    return lambda part: encoder.encode(part, batch_size=32, show_progress_bar=False)


def fastembed(folder: Path) -> Encode:
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    TextEmbedding.add_custom_model(
        model="minilm",
        pooling=PoolingType.MEAN,
        normalization=True,
        sources=ModelSource(hf="minilm"),
        dim=json.loads((folder / "config.json").read_text(encoding="utf-8"))["hidden_size"],
        model_file="model.onnx",
    )
    encoder = TextEmbedding("minilm", specific_model_path=str(folder))
    return lambda part: list(encoder.embed(part, batch_size=32))


def llama_cpp(folder: Path) -> Encode:
    from llama_cpp import Llama

    threads = len(os.sched_getaffinity(0))
    limit = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))["model_max_length"]
    encoder = Llama(
        str(folder / "model.gguf"), embedding=True, n_ctx=0, n_batch=limit, n_ubatch=limit, n_threads=threads,
        n_threads_batch=threads, verbose=False,
    )  # fmt: skip
    return lambda part: encoder.embed(part, normalize=True)


def load(backend: str, folder: Path, texts: str) -> Encode:
    if backend == "llama-cpp":
        return llama_cpp(folder)
    return fastembed(folder) if backend == "fastembed" else sentence_transformers(folder, backend, texts)


def versions() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            yield package, version(package)


def main(backend: str, model: str, texts: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print to stdout write to stderr instead
    with tempfile.TemporaryDirectory() as temporary:
        encode = load(backend, Path(shutil.copytree(model, Path(temporary) / "model")), texts)
        print(json.dumps(dict(versions())), file=answers, flush=True)
        for line in sys.stdin:
            part = json.loads(line)
            began = time.perf_counter()
            vectors = encode(part)
            seconds = time.perf_counter() - began
            vectors = [list(map(float, vector)) for vector in vectors]
            print(json.dumps({"seconds": seconds, "vectors": vectors}), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
