"""The training methods, by the name that a recipe gives."""

from training.methods.diffcse import DiffCSE
from training.methods.distill import Distill
from training.methods.mlm import MLM
from training.methods.objective import Objective
from training.methods.optiprompt import OptiPrompt
from training.methods.promptbert import PromptBERT
from training.methods.ranking import Ranking
from training.methods.scored import Scored
from training.methods.sg import SG
from training.methods.simcse import SimCSE
from training.methods.ssimcse import SSimCSE

__all__ = ["OBJECTIVES"]

OBJECTIVES: dict[str, type[Objective]] = {
    "diffcse": DiffCSE,
    "distill": Distill,
    "mlm": MLM,
    "optiprompt": OptiPrompt,
    "promptbert": PromptBERT,
    "ranking": Ranking,
    "scored": Scored,
    "sg": SG,
    "simcse": SimCSE,
    "ssimcse": SSimCSE,
}
