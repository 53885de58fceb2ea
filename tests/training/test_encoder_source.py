"""What the name of an encoder stands for, and how it is read by itself: no torch, and no guess."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT
from recipes import arguments, load_recipe

from cloze.encoding.bundle import Bundle
from cloze.training.adaptation.rounds import load_parent
from cloze.training.encoder_source import encoder_folder, learnt_sentences, of_library, own_config
from cloze.training.errors import EncoderError, RunError
from cloze.training.fit import main
from cloze.training.loop.soup import average_weights
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.masked_words import MaskedHead
from cloze.training.pretrain import main as pretrain
from cloze.training.recipes import command

MODEL = ROOT / "models" / "cloze-mini"
AT_MASK = {"template": "It says [X], that is [MASK].", "pooling": "mask", "final_period": True}


def library_model(folder: Path, pooling: dict[str, Any], prompts: dict[str, Any] | None = None) -> str:
    """The files by which sentence-transformers says how a model is read."""
    kinds = {"": "sentence_transformers.models.Transformer", "1_Pooling": "sentence_transformers.models.Pooling"}
    rows = [{"idx": place, "path": path, "type": kind} for place, (path, kind) in enumerate(kinds.items())]
    (folder / "1_Pooling").mkdir(parents=True)
    (folder / "modules.json").write_text(json.dumps(rows))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "config.json").write_text("{}")
    if prompts is not None:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return str(folder)


def test_a_run_a_folder_and_a_bundle_say_how_they_are_read(tiny_bert: Path, tmp_path: Path) -> None:
    SentenceEncoder.load(str(tiny_bert), **AT_MASK).save(tmp_path / "run" / "model")
    (tmp_path / "run" / "run.json").write_text("{}")
    assert encoder_folder(str(tmp_path / "run")) == str(tmp_path / "run" / "model")
    assert own_config(str(tmp_path / "run")) == own_config(str(tmp_path / "run" / "model")) == AT_MASK
    spec = Bundle.load(MODEL).spec
    own = {"template": spec.template, "pooling": spec.pooling, "final_period": spec.final_period}
    assert own_config(str(MODEL)) == own_config("cloze-mini") == own
    assert own_config(str(tiny_bert)) is None  # a masked language model


def test_the_shipped_model_is_not_looked_for_on_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def download(*names: str) -> str:
        asked.append(names)
        return "nowhere"

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.chdir(tmp_path)
    assert not of_library("cloze-mini")
    assert load_parent("cloze-mini").config.pooling == "mask"
    assert asked == []
    assert not of_library("somebody/mini")
    assert asked == [("somebody/mini", "modules.json")]


@pytest.mark.parametrize(
    ("pooling", "prompts", "expected"),
    [
        ({"pooling_mode": "max"}, None, ("[X]", "max")),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, {"prompts": {}}, ("[X]", "mean")),
        ({"pooling_mode": "mean"}, {"prompts": {"q": "query: "}, "default_prompt_name": "q"}, ("query: [X]", "mean")),
        ({"pooling_mode": "mean"}, {"prompts": {"q": "query: "}, "default_prompt_name": None}, ("[X]", "mean")),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, None, None),  # joined
    ],
)
def test_a_model_of_sentence_transformers_says_so_too(
    pooling: dict[str, Any], prompts: dict[str, Any] | None, expected: tuple[str, str] | None, tmp_path: Path
) -> None:
    found = own_config(library_model(tmp_path / "model", pooling, prompts))
    assert expected == (found and (found["template"], found["pooling"]))


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"recipe": "simcse", "data": []}', '{"recipe": {"method": "x"}}', "no"]
)
def test_a_damaged_provenance_is_one_line(content: str, tiny_bert: Path, tmp_path: Path) -> None:
    SentenceEncoder.load(str(tiny_bert), **AT_MASK).save(tmp_path / "model")
    (tmp_path / "run.json").write_text(content)
    for read in (learnt_sentences, lambda name: average_weights([Path(name)], parent_share=0.5)):
        with pytest.raises(RunError, match=r"run\.json .*; restore the folder"):
            read(str(tmp_path))


@pytest.mark.parametrize("file", ["embedding_config.json", "modules.json"])
def test_a_damaged_reading_is_one_line(file: str, tiny_bert: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_bert, tmp_path / "model")
    (model / file).write_text('[{"path": "1_Pooling"}, 3]')
    if file == "modules.json":
        assert own_config(str(model)) is None
        return
    with pytest.raises(RunError, match=r"embedding_config\.json does not contain a JSON object"):
        own_config(str(model))


def test_a_run_that_is_not_finished_is_refused(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text("")
    with pytest.raises(RunError, match="is a run that is not finished; continue it"):
        own_config(str(tmp_path))


def test_a_recipe_takes_the_encoders_own_template_and_pooling(tiny_bert: Path, tmp_path: Path) -> None:
    """Unless something chooses one of them. A recipe that reads the mask keeps its template for another encoder."""
    SentenceEncoder.load(str(tiny_bert), **AT_MASK).save(tmp_path / "masked")
    SentenceEncoder.load(str(tiny_bert), template="so: [X]", pooling="mean").save(tmp_path / "mean")

    def read(source: str, *words: str, preset: str | None = None, **keys: object) -> tuple[str, str]:
        recipe = load_recipe(source, {"corpus": ["c.txt"], **keys}, preset)
        return recipe.template, recipe.pooling

    mean, masked, bare = ({"encoder": str(tmp_path / name)} for name in ("mean", "masked", "none"))
    bare = {"encoder": str(tiny_bert)}
    assert read("simcse", **mean) == ("so: [X]", "mean")
    assert read("simcse", **masked) == (AT_MASK["template"], "mask")
    assert load_recipe("simcse", {"corpus": ["c.txt"], **masked}).final_period is True
    assert load_recipe("simcse", {"corpus": ["c.txt"], **masked, "final_period": False}).final_period is False
    assert read("simcse", **mean, final_period=True) == ("so: [X]", "mean")
    assert read("simcse", **bare) == read("simcse") == ("[X]", "cls")
    assert read("simcse", **mean, pooling="cls") == ("[X]", "cls")
    assert read("simcse", **mean, template="a [X]") == ("a [X]", "cls")
    assert read("promptbert-same", **mean) == ('This sentence of "[X]" means [MASK].', "mask")
    assert read("promptbert-same", **masked) == (AT_MASK["template"], "mask")
    assert read("mask", **mean) == ("[X] means [MASK].", "mask")
    paper = ("This sentence : ' [X] ' means [MASK].", "mask")  # a preset chooses it
    assert read("promptbert-same", preset="roberta-base", **masked) == paper
    sbert = tmp_path / "sbert"  # a preset's encoder is read as the recipe says
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "own_config", lambda _: {"template": "so: [X]", "pooling": "mean"})
        assert read("sg-opt", preset="sbert-base") == ("[X]", "cls")
        assert read("sg-opt", preset="sbert-base", encoder=str(sbert)) == ("so: [X]", "mean")
    own = tmp_path / "own.toml"
    own.write_text('method = "simcse"\n')
    spec = Bundle.load(MODEL).spec
    assert read(str(own)) == (spec.template, spec.pooling)  # of cloze-mini, the default
    own.write_text(f'method = "simcse"\nencoder = "{tmp_path}/mean"\n')
    assert read(str(own)) == ("so: [X]", "mean")
    own.write_text(f'method = "simcse"\nencoder = "{tmp_path}/mean"\npooling = "max"\n')
    assert read(str(own)) == ("[X]", "max")


def test_a_pretrained_run_is_found_by_its_name_wherever_a_masked_word_head_is_needed(
    tiny_bert: Path, tmp_path: Path
) -> None:
    corpus = tmp_path / "text.txt"
    corpus.write_text("\n".join(f"The dog and the {word} run." for word in ("man", "rain", "city", "letter")) + "\n")
    keys = {"corpus": corpus, "batch_size": 2, "max_tokens": 40, "max_steps": 1, "held_out": 0}
    run = tmp_path / "mlm"
    assert pretrain(arguments({"encoder": tiny_bert, "out": run, **keys})) == 0
    assert MaskedHead.load(str(run)).dense.weight.shape == (32, 32)
    assert main(["optiprompt", *arguments({"encoder": run, "out": tmp_path / "opti", **keys})]) == 0
    generated = {"encoder": tiny_bert, "generator": run, "out": tmp_path / "diff", **keys}
    assert main(["diffcse", *arguments(generated)]) == 0
    assert pretrain(arguments({"encoder": run, "head": "kept", "out": tmp_path / "more", **keys})) == 0
    paired = tmp_path / "pairs.csv"
    paired.write_text("sent0,sent1,hard_neg\n" + "The dog runs.,A dog runs.,It rains.\n" * 3)
    supervised = keys | {"corpus": paired, "encoder": run, "out": tmp_path / "supervised"}
    assert main(["promptbert-supervised", *arguments(supervised)]) == 0
    recipe = load_recipe("simcse", {"encoder": str(run), "corpus": str(corpus)})
    assert (recipe.template, recipe.pooling) == ("[X]", "cls")  # the paper's: no vector of the run was trained yet


def test_an_encoder_that_cannot_be_had_leads_to_the_one_that_comes_with_cloze(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EncoderError, match="or cloze-mini, the model that comes with Cloze"):
        SentenceEncoder.load(str(tmp_path), template="[X]", pooling="cls")
