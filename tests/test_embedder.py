"""`cloze.load`: the service's vectors in this process, and nothing of a server."""

import copy
import pickle
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow
import pytest
from harness import open_client
from tiny_bundle import DIMENSION, write_bundle

import cloze
from benchmarks.readme import MODEL
from cloze.encoding.bundle import Bundle
from cloze.encoding.errors import BundleError, ClozeError, OptionError, TextTooLong
from cloze.service.app import create_app
from cloze.service.settings import Settings

TEXTS = ["A man is playing the guitar.", "dogs", "", "two dogs run " * 200, "Rain over the city, and no end of it."] * 5
PAGE = Path(__file__).parents[1] / "docs" / "python.md"


@pytest.fixture(scope="module")
def model() -> Any:
    return cloze.load()


@pytest.mark.anyio
async def test_the_vectors_are_the_services_bit_for_bit(model: Any) -> None:
    async with open_client(create_app(Settings(bundle=MODEL, precision="int8"))) as http:
        for options in ({}, {"normalize": False}, {"dimensions": 7}):
            answer = await http.post("/embed", json={"inputs": TEXTS, **options})
            np.testing.assert_array_equal(model.embed(TEXTS, **options), np.array(answer.json(), np.float32))
        body = {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS[1:5]}}
        answer = await http.post("/similarity", json=body)
    np.testing.assert_allclose(model.similarity(TEXTS[0], TEXTS[1:5]), [answer.json()], atol=1e-12)


def test_a_named_template_is_the_services(tmp_path: Path) -> None:
    path = write_bundle(tmp_path / "tiny", templates={"query": "[X] asks [MASK]."})
    model, loaded = cloze.load(path), Bundle.load(path)
    expected = model._session.run(loaded.named["query"].batch(["two dogs run"]))
    np.testing.assert_allclose(model.embed(["two dogs run"], prompt_name="query", normalize=False), expected, atol=1e-6)
    assert model.tokens("dogs", prompt_name="query") != model.tokens("dogs")


def test_any_sequence_of_strings_is_taken(model: Any) -> None:
    expected = model.embed(["dogs", "a man"])
    assert (expected.shape, expected.dtype) == ((2, model.dimension), np.float32)
    column = pyarrow.chunked_array([["dogs"], ["a man"]])
    for texts in (("dogs", "a man"), np.array(["dogs", "a man"]), {"dogs": 1, "a man": 2}.keys(), column):
        np.testing.assert_array_equal(model.embed(texts), expected)
    old = type("Old", (), {"__len__": lambda _: 2, "__getitem__": lambda _, place: ["dogs", "a man"][place]})()
    np.testing.assert_array_equal(model.embed(old), expected)  # a sequence of the oldest kind
    assert model.embed("dogs").shape == (1, 384)
    assert model.embed([]).shape == (0, 384)


def test_many_texts_keep_their_order_in_many_threads(model: Any) -> None:
    texts = [f"{number} dogs run" + " far" * (number % 40) for number in range(300)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(model.embed, [texts, texts[::-1], texts[:10], texts[:1]]))
    np.testing.assert_array_equal(found[0], found[1][::-1])
    for few in found[2:]:
        np.testing.assert_array_equal(found[0][: len(few)], few)


def test_a_graph_that_fails_is_said_with_its_own_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = cloze.load(write_bundle(tmp_path / "tiny"))

    def fail(batch: Any) -> Any:
        raise RuntimeError("[ONNXRuntimeError] : 6 : no memory\nand more")

    monkeypatch.setattr(model._session, "_forward", fail)
    with pytest.raises(ClozeError, match=r"^texts 0 to 1: the model failed: \[ONNXRuntimeError\] : 6 : no memory$"):
        model.embed(["a man", "dogs"])


def test_libraries_may_copy_and_keep_it(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As scikit-learn does with the steps of a pipeline."""
    assert copy.copy(model) is copy.deepcopy(model) is model
    monkeypatch.chdir(write_bundle(tmp_path / "tiny").parent)
    kept = pickle.dumps(cloze.load("tiny", precision="fp32", threads=1))
    monkeypatch.chdir("/")
    again = pickle.loads(kept)
    np.testing.assert_array_equal(again.embed(["dogs"]), cloze.load(tmp_path / "tiny").embed(["dogs"]))
    assert again._again.keywords == {"precision": "fp32", "provider": "auto", "threads": 1}


@pytest.mark.parametrize("load", ["cloze.load", "cloze.service.bulk.Embed"])
def test_a_forked_process_is_told_to_load_its_own(tmp_path: Path, load: str) -> None:
    """A fork has none of the threads, for whose work it would wait without end."""
    code = f"""
import os, cloze, cloze.service.bulk
model = {load}({str(write_bundle(tmp_path / "tiny"))!r})
model.embed(["dogs"])
if os.fork():
    os.wait()
else:
    model.embed(["dogs"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (
        "OptionError: this process was forked from one that had loaded the model, and threads do not survive a fork"
        in done.stderr
    )


def test_what_it_shows_of_itself(model: Any) -> None:
    assert (model.template, model.dimension) == ("[X] means [MASK].", 384)
    assert re.fullmatch(r"<cloze-mini: '\[X\] means \[MASK\]\.', 384 dimensions, int8 on \w+>", repr(model))
    assert model.tokens("Two dogs run.") == ["[CLS]", "two", "dogs", "run", ".", "means", "[MASK]", ".", "[SEP]"]


@pytest.mark.parametrize(
    ("texts", "options", "error", "said"),
    [
        (["a", 1], {}, OptionError, "text 1 is 1, a int; give strings"),
        ([b"a"], {}, OptionError, "text 0 is b'a', a bytes; give strings"),
        (pd.DataFrame({"text": ["a"]}), {}, OptionError, "the texts are a DataFrame; give a list of them, such as a"),
        ({"text": "a"}, {}, OptionError, "the texts are a dict; give a list of them"),
        ({"a", "b"}, {}, OptionError, "the texts are a set; give a list of them"),
        (None, {}, OptionError, "the texts are a NoneType; give a list of them"),
        (np.array([["a"]]), {}, OptionError, "the texts are a ndarray; give a list"),
        (["a", "dogs " * 999], {"truncate": False}, TextTooLong, "text 1 has 999 tokens; at most 379 fit"),
        (["a"], {"dimensions": 385}, OptionError, "dimensions is 385; cloze-mini has 384: ask for 1 to 384"),
        (["a"], {"dimensions": 0}, OptionError, "dimensions is 0"),
        (["a"], {"dimensions": 3.0}, OptionError, "dimensions is 3.0"),
        (["a"], {"dimensions": True}, OptionError, "dimensions is True"),
        (["a"], {"prompt_name": "query"}, OptionError, "prompt_name is 'query'; .*: none"),
    ],
)
def test_what_cannot_be_embedded_is_said(model: Any, texts: Any, options: Any, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        model.embed(texts, **options)


def test_what_cannot_be_loaded_is_said(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="is not a folder; make a bundle with `cloze export RUN OUT`"):
        cloze.load(tmp_path / "nowhere")
    assert issubclass(BundleError, ClozeError)
    for option, said in (
        ({"provider": "tpu"}, "provider is 'tpu'; write auto, cuda or cpu"),
        ({"threads": -1}, "threads is -1; write 0 for all available CPUs, or a number above 0"),
    ):
        with pytest.raises(OptionError, match=said):
            cloze.load(write_bundle(tmp_path / "tiny"), **option)


def test_no_server_and_no_framework_is_loaded(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "tiny")
    code = f"""
import sys, cloze
assert not [name for name in sys.modules if name.startswith("cloze.")], "import cloze loads nothing"
print(cloze.load({str(bundle)!r}).embed(["dogs"]).shape)
loaded = {{"fastapi", "pyarrow", "starlette", "torch", "transformers", "uvicorn"}} & sys.modules.keys()
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"(1, {DIMENSION})\n", "")


def test_a_missing_package_is_said(tmp_path: Path) -> None:
    code = "import sys; sys.modules['onnxruntime'] = None; import cloze; cloze.load()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ClozeError: onnxruntime is not installed; install the extra `cpu`, or `gpu`" in done.stderr


def test_the_examples_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert len(blocks) == 5
    assert names["vectors"].shape == (2, 384)
    assert names["table"]["vector"][0].shape == (384,)
    assert names["classifier"].predict(["A dog sleeps.", "The bank fell."]).tolist() == [0, 1]
    embeddings = names["ClozeEmbeddings"]()
    assert embeddings.embed_query("dogs") == embeddings.embed_documents(["a man", "dogs"])[1]
