"""Compare the training speed of Cloze and sentence-transformers: SimCSE with the same encoder, texts and loss.

    python -m benchmarks.training --parent MODEL --data DATA [--steps 20] [--rounds 3]

Both train in fp32 on sentences of Wikipedia and image captions, 64 per step, truncated to 64 tokens, with mean pooling.
A sentence under two dropout masks is a positive pair, and the other sentences of the step are negatives. The trainers
take turns, and each run is a process of its own. The time between its first and its last step is measured, and ratios
are computed for each round. The command writes benchmarks/results/training.json and prints its table.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Final

from cloze.machine import available_cpus, processor, versions
from cloze.training.evaluation.tables import markdown_table

RESULTS: Final = Path(__file__).parent / "results" / "training.json"
PACKAGES: Final = ("torch", "transformers", "sentence-transformers")
CORPORA: Final = ("enwiki_sentences.txt", "multi30k_captions_nosts.txt")
BATCH: Final = 64
MAX_TOKENS: Final = 64
WARM: Final = 3  # steps before the clock starts
RATE: Final = 1e-5


def texts(data: Path, steps: int) -> list[str]:
    """Different sentences for this number of steps, drawn evenly from the corpora."""
    count = BATCH * steps // len(CORPORA)
    sentences = []
    for name in CORPORA:
        lines = (data / "corpus" / name).read_text(encoding="utf-8").split("\n")
        lines = sorted({line for line in lines if len(line.split()) > 2})
        sentences += lines[:: len(lines) // count][:count]
    return sentences


def ours(parent: str, corpus: Path, steps: int) -> float:
    """Seconds of the steps after the first WARM ones, with Cloze's trainer."""
    from transformers import TrainerCallback

    from cloze.training.loop.prepare import prepare
    from cloze.training.loop.processes import keep_memory
    from cloze.training.loop.trainer import ObjectiveTrainer, training_arguments
    from cloze.training.recipes.command import load_recipe

    keys = {
        "encoder": parent, "corpus": [str(corpus)], "pooling": "mean", "template": "[X]", "batch_size": BATCH,
        "max_tokens": MAX_TOKENS, "max_steps": steps, "learning_rate": RATE, "held_out": 0, "eval_steps": 1000000,
    }  # fmt: skip
    recipe = load_recipe("simcse", keys)
    keep_memory()
    corpus_, _, objective = prepare(recipe)
    with tempfile.TemporaryDirectory() as folder:
        arguments = training_arguments(recipe, Path(folder), None)
        arguments.save_strategy = "no"
        trainer = ObjectiveTrainer(objective, corpus_, arguments)
        clock = _clock(TrainerCallback)
        trainer.add_callback(clock)
        trainer.train()
    return float(clock.seconds)


def theirs(parent: str, corpus: Path, steps: int) -> float:
    """The same with SentenceTransformerTrainer and MultipleNegativesRankingLoss."""
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from transformers import TrainerCallback

    lines = corpus.read_text(encoding="utf-8").split("\n")
    model = SentenceTransformer(parent, device="cpu")
    model.max_seq_length = MAX_TOKENS
    with tempfile.TemporaryDirectory() as folder:
        arguments = SentenceTransformerTrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=BATCH, learning_rate=RATE, use_cpu=True,
            save_strategy="no", report_to=[], disable_tqdm=True, optim="adamw_torch_fused", dataloader_drop_last=True,
        )  # fmt: skip
        trainer = SentenceTransformerTrainer(
            model=model,
            args=arguments,
            train_dataset=Dataset.from_dict({"anchor": lines, "positive": lines}),
            loss=MultipleNegativesRankingLoss(model),
        )
        clock = _clock(TrainerCallback)
        trainer.add_callback(clock)
        trainer.train()
    return float(clock.seconds)


def _clock(base: Any) -> Any:
    """A callback that times the steps after the first WARM."""

    class Clock(base):  # type: ignore[misc]
        seconds = 0.0
        began = 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            now = time.perf_counter()
            if state.global_step == WARM:
                self.began = now
            self.seconds = now - self.began

    return Clock()


TRAINERS: Final[dict[str, Callable[[str, Path, int], float]]] = {"sentence-transformers": theirs, "Cloze": ours}


def table(results: dict[str, Any]) -> str:
    first, rows = next(iter(results["speeds"].values())), []
    for name, speeds in results["speeds"].items():
        ratios = [speed / base for speed, base in zip(speeds, first, strict=True)]
        spread = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        rows.append((name, f"{median(speeds):.1f}", spread))
    return markdown_table(["", "sentences per second", "ratio, median (lowest to highest)"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parent", required=True, help="encoder that both train")
    parser.add_argument("--data", type=Path, required=True, help="folder that contains corpus")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trainer", choices=TRAINERS, help=argparse.SUPPRESS)  # one run, in its own process
    parser.add_argument("--corpus", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trainer:
        seconds = TRAINERS[options.trainer](options.parent, options.corpus, options.steps)
        print(json.dumps(BATCH * (options.steps - WARM) / seconds))
        return
    speeds: dict[str, list[float]] = {name: [] for name in TRAINERS}
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "corpus.txt")
        corpus.write_text("\n".join(texts(options.data, options.steps)), encoding="utf-8")
        for number in range(options.rounds):
            for name in TRAINERS:
                command = [sys.executable, "-m", "benchmarks.training", "--parent", options.parent, "--trainer", name]
                command += ["--data", str(options.data), "--corpus", str(corpus), "--steps", str(options.steps)]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                speeds[name].append(json.loads(done.stdout.splitlines()[-1]))
                print(f"round {number + 1}: {name} {speeds[name][-1]:.1f} sentences per second", flush=True)
    results = {
        "texts": f"{BATCH * options.steps} sentences of {' and '.join(CORPORA)}, {BATCH} per step",
        "code": f"Cloze {version('cloze')}",
        "machine": f"{processor()}, {available_cpus()} CPUs",
        "versions": versions(PACKAGES),
        "speeds": speeds,
    }
    RESULTS.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
