import json
from pathlib import Path

import pytest

from cloze.training.errors import RecipeError, RunError
from cloze.training.fit import main
from cloze.training.loop.seeds import parse_seeds, summary

TEXT = [f"The {a} and the {b} run." for a in ("dog", "man", "city", "rain") for b in ("letter", "guitar", "market")]
DEV = "sentence1\tsentence2\tscore\nTwo dogs run.\tA dog runs.\t4.5\nRain.\tA city.\t1.0\nRain.\tThe guitar.\t0.5\n"


@pytest.fixture
def words(tmp_path: Path, tiny_bert: Path) -> list[str]:
    (tmp_path / "text.txt").write_text("\n".join(TEXT), encoding="utf-8")
    (tmp_path / "dev.tsv").write_text(DEV, encoding="utf-8")
    files = ["--corpus", str(tmp_path / "text.txt"), "--dev", str(tmp_path / "dev.tsv"), "--encoder", str(tiny_bert)]
    return ["simcse", *files, "--batch-size", "4", "--max-steps", "2", "--eval-steps", "1"]


def test_a_run_a_seed_and_the_spread_of_their_scores(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "runs"
    assert main([*words, "--out", str(out), "--seeds", "0-1", "7"]) == 0
    found = json.loads((out / "seeds.json").read_text(encoding="utf-8"))
    runs = {seed: json.loads((out / f"seed-{seed}" / "run.json").read_text(encoding="utf-8")) for seed in (0, 1, 7)}
    assert found["dev_score"] == {str(seed): run["dev_score"] for seed, run in runs.items()}
    assert [run["seeds"] for run in runs.values()] == [[0], [1], [7]]
    assert len({(out / f"seed-{seed}" / "model" / "model.safetensors").read_bytes() for seed in runs}) == 3
    table = capsys.readouterr().err
    assert f"{found['mean']:.2f} ± {found['sd']:.2f} ({found['min']:.2f}, {found['max']:.2f})" in table
    _same_command_again_trains_what_is_missing(out, words, capsys)


def _same_command_again_trains_what_is_missing(out: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    finished = (out / "seed-1" / "run.json").stat().st_mtime_ns
    weights = (out / "seed-7" / "model" / "model.safetensors").read_bytes()
    (out / "seed-7" / "run.json").unlink()  # as if it had been killed
    (out / "seeds.json").unlink()
    assert main([*words, "--out", str(out), "--seeds", "0-1", "7"]) == 0
    assert "seed-1 is finished" in capsys.readouterr().err
    assert (out / "seed-1" / "run.json").stat().st_mtime_ns == finished
    assert (out / "seed-7" / "model" / "model.safetensors").read_bytes() == weights
    assert (out / "seeds.json").is_file()
    with pytest.raises(RunError, match="holds one run per seed; continue them with the command that started them"):
        main(["--resume", str(out)])
    with pytest.raises(RunError, match="seed-0 was trained with another learning_rate; choose another --out"):
        main([*words, "--out", str(out), "--seeds", "0", "--learning-rate", "1e-5"])
    Path(words[words.index("--dev") + 1]).write_text(DEV + "Rain.\tRain.\t5.0\n", encoding="utf-8")
    message = r"seed-0 and .*seed-8 did not read the same dev .*dev\.tsv; remove the older of the two, and train again"
    with pytest.raises(RunError, match=message):
        main([*words, "--out", str(out), "--seeds", "0", "8"])


def test_refused_before_anything_is_trained(tmp_path: Path, words: list[str]) -> None:
    out = tmp_path / "runs"
    with pytest.raises(RecipeError, match="dev is not set; write --dev FILE"):
        main(["simcse", "--corpus", "text.txt", "--out", str(out), "--seeds", "0", "1"])
    assert not out.exists()
    out.mkdir()
    (out / "thesis.txt").write_text("years of work", encoding="utf-8")
    with pytest.raises(RunError, match="holds files other than runs of seeds"):
        main([*words, "--out", str(out), "--seeds", "0", "1"])
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]


def test_seeds_are_numbers_and_ranges() -> None:
    assert parse_seeds(["0", "1", "2"]) == [0, 1, 2]
    assert parse_seeds(["0-4", "7"]) == [0, 1, 2, 3, 4, 7]
    for words in (["x"], ["-1"], ["4-2"], ["1-"], ["1.5"]):
        with pytest.raises(RecipeError, match="write whole numbers, 0 1 2, or a range, 0-4"):
            parse_seeds(words)
    for word in ("2147483648", "0-99999999999"):
        with pytest.raises(RecipeError, match="a seed is at most 2147483647"):
            parse_seeds([word])
    with pytest.raises(RecipeError, match="has a seed twice"):
        parse_seeds(["0-2", "1"])


def test_the_summary_is_mean_sample_deviation_and_extremes() -> None:
    assert summary({0: 78.0, 3: 80.0, 4: 79.0}) == {
        "dev_score": {"0": 78.0, "3": 80.0, "4": 79.0},
        "mean": 79.0,
        "sd": 1.0,  # divided by n - 1
        "min": 78.0,
        "max": 80.0,
        "mean_of_best_3": None,
    }
    best = summary({seed: float(score) for seed, score in enumerate((70, 80, 71, 79, 78, 60, 1))})
    assert best["mean_of_best_3"] == 79.0
    assert summary({5: 70.0})["sd"] is None
