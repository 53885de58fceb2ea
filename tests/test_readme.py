"""What README.md shows is what the shipped model and the benchmarks say.

To write the figures again: python tests/test_readme.py
"""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import httpx
import pytest
from harness import open_client

from encoding.bundle import Bundle
from service.app import create_app
from service.settings import Settings

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
MODEL = ROOT / "models" / "cloze-mini"
RESULTS = ROOT / "benchmarks" / "results"
COLUMNS = ("STS12", "STS13", "STS14", "STS15", "STS16", "STS-B", "SICK-R", "Avg.")
BEGIN, END = "<!-- figures: made by tests/test_readme.py -->\n", "<!-- end of figures -->"


def figures() -> str:
    return f"\n{scores()}\n\n{speeds()}\n\n"


def scores() -> str:
    """The seven STS tasks: the shipped graph, the same before quantisation, its parent."""
    bundle = Bundle.load(MODEL)
    parent = json.loads((RESULTS / "all-MiniLM-L6-v2.json").read_text(encoding="utf-8"))["scores"]["torch fp32"]
    size = bundle.graph("int8").stat().st_size / 1e6
    rows = {
        f"**cloze-mini**, int8, {size:.1f} MB, [MASK]": bundle.spec.provenance.scores["int8"],
        "cloze-mini before quantisation, fp32, [MASK]": bundle.spec.provenance.scores["fp32"],
        "its parent all-MiniLM-L6-v2, fp32, mean": parent,
    }
    lines = [f"| | {' | '.join(COLUMNS)} |", "| --- |" + " ---: |" * len(COLUMNS)]
    for name, row in rows.items():
        lines.append(f"| {name} | {' | '.join(f'{row[column]:.2f}' for column in COLUMNS)} |")
    return "\n".join(lines)


def speeds() -> str:
    results = json.loads((RESULTS / "throughput.json").read_text(encoding="utf-8"))
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    return f"{benchmark().table(results)}\n\n{results['texts']}, {results['machine']}; {versions}."


def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("throughput", ROOT / "benchmarks" / "throughput.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def with_figures(page: str) -> str:
    before, rest = page.split(BEGIN)
    return before + BEGIN + figures() + END + rest.split(END)[1]


def test_the_figures_are_those_of_the_model_and_the_benchmark() -> None:
    page = README.read_text(encoding="utf-8")
    assert page == with_figures(page), "run: python tests/test_readme.py"


def test_the_shipped_model_meets_its_bar() -> None:
    bundle = Bundle.load(MODEL)
    assert bundle.spec.provenance.scores["int8"]["Avg."] >= 79.3
    assert sum(path.stat().st_size for path in MODEL.rglob("*") if path.is_file()) <= 30_000_000
    assert {source.name for source in bundle.spec.provenance.data} == {
        "enwiki_sentences.txt",
        "enwikinews_sentences.txt",
    }


@pytest.mark.anyio
async def test_the_call_it_shows_gives_the_answer_it_shows() -> None:
    path, body, answer = shown()
    async with open_client(create_app(Settings(bundle=MODEL))) as http:
        response: httpx.Response = await http.post(path, json=body)
    assert response.status_code == 200
    assert response.json() == pytest.approx(answer, abs=5e-3)  # int8 arithmetic differs a little between processors


def shown() -> tuple[str, object, list[float]]:
    """Path, body and answer of README's curl."""
    page = README.read_text(encoding="utf-8")
    found = re.search(r"curl -s 127\.0\.0\.1:8080(/\w+) .*? -d '(.*?)'\n```\n\n```json\n(.*?)\n```", page, re.DOTALL)
    assert found is not None
    return found[1], json.loads(found[2]), json.loads(found[3])


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


if __name__ == "__main__":
    README.write_text(with_figures(README.read_text(encoding="utf-8")), encoding="utf-8")
