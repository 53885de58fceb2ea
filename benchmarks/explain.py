"""Measure whether the words that `POST /explain` names are those that make two texts similar.

    python -m benchmarks.explain --data DATA [--bundle BUNDLE] [--pairs 300]

For pairs of STS-B dev with a cosine of at least 0.4 and more than three words in each text, the two or three words with
the lowest changes are removed together, and in turn as many words chosen at random (`DRAWS` times). Each change is that
of one word alone, so this shows whether they hold together. The command writes benchmarks/results/explain.json and
prints the table.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import httpx
import numpy as np
from numpy.typing import NDArray

from benchmarks.peers import ours
from cloze.encoding.bundle import locate
from cloze.machine import available_cpus, processor, versions
from cloze.training.evaluation.measures import mean_interval
from cloze.training.evaluation.sts import load_pairs
from cloze.training.evaluation.tables import markdown_table

RESULTS: Final = Path(__file__).parent / "results" / "explain.json"
PACKAGES: Final = ("onnxruntime", "tokenizers", "numpy", "fastapi", "uvicorn")
LEAST: Final = 0.4  # cosine of a pair of which words can take something away
REMOVED: Final = (2, 3)  # words
DRAWS: Final = 5

Word = tuple[int, int, int]  # text, start, stop


def without(texts: Sequence[str], words: Sequence[Word]) -> list[str]:
    """The texts without some of their words."""
    left = list(texts)
    for place, start, stop in sorted(words, reverse=True):
        left[place] = f"{left[place][:start]} {left[place][stop:]}"
    return [" ".join(text.split()) for text in left]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with senteval/downstream")
    parser.add_argument("--bundle", type=Path, default=locate("cloze-mini"))
    parser.add_argument("--pairs", type=int, default=300)
    options = parser.parse_args()
    pairs = load_pairs(options.data / "senteval/downstream/STS/STSBenchmark/sts-dev.csv")
    order = np.random.default_rng(0).permutation(len(pairs))
    server = ours(options.bundle, "int8")
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=None) as http:
            results = measured(http, [[pairs.left[place], pairs.right[place]] for place in order], options.pairs)
    finally:
        server.end()
    results |= {"machine": f"{processor()}, {available_cpus()} CPUs", "versions": versions(PACKAGES)}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"{results['pairs']} pairs, mean cosine {results['cosine']}, {results['milliseconds']} ms a request (median)")
    print(table(results))


def measured(http: httpx.Client, candidates: Sequence[list[str]], wanted: int) -> dict[str, Any]:
    """The fall of the cosine by words that are named and by random ones, with intervals of 95 %."""
    rng, cosines, seconds = np.random.default_rng(1), list[float](), list[float]()
    falls: dict[str, list[float]] = {f"{count} {choice}": [] for count in REMOVED for choice in ("named", "random")}
    for texts in candidates:
        began = perf_counter()
        explained = http.post("/explain", json={"inputs": texts}).raise_for_status().json()
        took, cosine = perf_counter() - began, explained["cosine"]
        words = [
            (word["change"], (place, word["start"], word["stop"]))
            for place, each in enumerate(explained["texts"])
            for word in each
            if word["change"] is not None
        ]
        if cosine < LEAST or min(map(len, explained["texts"])) <= max(REMOVED):
            continue
        named = [word for _, word in sorted(words)]
        cosines.append(cosine)
        seconds.append(took)
        for count in REMOVED:
            random_words = [[words[place][1] for place in rng.permutation(len(words))[:count]] for _ in range(DRAWS)]
            left = [without(texts, chosen) for chosen in (named[:count], *random_words)]
            first, *others = (cosine - similarity(http, pair) for pair in left)
            falls[f"{count} named"].append(first)
            falls[f"{count} random"].append(float(np.mean(others)))
        if len(cosines) == wanted:
            break
    return {
        "pairs": len(cosines),
        "cosine": round(float(np.mean(cosines)), 3),
        "milliseconds": round(1000 * float(np.median(seconds)), 1),
        "falls": {name: figures(np.array(values)) for name, values in falls.items()},
    }


def figures(values: NDArray[np.float64]) -> list[float]:
    """Their mean, and its interval."""
    return [round(each, 3) for each in (float(values.mean()), *mean_interval(values))]


def similarity(http: httpx.Client, texts: Sequence[str]) -> float:
    body = {"inputs": {"source_sentence": texts[0], "sentences": [texts[1]]}}
    return float(http.post("/similarity", json=body).raise_for_status().json()[0])


def table(results: dict[str, Any]) -> str:
    rows = [
        (str(count), *(
            "{:.3f} ({:.3f} to {:.3f})".format(*results["falls"][f"{count} {choice}"]) for choice in ("named", "random")
        ))
        for count in REMOVED
    ]  # fmt: skip
    return markdown_table(["words removed", "fall of the cosine, named", "random"], rows)


if __name__ == "__main__":
    main()
