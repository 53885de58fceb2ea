"""Measure Cloze on one GPU with one command that takes less than nine minutes.

    python -m benchmarks.gpu [--wheels FOLDER] [--out gpu.json]

Each part runs in its own process, on a GPU with a time limit. A part that fails is reported, and the next one starts.
The parts are:

1. Install the requirements from a folder of wheels or from the package index.
2. Measure the card's highest rate of matrix products.
3. Compare Cloze's fp16 session with sentence-transformers in fp16, in process, with the shapes of MiniLM and BERT-base,
   random weights, and 16 to 512 tokens.
4. Compare packed attention and CUDA graphs, which Cloze does not use, with Cloze's session.
5. Measure the service over HTTP with one, two and four processes, and the latency of one text.
6. Measure SimCSE training.
7. Run the CUDA tests.

Without a GPU, `--device cpu --tiny` runs the same code on small shapes. That tests the code and measures nothing.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

from cloze.machine import available_cpus, processor, versions

RESULTS: Final = Path(__file__).parent / "results" / "gpu.json"
PACKAGES: Final = ("onnxruntime-gpu", "onnxruntime", "torch", "transformers", "sentence-transformers", "tokenizers")
SHAPES: Final = {"MiniLM": (6, 384, 12), "BERT-base": (12, 768, 12)}  # layers, width, heads
LENGTHS: Final = (16, 32, 128, 512)
BATCH_TOKENS: Final = 32_768
SECONDS: Final = 2.0  # duration of each measurement
TINY: Final[dict[str, Any]] = {
    "SHAPES": {"tiny": (2, 32, 4)},
    "LENGTHS": (16, 32),
    "BATCH_TOKENS": 512,
    "SECONDS": 0.05,
}
TOOLS: Final = ("sentence-transformers", "pytest", "psutil", "rich")
LIMITS: Final = {
    "install": 120,
    "peak": 40,
    "session": 120,
    "techniques": 50,
    "served": 100,
    "training": 50,
    "tests": 50,
}  # s


def peak(device: str, _: Path) -> dict[str, float]:
    """TFLOP/s of square matrix products of three sizes in fp16, and the highest of them."""
    import torch

    dtype = torch.float32 if device == "cpu" else torch.float16
    tflops = {}
    for size in (256,) if device == "cpu" else (4096, 8192, 16384):
        left = torch.randn(size, size, device=device, dtype=dtype)
        seconds = _seconds(partial(torch.matmul, left, left), device)
        tflops[str(size)] = 2 * size**3 / seconds / 1e12
    return {"tflops": max(tflops.values()), **tflops}


def session(device: str, models: Path) -> list[dict[str, Any]]:
    """Tokens per second and TFLOP/s of Cloze's session and of sentence-transformers, on batches of one length."""
    import numpy as np
    import torch

    from cloze.encoding.bundle import Bundle
    from cloze.encoding.text import Batch
    from cloze.service.inference.session import Session

    rows = []
    for name, (layers, width, _) in SHAPES.items():
        model, bundle = random_model(models, name), random_bundle(models, name, device)
        loaded = Session.load(Bundle.load(bundle), provider="cpu" if device == "cpu" else "cuda")
        other = _sentence_transformer(model, device)
        for length in LENGTHS:
            texts = max(1, BATCH_TOKENS // length)
            ids = np.random.default_rng(0).integers(5, 900, (texts, length))
            batch = Batch(ids, np.ones_like(ids))
            tensors = {key: torch.from_numpy(value).to(device) for key, value in batch._asdict().items()}

            encode = partial(_encode, other, tensors)
            flops = length * texts * layers * (24 * width**2 + 4 * length * width)
            for contender, work in (("Cloze", partial(loaded.run, batch)), ("sentence-transformers", encode)):
                seconds = _seconds(work, device)
                rate = {"tokens_per_second": texts * length / seconds, "tflops": flops / seconds / 1e12}
                rows.append({"shape": name, "tokens": length, "texts": texts, "contender": contender, **rate})
    return rows


def techniques(device: str, models: Path) -> dict[str, Any]:
    """Seconds of a run with packed attention on texts of mixed lengths, and with a CUDA graph on one short text.

    On a CPU only the conversion runs: neither technique has a CPU kernel.
    """
    import numpy as np
    import onnx

    from cloze.encoding.bundle import GRAPHS, Bundle
    from cloze.encoding.text import Batch
    from cloze.service.inference.session import Session

    name, rng = next(iter(SHAPES)), np.random.default_rng(0)
    bundle = random_bundle(models, name, device)
    graph = bundle / GRAPHS[_precision(device)]
    packed = _packed(onnx.load(graph))
    results: dict[str, Any] = {"packed layers": sum(node.op_type == "PackedAttention" for node in packed.graph.node)}
    if device == "cpu":
        return results
    session = Session.load(Bundle.load(bundle), provider="cuda")
    other = _cuda_session(packed.SerializeToString())
    for spread, shortest in (("mixed", 8), ("sorted", 112)):  # the service sorts texts by length
        lengths = rng.integers(shortest, 129, BATCH_TOKENS // 128)
        mask = (np.arange(128) < lengths[:, None]).astype(np.int64)
        batch = Batch(rng.integers(5, 900, mask.shape) * mask, mask)
        expected, (vectors,) = session.run(batch), other.run(None, batch._asdict())
        results[f"{spread}, padded"] = _seconds(partial(session.run, batch), device)
        results[f"{spread}, packed"] = _seconds(partial(other.run, None, batch._asdict()), device)
        results[f"{spread}, greatest difference"] = float(np.abs(vectors - expected).max())
    ids = rng.integers(5, 900, (1, 16))
    batch = Batch(ids, np.ones_like(ids))
    results["one text, plain"] = _seconds(partial(session.run, batch), device)
    try:
        results["one text, CUDA graph"] = _seconds(_captured(graph.read_bytes(), batch), device)
    except Exception as error:  # ONNX Runtime's errors share no base class
        results["one text, CUDA graph"] = f"failed: {error}"
    return results


def _packed(model: Any) -> Any:
    """Convert a fused graph, with ONNX Runtime's tool, to layers that run without padding."""
    from onnxruntime.transformers.optimizer import optimize_by_fusion  # noqa: F401  # makes the next import work

    from onnxruntime.transformers.convert_to_packing_mode import PackingMode  # isort: skip
    from onnxruntime.transformers.onnx_model import OnnxModel

    wrapped = OnnxModel(model)
    PackingMode(wrapped).convert(use_symbolic_shape_infer=False)
    wrapped.topological_sort()
    return wrapped.model


def _cuda_session(graph: bytes, **options: str) -> Any:
    import onnxruntime

    onnxruntime.preload_dlls()
    return onnxruntime.InferenceSession(graph, providers=[("CUDAExecutionProvider", options)], enable_fallback=0)


def _captured(graph: bytes, batch: Any) -> Callable[[], object]:
    """A function that runs the batch as a CUDA graph, which ONNX Runtime captures here and replays in each call."""
    import numpy as np
    from onnxruntime import OrtValue

    session = _cuda_session(graph, enable_cuda_graph="1")
    binding = session.io_binding()
    inputs = {name: OrtValue.ortvalue_from_numpy(array, "cuda", 0) for name, array in batch._asdict().items()}
    for name, value in inputs.items():
        binding.bind_ortvalue_input(name, value)
    width = next(iter(SHAPES.values()))[1]
    output = OrtValue.ortvalue_from_shape_and_type([1, width], np.float32, "cuda", 0)
    binding.bind_ortvalue_output(session.get_outputs()[0].name, output)
    session.run_with_iobinding(binding)

    def replay() -> object:
        for name, value in inputs.items():
            value.update_inplace(batch._asdict()[name])  # as if the text were new
        session.run_with_iobinding(binding)
        return output.numpy()

    return replay


def served(device: str, models: Path) -> dict[str, Any]:
    """Texts per second over HTTP with several server processes on one card, and the latency of one text in ms."""
    from benchmarks.load import ask
    from benchmarks.peers import Server, ours

    name = next(iter(SHAPES))
    results: dict[str, Any] = {}
    bundle = random_bundle(models, name, device)
    texts = [" ".join(f"w{(number * 7 + place) % 900}" for place in range(4 + number % 60)) for number in range(4096)]
    texts = texts[: 64 if device == "cpu" else None]
    for count in (1, 2) if device == "cpu" else (1, 2, 4):
        with ExitStack() as stack:
            servers: list[Server] = []
            for _ in range(count):
                servers.append(ours(bundle, _precision(device)))
                stack.callback(servers[-1].end)
            if count == 1:
                _, seconds = asyncio.run(ask(servers[0], [servers[0].request(texts[:1])] * 200, 1))
                results["one text, ms, p50"] = 1000 * median(seconds)
            shares = [texts[place::count] for place in range(count)]
            results[f"{count} processes, texts per second"] = len(texts) / asyncio.run(_together(servers, shares))
    return results


async def _together(servers: Sequence[Any], shares: Sequence[Sequence[str]]) -> float:
    """Seconds until every server has answered its share, with 32 texts per request and 16 connections each."""
    from benchmarks.load import ask

    work = [
        ask(server, [server.request(texts[first : first + 32]) for first in range(0, len(texts), 32)], 16)
        for server, texts in zip(servers, shares, strict=True)
    ]
    began = time.perf_counter()
    await asyncio.gather(*work)
    return time.perf_counter() - began


def training(device: str, models: Path) -> dict[str, float]:
    """Tokens per second of SimCSE with BERT-base's shape, in bf16, with 256 sentences of 32 tokens per step."""
    import torch

    from cloze.training.methods import objective_of
    from cloze.training.model.encoder import SentenceEncoder
    from cloze.training.recipes.command import load_recipe

    name = list(SHAPES)[-1]
    size, length = (8, 16) if device == "cpu" else (256, 32)
    model = random_model(models, name)
    keys = {"encoder": str(model), "corpus": ["unused.txt"], "pooling": "mean", "template": "[X]"}
    recipe = load_recipe("simcse", keys | {"batch_size": size, "max_tokens": length})
    encoder = SentenceEncoder.load(str(model), template="[X]", pooling="mean")
    objective = objective_of("simcse")(encoder, recipe).to(device).train()
    optimiser = torch.optim.AdamW(objective.parameters(), lr=1e-5, fused=True)
    text = " ".join(f"w{place}" for place in range(length))
    views = {
        key: {part: tensor.to(device) for part, tensor in view.items()}
        for key, view in objective.views([(text,)] * size).items()
    }

    def step() -> None:
        with torch.autocast(device, torch.bfloat16):
            loss = objective(**views)["loss"]
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    return {"tokens_per_second": 2 * size * length / _seconds(step, device)}


def tests(device: str, _: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/service/test_cuda.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return {"status": done.returncode, "said": done.stdout.strip().splitlines()[-3:]}


def random_bundle(models: Path, name: str, device: str) -> Path:
    """A bundle of the random model of this shape; the first part that asks for it makes it."""
    from benchmarks.peers import bundle_of

    bundle = models / f"{name}-bundle"
    return bundle if bundle.is_dir() else bundle_of(random_model(models, name), bundle, (_precision(device),))


def random_model(folder: Path, name: str) -> Path:
    """An encoder of this shape with random weights and a vocabulary of 900 words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    layers, width, heads = SHAPES[name]
    torch.manual_seed(0)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(900))]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {f"{part}_token": f"[{part.upper()}]" for part in ("pad", "unk", "cls", "sep", "mask")}
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
    )
    model = folder / name
    BertModel(config, add_pooling_layer=False).save_pretrained(model)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(model)
    (model / "README.md").write_text(f"# {name}, random\n", encoding="utf-8")
    return model


def _precision(device: str) -> Any:
    return "fp32" if device == "cpu" else "fp16"


def _sentence_transformer(model: Path, device: str) -> Any:
    """sentence-transformers in fp16 with PyTorch's own attention, mean pooling."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer  # type: ignore[import-not-found]

    words = Transformer(str(model), model_args={"attn_implementation": "sdpa"})
    encoder = SentenceTransformer(modules=[words, Pooling(words.get_word_embedding_dimension(), "mean")], device=device)
    return encoder.eval() if device == "cpu" else encoder.half().eval()


def _encode(model: Any, tensors: dict[str, Any]) -> Any:
    """Vectors by sentence-transformers of token ids on the device, copied to the CPU."""
    import torch

    with torch.inference_mode():
        return model(dict(tensors))["sentence_embedding"].float().cpu()


def _seconds(work: Callable[[], object], device: str) -> float:
    """Mean seconds of one call, measured for SECONDS after a warm-up."""
    import torch

    def wait() -> None:
        if device != "cpu":
            torch.cuda.synchronize()

    for _ in range(3):
        work()
    wait()
    began, calls = time.perf_counter(), 0
    while time.perf_counter() - began < SECONDS:
        work()
        wait()
        calls += 1
    return (time.perf_counter() - began) / calls


PARTS: Final[dict[str, Callable[[str, Path], Any]]] = {
    "peak": peak, "session": session, "techniques": techniques, "served": served, "training": training, "tests": tests,
}  # fmt: skip


def install(wheels: str | None) -> dict[str, Any]:
    """Install the gpu and train extras."""
    source = ["--no-index", "--find-links", wheels] if wheels else ["-c", "constraints.txt"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", *source, "-e", ".[gpu,train]", *TOOLS],
        capture_output=True, text=True, check=False, timeout=LIMITS["install"],
    )  # fmt: skip
    return {"status": done.returncode, "said": done.stderr.strip().splitlines()[-5:]}


def run(part: str, device: str, tiny: bool, models: str) -> Any:
    """The figures of a part, or its error. The time limits are for a GPU: a CPU may be many times slower."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", part, models, "--device", device, *["--tiny"] * tiny]
    limit = LIMITS[part] if device == "cuda" else None
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"failed": f"not finished after {limit} s"}
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-3:]}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", help="folder of wheels to install from, instead of the index")
    parser.add_argument("--install", action="store_true", help="install the requirements first, from the index")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="small shapes, to test this file")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)  # run one part in this process, with this folder
    options = parser.parse_args()
    if options.tiny:
        globals().update(TINY)
    if options.part:
        part, models = options.part
        print(json.dumps(PARTS[part](options.device, Path(models))))
        return
    results: dict[str, Any] = {"machine": f"{processor()}, {available_cpus()} CPUs", "versions": {}}
    if options.wheels or options.install:
        results["install"] = install(options.wheels)
    results["versions"] = versions(PACKAGES)
    if options.device == "cuda":
        names = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
        results["machine"] = f"{names.stdout.strip().partition(' (UUID')[0]}; {results['machine']}"
    with tempfile.TemporaryDirectory() as models:
        for part in PARTS:
            began = time.perf_counter()
            results[part] = run(part, options.device, options.tiny, models)
            print(f"{part}, {time.perf_counter() - began:.0f} s: {json.dumps(results[part])}", flush=True)
            options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
