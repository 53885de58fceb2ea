"""Measure what `cloze verify` says of servers that are known to be right or wrong.

    python -m benchmarks.verify --parent MODEL [--infinity PYTHON]

MODEL is a folder of all-MiniLM-L6-v2: mean pooling, 256 tokens. Cloze serves it as it is, in int8 and with one mistake
at a time; infinity, if its interpreter is given, serves it with both engines. The command writes
benchmarks/results/verify.json and prints what differs, and what the server is taken for.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx

from benchmarks.peers import Server, bundle_of, infinity, ours, with_graphs
from cloze.machine import versions
from cloze.training.evaluation import verify
from cloze.training.evaluation.server import WAIT
from cloze.training.evaluation.tables import markdown_table

RESULTS: Final = Path(__file__).parent / "results" / "verify.json"
PACKAGES: Final = ("onnxruntime", "tokenizers", "torch", "sentence-transformers")
LEAST: Final = 0.999
INSTEAD: Final = "what it gives instead"
MISTAKES: Final[dict[str, dict[str, Any]]] = {
    "none": {},
    "[CLS] for the mean": {"pooling": "cls"},
    "the maximum for the mean": {"pooling": "max"},
    "a prefix that the model does not have": {"template": "passage: [X]"},
    "64 tokens at most": {"max_tokens": 64},
}


def servers(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, str, Callable[[], Server]]]:
    """Server, its mistake, and how it is started."""
    for place, (mistake, changed) in enumerate(MISTAKES.items()):
        bundle = bundle_of(options.parent, folder / str(place), ("fp32",), **changed)
        yield "Cloze, fp32", mistake, partial(ours, bundle, "fp32")
    yield "Cloze, int8", "rounded weights", partial(ours, bundle_of(options.parent, folder / "int8", ("int8",)), "int8")
    if options.infinity:
        model = with_graphs(options.parent, [options.infinity], None, folder / "model")
        for name, engine in (("torch", "torch"), ("ONNX", "optimum")):
            yield f"infinity, {name}", "none", partial(infinity, options.infinity, model, engine)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parent", type=Path, required=True, help="folder of all-MiniLM-L6-v2")
    parser.add_argument("--infinity", metavar="PYTHON", help="interpreter of an environment with infinity")
    options = parser.parse_args()
    reference, rows = verify.reference_of(options.parent), list[dict[str, str]]()
    with tempfile.TemporaryDirectory() as folder:
        for name, mistake, start in servers(options, Path(folder)):
            server = start()
            try:
                rows.append({"server": name, "mistake": mistake} | said(server, reference))
            finally:
                server.end()
    RESULTS.write_text(json.dumps({"servers": rows, "versions": versions(PACKAGES)}, indent=1) + "\n", encoding="utf-8")
    print(markdown_table(list(rows[0]), [list(row.values()) for row in rows]))


def said(server: Server, reference: verify.Reference) -> dict[str, str]:
    """The checks that differ, and what the server is taken for."""
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=WAIT) as client:
        checks = verify.checks(verify.Server(client, "openai", server.path, server.model), reference, LEAST)
    differ = [f"{check.name}: {check.result}" for check in checks if check.agrees is False]
    return {
        "differs": "; ".join(differ) or "nothing",
        "taken for": "".join(check.result for check in checks if check.name == INSTEAD),
    }


if __name__ == "__main__":
    main()
