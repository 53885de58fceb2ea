"""Masked language modelling (arXiv:1810.04805 section 3.1, without next sentences): guess the hidden words.

This trains the masked-word head that prompt methods, template search and DiffCSE's generator need, together with the
encoder, which may start from scratch. PromptBERT A.2 compares a tied head with an untied one.
"""

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModel, PreTrainedModel

from cloze.training.data.masking import mask_tokens, maskable_tokens
from cloze.training.data.stored_rows import Row
from cloze.training.errors import EncoderError, RecipeError
from cloze.training.methods.gather import totals
from cloze.training.methods.objective import Objective
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.masked_words import MaskedHead, save_masked_lm
from cloze.training.model.views import View, trimmed, view
from cloze.training.recipes.methods import MLMRecipe


class MLM(Objective):
    """Cross entropy of the chosen tokens; only they pass through the head."""

    recipe: MLMRecipe

    def __init__(self, encoder: SentenceEncoder, recipe: MLMRecipe) -> None:
        if encoder.tokenizer.mask_token_id is None:
            raise EncoderError(f"{recipe.encoder!r}: its tokenizer has no mask token; choose another encoder")
        if recipe.layers:
            encoder = SentenceEncoder(_shorter(encoder.backbone, recipe.layers), encoder.tokenizer, encoder.config)
        if recipe.from_scratch:
            fresh = AutoModel.from_config(encoder.backbone.config)
            encoder = SentenceEncoder(fresh, encoder.tokenizer, encoder.config)
        super().__init__(encoder, recipe)
        config = encoder.backbone.config
        self.head = MaskedHead.load(recipe.encoder) if recipe.head == "kept" else MaskedHead(config, recipe.tied)
        encoder.head = encoder.continuous = None  # they were trained with the old weights
        self.text_alone = encoder.make_text_encoder("[X]", recipe.max_tokens, mode="cls")

    def views(self, rows: Sequence[Row]) -> dict[str, View]:
        return {"texts": view(self.text_alone, [text for (text,) in rows])}

    def forward(self, texts: View) -> dict[str, Tensor]:
        tokenizer = self.encoder.tokenizer
        ids = texts["input_ids"]
        masked, chosen = mask_tokens(
            ids,
            maskable_tokens(ids, tokenizer),
            self.recipe.masked_share,
            tokenizer.mask_token_id,
            self.encoder.vocabulary,
        )
        hidden, answers = self._hidden(texts | {"input_ids": masked, "answers": ids.where(chosen, -100)})
        scores = self.head(hidden, self.encoder.word_embeddings.weight).float()  # (m, vocabulary)
        right = scores.argmax(-1) == answers
        total_loss, rights, guesses = totals(F.cross_entropy(scores, answers, reduction="sum"), right, chosen)
        guesses = guesses.clamp(min=1)  # if no token was chosen, the loss is 0, not nan
        return {"loss": total_loss / guesses, "accuracy": (rights / guesses).detach()}

    def _hidden(self, view: View) -> tuple[Tensor, Tensor]:
        """The last layer (m, d) at the chosen tokens, and the answers (m), which are the original tokens."""
        hidden, answers = [], []
        for _, part in trimmed(view, tokenwise=["answers"]):
            chosen = part["answers"] >= 0
            hidden.append(self.encoder.hidden(part["input_ids"], part["attention_mask"])[chosen])
            answers.append(part["answers"][chosen])
        return torch.cat(hidden), torch.cat(answers)

    def save(self, folder: Path) -> None:
        super().save(folder)
        save_masked_lm(self.encoder.backbone, self.head, folder)


def _shorter(backbone: PreTrainedModel, layers: int) -> PreTrainedModel:
    """A copy of the embeddings and the first layers. Raises RecipeError if there are fewer."""
    config = copy.deepcopy(backbone.config)
    if layers > config.num_hidden_layers:
        raise RecipeError(f"layers is {layers}; the encoder has {config.num_hidden_layers}: lower it")
    config.num_hidden_layers = layers
    shorter: PreTrainedModel = AutoModel.from_config(config)
    shorter.load_state_dict(backbone.state_dict(), strict=False)  # without the layers above, and without a pooler
    return shorter
