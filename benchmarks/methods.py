"""Train every method of the papers from one parent on the same sentences, and write methods.md.

python -m benchmarks.methods run --data DATA --parent MLM --sentence-encoder ENCODER [ROW ...]
python -m benchmarks.methods table

methods.toml lists the rows. `run` trains and scores the named rows, or all, and writes results/methods/. It skips a row
whose figures are already in the folder of runs, so an interrupted run can be started again. `table` writes methods.md.
"""

import argparse
import json
import shutil
import tomllib
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import ttest_1samp

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
PAGE = HERE / "methods.md"
TASKS = ("STS-B dev", *STS_TASKS)
COLUMNS = (*TASKS, "Avg.")
SEED_NOISE = 1.2  # sqrt(2) * 0.86, the largest standard deviation between seeds that the papers report

Row = dict[str, Any]


class Difference(NamedTuple):
    """How much one row is above another: the mean over the test sets, and its 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """Whether the difference exceeds the variation between test sets and the noise of one seed."""
        if self.low > SEED_NOISE:
            return "shown"
        return "reversed" if self.high < -SEED_NOISE else "undecided"


def rows() -> dict[str, Row]:
    return {name: row for name, row in PLAN.items() if "title" in row}


# --- run -------------------------------------------------------------------------------------------------------------


def run(name: str, row: Row, options: argparse.Namespace) -> None:
    """Train if the row has a recipe, or search for templates; score, and write results/methods/NAME.json."""
    source = str(options.sentence_encoder if row.get("encoder") == "sentences" else options.parent)
    if "search" in row:
        words = [source, "--dev", str(_dev(options.data)), "--json", str(_file(name)), *row["search"]]
        return search_templates(words)
    results = {
        "machine": f"{processor()}, CPUs: {threads()}",
        "versions": versions(("torch", "transformers")),
    }
    if "recipe" in row:
        results["runs"] = [_train(name, row, source, seed, options) for seed in row.get("seeds", [None])]
    else:
        results["runs"] = [{"scores": _scores(_untuned(source, **row["read"]), options.data)}]
    _file(name).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return None


def _train(name: str, row: Row, source: str, seed: int | None, options: argparse.Namespace) -> dict[str, Any]:
    """Train one run with `training.fit` and score it. A finished run is scored without training."""
    out = options.runs / (name if seed is None else f"{name}-{seed}")
    keys = PLAN["training"] | {
        "encoder": source,
        "dev": str(_dev(options.data)),
        **_corpus(row, options.data),
        **row.get("keys", {}),
    }
    keys = {key: source if value == "PARENT" else value for key, value in keys.items()}
    if seed is not None:
        keys["seed"] = seed
    if not (out / "run.json").is_file():
        fit.main([row["recipe"], "--out", str(out), *_words({key: keys[key] for key in keys if keys[key] is not None})])
    record = json.loads((out / "run.json").read_text(encoding="utf-8"))
    log = map(json.loads, (out / "log.jsonl").read_text(encoding="utf-8").splitlines())
    before = next(entry["eval_dev_spearman"] for entry in log if "eval_dev_spearman" in entry)
    return {
        "scores": _scores(SentenceEncoder.load(str(out / "model")).to(fastest_device()).embed, options.data),
        "before": round(before, 2),
        "seed": record["recipe"]["seed"],
        "steps": record["steps"],
        "best_step": record["best_step"],
        "sentences": record["steps"] * record["recipe"]["batch_size"],
        "seconds": record["seconds"],
        "recipe": {key: value for key, value in record["recipe"].items() if key not in ("corpus", "dev", "encoder")},
        "commit": record["commit"],
    }


def _dev(data: Path) -> Path:
    return data / "senteval/downstream/STS/STSBenchmark/sts-dev.csv"


def _corpus(row: Row, data: Path) -> dict[str, Any]:
    if row.get("triplets"):
        triplets = {"corpus": [str(data / "snli_devtest_triplets.csv")], "columns": ["sent0", "sent1", "hard_neg"]}
        return triplets | {"sentences": None, "min_words": None, "max_words": None, "epochs": 3.3}
    return {
        "corpus": [str(data / "corpus" / f"{name}.txt") for name in ("enwiki_sentences", "multi30k_captions_nosts")]
    }


def _words(keys: dict[str, Any]) -> list[str]:
    """Recipe keys as command-line arguments."""
    words = []
    for key, value in keys.items():
        if isinstance(value, bool):
            words.append(flag(key) if value else flag(f"no_{key}"))
        else:
            words += [flag(key), *map(str, value if isinstance(value, list) else [value])]
    return words


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


# --- table -----------------------------------------------------------------------------------------------------------


def page() -> str:
    """The complete text of methods.md."""
    found = {name: json.loads(path.read_text(encoding="utf-8")) for name in rows() if (path := _file(name)).is_file()}
    parts = [PLAN["page"]["intro"].strip()]
    for group, names in groupby((name for name in rows() if name in found), key=lambda name: rows()[name]["group"]):
        table = _templates if group == "Templates" else _table
        parts.append(f"## {group}\n\n" + table({name: found[name] for name in names}))
    parts.append(f"## The papers' claims\n\n{PLAN['page']['claims'].strip()}\n\n{_claims(found)}")
    parts.append(PLAN["page"]["limits"].strip())
    machines = sorted({_setting(results) for results in found.values() if "machine" in results})
    parts.append("Machine: " + "; ".join(machines) + ".")
    return "\n\n".join(parts) + "\n"


def _table(found: dict[str, Any]) -> str:
    head = ["", "dev before", *COLUMNS, "seeds", "sentences", "paper's Avg."]
    lines = [f"| {' | '.join(head)} |", "| --- |" + " ---: |" * (len(head) - 1)]
    for name, results in found.items():
        row, runs = rows()[name], results["runs"]
        cells = [row["title"], _spread([one["before"] for one in runs]) if "before" in runs[0] else ""]
        cells += [_spread([one["scores"][column] for one in runs]) for column in COLUMNS]
        if "seed" in runs[0]:
            cells += [str(len(runs)), f"{runs[0]['sentences']:,}"]
        else:
            cells += ["", ""]
        paper = row.get("paper")
        cells.append(f"{paper['average']:.2f} ({paper['of']})" if paper else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _templates(found: dict[str, Any]) -> str:
    """The greedy search of PromptBERT's table 4, best template first."""
    (search,) = found.values()
    papers = PLAN["page"]["table_4"]
    lines = [PLAN["page"]["templates"].strip(), "", "| template | STS-B dev | the paper's |", "| --- | ---: | ---: |"]
    for row in search["templates"]:
        paper = papers.get(row["template"])
        lines.append(f"| `{row['template']}` | {row['score']:.2f} | {f'{paper:.2f}' if paper else ''} |")
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{mean(values):.2f} ± {stdev(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _claims(found: dict[str, Any]) -> str:
    """The table of the papers' claims: each difference with its interval and verdict."""
    lines = [
        "| claim | difference | 95 % interval | STS-B dev | the paper's (between seeds) | verdict |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for order in PLAN["page"]["orders"]:
        if {order["better"], order["worse"]} <= found.keys():
            better, worse = (_means(found[order[side]]) for side in ("better", "worse"))
            gap = difference([better[task] for task in STS_TASKS], [worse[task] for task in STS_TASKS])
            cells = [
                order["claim"],
                _signed(gap.mean),
                f"{_signed(gap.low)} to {_signed(gap.high)}",
                _signed(better["STS-B dev"] - worse["STS-B dev"]),
                f"{order['paper']} ({order['seeds']})",
                gap.verdict,
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def difference(better: Sequence[float], worse: Sequence[float]) -> Difference:
    """Paired difference of two rows over the same test sets, with the 95 % Student t interval of its mean."""
    gaps = np.subtract(better, worse)
    interval = ttest_1samp(gaps, 0).confidence_interval(0.95)
    return Difference(float(gaps.mean()), float(interval.low), float(interval.high))


def _means(results: dict[str, Any]) -> dict[str, float]:
    """The row's score on each task, averaged over its runs."""
    return {task: mean(run["scores"][task] for run in results["runs"]) for task in TASKS}


def _signed(value: float) -> str:
    return f"{round(value, 2) + 0.0:+.2f}"  # + 0.0 turns -0.0 into 0.0


def _setting(results: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    return f"{results['machine']}; {versions}"


def _file(name: str) -> Path:
    return RESULTS / f"{name}.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run", help="train and score")
    runner.add_argument("rows", nargs="*", metavar="ROW", choices=[[], *rows()], help="default: all")
    runner.add_argument("--data", type=Path, required=True, help="folder that holds corpus/ and senteval/")
    runner.add_argument("--parent", type=Path, required=True, help="encoder with a masked-word head")
    runner.add_argument("--sentence-encoder", type=Path, required=True, help="all-MiniLM-L6-v2")
    runner.add_argument("--runs", type=Path, default=Path("runs/methods"), help="default: %(default)s")
    commands.add_parser("table", help="write methods.md")
    options = parser.parse_args()
    if options.command == "run":
        options.runs.mkdir(parents=True, exist_ok=True)
        RESULTS.mkdir(parents=True, exist_ok=True)
        for name in options.rows or rows():
            done = options.runs / f"{name}.json"
            if not done.is_file():
                run(name, rows()[name], options)
                shutil.copyfile(_file(name), done)
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
