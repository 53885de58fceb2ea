"""Write the figures of README.md, and figures.md, from the shipped model's scores and the recorded results.

python -m benchmarks.readme
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from types import ModuleType
from typing import Any

from benchmarks import graphs, mask, serving, serving_report, training
from cloze.encoding.bundle import Bundle
from cloze.training.evaluation.tables import digits, markdown_table
from cloze.training.evaluation.task import search_columns

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
MODEL = ROOT / "models" / "cloze-mini"
PAGE = Path(__file__).parent / "figures.md"
RESULTS = Path(__file__).parent / "results"
PARENT = RESULTS / "all-MiniLM-L6-v2.json"
TRANSFER = ("MR", "CR", "SUBJ", "MPQA", "SST-2", "TREC", "MRPC")
CLASSIFICATION = "classification average"
STS = ("STS12", "STS13", "STS14", "STS15", "STS16", "STS-B", "SICK-R", "Avg.")
LONGER = "infinity, ONNX"  # it truncates by the positions of the model, whatever its other files say
LARGE = 8  # connections of 32 texts, above which infinity sorts a longer queue
AVX2 = RESULTS / "serving_avx2.json"  # of `make bench` on a CPU without AVX-512; there its only library was torch
CARD = "models/cloze-mini/README.md#how-it-was-made"
BEGIN, END = "<!-- figures: made by benchmarks/readme.py -->\n", "<!-- end of figures -->"


def with_figures(page: str) -> str:
    """README.md with its figures replaced by the current ones."""
    before, rest = page.split(BEGIN)
    text = "\n\n".join((measured(), quality()))
    return f"{before}{BEGIN}\n{text}\n\n{END}{rest.split(END)[1]}"


def measured() -> str:
    """A row for each figure: what, how much, where and when, and the command that measures it again."""
    taught = _results(mask)
    learnt = taught["sts_b_dev"]
    rows = [row for both in zip(*map(_serving, (_results(serving), _read(AVX2))), strict=True) for row in both]
    rows.append(
        [
            f"`fit mask`, {taught['sentences']:,} sentences, {taught['encoder']}: cosine to its own vectors on other "
            "text; STS-B dev of the encoder, and at [MASK] before and after; time",
            f"{taught['cosine']:.3f}; {learnt['parent']:.1f}, {learnt['start']:.1f}, {learnt['trained']:.1f}; "
            f"{taught['seconds']:.0f} s",
            f"{taught['machine']}; {taught['date']}, Cloze {taught['cloze']}",
            "`python -m benchmarks.mask`",
        ]
    )
    return markdown_table(["what", "figure", "machine; date, version", "command"], rows)


def _serving(served: dict[str, Any]) -> list[list[str]]:
    """The rows of serving on one machine."""
    ratios, servers = serving_report.ratio_rows(served), served["servers"]
    own = servers[serving_report.INT8]
    started, peak = (min(server[key] for name, server in servers.items() if "infinity" in name) for key in own)
    where = f"{served['machine'].partition(', shared')[0]}; {served['date']}, Cloze {served['cloze']}"
    figures = {
        "texts of mixed length, 32 a request, int8: throughput / infinity's best": ratios[serving_report.INT8_MIXED],
        "short texts, one a request, int8: throughput / infinity's best": ratios[serving_report.INT8_SHORT],
        "start to first answer; peak memory": f"{own['started']:.1f} s; {own['peak_mb']:.0f} MiB (infinity "
        f"{started:.0f} s; {peak:.0f} MiB)",
    }
    return [[what, figure, where, "`make bench`"] for what, figure in figures.items()]


def quality() -> str:
    bundle = Bundle.load(MODEL)
    return (
        f"The shipped model (template `{bundle.spec.template}`, pooling {bundle.spec.pooling}, at most "
        f"{bundle.spec.max_tokens} tokens) beside its parent, × 100: Spearman's correlation, averaged over seven STS "
        "test sets; nDCG@10 on three search collections, which helped to choose it; accuracy, averaged over SentEval's "
        f"seven tasks ([how it was made]({CARD})).\n\n"
        f"{scores(['Avg.', *search_columns([parent()]), CLASSIFICATION])}\n\n"
        "[figures.md](benchmarks/figures.md) has all figures, with versions, and what the contenders do not have in "
        "common."
    )


def page() -> str:
    """figures.md: every table of the benchmarks."""
    speeds, served, trained, avx2 = _results(graphs), _results(serving), _results(training), _read(AVX2)
    counts = ", ".join(f"{count} {name.partition(',')[0]}" for name, count in served["texts"].items())
    parts = (
        "# Figures",
        "`python -m benchmarks.readme` writes this page from `results/` and from the scores in the shipped bundle. "
        "[methods.md](methods.md) compares the training methods.",
        "## Similarity",
        "Spearman's correlation × 100 ('all' aggregation), measured by `cloze evaluate`. Each model uses "
        f"its own template and pooling; texts are cut at {Bundle.load(MODEL).spec.max_tokens} tokens by cloze-mini and "
        "at 256 by its parent. int8 vectors are the same on CPUs with AVX2 and with AVX-512 "
        "([docs/int8.md](../docs/int8.md)).",
        scores(STS),
        "## Search",
        "nDCG@10 × 100 with exact cosine search, measured by the same command. The collections were used to choose "
        "cloze-mini, so its figures are optimistic.",
        scores(search_columns([parent()])),
        "## Classification",
        "Accuracy × 100 by SentEval's protocol, measured by the same command. cloze-mini was not trained for "
        "classification.",
        scores([*(f"transfer {name} accuracy" for name in TRANSFER), CLASSIFICATION]),
        "## Graphs",
        "Speed of the graphs exported from cloze-mini, in process, one batch at a time, each "
        "with the threads that the service gives a batch (`python -m benchmarks.graphs --run RUN --data DATA`).",
        graphs.table(speeds),
        f"{speeds['texts']}. {_setting(speeds)}",
        "## Serving",
        "Cloze, infinity 0.0.78 and libraries in process with the weights of all-MiniLM-L6-v2, without a template "
        "(`make bench`).",
        serving_report.tables(served),
        f"{_agreement(served)} 'Changed by the batch' is the largest difference of a component between a text alone "
        "and the same text in a batch. OpenVINO computes in bf16 here. wrk, the client, corrects percentiles for "
        "coordinated omission. fastembed does not sort texts by length, and llama.cpp takes batches of at most 256 "
        "tokens.",
        f"{counts} texts, {served['rounds']} rounds ([chart](results/serving.svg)). {_connections(served)} "
        f"{_spread(served)} "
        f"{_setting(served)}{_rivals(served)}",
        "The same on a CPU without AVX-512; of the libraries, only sentence-transformers with torch was measured:",
        serving_report.tables(avx2),
        f"{avx2['rounds']} rounds. {_spread(avx2)} {_setting(avx2)}",
        "## Training",
        "SimCSE with the trainers of Cloze and of sentence-transformers (`make bench`).",
        training.table(trained),
        f"{trained['texts']}, {trained['code']}. {_setting(trained)}",
    )
    return "\n\n".join(parts) + "\n"


def scores(columns: Sequence[str]) -> str:
    """Scores of the shipped graph and of its parent, as a Markdown table."""
    bundle = Bundle.load(MODEL)
    size = bundle.graph("int8").stat().st_size / 1e6
    rows = {
        f"**cloze-mini**, int8, {size:.1f} MB": bundle.spec.provenance.scores["int8"],
        "its parent all-MiniLM-L6-v2, fp32": parent(),
    }
    titles = [column.removeprefix("transfer ").removesuffix(" accuracy") for column in columns]
    titles = ["STS average" if title == "Avg." and "STS12" not in columns else title for title in titles]
    every = {name: scored | _classification(scored) for name, scored in rows.items()}
    cells = [
        [name, *(digits(row[column]) if column in row else "" for column in columns)]
        for name, row in every.items()
        if any(column in row for column in columns)
    ]
    return markdown_table(["", *titles], cells)


def _classification(scored: Mapping[str, float]) -> dict[str, float]:
    """The mean of the seven accuracies, of a model that has them."""
    accuracies = [scored[column] for name in TRANSFER if (column := f"transfer {name} accuracy") in scored]
    return {CLASSIFICATION: mean(accuracies)} if len(accuracies) == len(TRANSFER) else {}


def parent() -> dict[str, float]:
    """The parent's scores, as `cloze evaluate --json` wrote them."""
    parent_scores: dict[str, float] = json.loads(PARENT.read_text(encoding="utf-8"))["scores"]["torch fp32"]
    return parent_scores


def _results(benchmark: ModuleType) -> dict[str, Any]:
    return _read(benchmark.RESULTS)


def _read(file: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return results


def _agreement(served: dict[str, Any]) -> str:
    """How close the contenders' vectors are to those of sentence-transformers in torch."""
    lowest = {name: cosines["least"] for name, cosines in served["accuracy"].items()}
    longer = lowest.get(LONGER)
    fp32 = [cosine for name, cosine in lowest.items() if not serving_report.is_quantised(name) and name != LONGER]
    rivals = [cosine for name, cosine in lowest.items() if serving_report.is_quantised(name) and "Cloze" not in name]
    return (
        f"The lowest cosine of a vector with that of torch is {min(fp32):.4f} for contenders in fp32, "
        f"{lowest[serving_report.INT8]:.4f} for Cloze in int8"
        + (f" and {min(rivals):.4f} for other graphs of 8 bits." if rivals else ".")
        + (f" infinity's ONNX engine truncates at 512 tokens, not 256, and has {longer:.4f}." if longer else "")
    )


def _connections(served: dict[str, Any]) -> str:
    """How many texts a server had at once, at most: infinity takes batches from its queue in another way above 256."""
    highest = {
        name: max(int(level) for level in levels if level.isdecimal()) for name, levels in served["figures"].items()
    }
    short, mixed, _ = highest.values()
    return f"Short texts come over up to {short} connections, mixed ones, 32 a request, over up to {mixed}" + (
        "." if mixed > LARGE else ", with which infinity does not yet form its largest batches."
    )


def _spread(served: dict[str, Any]) -> str:
    middle, highest = serving_report.spread(served)
    return (
        "Other programs shared the machine: between rounds the speed of a contender differed by a factor of "
        f"{middle:.2f} (median) to {highest:.1f}, and each ratio compares figures of the same round."
    )


def _rivals(served: dict[str, Any]) -> str:
    """The versions of each library that ran in process, if there were any."""
    libraries = (
        f"{name}: {', '.join(f'{package} {version}' for package, version in packages.items())}"
        for name, packages in served["rivals"].items()
    )
    return f" Libraries in process: {'; '.join(libraries)}." if served["rivals"] else ""


def _setting(results: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    return f"Machine: {results['machine']}. Versions: {versions}."


if __name__ == "__main__":
    README.write_text(with_figures(README.read_text(encoding="utf-8")), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
