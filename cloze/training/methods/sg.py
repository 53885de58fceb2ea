"""SG and SG-OPT (arXiv:2106.07345): the hidden layers of a frozen copy guide the [CLS] vector of the tuned encoder.

One column is the paper's method. A second column is a back-translation of the first. The frozen copy encodes it
(BT + SG-OPT), or the tuned encoder itself (BT) if `positives` is "translation".
"""

import copy
from collections.abc import Hashable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from cloze.training.data.stored_rows import Row
from cloze.training.errors import RecipeError
from cloze.training.methods.contrastive import BatchObjective
from cloze.training.methods.losses import SELF_GUIDED, parameter_drift
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.pooling import pool
from cloze.training.model.views import View, view
from cloze.training.recipes.methods import SGRecipe


class SG(BatchObjective):
    """L_base of section 3.1, or L_opt1 to L_opt3 of section 3.2, plus the distance from the frozen copy.

    The copy is the encoder that the recipe names, in evaluation mode, and is not in a checkpoint. It shares the
    embeddings, which are not trained, with the tuned encoder. opt3 takes all layers; the others draw one per sentence
    and step.
    """

    recipe: SGRecipe

    def __init__(self, encoder: SentenceEncoder, recipe: SGRecipe) -> None:
        super().__init__(encoder, recipe)
        depth = int(encoder.backbone.config.num_hidden_layers)
        if recipe.first_layer > depth:
            raise RecipeError(
                f"first_layer is {recipe.first_layer}; the encoder's layers go from 0, the embeddings, to {depth}: "
                "lower it"
            )
        self._layers = depth + 1 - recipe.first_layer  # number of layers that may guide
        encoder.backbone.embeddings.requires_grad_(False)
        untrained = {id(weight): weight for weight in encoder.backbone.parameters() if not weight.requires_grad}
        frozen = copy.deepcopy(encoder.backbone, untrained).eval()  # `untrained` is shared, whatever its device
        self._frozen = (frozen.requires_grad_(False),)  # in a tuple, so that it is not a submodule
        self.head = _head(encoder, recipe.head_width) if recipe.head_width else nn.Identity()

    def models(self) -> Iterator[nn.Module]:
        yield from (*super().models(), *self._frozen)

    def views(self, rows: Sequence[Row]) -> dict[str, View]:
        columns = list(zip(*rows, strict=True))
        guide_view = "frozen" if self.recipe.positives == "layers" else "translation"
        return {"tuned": view(self.text_encoder, columns[0]), guide_view: view(self.text_encoder, columns[-1])}

    def draw(self, views: dict[str, View]) -> dict[str, View]:
        if self.recipe.variant == "opt3" or "frozen" not in views:
            return views
        frozen = views["frozen"]
        layer = torch.randint(self._layers, (len(frozen["input_ids"]),), device=frozen["input_ids"].device)
        return views | {"frozen": {**frozen, "layer": layer}}  # (n), counted from first_layer

    def reads(self, name: str) -> Hashable:
        return name == "frozen"

    def encode(self, name: str, view: View) -> Tensor:
        if name != "frozen":
            return self.encoder.vectors(view, self.text_encoder)  # (n, d)
        pooled = self._guides(view["input_ids"], view["attention_mask"])  # (n, layers, d)
        if "layer" not in view:
            return pooled
        return pooled[torch.arange(len(pooled), device=pooled.device), view["layer"]]  # (n, d)

    @torch.no_grad()
    def _guides(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Every layer of the frozen copy, pooled over all attended tokens, [CLS] and [SEP] included."""
        frozen = self._frozen[0].to(input_ids.device)
        states = frozen(input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True).hidden_states
        mode = self.recipe.guide_pooling
        return torch.stack(
            [pool(layer.float(), attention_mask, mode) for layer in states[self.recipe.first_layer :]], 1
        )

    def loss(self, vectors: Mapping[str, Tensor], views: Mapping[str, View]) -> dict[str, Tensor]:
        sentences, guides = vectors["tuned"], vectors["frozen" if "frozen" in vectors else "translation"]
        if self.recipe.variant == "opt3" and guides.dim() == 2:
            guides = guides.unsqueeze(1)  # one view per sentence
        contrast = self.nested(self._contrast, *self.joined(sentences, guides))
        drift = parameter_drift(*zip(*self._trained(self._frozen[0].to(contrast.device)), strict=True))
        loss = contrast + self.recipe.drift_weight * drift
        return {"loss": loss, "contrast": contrast.detach(), "drift": drift.detach()}

    def _trained(self, frozen: nn.Module) -> list[tuple[Tensor, Tensor]]:
        """Each trained weight, and its value before training."""
        pairs = zip(self.encoder.backbone.parameters(), frozen.parameters(), strict=True)
        return [(weight, before) for weight, before in pairs if weight.requires_grad]

    def _contrast(self, sentences: Tensor, guides: Tensor) -> Tensor:
        sentences, guides = self.headed(sentences, guides)
        return SELF_GUIDED[self.recipe.variant](sentences, guides, self.recipe.temperature)


def _head(encoder: SentenceEncoder, width: int) -> nn.Sequential:
    """The paper's f, shared by sentences and guides: two layers, each with a GELU, initialised as in BERT."""
    first, second = nn.Linear(encoder.dimension, width), nn.Linear(width, width)
    for linear in (first, second):
        nn.init.normal_(linear.weight, std=encoder.backbone.config.initializer_range)
        nn.init.zeros_(linear.bias)
    return nn.Sequential(first, nn.GELU(), second, nn.GELU())
