"""Run sentence-transformers behind a pipe: each input line is a JSON list of texts, each output line the result.

    PYTHON benchmarks/encode.py MODEL BACKEND

An output line has the seconds of `encode` and the vectors. This file imports nothing from Cloze, so that it can run in
another environment.
"""

import json
import os
import sys
import time


def main(model: str, backend: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print to stdout write to stderr instead
    from sentence_transformers import SentenceTransformer

    options = {} if backend == "torch" else {"model_kwargs": {"file_name": "model.onnx"}}
    encoder = SentenceTransformer(model, device="cpu", backend=backend, **options)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        texts = json.loads(line)
        began = time.perf_counter()
        vectors = encoder.encode(texts, batch_size=32, show_progress_bar=False)
        seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "vectors": vectors.tolist()}), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
