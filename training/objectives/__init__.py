"""The training methods, by the name a recipe calls them."""

from training.objective import Objective
from training.objectives.diffcse import DiffCSE
from training.objectives.distill import Distill
from training.objectives.mlm import MLM
from training.objectives.optiprompt import OptiPrompt
from training.objectives.promptbert import PromptBERT
from training.objectives.sg import SG
from training.objectives.simcse import SimCSE
from training.objectives.ssimcse import SSimCSE

__all__ = ["OBJECTIVES"]

OBJECTIVES: dict[str, type[Objective]] = {
    "diffcse": DiffCSE,
    "distill": Distill,
    "mlm": MLM,
    "optiprompt": OptiPrompt,
    "promptbert": PromptBERT,
    "sg": SG,
    "simcse": SimCSE,
    "ssimcse": SSimCSE,
}
