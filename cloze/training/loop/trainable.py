"""Which weights are trained: not those of frozen layers; with LoRA only matrices that are added to the backbone.

The embeddings and the first layers can be frozen to make steps cheaper. No gradient passes through them, and AdamW
reads and writes nothing for them. The embeddings of a small encoder are half of its weights. The layers can be thawed
after a share of the steps; from then on they are trained with the others.

LoRA (arXiv:2106.09685) freezes the backbone, and each of its linear layers learns a product of two thin matrices. A
layer's weight W (out, in) becomes W + alpha / rank · B A, where A is (rank, in) and B is (out, rank) and begins as 0.
"""

import math

from torch import nn
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cloze.training.errors import RecipeError


def freeze_embeddings(backbone: PreTrainedModel) -> None:
    """Freeze the embeddings of words, positions and types, and their layer norm."""
    embeddings = getattr(backbone, "embeddings", None) or backbone.get_input_embeddings()
    embeddings.requires_grad_(False)


def first_layers(backbone: PreTrainedModel, count: int) -> nn.ModuleList:
    """The first `count` layers. Raises RecipeError unless at least one more layer remains."""
    depth = backbone.config.num_hidden_layers
    layers = next(
        (module for module in backbone.modules() if isinstance(module, nn.ModuleList) and len(module) == depth), None
    )
    if count and (layers is None or count >= depth):
        raise RecipeError(
            f"frozen_layers is {count}, but the encoder has {depth if layers else 0} layers with weights of their own; "
            f"write {depth - 1 if layers else 0} at most"
        )
    return nn.ModuleList(layers[:count] if layers else [])


class Thaw(TrainerCallback):
    """Trains `layers` after `share` of all steps."""

    def __init__(self, layers: nn.ModuleList, share: float) -> None:
        self.layers = layers
        self.share = share

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self.layers.requires_grad_(state.global_step >= self.share * state.max_steps)


def add_lora(backbone: PreTrainedModel, rank: int, alpha: int) -> None:
    """Freeze the backbone and add matrices to every linear layer of its attention and feed-forward parts, in place.

    Raises RecipeError for a rank at which the matrices would have as many weights as the narrowest layer's own.
    """
    from peft import LoraConfig, inject_adapter_in_model  # slow to import, and most runs do not need it

    linears = [module for module in backbone.modules() if isinstance(module, nn.Linear)]
    narrowest = min(linears, key=_limit)
    highest = math.ceil(_limit(narrowest)) - 1
    if rank > highest:
        raise RecipeError(
            f"lora_rank is {rank}, and matrices of that rank have at least as many weights as the narrowest layer, "
            f"{narrowest.in_features} by {narrowest.out_features}; write {highest} at most, or 0 to train all weights"
        )
    backbone.requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear"), backbone)


def merge_lora(backbone: PreTrainedModel) -> None:
    """Add each product to its weight, so that the backbone has the same layers as transformers built."""
    from peft.tuners.lora import LoraLayer

    for name, module in list(backbone.named_modules()):
        if isinstance(module, LoraLayer):
            module.merge()
            backbone.set_submodule(name, module.get_base_layer())


def _limit(linear: nn.Linear) -> float:
    """The rank at which the two matrices together have as many weights as the layer."""
    return linear.in_features * linear.out_features / (linear.in_features + linear.out_features)
