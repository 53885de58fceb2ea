"""Measure the speed of one model's graphs in process: plain fp32, the exported fp32 forms, and int8.

    python -m benchmarks.graphs --run runs/cloze-mini/mean --data DATA [--former BUNDLE]

The texts are sentences of STS-B dev and documents of the retrieval collections, sorted by length, in batches of 512
padded tokens. The graphs take turns batch by batch, and the best of several times counts, so that other load on the
machine has little influence. `--former` adds the int8 graph of another bundle. The command writes
benchmarks/results/graphs.json and prints its table.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnxruntime as ort

from cloze.encoding.bundle import Bundle
from cloze.encoding.text import Batch, TextEncoder, token_batches
from cloze.machine import available_cpus, processor, versions
from cloze.service.inference.threads import share_threads
from cloze.training.evaluation.search import find_collections, load_collection
from cloze.training.evaluation.sts import load_pairs
from cloze.training.evaluation.tables import markdown_table
from cloze.training.export.graph import fuse, trace
from cloze.training.export.layers import one_row
from cloze.training.export.quantise import quantise, vocabulary_feeds
from cloze.training.model.encoder import SentenceEncoder

RESULTS = Path(__file__).parent / "results" / "graphs.json"
PACKAGES = ("onnxruntime", "onnx", "torch", "numpy")
BATCH_TOKENS = 512
SENTENCES, DOCUMENTS = 400, 30


def graphs(encoder: SentenceEncoder, former: str | None) -> dict[str, bytes]:
    """Every form of the encoder's graph, the plain one first."""
    plain, rows = trace(encoder, "plain"), trace(encoder, "rows")
    models = {
        "fp32, plain": plain,
        "fp32, last layer for one row, fused": fuse(trace(encoder, "fusible"), encoder),
        "fp32, last layer for one row, rows": rows,
        "int8": quantise(trace(encoder, "exact"), vocabulary_feeds(encoder.text_encoder), one_row(encoder)),
    }
    serialised = {name: model.SerializeToString() for name, model in models.items()}
    if former:
        bundle = Bundle.load(former)
        serialised["int8 of the former bundle"] = bundle.graph("int8").read_bytes()
    return serialised


def batches(data: Path, encoder: TextEncoder) -> tuple[list[Batch], int]:
    """Batches of padded token ids, and the number of texts in them."""
    pairs = load_pairs(data / "senteval/downstream/STS/STSBenchmark/sts-dev.csv")
    texts = sorted({*pairs.left, *pairs.right})[:: 2 * len(pairs) // SENTENCES][:SENTENCES]
    for folder in find_collections(data):
        texts += load_collection(folder).documents[:DOCUMENTS]
    sequences = [tokens.ids for tokens in encoder.encode(texts)]
    parts = token_batches([len(ids) for ids in sequences], BATCH_TOKENS)
    return [encoder.pad([sequences[row] for row in rows]) for rows in parts], len(texts)


def measure(models: dict[str, bytes], work: Sequence[Batch], rounds: int, count: int) -> dict[str, float]:
    """Seconds that each graph takes for all batches, one batch at a time with `count` threads."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = count
    options.add_session_config_entry("session.force_spinning_stop", "1")  # as in the service
    sessions = {name: ort.InferenceSession(model, options) for name, model in models.items()}
    seconds = dict.fromkeys(sessions, 0.0)
    for batch in work:
        best = dict.fromkeys(sessions, float("inf"))
        for _ in range(rounds):
            for name, session in sessions.items():
                started = time.perf_counter()
                session.run(None, batch._asdict())
                best[name] = min(best[name], time.perf_counter() - started)
        for name, fastest in best.items():
            seconds[name] += fastest
    return seconds


def table(results: dict[str, Any]) -> str:
    plain = next(iter(results["speeds"].values()))
    rows = [(name, f"{speed:.0f}", f"{speed / plain:.2f}") for name, speed in results["speeds"].items()]
    return markdown_table(["graph", "sentences per second", "relative to plain"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="finished run whose model is exported and timed")
    parser.add_argument("--data", type=Path, required=True, help="folder with senteval/downstream and retrieval")
    parser.add_argument("--former", help="another bundle whose int8 graph is timed too")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=share_threads(0).per_batch, help="threads of each graph")
    options = parser.parse_args()
    encoder = SentenceEncoder.load(str(options.run / "model"), max_tokens=256)
    work, count = batches(options.data, encoder.text_encoder)
    seconds = measure(graphs(encoder, options.former), work, options.rounds, options.threads)
    results = {
        "texts": f"{count} texts, {sum(int(batch.attention_mask.sum()) for batch in work) / count:.0f} tokens each",
        "machine": f"{processor()}, {options.threads} of {available_cpus()} CPUs",
        "versions": versions(PACKAGES),
        "speeds": {name: count / total for name, total in seconds.items()},
    }
    RESULTS.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
