"""Every method of the papers from one parent, on the same sentences: methods.md beside this file.

python -m benchmarks.methods run --data DATA --parent MLM --sentence-encoder ENCODER [ROW ...]
python -m benchmarks.methods table

methods.toml says which rows there are. `run` trains and scores the rows named, or all, and writes results/methods/; a
row whose figures lie in the folder of runs is done, so that a run that was killed goes on. `table` writes methods.md.
"""

import argparse
import json
import shutil
import tomllib
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.machine import processor, threads, versions
from training import fit
from training.evaluate import STS_TASKS, average, load_tasks, sts_dev
from training.model.encoder import SentenceEncoder
from training.model.pooling import Embed, token_batches
from training.model.pretrained import fastest_device
from training.options import flag
from training.templates.__main__ import main as search_templates

HERE = Path(__file__).parent
PLAN = tomllib.loads((HERE / "methods.toml").read_text(encoding="utf-8"))
RESULTS = HERE / "results" / "methods"
PAGE = HERE / "methods.md"
TASKS = ("STS-B dev", *STS_TASKS)
COLUMNS = (*TASKS, "Avg.")

Row = dict[str, Any]


def rows() -> dict[str, Row]:
    return {name: row for name, row in PLAN.items() if "title" in row}


# --- run -------------------------------------------------------------------------------------------------------------


def run(name: str, row: Row, options: argparse.Namespace) -> None:
    """Train (where the row has a recipe) or search, score, write results/methods/NAME.json."""
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
    """One run of `training.fit` and its scores; a run that is there already is only scored."""
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
    """Keys as words of the command line."""
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
    """Means over tokens of the embedding layer and the last layer, averaged: the papers' `first-last avg.`"""

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
    """Every task, each distinct sentence embedded once: STS-B is made of sentences of the others."""
    tasks = load_tasks(data, TASKS)
    texts = sorted({text for pairs in tasks.values() for text in (*pairs.left, *pairs.right)})
    vectors = dict(zip(texts, embed(texts), strict=True))
    scores = {task: sts_dev(lambda asked: np.stack([vectors[text] for text in asked]), tasks[task]) for task in tasks}
    return scores | {"Avg.": average(scores)}


# --- table -----------------------------------------------------------------------------------------------------------


def page() -> str:
    """methods.md, whole."""
    found = {name: json.loads(path.read_text(encoding="utf-8")) for name in rows() if (path := _file(name)).is_file()}
    parts = [PLAN["page"]["intro"].strip()]
    for group, names in groupby((name for name in rows() if name in found), key=lambda name: rows()[name]["group"]):
        table = _templates if group == "Templates" else _table
        parts.append(f"## {group}\n\n" + table({name: found[name] for name in names}))
    orders = [order for order in PLAN["page"]["orders"] if {order["better"], order["worse"]} <= found.keys()]
    parts.append("## What shows\n\n" + "\n".join(_order(order, found) for order in orders))
    parts.append(PLAN["page"]["limits"].strip())
    machines = sorted({_setting(results) for results in found.values() if "machine" in results})
    parts.append("Machine: " + "; ".join(machines) + ".")
    return "\n\n".join(parts) + "\n"


def _table(found: dict[str, Any]) -> str:
    head = ["", "dev before", *COLUMNS, "seeds", "sentences", "seconds", "paper's Avg."]
    lines = [f"| {' | '.join(head)} |", "| --- |" + " ---: |" * (len(head) - 1)]
    for name, results in found.items():
        row, runs = rows()[name], results["runs"]
        cells = [row["title"], _spread([one["before"] for one in runs]) if "before" in runs[0] else ""]
        cells += [_spread([one["scores"][column] for one in runs]) for column in COLUMNS]
        if "seed" in runs[0]:
            cells += [str(len(runs)), f"{runs[0]['sentences']:,}", f"{mean(one['seconds'] for one in runs):.0f}"]
        else:
            cells += ["", "", ""]
        paper = row.get("paper")
        cells.append(f"{paper['average']:.2f} ({paper['of']})" if paper else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _templates(found: dict[str, Any]) -> str:
    """Table 4 of PromptBERT: greedy search, best first."""
    (search,) = found.values()
    papers = PLAN["page"]["table_4"]
    lines = ["| template | STS-B dev | the paper's |", "| --- | ---: | ---: |"]
    for row in search["templates"]:
        paper = papers.get(row["template"])
        lines.append(f"| `{row['template']}` | {row['score']:.2f} | {f'{paper:.2f}' if paper else ''} |")
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{mean(values):.2f} ± {stdev(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _order(order: dict[str, str], found: dict[str, Any]) -> str:
    """One line: whether a paper's order of two methods shows here, and by how much."""
    better, worse = ([run["scores"] for run in found[order[side]]["runs"]] for side in ("better", "worse"))
    gaps = {
        column: mean(one[column] for one in better) - mean(one[column] for one in worse)
        for column in ("STS-B dev", "Avg.")
    }
    verdict = "shows" if min(gaps.values()) > 0 else "does not show" if max(gaps.values()) <= 0 else "is undecided"
    figures = ", ".join(
        f"{gap:+.2f} on {'the average' if column == 'Avg.' else column}" for column, gap in gaps.items()
    )
    return f"- {order['claim']}: {verdict} here ({figures}; the paper: {order['paper']})."


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
