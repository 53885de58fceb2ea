"""The training loop in two processes, against one; early stopping; what a killed run finds again."""

import json
import shutil
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from contrastive_methods import add_masked_head
from killed_runs import assert_same_weights, fit, fit_until_killed, log
from recipes import arguments, load_recipe
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import TrainerControl, TrainerState, TrainingArguments
from two_processes import in_two

from cloze.encoding.errors import OptionError
from cloze.training.errors import RecipeError, RunError
from cloze.training.export import __main__ as export
from cloze.training.fit import main
from cloze.training.loop.callbacks import Seldom
from cloze.training.loop.prepare import for_this_machine, prepare
from cloze.training.loop.trainer import ObjectiveTrainer, training_arguments
from cloze.training.methods.mlm import MLM
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.run_folder import Run

STEPS = 4
SECOND_EPOCH: dict[str, list[str]] = {"max_steps": ["8"], "group_by_length": ["false"]}  # an epoch has 4 steps
Words = dict[str, list[str]]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> Words:
    """Keys of a short run of an encoder without dropout."""
    folder = tmp_path_factory.mktemp("loop")
    things = ["dog", "man", "letter", "city", "rain", "guitar"]
    lines = [f"{a},The {a} and the {b} run.,Nothing {b}" for a in things for b in things]
    (folder / "rows.csv").write_text("a,b,c\n" + "\n".join(lines) + "\n", encoding="utf-8")
    pairs = "Two dogs run.\tA dog runs.\t4.5\nRain.\tA city.\t1.0\nRain.\tThe guitar.\t0.5\n"
    (folder / "dev.tsv").write_text("sentence1\tsentence2\tscore\n" + pairs, encoding="utf-8")
    shutil.copytree(tiny_bert, folder / "bert")
    path = folder / "bert" / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    path.write_text(json.dumps(config), encoding="utf-8")
    keys = {"encoder": folder / "bert", "corpus": folder / "rows.csv", "dev": folder / "dev.tsv", "batch_size": 8}
    keys |= {
        "max_steps": STEPS,
        "eval_steps": 2,
        "save_steps": 2,
        "log_steps": 1,
        "learning_rate": 1e-3,
        "group_by_length": "true",
    }
    keys["report_to"] = "tensorboard"
    return {key: [str(value)] for key, value in keys.items()} | {"columns": ["a", "b", "c"]}


def runs_of_two(rank: int, words: Words, dropout: Path, folder: Path) -> tuple[str, str]:
    """Runs in the folder; what is refused, and what the command prints."""
    with mock.patch.object(SentenceEncoder, "embed", autospec=True, side_effect=SentenceEncoder.embed) as embed:
        fit(load_recipe("simcse", words), Run(folder / "plain"))
    texts = [list(call.args[1]) for call in embed.call_args_list]
    (folder / f"embedded-{rank}.json").write_text(json.dumps(texts), encoding="utf-8")
    fit(load_recipe("simcse", words | {"mini_batch_size": ["3"]}), Run(folder / "cached"))
    random = load_recipe("simcse", words | {"encoder": [str(dropout)]})
    fit(random, Run(folder / "whole"))
    fit_until_killed(random, Run(folder / "killed"))
    fit(random, Run(folder / "killed"), resume=True)
    longer = load_recipe("simcse", words | SECOND_EPOCH | {"encoder": [str(dropout)]})
    fit(longer, Run(folder / "longer"))
    fit_until_killed(longer, Run(folder / "killed-longer"), step=7)  # with a checkpoint of step 6
    fit(longer, Run(folder / "killed-longer"), resume=True)
    with pytest.raises(RecipeError) as refusal:
        fit(load_recipe("simcse", words | {"batch_size": ["7"]}), Run(folder / "odd"))
    with redirect_stderr(StringIO()) as printed:
        command = ["simcse", *arguments(words), "--max-steps", "2", "--seeds", "3", "4"]
        assert main([*command, "--out", str(folder / "seeds")]) == 0  # it leaves the group of processes
    return str(refusal.value), printed.getvalue()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, words: Words, tiny_bert: Path) -> Path:
    """The folder of those runs."""
    folder = tmp_path_factory.mktemp("two")
    refusals, printed = zip(*in_two(runs_of_two, folder, words, tiny_bert, folder), strict=True)
    assert refusals == ("batch_size is 7, but it is split among 2 processes; write a multiple of 2",) * 2
    (folder / "printed.json").write_text(json.dumps(printed), encoding="utf-8")
    return folder


def weights(run: Path) -> dict[str, Tensor]:
    return load_file(run / "model" / "model.safetensors")


def losses(run: Path) -> list[float]:
    return [entry["loss"] for entry in log(run) if "loss" in entry]


@pytest.mark.parametrize("way", ["plain", "cached"])
def test_two_processes_train_what_one_would(way: str, words: Words, two: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    fit(load_recipe("simcse", words), Run(alone))
    expected, found, begun = (
        weights(alone),
        weights(two / way),
        load_file(Path(words["encoder"][0], "model.safetensors")),
    )
    assert max((expected[key] - begun[key]).abs().max() for key in expected) > 1e-3
    for key, weight in expected.items():
        if not key.endswith("key.bias"):  # its gradient is 0 but for rounding, which AdamW enlarges
            torch.testing.assert_close(found[key], weight, atol=1e-5, rtol=1e-5, msg=key)
    for ours, theirs in zip(log(two / way), log(alone), strict=True):  # one line each, in the same order
        assert ours.keys() == theirs.keys()
        shared = [key for key in ours if key in ("step", "epoch", "loss", "learning_rate", "eval_dev_spearman")]
        assert [ours[key] for key in shared] == pytest.approx([theirs[key] for key in shared], abs=1e-4)


def test_each_process_has_its_own_dropout_and_finds_it_again(two: Path) -> None:
    states = [
        torch.load(two / "whole" / f"checkpoint-{STEPS}" / f"rng_state_{rank}.pth", weights_only=False)["cpu"]
        for rank in range(2)
    ]
    assert not torch.equal(*states)
    whole, killed = weights(two / "whole"), weights(two / "killed")
    assert all(torch.equal(killed[key], weight) for key, weight in whole.items())
    assert [entry["step"] for entry in log(two / "killed")] == [entry["step"] for entry in log(two / "whole")]
    assert len(list((two / "whole" / "tensorboard").iterdir())) == 1
    assert not (two / "odd").exists()


def test_two_processes_resume_in_the_second_epoch_with_its_order(two: Path) -> None:
    assert_same_weights(two / "longer", two / "killed-longer", "checkpoint-8")
    assert losses(two / "longer") == losses(two / "killed-longer")


def test_the_second_epoch_of_a_seed_is_not_the_first_of_the_next(words: Words, tmp_path: Path) -> None:
    """So the runs of `--seeds 0-4` have no order in common."""

    def order(seed: str, epoch: int) -> list[list[int]]:
        recipe = load_recipe("simcse", words | SECOND_EPOCH | {"seed": [seed]})
        corpus, _, objective = prepare(recipe)
        batches = ObjectiveTrainer(objective, corpus, training_arguments(recipe, tmp_path, None)).get_train_dataloader()
        batches.set_epoch(epoch)
        return list(batches.batch_sampler)

    assert order("0", 1) != order("1", 0)
    assert order("0", 1) == order("0", 1)


def test_one_process_does_not_go_on_for_two(two: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(two / "whole", tmp_path / "whole"))
    (run / "run.json").rename(run / "was-run.json")
    with pytest.raises(
        RunError, match=r"checkpoint-4 was saved by 2 processes, but .* start 2 with torchrun: --nnodes"
    ):
        fit(load_recipe(str(run / "recipe.toml")), Run(run), resume=True)


def test_the_command_speaks_once_for_all_processes(two: Path) -> None:
    first, second = json.loads((two / "printed.json").read_text(encoding="utf-8"))
    assert first.count("finished: ") == 1
    assert first.count("mean ± SD") == 1
    assert second == ""
    assert json.loads((two / "seeds" / "seeds.json").read_text(encoding="utf-8")).keys() >= {"mean", "sd"}


def test_both_processes_share_the_embedding_of_the_dev_data(two: Path) -> None:
    """One that waited for the other's scores would be ended by the limit of its collectives."""
    first, second = (json.loads((two / f"embedded-{rank}.json").read_text(encoding="utf-8")) for rank in range(2))
    assert len(first) == len(second) > STEPS // 2
    for ours, theirs in zip(first, second, strict=True):
        assert 0 <= len(ours) - len(theirs) <= 1
        assert not set(ours) & set(theirs)


def test_several_devices_without_torchrun_are_refused(words: Words, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(RecipeError, match=r"4 GPUs .* torchrun --nproc_per_node 4 -m cloze.training.fit"):
        prepare(load_recipe("simcse", words))


def test_ranking_is_refused_in_several_processes(words: Words, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would compare the documents of its own part of the batch alone."""
    monkeypatch.setattr("cloze.training.loop.prepare.processes", lambda: SimpleNamespace(num_processes=2))
    recipe = load_recipe("ranking", words | {"columns": ["a", "b"]})
    with pytest.raises(
        RecipeError, match=r"ranking.* in one process and on one device, but there are 2 processes and 0 devices; start"
    ):
        prepare(recipe)


def test_a_dev_score_that_stands_still_stops_the_run(words: Words, tmp_path: Path) -> None:
    still = {"learning_rate": ["1e-12"], "eval_steps": ["1"], "max_steps": ["20"], "patience": ["2"]}
    recipe = load_recipe("simcse", words | still)
    fit(recipe, Run(tmp_path / "run"))
    assert Run(tmp_path / "run").provenance()["steps"] == 3  # a first score, and two no better
    fit_until_killed(recipe, Run(tmp_path / "killed"))
    assert not Run(tmp_path / "killed").finished
    fit(recipe, Run(tmp_path / "killed"), resume=True)
    assert Run(tmp_path / "killed").provenance()["steps"] == 3
    steps = [entry["step"] for entry in log(tmp_path / "killed") if "eval_dev_spearman" in entry]
    assert steps == [0, 1, 2, 3]


def test_the_best_weights_are_kept_between_checkpoints(words: Words, tmp_path: Path) -> None:
    """A rate so high that the first evaluation is the best; the one checkpoint is that of the last step."""
    run = Run(tmp_path / "run")
    high = {"learning_rate": ["0.5"], "warmup_steps": ["0"]}
    fit(load_recipe("simcse", words | high | {"eval_steps": ["1"], "save_steps": ["3"]}), run)
    best = run.provenance()["best_step"]
    assert 0 < best < STEPS
    assert sorted(path.name for path in run.path.glob("checkpoint-*")) == ["checkpoint-3", f"checkpoint-{STEPS}"]
    assert run.best.is_file()
    every = Run(tmp_path / "every")
    fit(load_recipe("simcse", words | high | {"eval_steps": ["1"], "max_steps": [str(STEPS)]}), every)
    found, expected = (load_file(each.model / "model.safetensors") for each in (run, every))
    assert all(torch.equal(weight, expected[name]) for name, weight in found.items())
    last = load_file(run.path / f"checkpoint-{STEPS}" / "model.safetensors")
    assert any(not torch.equal(last[f"encoder.backbone.{name}"], weight) for name, weight in found.items())


def test_the_best_step_is_that_of_the_weights_that_are_kept(words: Words, tmp_path: Path) -> None:
    """A run may be killed after an evaluation that comes out worse when it is repeated, on a GPU for example."""
    keys = words | {"eval_steps": ["1"], "save_steps": ["2"], "learning_rate": ["0.5"], "warmup_steps": ["0"]}
    recipe, run = load_recipe("simcse", keys), Run(tmp_path / "run")
    fit_until_killed(recipe, run)
    save_file(load_file(run.best), run.best, {"step": "3", "metric": "99.5"})
    fit(recipe, run, resume=True)
    found = run.provenance()
    assert (found["best_step"], found["dev_score"]) == (3, 99.5)


@pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker processes")  # where there is one CPU
def test_with_workers_the_weights_are_the_same(words: Words, tiny_bert: Path, tmp_path: Path) -> None:
    """Dropout included: what a worker draws is its own."""
    found = []
    for workers in ("0", "2"):
        run = Run(tmp_path / workers)
        fit(load_recipe("simcse", words | {"workers": [workers], "encoder": [str(tiny_bert)]}), run)
        found.append(load_file(run.path / "model" / "model.safetensors"))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(weight, found[1][name]) for name, weight in found[0].items())


@pytest.mark.parametrize(("steps", "expected"), [("0", 0), ("7", 7), ("0.1", 20), ("0.001", 1)])
def test_warm_up_is_steps_or_a_share_of_them(steps: str, expected: int, words: Words, tmp_path: Path) -> None:
    recipe = load_recipe("simcse", words | {"warmup_steps": [steps]})
    assert training_arguments(recipe, tmp_path, None).get_warmup_steps(200) == expected


def test_the_rate_falls_to_zero(words: Words, tmp_path: Path) -> None:
    keys = {"max_steps": ["4"], "log_steps": ["1"], "learning_rate": ["1e-3"]}
    fit(load_recipe("simcse", words | keys), Run(tmp_path))
    rates = [line["learning_rate"] for line in log(tmp_path) if "learning_rate" in line]
    assert rates == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])  # after the last step it would be 0


@pytest.mark.parametrize("steps", ["-1", "1.5"])
def test_a_warm_up_that_is_neither_is_refused(steps: str, words: Words) -> None:
    with pytest.raises(OptionError, match=f"--warmup-steps is '{steps}': .*below 1: a fraction of all steps"):
        load_recipe("simcse", words | {"warmup_steps": [steps]})


@pytest.mark.parametrize("chunks", [{}, {"mini_batch_size": ["3"]}])
def test_bf16_is_of_the_passes_and_the_weights_stay_fp32(chunks: Words, words: Words, tmp_path: Path) -> None:
    for precision in ("fp32", "bf16"):
        keys = words | chunks | {"precision": [precision], "max_steps": ["3"], "learning_rate": ["1e-4"]}
        fit(load_recipe("simcse", keys), Run(tmp_path / precision))
    expected, found = weights(tmp_path / "fp32"), weights(tmp_path / "bf16")
    begun = load_file(Path(words["encoder"][0], "model.safetensors"))
    assert {weight.dtype for weight in found.values()} == {torch.float32}
    assert all(weight.isfinite().all() for weight in found.values())
    assert any(not torch.equal(found[key], weight) for key, weight in begun.items())  # it trained
    assert any(not torch.equal(found[key], weight) for key, weight in expected.items())  # and not in fp32
    losses = [[line["loss"] for line in log(tmp_path / name) if "loss" in line] for name in ("fp32", "bf16")]
    assert len(losses[1]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


@pytest.mark.parametrize(
    ("gpu", "bf16", "found"), [(True, True, ("bf16", 2)), (True, False, ("fp32", 2)), (False, False, ("fp32", 0))]
)
def test_precision_and_workers_suit_the_gpu(
    gpu: bool, bf16: bool, found: tuple[str, int], words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16 or including_emulation)
    recipe = for_this_machine(load_recipe("simcse", words))
    assert (recipe.precision, recipe.workers) == found
    named = words | {"precision": ["tf32"], "workers": ["1"]}
    recipe = for_this_machine(load_recipe("simcse", named))
    assert (recipe.precision, recipe.workers) == ("tf32", 1)


def test_a_checkpoint_is_saved_every_five_minutes_and_at_the_end(words: Words, tmp_path: Path) -> None:
    """Unless save_steps says otherwise."""
    now = 0.0
    seldom, control, saved = Seldom(lambda: now), TrainerControl(), []
    for step in range(1, 11):
        now += 100
        control.should_save = step != 3  # as an evaluation came or did not come
        seldom.on_step_end(TrainingArguments(str(tmp_path)), TrainerState(global_step=step, max_steps=10), control)
        saved += [step] * control.should_save
    assert saved == [4, 7, 10]
    run = Run(tmp_path / "run")
    fit(load_recipe("simcse", {key: value for key, value in words.items() if key != "save_steps"}), run)
    assert [path.name for path in run.path.glob("checkpoint-*")] == ["checkpoint-4"]


def test_a_run_keeps_the_precision_that_it_began_with(two: Path) -> None:
    assert load_recipe(str(two / "whole" / "recipe.toml")).precision == "fp32"


def test_tf32_needs_a_gpu_that_has_it(words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("simcse", words | {"precision": ["tf32"]})
    monkeypatch.setattr("cloze.training.loop.prepare.is_torch_tf32_available", lambda: False)
    with pytest.raises(RecipeError, match="precision is 'tf32', which needs an NVIDIA GPU"):
        fit(recipe, Run(tmp_path / "run"))


def test_compile_needs_a_compiler_on_a_cpu(words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("simcse", words | {"compile": ["true"]})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("cloze.training.loop.prepare.shutil.which", lambda program: None)
    with pytest.raises(RecipeError, match="needs a C"):
        fit(recipe, Run(tmp_path / "run"))


METHODS_BESIDE: dict[str, Words] = {  # methods that run more than the encoder, of one column
    "diffcse": {"generator": ["ENCODER"], "warmup_steps": ["0"]},
    "sg-opt": {"head_width": ["16"], "max_tokens": ["32"], "held_out": ["8"]},
}


def beside(name: str, words: Words, folder: Path, layers: int = 2) -> Words:
    """The keys for such a method, and for its encoder, which has a masked-word head."""
    encoder = add_masked_head(Path(words["encoder"][0]), folder / "masked", layers)
    keys = {key: value for key, value in words.items() if key not in ("dev", "eval_steps")}
    extra = {key: [str(encoder)] if value == ["ENCODER"] else value for key, value in METHODS_BESIDE[name].items()}
    return keys | {"encoder": [str(encoder)], "columns": ["a"], "held_out": ["0"]} | extra


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The modules that are compiled from now on, without being compiled."""
    found: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda module, **_: found.append(module))
    monkeypatch.setattr("cloze.training.loop.prepare.shutil.which", lambda program: program)
    return found


@pytest.mark.parametrize(("name", "count"), [("diffcse", 3), ("sg-opt", 2)])
def test_compile_reaches_all_that_a_step_runs(
    name: str, count: int, compiled: list[nn.Module], words: Words, tmp_path: Path
) -> None:
    """Of DiffCSE: encoder, discriminator and generator; of SG: the encoder and its frozen copy."""
    _, _, objective = prepare(load_recipe(name, beside(name, words, tmp_path) | {"compile": ["true"]}))
    ran = set[nn.Module]()
    for module in compiled:
        module.register_forward_hook(lambda module, *_: ran.add(module))
    objective.train()(**objective.views([("Two dogs run.",), ("Rain.",)]))
    assert len(ran) == len(compiled) == count


@pytest.mark.parametrize("key", ["guide", "teacher"])
def test_compile_reaches_what_embeds_the_texts(
    key: str, compiled: list[nn.Module], words: Words, tmp_path: Path
) -> None:
    SentenceEncoder.load(words["encoder"][0], template="[X]", pooling="mean").save(tmp_path / "other")
    keys = {name: value for name, value in words.items() if name not in ("dev", "eval_steps", "columns")}
    columns = {"guide": ["a", "b"], "teacher": ["a"]}[key]
    keys |= {"compile": ["true"], "max_tokens": ["32"], "columns": columns, key: [str(tmp_path / "other")]}
    _, _, objective = prepare(load_recipe({"guide": "simcse", "teacher": "distill"}[key], keys))
    teacher, encoder = compiled
    assert encoder is objective.encoder.backbone
    assert teacher not in set(objective.modules())
    assert type(teacher) is type(encoder)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # torch's own use
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # it hides that
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_a_compiled_method_trains_the_same(words: Words, tmp_path: Path) -> None:
    """A layer takes twenty seconds of CPU to compile; what other methods compile is tested above."""
    keys = beside("sg-opt", words, tmp_path, layers=1)
    losses = []
    for compiled in ("false", "true"):
        changed = keys | {"compile": [compiled], "max_steps": ["2"], "log_steps": ["1"]}
        fit(load_recipe("sg-opt", changed), Run(tmp_path / compiled))
        losses.append([line["loss"] for line in log(tmp_path / compiled) if "loss" in line])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert weights(tmp_path / "false").keys() == weights(tmp_path / "true").keys()


def test_accumulated_parts_make_one_step(words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    forward = MLM.forward

    def counted(self: MLM, texts: dict[str, Tensor]) -> dict[str, Tensor]:
        rows.append(len(texts["input_ids"]))
        return forward(self, texts)

    monkeypatch.setattr(MLM, "forward", counted)
    losses = []
    for parts in ("1", "4"):
        keys = {key: value for key, value in words.items() if key not in ("dev", "eval_steps")}
        keys |= {"columns": ["b"], "accumulation_steps": [parts], "max_steps": ["3"], "log_steps": ["1"]}
        keys |= {"masked_share": ["0.9"]}  # a part without a masked word would have the loss 0
        fit(load_recipe("mlm", keys), Run(tmp_path / parts))
        losses.append([line["loss"] for line in log(tmp_path / parts) if "loss" in line])
    assert rows == [8] * 3 + [2] * 12
    assert len(losses[1]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=0.2)  # their mean, not their sum


def test_an_epoch_of_parts_has_no_smaller_step(words: Words, tmp_path: Path) -> None:
    keys = {key: value for key, value in words.items() if key not in ("dev", "eval_steps", "max_steps")}
    keys |= {"columns": ["b"], "accumulation_steps": ["4"], "batch_size": ["24"], "epochs": ["2"], "held_out": ["0"]}
    recipe, run = load_recipe("mlm", keys), Run(tmp_path / "run")
    fit(recipe, run)
    rows = sum(source["sentences"] for source in run.provenance()["data"])
    assert rows % 24 > 6  # a part of a further batch is left
    assert run.provenance()["steps"] == recipe.steps(rows) == 2 * (rows // 24)


def test_a_run_that_continues_another_names_the_texts_of_both(words: Words, tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("The harbour is frozen.\nA ship waits.\n" * 8, encoding="utf-8")
    first, second, third = (Run(tmp_path / name) for name in ("first", "second", "third"))
    keys = words | {"max_steps": ["1"], "dev": [], "eval_steps": ["1"], "held_out": ["0"]}
    fit(load_recipe("simcse", keys), first)
    own = {"encoder": [str(first.path)], "corpus": [str(tmp_path / "own.txt")], "columns": []}
    fit(load_recipe("simcse", keys | own), second)
    assert [source["name"] for source in second.provenance()["data"]] == ["rows.csv", "own.txt"]
    export.main([str(second.path), str(tmp_path / "bundle"), "--precision", "fp32"])
    fit(load_recipe("simcse", keys | {"encoder": [str(tmp_path / "bundle")]}), third)
    assert [source["name"] for source in third.provenance()["data"]] == ["rows.csv", "own.txt"]
    assert third.provenance()["rows"] == first.provenance()["rows"]


def test_the_texts_of_the_encoder_are_those_of_the_start(
    words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Run(tmp_path / "first"), Run(tmp_path / "second")
    keys = words | {"max_steps": ["1"], "dev": [], "eval_steps": ["1"], "held_out": ["0"]}
    fit(load_recipe("simcse", keys), first)
    train = ObjectiveTrainer.train

    def replace_the_first(trainer: ObjectiveTrainer, **settings: object) -> object:
        first.provenance_file.write_text("not JSON", encoding="utf-8")
        return train(trainer, **settings)

    monkeypatch.setattr(ObjectiveTrainer, "train", replace_the_first)
    (tmp_path / "own.txt").write_text("The harbour is frozen.\nA ship waits.\n" * 8, encoding="utf-8")
    own = keys | {"encoder": [str(first.model)], "corpus": [str(tmp_path / "own.txt")], "columns": []}
    fit(load_recipe("simcse", own), second)
    assert [source["name"] for source in second.provenance()["data"]] == ["rows.csv", "own.txt"]
    with pytest.raises(RunError, match=r"run\.json cannot be read as JSON .*; restore the folder"):
        fit(load_recipe("simcse", own), Run(tmp_path / "third"))
    assert not (tmp_path / "third").exists()


def test_parts_that_do_not_divide_the_batch_are_refused(words: Words) -> None:
    with pytest.raises(RecipeError, match="batch_size is 8 and accumulation_steps is 3; write a batch_size"):
        load_recipe("mlm", words | {"columns": ["b"], "accumulation_steps": ["3"]})
