"""Measure the recipe `mask`: how near an encoder comes to its own vectors at [MASK], and in how many seconds.

    python -m benchmarks.mask --encoder ENCODER --data DATA

The text is 2,000 sentences of Wikipedia. The command writes benchmarks/results/mask.json.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Final

from cloze.machine import available_cpus, processor
from cloze.training.data.corpus import read_lines
from cloze.training.evaluation.sts import load_pairs, spearman
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.run_folder import Run

RESULTS: Final = Path(__file__).parent / "results" / "mask.json"
SENTENCES: Final = 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", required=True)
    parser.add_argument("--data", type=Path, required=True)
    options = parser.parse_args()
    lines = list(read_lines(options.data / "corpus" / "enwiki_sentences.txt"))
    with tempfile.TemporaryDirectory() as folder:
        corpus, out = Path(folder, "sentences.txt"), Path(folder, "run")
        corpus.write_text("".join(random.Random(0).sample(lines, SENTENCES)), encoding="utf-8")
        words = ["mask", "--encoder", options.encoder, "--corpus", str(corpus), "--out", str(out)]
        began = time.monotonic()
        subprocess.run([sys.executable, "-m", "cloze.training.fit", *words], check=True)
        seconds = time.monotonic() - began
        provenance = Run(out).provenance()
        dev = load_pairs(options.data / "senteval" / "downstream" / "STS" / "STSBenchmark" / "sts-dev.csv")
        parent = SentenceEncoder.load(options.encoder, template="[X]", pooling="mean")
        trained = SentenceEncoder.load(str(out))
        template = {"template": trained.config.template, "pooling": "mask"}
        start = SentenceEncoder.load(options.encoder, **template)
        scores = {name: spearman(encoder.embed, dev) for name, encoder in (("parent", parent), ("start", start))}
        scores["trained"] = spearman(trained.embed, dev)
    results = {
        "machine": f"{processor()}, {available_cpus()} CPUs",
        "cloze": version("cloze"),
        "date": datetime.now(UTC).date().isoformat(),
        "versions": provenance["versions"],
        "encoder": Path(options.encoder).name,
        "sentences": SENTENCES,
        "held_out": provenance["held_out"],
        "steps": provenance["steps"],
        "seconds": round(seconds, 1),
        "cosine": round(1 - provenance["held_out_cosine_distance"], 4),
        "sts_b_dev": {name: round(score, 2) for name, score in scores.items()},
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
