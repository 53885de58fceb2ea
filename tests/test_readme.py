"""The figures and the example in README.md match the shipped model and the recorded benchmarks."""

import json
import os
import re
import subprocess
from pathlib import Path

import httpx
import pytest
import yaml
from harness import open_client
from huggingface_hub import ModelCard

from benchmarks.readme import MODEL, PAGE, README, ROOT, page, parent, with_figures
from cloze.encoding.bundle import Bundle
from cloze.service.app import create_app
from cloze.service.settings import Settings


def test_the_figures_are_those_of_the_model_and_the_benchmark() -> None:
    text = README.read_text(encoding="utf-8")
    assert text == with_figures(text), "run: python -m benchmarks.readme"
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m benchmarks.readme"


def test_the_shipped_model_meets_its_bar() -> None:
    bundle = Bundle.load(MODEL)
    assert (bundle.spec.template, bundle.spec.pooling) == ("[X] means [MASK].", "mask")
    scores = bundle.spec.provenance.scores["int8"]
    assert scores["Avg."] >= 81.0
    assert scores["STS-B dev"] >= 87.2
    assert scores["med nDCG@10"] >= parent()["med nDCG@10"]
    assert scores["cisi nDCG@10"] >= parent()["cisi nDCG@10"] + 0.4
    assert scores["cacm nDCG@10"] >= parent()["cacm nDCG@10"] + 0.5
    assert sum(path.stat().st_size for path in MODEL.rglob("*") if path.is_file()) <= 30_000_000
    card = ModelCard.load(MODEL / "README.md").data
    assert (card.license, card.language) == ("apache-2.0", "en")  # its parent's
    learnt_from = {source.name for source in bundle.spec.provenance.data}
    # no text that is limited to research
    assert learnt_from == {
        *("texts.jsonl", "snli_devtest_triplets.csv", "rules.csv"),
        *("enwiki_sentences.txt", "enwikinews_sentences.txt"),
    }


@pytest.mark.anyio
async def test_the_call_it_shows_gives_the_answer_it_shows() -> None:
    path, body, answer = shown()
    async with open_client(create_app(Settings(bundle=MODEL))) as http:
        response: httpx.Response = await http.post(path, json=body)
    assert response.status_code == 200
    assert response.json() == pytest.approx(answer, abs=5e-4)


def shown() -> tuple[str, object, list[float]]:
    """Path, body and answer of README's curl."""
    text = README.read_text(encoding="utf-8")
    found = re.search(r"curl -s 127\.0\.0\.1:8080(/\w+) .*? -d '(.*?)'\n```\n\n```json\n(.*?)\n```", text, re.DOTALL)
    assert found is not None
    return found[1], json.loads(found[2]), json.loads(found[3])


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def test_the_release_makes_links_that_hold_on_a_package_index(tmp_path: Path) -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))
    [script] = [step["run"] for step in workflow["jobs"]["build"]["steps"] if "README" in step.get("name", "")]
    copy = tmp_path / "README.md"
    copy.write_bytes(README.read_bytes())
    server = {"GITHUB_SERVER_URL": "https://example.org", "GITHUB_REPOSITORY": "us/cloze", "GITHUB_REF_NAME": "v1.2.3"}
    subprocess.run(["bash", "-ec", script], cwd=tmp_path, env=os.environ | server, check=True)
    links = re.findall(r"\]\(([^)]*)\)", copy.read_text(encoding="utf-8"))
    assert "https://example.org/us/cloze/raw/v1.2.3/docs/playground.png" in links
    assert "https://example.org/us/cloze/blob/v1.2.3/models/cloze-mini/README.md#how-it-was-made" in links
    assert [link for link in links if not link.startswith("https://")] == []
