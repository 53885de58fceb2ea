"""One run of benchmarks/methods.py: train and score a row of the plan with a seed, or score the untuned parent."""

import json
import shutil
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.methods_plan import Plan, Results, Row
from cloze.encoding.text import token_batches
from cloze.machine import available_cpus, processor
from cloze.options import flag
from cloze.training import fit
from cloze.training.evaluation.measures import Embed
from cloze.training.evaluation.sts import STS_TASKS, average, load_tasks, spearman
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.pooling import pool
from cloze.training.model.pretrained import fastest_device
from cloze.training.recipes.recipe import shipped_recipes
from cloze.training.templates import main as search_templates

__all__ = ["Paths", "digest", "pretraining", "source_of", "trained", "tried", "untrained"]

TASKS: Final = ("STS-B dev", *STS_TASKS)


@dataclass(frozen=True)
class Paths:
    """Where things are: the data, all-MiniLM-L6-v2, and the folder of the runs, the parent's and generator's too."""

    data: Path
    encoder: Path
    runs: Path

    @property
    def parent(self) -> Path:
        return self.runs / "parent" / "model"

    @property
    def dev(self) -> Path:
        return self.data / "senteval/downstream/STS/STSBenchmark/sts-dev.csv"

    def run(self, name: str, seed: int, rate: float) -> Path:
        """The folder of a run."""
        return self.runs / f"{name}-{seed}-{rate:g}"

    def corpus(self, names: Iterable[str]) -> list[str]:
        return [str(self.data / "corpus" / f"{name}.txt") for name in names]


def source_of(row: Row, paths: Paths) -> Path:
    """The encoder that a row begins with."""
    return paths.encoder if row.get("encoder") == "sentences" else paths.parent


def digest(model: Path) -> str:
    """First 16 digits of the SHA-256 of a model's weights."""
    return sha256((model / "model.safetensors").read_bytes()).hexdigest()[:16]


def pretraining(plan: Plan, paths: Paths, role: str) -> list[str]:
    """The arguments of cloze pretrain for the `parent` or the `generator`; an interrupted run is continued."""
    out = paths.runs / role
    if (out / "recipe.toml").is_file():
        return ["--resume", str(out)]
    keys = plan.content["pretraining"] | (plan.content["generator"] if role == "generator" else {})
    keys |= {"encoder": str(paths.encoder), "corpus": paths.corpus(keys["corpus"])}
    return ["--out", str(out), *_words(_filled(keys, plan, paths))]


def untrained(plan: Plan, paths: Paths, name: str) -> Results:
    """Search for templates, or score the parent's own vectors."""
    row = plan.rows[name]
    source = source_of(row, paths)
    run: Results = {"parent": digest(source), "machine": f"{processor()}, CPUs: {available_cpus()}"}
    if "search" in row:
        file = paths.runs / f"{name}.json"
        search_templates([str(source), "--dev", str(paths.dev), "--json", str(file), *row["search"]])
        templates = json.loads(file.read_text(encoding="utf-8"))["templates"]
        run["templates"] = {candidate["template"]: round(candidate["score"], 2) for candidate in templates}
    else:
        run["scores"] = _scores(_untuned(str(source), **row["read"]), paths.data)
    return run


def tried(plan: Plan, paths: Paths, name: str, rate: float) -> Results:
    """The best dev score of a row with the first seed and a learning rate."""
    record = _train(plan, paths, name, plan.content["seeds"][0], rate)
    return {"dev": round(record["dev_score"], 2)}


def trained(plan: Plan, paths: Paths, name: str, seed: int) -> Results:
    """Train a row with a seed and its best rate, and score it. A finished run is scored without training."""
    rate = plan.best_rate(name)
    out, record = paths.run(name, seed, rate), _train(plan, paths, name, seed, rate)
    log = map(json.loads, (out / "log.jsonl").read_text(encoding="utf-8").splitlines())
    dev = [round(entry["eval_dev_spearman"], 2) for entry in log if "eval_dev_spearman" in entry]
    return {
        "seed": seed,
        "scores": _scores(SentenceEncoder.load(str(out / "model")).to(fastest_device()).embed, paths.data),
        "before": dev[0],
        "dev": dev,
        "steps": record["steps"],
        "best_step": record["best_step"],
        "sentences": record["steps"] * record["recipe"]["batch_size"],
        "seconds": record["seconds"],
        "machine": f"{processor()}, CPUs: {available_cpus()}",
        "recipe": {k: v for k, v in record["recipe"].items() if k not in ("corpus", "dev", "encoder", "generator")},
        "commit": record["commit"],
        "parent": digest(source_of(plan.rows[name], paths)),
    }


def _train(plan: Plan, paths: Paths, name: str, seed: int, rate: float) -> Results:
    """Train a row, or continue its run, and return the run's record.

    Ends the process with status 130 if it is interrupted.
    """
    row, out = plan.rows[name], paths.run(name, seed, rate)
    own = {"seed": seed, "learning_rate": rate, "encoder": str(source_of(row, paths)), "dev": "DEV"}
    recipe = tomllib.loads(shipped_recipes()[row["recipe"]])
    own |= {"template": recipe.get("template", "[X]"), "pooling": recipe["pooling"]}  # whatever the parent's are
    keys = plan.content["training"] | own | _corpus(plan, row, paths) | row.get("keys", {})
    if not (out / "run.json").is_file():
        fresh = [row["recipe"], "--out", str(out), *_words(_filled(keys, plan, paths))]
        if code := fit.main(["--resume", str(out)] if (out / "recipe.toml").is_file() else fresh):
            raise SystemExit(code)
    _drop_checkpoints(out)
    record: Results = json.loads((out / "run.json").read_text(encoding="utf-8"))
    return record


def _drop_checkpoints(run: Path) -> None:
    """Delete what only an unfinished run needs: up to 1.2 GB, and the plan has some 100 runs."""
    for checkpoint in run.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    (run / "best.safetensors").unlink(missing_ok=True)


def _filled(keys: dict[str, Any], plan: Plan, paths: Paths) -> dict[str, Any]:
    """The keys that are set, with paths and templates for the words that stand for them."""
    generator = str(paths.runs / "generator" / "model")
    values = {"PARENT": str(paths.parent), "GENERATOR": generator, "DEV": str(paths.dev)}
    if "BEST" in keys.values():
        values |= zip(("BEST", "SECOND"), plan.best_templates(digest(paths.parent)), strict=False)
    return {key: values.get(str(value), value) for key, value in keys.items() if value not in (None, [])}


def _corpus(plan: Plan, row: Row, paths: Paths) -> dict[str, Any]:
    if row.get("triplets"):
        triplets = {
            "corpus": [str(paths.data / "snli_devtest_triplets.csv")],
            "columns": ["sent0", "sent1", "hard_neg"],
        }
        return triplets | {"sentences": None, "min_words": None, "max_words": None, "epochs": 1.1}
    return {"corpus": paths.corpus(row.get("corpus", plan.content["corpus"]))}


def _words(keys: dict[str, Any]) -> list[str]:
    """Recipe keys as command-line arguments."""
    return list(chain.from_iterable(_argument(key, value) for key, value in keys.items()))


def _argument(key: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag(key) if value else flag(f"no_{key}")]
    return [flag(key), *map(str, value if isinstance(value, list) else [value])]


def _untuned(source: str, first_and_last: bool = False, **config: Any) -> Embed:
    encoder = SentenceEncoder.load(source, **config)
    return _first_and_last(encoder) if first_and_last else encoder.to(fastest_device()).embed


def _first_and_last(encoder: SentenceEncoder) -> Embed:
    """Average of the token means of the embedding layer and the last layer: the papers' `first-last avg.`"""

    @torch.no_grad()
    def embed(texts: Sequence[str]) -> NDArray[np.float32]:
        sequences = [tokens.ids for tokens in encoder.text_encoder.encode(texts)]
        vectors = np.empty((len(texts), encoder.dimension), dtype=np.float32)
        for places in token_batches([len(ids) for ids in sequences], 8192):
            ids, attention = map(torch.from_numpy, encoder.text_encoder.pad([sequences[at] for at in places]))
            layers = encoder.backbone(input_ids=ids, attention_mask=attention, output_hidden_states=True).hidden_states
            vectors[places] = pool((layers[0] + layers[-1]) / 2, attention, encoder.config.pooling).numpy()
        return vectors

    return embed


def _scores(embed: Embed, data: Path) -> dict[str, float]:
    """Score every task. Each distinct sentence is embedded once: STS-B shares sentences with the other tasks."""
    tasks = load_tasks(data, TASKS)
    texts = sorted({text for pairs in tasks.values() for text in (*pairs.left, *pairs.right)})
    vectors = dict(zip(texts, embed(texts), strict=True))

    def look_up(sentences: Sequence[str]) -> NDArray[np.float32]:
        return np.stack([vectors[text] for text in sentences])

    scores = {task: round(spearman(look_up, pairs), 2) for task, pairs in tasks.items()}
    return scores | {"Avg.": average(scores)}
