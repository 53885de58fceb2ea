"""sentence-transformers behind a pipe: a JSON list of texts a line in, seconds and vectors a line out.

    PYTHON benchmarks/encode.py MODEL BACKEND

Imports nothing of Cloze, so that it runs in an environment of its own.
"""

import json
import os
import sys
import time


def main(model: str, backend: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
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
