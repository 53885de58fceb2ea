"""LoRA: what learns and what stays, merged weights, what is refused."""

from pathlib import Path

import pytest
import torch
from killed_runs import fit
from recipes import load_recipe
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    ModernBertConfig,
    ModernBertModel,
    MPNetConfig,
    MPNetModel,
    PreTrainedModel,
    RobertaConfig,
    RobertaModel,
)

from cloze.training.errors import RecipeError
from cloze.training.loop.prepare import prepare
from cloze.training.loop.trainable import add_lora, merge_lora
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.run_folder import Run

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}
THIN = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "vocab_size": 50}
LINEARS = {"bert": 12, "roberta": 12, "mpnet": 12, "distilbert": 12, "modernbert": 8}  # in two layers
IDS = torch.arange(5, 45).view(4, 10)
RANK = 3


def backbone(family: str) -> PreTrainedModel:
    """A tiny random model of the family, in evaluation mode."""
    torch.manual_seed(0)
    if family == "bert":
        return BertModel(BertConfig(**SIZES), add_pooling_layer=False).eval()
    if family == "roberta":
        return RobertaModel(RobertaConfig(**SIZES), add_pooling_layer=False).eval()
    if family == "mpnet":
        return MPNetModel(MPNetConfig(**SIZES), add_pooling_layer=False).eval()
    if family == "distilbert":
        return DistilBertModel(DistilBertConfig(**THIN)).eval()
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
    return ModernBertModel(ModernBertConfig(**SIZES, **tokens, global_attn_every_n_layers=1)).eval()


def randomise_lora(model: nn.Module) -> dict[str, Tensor]:
    """Give what learns random values, as training would; return it by name."""
    learning = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    for weight in learning.values():
        nn.init.normal_(weight, std=0.1)
    return learning


@pytest.mark.parametrize("family", LINEARS)
@torch.no_grad()
def test_each_linear_layer_learns_and_merges(family: str) -> None:
    model = backbone(family)
    before = model(IDS).last_hidden_state
    shapes = [module.weight.shape for module in model.modules() if isinstance(module, nn.Linear)]
    names = list(model.state_dict())
    add_lora(model, RANK, alpha=6)
    torch.testing.assert_close(model(IDS).last_hidden_state, before, atol=0, rtol=0)  # B begins as 0
    learning = randomise_lora(model)
    assert len(shapes) == LINEARS[family]
    assert sum(weight.numel() for weight in learning.values()) == sum(RANK * (rows + width) for rows, width in shapes)
    unmerged = model(IDS).last_hidden_state
    merge_lora(model)
    assert list(model.state_dict()) == names
    torch.testing.assert_close(model(IDS).last_hidden_state, unmerged, atol=1e-5, rtol=0)
    assert (unmerged - before).abs().max() > 1e-2


@torch.no_grad()
def test_the_product_is_scaled_by_alpha_over_the_rank() -> None:
    model = backbone("bert")
    place = "encoder.layer.1.output.dense"
    before = model.get_submodule(place).weight.clone()
    add_lora(model, RANK, alpha=6)
    learning = randomise_lora(model)
    down, up = (learning[f"{place}.lora_{matrix}.default.weight"] for matrix in "AB")
    merge_lora(model)
    torch.testing.assert_close(model.get_submodule(place).weight, before + 6.0 / RANK * up @ down)


@pytest.fixture
def keys(tiny_bert: Path, tmp_path: Path) -> dict[str, list[str]]:
    """Keys of a short run with LoRA and dropout."""
    things = ["dog", "man", "letter", "city", "rain", "guitar"]
    text = "".join(f"The {a} and the {b} run.\n" for a in things for b in things)
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    values = {"encoder": tiny_bert, "corpus": tmp_path / "text.txt", "lora_rank": RANK, "batch_size": 8, "max_steps": 4}
    values |= {"held_out": 8, "eval_steps": 2, "log_steps": 1, "learning_rate": 1e-2}
    return {key: [str(value)] for key, value in values.items()}


def test_a_run_leaves_merged_weights_and_the_parent_frozen(
    keys: dict[str, list[str]], tiny_bert: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    fit(load_recipe("simcse", keys), Run(run))
    parent, model = load_file(tiny_bert / "model.safetensors"), load_file(run / "model" / "model.safetensors")
    assert model.keys() == parent.keys()
    linear = {name for name, weight in parent.items() if weight.dim() == 2 and "embeddings" not in name}
    assert {name for name, weight in parent.items() if not torch.equal(model[name], weight)} == linear
    checkpoint = load_file(run / "checkpoint-4" / "model.safetensors")
    frozen = {name.replace(".base_layer", ""): weight for name, weight in checkpoint.items() if "lora_" not in name}
    assert all(torch.equal(frozen[f"encoder.backbone.{name}"], weight) for name, weight in parent.items())
    merged = SentenceEncoder.load(str(run / "model"))
    recipe = load_recipe("simcse", keys)
    _, _, objective = prepare(recipe)
    objective.load_state_dict(load_file(run / "best.safetensors"))
    texts = ["A dog runs.", "Rain in the city."]
    assert merged.embed(texts) == pytest.approx(objective.encoder.embed(texts), abs=1e-5)


@pytest.mark.parametrize(
    ("recipe", "words", "message"),
    [
        ("optiprompt", {}, "lora_rank is 3, and method 'optiprompt' keeps the encoder frozen; write lora_rank = 0"),
        ("sg", {}, "lora_rank is 3, and method 'sg' compares every weight with the frozen copy's; write lora_rank = 0"),
        ("mlm", {"from_scratch": ["true"]}, "lora_rank is 3, which keeps weights, but from_scratch initialises all"),
    ],
)
def test_methods_that_it_cannot_serve_refuse_it(
    recipe: str, words: dict[str, list[str]], message: str, keys: dict[str, list[str]]
) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(recipe, keys | words)


def test_a_rank_that_saves_nothing_is_refused(keys: dict[str, list[str]]) -> None:
    recipe = load_recipe("simcse", keys | {"lora_rank": ["16"]})
    with pytest.raises(RecipeError, match=r"lora_rank is 16, .* 32 by 32; write 15 at most, or 0"):
        prepare(recipe)
