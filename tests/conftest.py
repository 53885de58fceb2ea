"""Tiny random encoders with real tokenizers, made in code; nothing is fetched."""

import gc
import inspect
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import NamedTemporaryFile

import certifi
import httpx
import hypothesis
import pytest
from container_engine import take_down
from made_once import made_once
from patience import PATIENCE

gc.disable()  # until all tests are imported: collecting takes a quarter of that time

# Tests start hundreds of processes, and without this each would compile Cloze again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shell's background job ignores Ctrl-C, and so would the commands that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Each is read once, when the library is imported.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"  # the models are tiny, and the workers of pytest-xdist share the cores
os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # for tests that import ONNX Runtime before Cloze
for each in ("READY", "HEALTH"):  # Ray Serve kills a proxy that takes longer than 5 and 10 seconds
    os.environ[f"RAY_SERVE_PROXY_{each}_CHECK_TIMEOUT_S"] = str(PATIENCE)

# Nothing here asks a server of the internet, and each client would read all of certifi's certificates: 40 ms.
CERTIFICATE = NamedTemporaryFile(suffix=".pem")  # noqa: SIM115 - until this process ends
CERTIFICATE.write(re.search(rb"-----BEGIN.*?-----END[^\n]*\n", Path(certifi.where()).read_bytes(), re.DOTALL)[0])  # type: ignore[index]
CERTIFICATE.flush()
os.environ["SSL_CERT_FILE"] = CERTIFICATE.name

# Of clients that name no limit of their own: httpx's is 5 seconds, which a busy machine reaches.
for each in ("connect", "read", "write", "pool"):
    setattr(inspect.signature(httpx.get).parameters["timeout"].default, each, PATIENCE)

# The same inputs each time; with EXAMPLES=10000, as many others for each property.
EXAMPLES = os.environ.get("EXAMPLES")
hypothesis.settings.register_profile(
    "cloze",
    derandomize=EXAMPLES is None,
    max_examples=int(EXAMPLES or 50),
    database=None,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile("cloze")

ENGINE_LEFT = pytest.StashKey[str | None]()  # why the engine of the containers could not be taken down

APART = {  # the folders in which `make test-long` runs the tests with a mark
    **dict.fromkeys(("container", "ray"), ("bulk", "containers", "ray")),
    "browser": ("evaluation", "playground"),
}

SENTENCES = [
    "A man is playing the guitar on a stage.",
    "Two dogs run over the green field.",
    "The markets fell sharply after the announcement.",
    "She wrote a letter to her old friend in the city.",
    "Nothing grows here without a little rain.",
    "This sentence of a text means something : \"quoted\" and 'single'.",
]


def pytest_collection_finish() -> None:
    """Exclude what the imports left from garbage collection, which every training run and every export starts."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers():
            if item.path.parent.name not in APART.get(mark.name, (item.path.parent.name,)):
                raise pytest.UsageError(
                    f"{item.nodeid} is marked {mark.name}: `make test-long` would not run it in {item.path.parent}"
                )


@pytest.hookimpl(trylast=True)  # when the workers have ended
def pytest_sessionfinish(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        session.config.stash[ENGINE_LEFT] = take_down()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say in one line how many tests were skipped, and for want of what. `-rs` lists them."""
    if reason := config.stash.get(ENGINE_LEFT, None):
        terminalreporter.section("ENGINE NOT TAKEN DOWN", yellow=True, bold=True)
        terminalreporter.write_line(reason)
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", ())
    )
    if reasons:
        listed = "; ".join(f"{count}: {reason}" for reason, count in reasons.most_common())
        terminalreporter.write_line(f"skipped (CONTRIBUTING.md says what they need): {listed}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """`-n auto` starts two workers for each core, because tests wait more than they compute."""
    return min(2 * (os.cpu_count() or 1), 16)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """A folder that all workers of this run share."""
    base = tmp_path_factory.getbasetemp()  # of this worker
    folder = (base.parent if hasattr(pytestconfig, "workerinput") else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def custom_code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A temporary folder for the code of models, which transformers copies there before it imports it."""
    folder = str(tmp_path_factory.mktemp("modules"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_MODULES_CACHE", folder)  # of the processes that a test starts
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", folder)
        yield


def word_pieces() -> list[str]:
    """Every character and every word; to train a vocabulary gives another one each time."""
    words = sorted(set(re.findall(r"\w+|[^\w\s]", " ".join(SENTENCES).lower())))
    characters = sorted(set("".join(words)))
    pieces = [*characters, *(f"##{each}" for each in characters), *words]
    return list(dict.fromkeys(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces]))


@pytest.fixture(scope="session")
def tiny_bert(shared: Path) -> Path:
    """A folder with a random 2-layer BERT, 32 wide, 64 positions, and a word-piece tokenizer."""
    return made_once(shared / "tiny-bert", make_bert)


def make_bert(folder: Path) -> None:
    from transformers import BertConfig, BertModel, BertTokenizerFast, set_seed

    folder.mkdir()
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(word_pieces()) + "\n", encoding="utf-8")
    tokenizer = BertTokenizerFast(vocab=str(vocabulary))
    set_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2,  # wide enough that texts differ
    )
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="session")
def tiny_roberta(shared: Path) -> Path:
    """A folder with a random 2-layer RoBERTa, 32 wide, 64 positions, and a byte-level BPE tokenizer."""
    return made_once(shared / "tiny-roberta", make_roberta)


def make_roberta(folder: Path) -> None:
    from tokenizers import AddedToken, ByteLevelBPETokenizer
    from transformers import RobertaConfig, RobertaModel, RobertaTokenizerFast, set_seed

    folder.mkdir()
    pieces = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    pieces.train_from_iterator(
        SENTENCES * 3, vocab_size=500, min_frequency=1, special_tokens=special, show_progress=False
    )
    pieces.save_model(str(folder))
    mask = AddedToken("<mask>", lstrip=True, special=True)  # takes the blank before it, as RoBERTa's own does
    tokenizer = RobertaTokenizerFast(
        vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt"), mask_token=mask
    )
    set_seed(0)
    config = RobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=66,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.2,
    )
    RobertaModel(config, add_pooling_layer=False).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="session")
def masked_bert(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> Path:
    """The tiny BERT with a random masked-word head."""
    return with_masked_head(tiny_bert, tmp_path_factory.mktemp("masked-bert"))


@pytest.fixture(scope="session")
def masked_roberta(tmp_path_factory: pytest.TempPathFactory, tiny_roberta: Path) -> Path:
    """The tiny RoBERTa with a random masked-word head."""
    return with_masked_head(tiny_roberta, tmp_path_factory.mktemp("masked-roberta"))


def with_masked_head(folder: Path, out: Path) -> Path:
    from transformers import AutoModel, AutoTokenizer, set_seed

    from cloze.training.model.masked_words import MaskedHead, save_masked_lm

    backbone = AutoModel.from_pretrained(folder, add_pooling_layer=False)
    set_seed(0)
    save_masked_lm(backbone, MaskedHead(backbone.config), out)
    AutoTokenizer.from_pretrained(folder).save_pretrained(out)
    return out
