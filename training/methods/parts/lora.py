"""LoRA (arXiv:2106.09685): the backbone is frozen, and each of its linear layers learns a product of two thin matrices.

A layer's weight W (out, in) becomes W + alpha / rank · B A, where A is (rank, in) and B is (out, rank) and begins as 0.
"""

import math

from torch import nn
from transformers import PreTrainedModel

from training.errors import RecipeError

__all__ = ["add_lora", "merge_lora"]


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
            f"lora_rank is {rank}; a layer of {narrowest.in_features} by {narrowest.out_features} weights has no more "
            f"than the matrices of that rank: write {highest} at most, or 0 to train all weights"
        )
    backbone.requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear"), backbone)


def merge_lora(backbone: PreTrainedModel) -> None:
    """Add the products to the weights that they belong to, so that the backbone is again as transformers built it."""
    from peft.tuners.lora import LoraLayer

    for name, module in list(backbone.named_modules()):
        if isinstance(module, LoraLayer):
            module.merge()
            backbone.set_submodule(name, module.get_base_layer())


def _limit(linear: nn.Linear) -> float:
    """The rank at which the two matrices together have as many weights as the layer."""
    return linear.in_features * linear.out_features / (linear.in_features + linear.out_features)
