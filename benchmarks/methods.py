"""Train every method of the papers from one parent on the same sentences, with several seeds.

python -m benchmarks.methods --data DATA --parent MLM --generator SMALL_MLM --encoder ENCODER [--jobs 2] [ROW ...]

methods.toml lists the rows, and `python -m benchmarks.methods_report` writes methods.md. First each row's learning rate
is chosen on STS-B dev with the first seed, then all rows are trained with one seed after the other. Each run is kept in
results/methods/ at once and is not repeated, so the command can be stopped at any time and started again, also on
another machine with a parent of its own: then it goes on with a seed that no row has yet. Rows are compared within a
seed, and all rows of a seed have one parent.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from encoding.options import flag
from training import fit
from training.evaluate import STS_TASKS, average, load_tasks, sts_dev
from training.evaluate.machine import processor, threads, versions
from training.model.encoder import SentenceEncoder
from training.model.pooling import Embed, token_batches
from training.model.pretrained import fastest_device
from training.templates.__main__ import main as search_templates

HERE = Path(__file__).parent
PLAN = tomllib.loads((HERE / "methods.toml").read_text(encoding="utf-8"))
RESULTS = HERE / "results" / "methods"
TASKS = ("STS-B dev", *STS_TASKS)
KEEPING = Lock()  # jobs add to the same files

Row = dict[str, Any]
Results = dict[str, Any]


def rows() -> dict[str, Row]:
    """The rows of the page, in its order."""
    return {name: row for name, row in PLAN.items() if "title" in row}


def results(name: str) -> Results:
    """What is measured of a row so far; without a run, {"runs": []}."""
    file = RESULTS / f"{name}.json"
    return {"runs": []} | (json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {})


def _keep(name: str, found: Results) -> None:
    text = json.dumps(found | {"versions": versions(("torch", "transformers"))}, indent=2)
    (RESULTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")


# --- the order of the runs -------------------------------------------------------------------------------------------


def main() -> None:
    options = _options()
    for folder in (options.runs, RESULTS):
        folder.mkdir(parents=True, exist_ok=True)
    if options.one:
        name, seed, rate = options.one
        measured = (_trial if options.trial else _run)(name, int(seed), float(rate), options)
        return print(json.dumps(measured))
    chosen = {name: rows()[name] for name in options.rows or rows()}
    for name, row in chosen.items():
        if "recipe" not in row and digest(_source(row, options)) not in [
            run["parent"] for run in results(name)["runs"]
        ]:
            _measure_untrained(name, row, options)
    with ThreadPoolExecutor(options.jobs) as pool:
        trained = [name for name, row in chosen.items() if "recipe" in row]
        rates = [(name, rate) for name in trained for rate in rows()[name].get("rates", [])]
        _wait(pool.submit(_try_rate, name, rate, options) for name, rate in rates)
        for seed in PLAN["seeds"]:
            _wait(pool.submit(_add_run, name, seed, options) for name in trained)
    return None


def _wait(jobs: Iterable[Future[None]]) -> None:
    for job in list(jobs):
        job.result()


def _try_rate(name: str, rate: float, options: argparse.Namespace) -> None:
    """Record the dev score of one learning rate after a short run."""
    if str(rate) not in results(name).get("rates", {}):
        measured = _in_own_process(name, PLAN["seeds"][0], rate, options, "--trial")
        with KEEPING:
            found = results(name)
            _keep(name, found | {"rates": found.get("rates", {}) | {str(rate): measured["scores"]["STS-B dev"]}})


def best_rate(name: str) -> float:
    """The rate with the best dev score, or `rate` before all are tried; `like` names a row with the same rate."""
    row, tried = rows()[name], results(name).get("rates", {})
    if "like" in row:
        return best_rate(row["like"])
    chosen = "rates" in row and len(tried) == len(row["rates"])
    return float(max(tried, key=tried.__getitem__) if chosen else row["rate"])


def counted(name: str) -> list[dict[str, Any]]:
    """The runs of a trained row at its chosen learning rate."""
    rate = best_rate(name)
    return [run for run in results(name)["runs"] if run["recipe"]["learning_rate"] == rate]


def _add_run(name: str, seed: int, options: argparse.Namespace) -> None:
    """Train a row with a seed and add the scores to its results."""
    runs = counted(name)
    if seed in map(_seed, runs) or len(runs) == rows()[name].get("seeds"):
        return
    parent = digest(_source(rows()[name], options))
    if others := parents_of(seed, rows()[name].get("encoder")) - {parent}:
        print(f"seed {seed} was measured from another parent ({', '.join(others)}); this one is {parent}: seed skipped")
        return
    measured = _in_own_process(name, seed, best_rate(name), options)
    with KEEPING:
        found = results(name)
        _keep(name, found | {"runs": sorted([*found["runs"], measured | {"parent": parent}], key=_seed)})


def parents_of(seed: int, encoder: str | None) -> set[str]:
    """The digests of the parents that rows with this `encoder` had for a seed."""
    same = [name for name, row in rows().items() if "recipe" in row and row.get("encoder") == encoder]
    return {run["parent"] for name in same for run in results(name)["runs"] if run["seed"] == seed}


def _source(row: Row, options: argparse.Namespace) -> Path:
    """The encoder that a row begins with."""
    source: Path = options.encoder if row.get("encoder") == "sentences" else options.parent
    return source


def _seed(run: dict[str, Any]) -> int:
    return int(run["seed"])


def digest(model: Path) -> str:
    """First 16 digits of the SHA-256 of a model's weights."""
    return sha256((model / "model.safetensors").read_bytes()).hexdigest()[:16]


def _in_own_process(name: str, seed: int, rate: float, options: argparse.Namespace, *words: str) -> dict[str, Any]:
    """Train and score in a process of its own, with the processor's cores shared between the jobs."""
    threads = max(1, (os.cpu_count() or 1) // options.jobs)
    command = [sys.executable, "-m", "benchmarks.methods", *sys.argv[1:], "--one", name, str(seed), str(rate), *words]
    log = options.runs / f"{name}-{seed}-{rate}.log"
    with log.open("w", encoding="utf-8") as stream:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=stream,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        )
    if done.returncode:
        raise SystemExit(f"{name}, seed {seed}, learning rate {rate} ended with an error: see {log}")
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{name}, seed {seed}, learning rate {rate:g}: STS-B dev {measured['scores']['STS-B dev']:.2f}", flush=True)
    return measured


# --- one run ---------------------------------------------------------------------------------------------------------


def _measure_untrained(name: str, row: Row, options: argparse.Namespace) -> None:
    """Search for templates, or score the parent's own vectors."""
    source = _source(row, options)
    run: dict[str, Any] = {"parent": digest(source), "machine": f"{processor()}, CPUs: {threads()}"}
    if "search" in row:
        file = options.runs / f"{name}.json"
        search_templates([str(source), "--dev", str(_dev(options.data)), "--json", str(file), *row["search"]])
        found = json.loads(file.read_text(encoding="utf-8"))["templates"]
        run["templates"] = {each["template"]: round(each["score"], 2) for each in found}
    else:
        run["scores"] = _scores(_untuned(str(source), **row["read"]), options.data)
    _keep(name, {"runs": [run]})


def _trial(name: str, seed: int, rate: float, options: argparse.Namespace) -> dict[str, Any]:
    """Train for a third of the steps, and return the best dev score."""
    out = options.runs / f"{name}-{rate}"
    return {"scores": {"STS-B dev": round(_train(name, out, seed, rate, options, PLAN["trial"])["dev_score"], 2)}}


def _run(name: str, seed: int, rate: float, options: argparse.Namespace) -> dict[str, Any]:
    """Train a row with a seed and score it. A finished run is scored without training."""
    out = options.runs / f"{name}-{seed}"
    record = _train(name, out, seed, rate, options, {})
    log = map(json.loads, (out / "log.jsonl").read_text(encoding="utf-8").splitlines())
    dev = [round(entry["eval_dev_spearman"], 2) for entry in log if "eval_dev_spearman" in entry]
    return {
        "seed": seed,
        "scores": _scores(SentenceEncoder.load(str(out / "model")).to(fastest_device()).embed, options.data),
        "before": dev[0],
        "dev": dev,
        "steps": record["steps"],
        "best_step": record["best_step"],
        "sentences": record["steps"] * record["recipe"]["batch_size"],
        "seconds": record["seconds"],
        "machine": f"{processor()}, CPUs: {threads()}",
        "recipe": {k: v for k, v in record["recipe"].items() if k not in ("corpus", "dev", "encoder", "generator")},
        "commit": record["commit"],
    }


def _train(
    name: str, out: Path, seed: int, rate: float, options: argparse.Namespace, changes: dict[str, Any]
) -> dict[str, Any]:
    """Train a row into the folder `out`, if that run is not finished there, and return its record."""
    row = rows()[name]
    source = str(_source(row, options))
    own = {"seed": seed, "learning_rate": rate, "encoder": source, "dev": str(_dev(options.data))}
    keys = PLAN["training"] | own | _corpus(row, options.data) | row.get("keys", {}) | changes
    values = {"PARENT": source, "GENERATOR": str(options.generator)} | dict(
        zip(("BEST", "SECOND"), best_templates(), strict=False)
    )
    keys = {key: values.get(str(value), value) for key, value in keys.items() if value is not None}
    if not (out / "run.json").is_file():
        shutil.rmtree(out, ignore_errors=True)  # of a run that was interrupted
        fit.main([row["recipe"], "--out", str(out), *_words(keys)])
    record: dict[str, Any] = json.loads((out / "run.json").read_text(encoding="utf-8"))
    return record


def best_templates() -> list[str]:
    """The templates of the greedy search, best first."""
    return [template for run in results("templates")["runs"] for template in run["templates"]]


def _dev(data: Path) -> Path:
    return data / "senteval/downstream/STS/STSBenchmark/sts-dev.csv"


def _corpus(row: Row, data: Path) -> dict[str, Any]:
    if row.get("triplets"):
        triplets = {"corpus": [str(data / "snli_devtest_triplets.csv")], "columns": ["sent0", "sent1", "hard_neg"]}
        return triplets | {"sentences": None, "min_words": None, "max_words": None, "epochs": 3.3}
    return {"corpus": [str(data / "corpus" / f"{name}.txt") for name in row.get("corpus", PLAN["corpus"])]}


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
        sequences = [tokens.ids for tokens in encoder.pooling.text_encoder.encode(texts)]
        vectors = np.empty((len(texts), encoder.dimension), dtype=np.float32)
        for places in token_batches([len(ids) for ids in sequences], 8192):
            ids, attention = map(torch.from_numpy, encoder.pooling.text_encoder.pad([sequences[at] for at in places]))
            layers = encoder.backbone(input_ids=ids, attention_mask=attention, output_hidden_states=True).hidden_states
            vectors[places] = encoder.pooling.read((layers[0] + layers[-1]) / 2, attention).numpy()
        return vectors

    return embed


def _scores(embed: Embed, data: Path) -> dict[str, float]:
    """Score every task. Each distinct sentence is embedded once: STS-B shares sentences with the other tasks."""
    tasks = load_tasks(data, TASKS)
    texts = sorted({text for pairs in tasks.values() for text in (*pairs.left, *pairs.right)})
    vectors = dict(zip(texts, embed(texts), strict=True))
    scores = {task: sts_dev(lambda asked: np.stack([vectors[text] for text in asked]), tasks[task]) for task in tasks}
    return scores | {"Avg.": average(scores)}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", choices=[[], *rows()], help="default: all")
    parser.add_argument("--data", type=Path, required=True, help="folder that holds corpus/ and senteval/")
    parser.add_argument("--parent", type=Path, required=True, help="encoder with a masked-word head")
    parser.add_argument("--generator", type=Path, required=True, help="smaller masked language model, for DiffCSE")
    parser.add_argument("--encoder", type=Path, required=True, help="all-MiniLM-L6-v2")
    parser.add_argument("--runs", type=Path, default=Path("runs/methods"), help="default: %(default)s")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: %(default)s)")
    parser.add_argument("--one", nargs=3, metavar=("ROW", "SEED", "RATE"), help=argparse.SUPPRESS)
    parser.add_argument("--trial", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
