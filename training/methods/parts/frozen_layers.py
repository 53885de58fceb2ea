"""Frozen layers: the embeddings and the first layers stay as they are, for cheaper steps.

No gradient passes through them, and AdamW reads and writes nothing for them. The embeddings of a small encoder are half
of its weights. Thawed after a share of the steps, the layers are trained with the others in the rest.
"""

from torch import nn
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from training.errors import RecipeError

__all__ = ["Thaw", "first_layers", "freeze_embeddings"]


def freeze_embeddings(backbone: PreTrainedModel) -> None:
    """Freeze the embeddings of words, positions and types, and their layer norm."""
    embeddings = getattr(backbone, "embeddings", None) or backbone.get_input_embeddings()
    embeddings.requires_grad_(False)


def first_layers(backbone: PreTrainedModel, count: int) -> nn.ModuleList:
    """Its first layers. Raises RecipeError unless at least one more stays."""
    depth = backbone.config.num_hidden_layers
    layers = next((each for each in backbone.modules() if isinstance(each, nn.ModuleList) and len(each) == depth), None)
    if count and (layers is None or count >= depth):
        raise RecipeError(
            f"frozen_layers is {count}, and the encoder has {depth if layers else 0} layers of their own weights; "
            f"write {depth - 1 if layers else 0} at most"
        )
    return nn.ModuleList(layers[:count] if layers else [])


class Thaw(TrainerCallback):
    """Trains `layers` from the step at which their share of all steps is over."""

    def __init__(self, layers: nn.ModuleList, share: float) -> None:
        self.layers = layers
        self.share = share

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self.layers.requires_grad_(state.global_step >= self.share * state.max_steps)
