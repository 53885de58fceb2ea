"""What a model takes is estimated from its files, and one that would not fit is refused by name before it is loaded."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import services
from live import served
from test_models import ADMIN, no_operator, reload
from tiny_bundle import OTHER, write_bundle

from cloze.encoding.bundle import Bundle, Precision
from cloze.encoding.errors import OptionError
from cloze.service.app import create_app
from cloze.service.inference import memory
from cloze.service.inference.memory import MIB, PROCESS, Need, check, need, resident
from cloze.service.settings import Settings


def test_an_estimate_by_hand(tmp_path: Path) -> None:
    """16 wide, with an inner layer of 64, one head, and 32 tokens at most: a batch of 64 tokens is two such texts."""
    bundle = Bundle.load(write_bundle(tmp_path / "tiny"))
    size = (tmp_path / "tiny" / "onnx" / "model.onnx").stat().st_size
    values = 2 * 32 * (16 + 64) + 2 * 1 * 32 * 32
    found = need(bundle, Settings(threads=1, max_batch_tokens=64))
    assert found == Need(round(1.1 * size), round(2.2 * 4 * values))
    two = need(bundle, Settings(threads=2, max_batch_tokens=64))  # two batches at once
    assert two == Need(found.graph, round(2.2 * 4 * values * 2))


def test_the_configuration_says_how_large_a_layer_is(tmp_path: Path) -> None:
    bundle = Bundle.load(write_bundle(tmp_path / "tiny"))
    sizes = {"hidden_size": 8, "intermediate_size": 10, "num_attention_heads": 3}
    (bundle.path / "config.json").write_text(json.dumps(sizes))
    found = need(bundle, Settings(threads=1, max_batch_tokens=32))
    assert found.batches == round(2.2 * 4 * (32 * (8 + 10) + 3 * 32 * 32))


@pytest.mark.parametrize(("precision", "graphs"), [("auto", 2), ("fp32", 1), ("fp16", 1)])
def test_graphs_that_race_are_loaded_together(tmp_path: Path, precision: Precision, graphs: int) -> None:
    bundle = Bundle.load(write_bundle(tmp_path / "tiny", precisions=("fp32", "fp16", "int8")))
    size = bundle.graph("fp32").stat().st_size
    assert need(bundle, Settings(precision=precision)).graph == round(1.1 * size * graphs)


def test_the_models_are_summed_and_share_their_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundles = [Bundle.load(write_bundle(tmp_path / name)) for name in ("one", "two", "three")]
    needs = {"one": Need(100 * MIB, 40 * MIB), "two": Need(200 * MIB, 60 * MIB), "three": Need(300 * MIB, 10 * MIB)}
    monkeypatch.setattr(memory, "need", lambda bundle, settings: needs[bundle.name])
    monkeypatch.setattr(memory, "resident", lambda: 0)
    monkeypatch.setattr(memory, "PROCESS", 0)
    check(Settings(max_memory_mb=0), bundles)  # no limit
    check(Settings(max_memory_mb=1, provider="cuda"), bundles)  # the estimate is of the CPU
    check(Settings(max_memory_mb=660), bundles)  # 100 + 200 + 300 + 60
    with pytest.raises(OptionError, match=r"model three would not fit: .* about 660 MiB, and max_memory_mb is 659; "):
        check(Settings(max_memory_mb=659), bundles)
    with pytest.raises(OptionError, match="model two would not fit"):
        check(Settings(max_memory_mb=359), bundles)
    with pytest.raises(OptionError, match="about 661 MiB"):
        check(Settings(max_memory_mb=660, cache_mb=1), bundles)
    check(Settings(max_memory_mb=220), bundles[1:2], bundles[:1])  # 200 and 20 more for batches
    with pytest.raises(OptionError, match="model two would not fit"):
        check(Settings(max_memory_mb=219), bundles[1:2], bundles[:1])


def test_one_line_before_the_graph_is_loaded(tmp_path: Path, check_here: Callable[..., tuple[int, str, str]]) -> None:
    bundle = write_bundle(tmp_path / "tiny", no_operator())
    status, _, err = check_here("--bundle", str(bundle), "--max-memory-mb", "1")
    assert status == 2
    assert err.count("\n") == 1
    assert err.startswith("error: model tiny would not fit: with it the process needs about ")
    assert "max_memory_mb is 1; raise it" in err


def test_a_reload_that_would_not_fit_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "bundles"
    write_bundle(folder / "tiny")
    app = create_app(Settings(bundle=folder, model="tiny", threads=1, admin_keys=ADMIN, max_memory_mb=10**6))
    before = list(services(app).models)
    with served(app) as url:
        write_bundle(folder / "new", **OTHER)
        monkeypatch.setattr(memory, "resident", lambda: 10**6 * MIB - PROCESS)
        status, body = reload(url)
        assert status == 409
        assert "model new would not fit" in body["error"]
        assert list(services(app).models) == before


def test_what_this_process_has(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("VmHWM:\t9 kB\nVmRSS:\t    2048 kB\n")
    assert resident(tmp_path / "status") == 2 * MIB
    assert resident(tmp_path / "none") is None
