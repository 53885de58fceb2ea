"""The training methods, by the name that a recipe gives."""

from cloze.training.methods.diffcse import DiffCSE
from cloze.training.methods.distill import Distill
from cloze.training.methods.mlm import MLM
from cloze.training.methods.objective import Objective
from cloze.training.methods.optiprompt import OptiPrompt
from cloze.training.methods.promptbert import PromptBERT
from cloze.training.methods.ranking import Ranking
from cloze.training.methods.scored import Scored
from cloze.training.methods.sg import SG
from cloze.training.methods.simcse import SimCSE
from cloze.training.methods.ssimcse import SSimCSE

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
