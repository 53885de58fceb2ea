"""Every method that compares vectors across the batch, on a tiny encoder: the gradient of each weight is compared."""

from pathlib import Path
from typing import Any

import torch
from recipes import load_recipe
from torch import Tensor

from cloze.training.methods import objective_of
from cloze.training.methods.contrastive import BatchObjective
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.masked_words import MaskedHead, save_masked_lm

TEXTS = ["Two dogs run.", "A man is playing the guitar.", "Rain.", "She wrote a letter to the city.", "A stage."]
ROWS = [(text,) for text in TEXTS]
TRIPLES = [(text, TEXTS[place - 1], TEXTS[place - 2]) for place, text in enumerate(TEXTS)]
PAIRS = [row[:2] for row in TRIPLES]
SCORED = [(*pair, str(score)) for pair, score in zip(PAIRS, (0.5, 4, 2.5, 4, 1), strict=True)]
SG = {"head_width": ["16"], "max_tokens": ["32"]}

METHODS: dict[str, tuple[str, list[tuple[str, ...]], dict[str, list[str]]]] = {
    "simcse": ("simcse", ROWS, {}),
    "triplets": ("simcse", TRIPLES, {"columns": ["a", "b", "c"], "negative_weight": ["1.0"]}),
    "guided": ("simcse", TRIPLES, {"columns": ["a", "b", "c"], "guide": ["ENCODER"], "guide_margin": ["0.02"]}),
    "masked words": ("simcse", ROWS, {"mlm_weight": ["0.1"], "masked_share": ["0.5"]}),
    "nested": ("simcse", ROWS, {"dimensions": ["8", "32"]}),
    "promptbert": ("promptbert", ROWS, {}),
    "promptbert, triplets": ("promptbert-supervised", TRIPLES, {}),
    "optiprompt": ("optiprompt", ROWS, {}),
    "ssimcse": ("ssimcse", ROWS, {}),
    "ssimcse, an operation": ("ssimcse", ROWS, {"scope": ["sentence-op"]}),
    "sg-opt": ("sg-opt", ROWS, SG),
    "sg": ("sg", ROWS, SG),
    "scored": ("scored", SCORED, {}),
    "back-translation": ("sg", PAIRS, {**SG, "columns": ["a", "b"], "positives": ["translation"]}),
}
"""A case's recipe, its rows and its keys, in which ENCODER stands for the folder that `build` is given."""


def add_masked_head(parent: Path, folder: Path, layers: int = 2) -> Path:
    """The encoder in `parent`, its first layers, with a random masked-word head, which some methods begin from."""
    encoder = SentenceEncoder.load(str(parent), template="[X]", pooling="cls")
    encoder.backbone.encoder.layer = encoder.backbone.encoder.layer[:layers]
    encoder.backbone.config.num_hidden_layers = layers
    torch.manual_seed(0)
    save_masked_lm(encoder.backbone, MaskedHead(encoder.backbone.config), folder)
    encoder.tokenizer.save_pretrained(folder)
    return folder


def build(name: str, folder: Path, dropout: bool = True, **words: Any) -> BatchObjective:
    fixed = {"encoder": [str(folder)], "corpus": ["unused.txt"], "batch_size": ["5"]}
    fixed |= {"scale": ["2"]} if name == "scored" else {"temperature": ["0.5"]}
    fixed |= {key: [str(folder)] if value == ["ENCODER"] else value for key, value in words.items()}
    recipe = load_recipe(name, fixed)
    torch.manual_seed(0)
    encoder = SentenceEncoder.load(recipe.encoder, template=recipe.template, pooling=recipe.pooling)
    objective = objective_of(recipe.method)(encoder, recipe)
    assert isinstance(objective, BatchObjective)
    return objective.train(dropout)


def leaves(loss: Tensor) -> set[int]:
    """The ids of all weights that the loss has a gradient of, in this module or outside it."""
    found, seen, waiting = set[int](), set[object](), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        waiting += [each for each, _ in node.next_functions]
    return found


def gradients(objective: BatchObjective) -> dict[str, Tensor]:
    """The gradients since the last call, by the weight's name."""
    found = {key: weight.grad.clone() for key, weight in objective.named_parameters() if weight.grad is not None}
    objective.zero_grad()
    return found
