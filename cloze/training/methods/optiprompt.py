"""OptiPrompt (arXiv:2104.05240) as in PromptBERT's section 4.2: only the template is trained, the backbone is frozen.

Each word of the template is a vector that begins as the word's own embedding. A sentence and itself under another
dropout mask are positives, as in SimCSE. The vectors are served; the head is used in training only.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from cloze.training.bar import console
from cloze.training.data.stored_rows import Row
from cloze.training.methods.contrastive import BatchObjective, transform
from cloze.training.methods.losses import info_nce
from cloze.training.model.continuous_template import ContinuousTemplate
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.views import View, view
from cloze.training.recipes.methods import OptiPromptRecipe


class OptiPrompt(BatchObjective):
    """Trains one vector per word of the template, and the head, initialised as the masked-word head's transform.

    The paper's code finds the template's words by token id. This overwrites the same words in the text and misses the
    opening quote. Here they are found by position.
    """

    recipe: OptiPromptRecipe

    def __init__(self, encoder: SentenceEncoder, recipe: OptiPromptRecipe) -> None:
        super().__init__(encoder, recipe)
        self.head = transform(encoder, recipe.encoder)
        encoder.requires_grad_(False)
        if encoder.config.templates:
            console.print(
                f"skipped the templates for {', '.join(encoder.config.templates)}, because trained vectors replace "
                "only one"
            )
            encoder.reconfigure(encoder.config.model_copy(update={"templates": {}}))
        if encoder.continuous is None:
            encoder.continuous = ContinuousTemplate(encoder.text_encoder, encoder.word_embeddings)
        encoder.continuous.requires_grad_(True)

    def views(self, rows: Sequence[Row]) -> dict[str, View]:
        texts = [text for (text,) in rows]
        return {name: view(self.text_encoder, texts) for name in ("first", "second")}

    def loss(self, vectors: Mapping[str, Tensor], views: Mapping[str, View]) -> dict[str, Tensor]:
        def contrast(first: Tensor, second: Tensor) -> Tensor:
            first, second = self.headed(first, second)
            return info_nce(first, second, self.recipe.temperature)

        return {"loss": self.nested(contrast, *self.joined(*vectors.values()))}
